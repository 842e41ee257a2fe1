package mutants_test

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
	"github.com/kvport/kvport/connector"
)

// Right pairs are not accused, whatever the seed, with leases that end during a history and with those that do not.
func TestRandomHistoriesOfRightPairs(t *testing.T) {
	rightPairs(t, "random-holds", conformance.PDProducer)
}

// What holds do to other holds is found, with the rule that says so.
func TestHoldFaults(t *testing.T) { faultsAreFound(t, "random-holds", 1) }

// What loads of other shapes do in many calls is found.
func TestReadFaults(t *testing.T) { faultsAreFound(t, "random-reshape", 3) }

// What engines do to answers in conversations of several turns is found.
func TestTurnFaults(t *testing.T) { faultsAreFound(t, "random-turns", 3) }

// Right pairs that talk are not accused, whatever the seed.
func TestRandomTurnsOfRightPairs(t *testing.T) {
	rightPairs(t, "random-turns", conformance.Bidirectional)
}

// Right pairs of other shapes are not accused, whatever the seed.
func TestRandomReadsOfRightPairs(t *testing.T) {
	rightPairs(t, "random-reshape", conformance.Reshape)
}

// rightPairs plays histories of a case with the right pair, whose leases end during some of them.
func rightPairs(t *testing.T, caseID string, profile conformance.Profile) {
	t.Helper()
	configs := []json.RawMessage{json.RawMessage(`{}`), json.RawMessage(`{"lease_ms":60000}`)}
	o := conformance.Options{Only: []string{caseID}, Profiles: []conformance.Profile{profile}}
	seedsPass(t, mutants.PDReference(), configs, o)
	seedsPass(t, mutants.PDFrugal(), configs, o)
}

// seedsPass plays histories of several seeds with a right connector, which has the configs in turn.
func seedsPass(t *testing.T, p connector.Plugin, configs []json.RawMessage, o conformance.Options) {
	t.Helper()
	seeds := uint64(2)
	if testing.Short() {
		seeds = 1
	}
	if os.Getenv("KVPORT_SOAK") != "" {
		seeds = 60
	}
	for o.Seed = range seeds {
		r := conformance.Check(t.Context(), conformance.InProcess(p, configs[o.Seed%uint64(len(configs))]), o)[0]
		require.NotEqual(t, conformance.Fail, r.Status, "seed %d: %v %v", o.Seed, r.Log, r.Transcript)
		require.NotEqual(t, conformance.Skip, r.Status, "seed %d: %v", o.Seed, r.Log)
		decided(t, r)
	}
}

// What saves that wait for layers do to others is found.
func TestManyLayerFaults(t *testing.T) { faultsAreFound(t, "random-layers", 3) }

// A right connector that saves layer by layer is not accused, whatever the seed, nor one that drops at once what the engine has called damaged.
func TestRandomLayersOfRightConnectors(t *testing.T) {
	o := conformance.Options{Only: []string{"random-layers"}, Profiles: []conformance.Profile{conformance.LayerWise}}
	seedsPass(t, mutants.Reference(), []json.RawMessage{nil}, o)
	seedsPass(t, mutants.DropsDamaged(), []json.RawMessage{nil}, o)
}
