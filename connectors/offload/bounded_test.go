package offload_test

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
)

// The options that say what they bound do bound it, with every policy, with and without a disk tier.
func TestBounded(t *testing.T) {
	configs := []string{
		string(config(t)), `{"cpu_bytes_to_use":1048576}`, `{"num_cpu_blocks":64,"store_threshold":2,"pin_after_loads":1,"pin_percent":50}`,
		`{"num_cpu_blocks":64,"disk_path":"@TMP@/tier","disk_bytes":1048576,"disk_admit_after":1,"disk_write_queue":1}`,
	}
	policies := []string{"lru", "arc", "s3fifo"}
	seeds := len(configs) * len(policies)
	if os.Getenv("KVPORT_SOAK") != "" {
		seeds *= 10
	}
	for seed := range seeds {
		var fields map[string]json.RawMessage
		require.NoError(t, json.Unmarshal([]byte(configs[seed%len(configs)]), &fields))
		fields["eviction_policy"] = json.RawMessage(`"` + policies[seed/len(configs)%len(policies)] + `"`)
		with, err := json.Marshal(fields)
		require.NoError(t, err)
		o := conformance.Options{Only: []string{"random-bounded"}, Profiles: []conformance.Profile{conformance.Bounded}, Seed: uint64(seed)} //nolint:gosec // not negative
		r := conformance.Check(t.Context(), conformance.InProcess(plugin(), with), o)[0]
		require.Equal(t, conformance.Pass, r.Status, "%s, seed %d: %v %v", with, seed, r.Log, r.Transcript)
	}
}
