package mutants_test

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
	"github.com/kvport/kvport/connector"
)

// everywhere are the powers whose rules are judged at both trust levels, in this process and over the wire.
const everywhere = connector.CanPlace | connector.CanLayers | connector.CanOverlap

// rightFor is a connector to which a case of these powers applies, and that passes it.
func rightFor(c *conformance.Case) connector.Plugin {
	switch {
	case strings.HasPrefix(c.ID, "lent"):
		return mutants.LendingReference()
	case c.ID == "place-complete":
		return mutants.CompleteReference()
	case c.Needs == connector.CanPlace:
		return mutants.PlacingReference()
	}
	return mutants.Reference()
}

// hiddenStaged are the cases whose mutants are right connectors at level staged, and why.
func hiddenStaged() map[string]string {
	return map[string]string{}
}

// Each case about placement, layer-wise saves and layer-wise loads applies in this process, over the wire and at level staged: a right connector
// passes it there, and every wrong one that is made for it fails it over the wire and at level staged, too. (TestMutantsAreCaught has them in this
// process.) What the host itself keeps from happening at level staged is listed with the reason.
func TestJudgedEverywhere(t *testing.T) {
	if testing.Short() {
		t.Skip("it waits much; make test runs it")
	}
	rules, wrong := map[string][]string{}, 0
	for _, c := range conformance.Cases() {
		if c.Needs&everywhere == 0 {
			continue
		}
		rules[c.Rule] = append(rules[c.Rule], c.ID)
		t.Run(c.ID, func(t *testing.T) {
			right := rightFor(&c)
			for way, h := range map[string]conformance.Maker{
				"in this process": conformance.InProcess(right, nil), "over the wire": conformance.Wire(right, nil), "staged": conformance.Staged(conformance.Wire(right, nil)),
			} {
				judge(t, way+", a right connector", h, c.ID, conformance.Pass)
			}
			for _, m := range mutants.All() {
				if m.Case != c.ID {
					continue
				}
				require.Empty(t, m.Program)
				wrong++
				wire := conformance.Wire(m.Plugin(), json.RawMessage(m.Config))
				judge(t, "over the wire, "+m.Name, wire, c.ID, conformance.Fail)
				want := conformance.Fail
				if hiddenStaged()[c.ID] != "" {
					want = conformance.Pass
				}
				judge(t, "staged, "+m.Name, conformance.Staged(wire), c.ID, want)
			}
		})
	}
	for _, rule := range slices.Sorted(maps.Keys(rules)) {
		t.Log(rule, strings.Join(rules[rule], ", "))
	}
	t.Logf("%d rules, %d wrong connectors", len(rules), wrong)
}

// judge runs a case, which must end in that way. A connector that is wrong by chance has more chances.
func judge(t *testing.T, what string, h conformance.Maker, id string, want conformance.Status) {
	t.Helper()
	var r conformance.Result
	for seed := uint64(7); seed == 7 || seed < 12 && want == conformance.Fail && r.Status == conformance.Pass && byChance("", id); seed++ {
		r = conformance.Check(t.Context(), h, conformance.Options{Only: []string{id}, Seed: seed})[0]
	}
	if decided(t, r) {
		require.Equal(t, want, r.Status, "%s: %v", what, r.Log)
	}
}
