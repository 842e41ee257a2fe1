package mutants_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
)

func TestReferenceStaged(t *testing.T) {
	conformance.Run(t, conformance.Staged(conformance.Wire(mutants.Reference(), nil)), inProcess()...)
}

// What a connector writes after its Load has returned ends in landing memory: at level staged the
// mutants that do so cannot be told from connectors that keep the rule.
func TestStagedStopsLateWrites(t *testing.T) {
	for _, m := range mutants.All() {
		if m.Case != "load-ends" {
			continue
		}
		o := conformance.Options{Only: []string{m.Case}, Seed: 7, Profiles: conformance.Profiles()}
		results := conformance.Check(t.Context(), conformance.Wire(m.Plugin(), nil), o)
		require.Equal(t, conformance.Fail, results[0].Status, "in place: %s", m.Name)
		results = conformance.Check(t.Context(), conformance.Staged(conformance.Wire(m.Plugin(), nil)), o)
		require.Equal(t, conformance.Pass, results[0].Status, "staged: %s: %v", m.Name, results[0].Log)
	}
}
