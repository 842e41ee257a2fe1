package conformance_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
)

// Right connectors are not accused, whatever the seed.
func TestRandomHistoriesOfRightConnectors(t *testing.T) {
	seeds := uint64(3)
	if testing.Short() {
		seeds = 1
	}
	for name, maker := range map[string]conformance.Maker{
		"all powers":        conformance.InProcess(mutants.Reference(), nil),
		"a store":           conformance.InProcess(mutants.StoreReference(), nil),
		"an arena":          conformance.InProcess(mutants.ArenaReference(), nil),
		"over the wire":     conformance.Wire(mutants.Reference(), nil),
		"an engine's store": conformance.InProcess(mutants.Private(), nil),
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range seeds {
				results := conformance.Check(t.Context(), maker, conformance.Options{Only: []string{"random"}, Seed: seed})
				require.Equal(t, conformance.Pass, results[0].Status, "seed %d: %v %v", seed, results[0].Log, results[0].Transcript)
			}
		})
	}
}
