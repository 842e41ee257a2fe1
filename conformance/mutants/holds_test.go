package mutants_test

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
)

// Right pairs are not accused, whatever the seed, with leases that end during a history and with those that do not.
func TestRandomHistoriesOfRightPairs(t *testing.T) {
	seeds := uint64(3)
	if testing.Short() {
		seeds = 1
	}
	if os.Getenv("KVPORT_SOAK") != "" {
		seeds = 60
	}
	o := conformance.Options{Only: []string{"random-holds"}, Profiles: []conformance.Profile{conformance.PDProducer}}
	for o.Seed = range seeds {
		config := json.RawMessage(`{}`)
		if o.Seed%3 == 2 {
			config = json.RawMessage(`{"lease_ms":60000}`)
		}
		r := conformance.Check(t.Context(), conformance.InProcess(mutants.PDReference(), config), o)[0]
		require.NotEqual(t, conformance.Fail, r.Status, "seed %d: %v %v", o.Seed, r.Log, r.Transcript)
		require.NotEqual(t, conformance.Skip, r.Status, "seed %d: %v", o.Seed, r.Log)
		decided(t, r)
	}
}

// What holds do to other holds is found, with the rule that says so.
func TestHoldFaults(t *testing.T) { faultsAreFound(t, "random-holds") }
