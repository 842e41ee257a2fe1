package mutants_test

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

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
func TestBoundedFaults(t *testing.T) {
	for _, m := range mutants.RandomlyFound() {
		if m.Case != "random-bounded" {
			continue
		}
		t.Run(m.Name, func(t *testing.T) {
			var r conformance.Result
			for seed := uint64(1); seed < 12 && r.Status != conformance.Fail; seed++ {
				o := conformance.Options{Only: []string{m.Case}, Seed: seed, Budget: 4900 * time.Millisecond} // a busy machine plays fewer histories in it; the first one that fails ends it
				r = conformance.Check(t.Context(), conformance.InProcess(m.Plugin(), configOf(m.Mutant)), o)[0]
			}
			require.Equal(t, conformance.Fail, r.Status, "nobody noticed: %v", r.Log)
			t.Log(r.Took.Round(1e6), r.Log[0], "\n   "+strings.Join(r.Transcript, "\n   "))
			require.Contains(t, m.Rules, r.Rule)
		})
	}
}
