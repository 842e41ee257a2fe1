package offload_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
)

// The options that say what they bound do bound it, with every policy.
func TestBounded(t *testing.T) {
	for _, policy := range []string{"lru", "arc", "s3fifo"} {
		var fields map[string]json.RawMessage
		require.NoError(t, json.Unmarshal(config(t), &fields))
		fields["eviction_policy"] = json.RawMessage(`"` + policy + `"`)
		with, err := json.Marshal(fields)
		require.NoError(t, err)
		o := conformance.Options{Only: []string{"random-bounded"}, Profiles: []conformance.Profile{conformance.Bounded}}
		for o.Seed = range uint64(2) {
			r := conformance.Check(t.Context(), conformance.InProcess(plugin(), with), o)[0]
			require.Equal(t, conformance.Pass, r.Status, "%s, seed %d: %v %v", policy, o.Seed, r.Log, r.Transcript)
		}
	}
}
