package mutants_test

import (
	"encoding/json"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

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

// hidden are the cases whose wrong connectors do as right ones do behind a host, and why. Each is wrong in one process.
func hidden() map[string]hiding {
	announced := hiding{staged: true, why: "the host announces a load itself, when it has copied and verified all of it"}
	return map[string]hiding{
		"overlap-order": announced, "overlap-digests": announced, "overlap-still": announced, "overlap-missing": announced, "overlap-whole": announced,
		"layer-give-up-first": {staged: true, why: "a save of a step that was given up has failed for the host, whatever the connector says"},
		"layer-cancel":        {staged: true, wire: true, why: "the host gives the layers up when the context of a save ends, so a connector that looks at nothing else ends, too"},
	}
}

type hiding struct {
	wire, staged bool
	why          string
}

// slow are the cases whose wrong connectors take seconds to be found: soak runs them.
func slow() []string { return []string{"layer-many", "layer-beside", "layer-idle", "random-layers"} }

// Each case about placement, layer-wise saves and layer-wise loads applies in this process, over the wire and at level staged: a right connector
// passes it there, and each wrong one that is made for it fails it over the wire and at level staged, too, unless the host keeps it from doing harm.
// (TestMutantsAreCaught has them in this process.)
func TestJudgedEverywhere(t *testing.T) {
	if testing.Short() {
		t.Skip("it waits much; make test runs it")
	}
	rules, wrong, judged, kept, left := map[string][]string{}, 0, 0, 0, 0
	for _, c := range conformance.Cases() {
		if c.Needs&everywhere == 0 || slices.Contains(c.Profiles, conformance.MultiChildren) {
			continue // children have cases of their own
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
				if slices.Contains(slow(), c.ID) && os.Getenv("KVPORT_SOAK") == "" {
					left++
					continue
				}
				wrong++
				hides, wire := hidden()[c.ID], conformance.Wire(m.Plugin(), json.RawMessage(m.Config))
				byWire := judge(t, "over the wire, "+m.Name, wire, c.ID, verdict(hides.wire))
				if staged := judge(t, "staged, "+m.Name, conformance.Staged(wire), c.ID, verdict(hides.staged)); byWire && staged {
					judged++
				}
				if hides.why != "" {
					kept++
					t.Logf("%s: %s", m.Name, hides.why)
				}
			}
		})
	}
	for _, rule := range slices.Sorted(maps.Keys(rules)) {
		t.Log(rule, strings.Join(rules[rule], ", "))
	}
	t.Logf("%d rules; %d of %d wrong connectors judged over the wire and staged, %d of which a host keeps from doing harm; %d left to soak", len(rules), judged, wrong, kept, left)
	require.Positive(t, judged)
}

// verdict is what a wrong connector gets.
func verdict(hides bool) conformance.Status {
	if hides {
		return conformance.Pass
	}
	return conformance.Fail
}

// judge runs a case, which must end in that way, and reports whether it came to a verdict. A connector that is wrong by chance has more chances.
func judge(t *testing.T, what string, h conformance.Maker, id string, want conformance.Status) bool {
	t.Helper()
	o := conformance.Options{Only: []string{id}, Seed: 7}
	if want == conformance.Pass {
		o.Budget = 300 * time.Millisecond // longer histories of right connectors are other tests'
	}
	r := conformance.Check(t.Context(), h, o)[0]
	for o.Seed < 12 && want == conformance.Fail && r.Status == conformance.Pass && byChance("", id) {
		o.Seed++
		r = conformance.Check(t.Context(), h, o)[0]
	}
	if !decided(t, r) {
		return false
	}
	require.Equal(t, want, r.Status, "%s: %v", what, r.Log)
	return true
}
