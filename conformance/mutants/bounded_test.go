package mutants_test

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
)

// Right tiers are not accused, whatever the seed, and a connector that declares nothing is told so.
func TestRandomHistoriesOfRightTiers(t *testing.T) {
	seeds := uint64(4)
	if testing.Short() {
		seeds = 1
	}
	if os.Getenv("KVPORT_SOAK") != "" {
		seeds = 60
	}
	profiles := []conformance.Profile{conformance.Bounded}
	only := []string{"random-bounded"}
	for _, config := range []string{`{"num_cpu_blocks":64}`, `{"num_cpu_blocks":64,"store_threshold":3}`, `{"num_cpu_blocks":64,"disk_path":"@TMP@/tier","disk_bytes":65536}`} {
		maker := conformance.InProcess(mutants.Offload(""), json.RawMessage(config))
		for seed := range seeds {
			r := conformance.Check(t.Context(), maker, conformance.Options{Only: only, Profiles: profiles, Seed: seed})[0]
			require.Equal(t, conformance.Pass, r.Status, "%s, seed %d: %v %v", config, seed, r.Log, r.Transcript)
		}
	}
	r := conformance.Check(t.Context(), conformance.InProcess(mutants.StoreReference(), nil), conformance.Options{Only: only, Profiles: profiles})[0]
	require.Equal(t, conformance.Fail, r.Status)
	require.Contains(t, r.Log[0], "no option in the schema of the config says what it bounds")
}

// What breaks a bound only in company is found, with the rule that says so.
func TestBoundedFaults(t *testing.T) { faultsAreFound(t, "random-bounded", 1) }
