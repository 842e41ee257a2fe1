package mutants_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
)

func TestReferenceInProcess(t *testing.T) {
	conformance.Run(t, conformance.InProcess(mutants.Reference(), nil), conformance.Profiles()...)
}

func TestReferenceOverTheWire(t *testing.T) {
	conformance.Run(t, conformance.Wire(mutants.Reference(), nil), conformance.Profiles()...)
}

func TestStoreReference(t *testing.T) {
	conformance.Run(t, conformance.InProcess(mutants.StoreReference(), nil))
}

// Every mutant fails the case that is named for its fault, and every case has a mutant.
func TestMutantsAreCaught(t *testing.T) {
	uncovered := map[string]bool{}
	for _, c := range conformance.Cases() {
		uncovered[c.ID] = true
	}
	caught := 0
	all := mutants.All()
	for _, m := range all {
		delete(uncovered, m.Case)
		t.Run(m.Case+"/"+m.Name, func(t *testing.T) {
			newHarness := conformance.InProcess(m.Plugin(), nil)
			if m.Case == "load-ends" {
				// Its late write is a data race by definition. Through the protocol, in memory that
				// is mapped twice, the race detector does not see it, but the case must.
				newHarness = conformance.Wire(m.Plugin(), nil)
			}
			results := conformance.Check(t.Context(), newHarness, conformance.Options{
				Only: []string{m.Case}, Seed: 7, Profiles: conformance.Profiles(),
			})
			require.Len(t, results, 1)
			require.Equal(t, conformance.Fail, results[0].Status, "nobody noticed")
			require.NotContains(t, results[0].Log[0], "panic", "it must fail by its rule, not by accident")
			caught++
		})
	}
	require.Empty(t, uncovered, "cases that no mutant fails")
	t.Logf("%d of %d mutants caught, %d cases", caught, len(all), len(conformance.Cases()))
}

// The names are what a report of this test shows, so each is used once.
func TestMutantsHaveNames(t *testing.T) {
	var names []string
	for _, m := range mutants.All() {
		names = append(names, m.Name)
	}
	slices.Sort(names)
	require.Equal(t, len(names), len(slices.Compact(names)))
}
