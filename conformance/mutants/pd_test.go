package mutants_test

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
)

// pdProfiles are the profiles of pairs.
func pdProfiles() []conformance.Profile {
	return []conformance.Profile{conformance.PDProducer, conformance.PDConsumer, conformance.Bidirectional, conformance.Reshape}
}

// The reference of the P/D profiles passes them, and of what is optional only the deaths of processes are
// skipped in this one.
func TestPDReference(t *testing.T) {
	run := conformance.InProcess
	if !testing.Short() { // as well in make test; in this one the race detector sees what runs
		run = conformance.Wire
	}
	results := conformance.Check(t.Context(), run(mutants.PDReference(), nil), conformance.Options{Profiles: pdProfiles()[:3], Seed: 3})
	// No case of other shapes waits for the end of a lease, and under the race detector many loads take longer than a short one.
	long := json.RawMessage(`{"lease_ms": 60000}`)
	results = append(results, conformance.Check(t.Context(), run(mutants.PDReference(), long), conformance.Options{Profiles: pdProfiles()[3:], Seed: 3})...)
	for _, r := range results {
		require.NotEqual(t, conformance.Fail, r.Status, "%s (%s): %v", r.ID, r.Rule, r.Log)
		decided(t, r)
		if r.Status == conformance.Skip && strings.HasPrefix(r.ID, "pd-") {
			require.Contains(t, r.Log[0], "kvport conform runs it in its own", r.ID)
		}
	}
}

// The pair whose producer writes passes too: the cases of what writing changes, and all with KVPORT_SOAK=1.
func TestPDPushReference(t *testing.T) {
	h := conformance.InProcess(mutants.PDPushReference(), nil)
	o := conformance.Options{Only: []string{"pd-handoff", "pd-tail", "pd-groups", "pd-ranks", "pd-at-once", "pd-crowd", "pd-named", "pd-cut"}, Seed: 4}
	if !testing.Short() {
		h = conformance.Wire(mutants.PDPushReference(), nil)
		o.Only = append(o.Only, "pd-asked-late", "pd-late-next", "pd-under-way", "pd-closed-reading")
	}
	if os.Getenv("KVPORT_SOAK") != "" {
		o.Only, o.Profiles = nil, pdProfiles()[:3]
	}
	for _, r := range conformance.Check(t.Context(), h, o) {
		require.NotEqual(t, conformance.Fail, r.Status, "%s (%s): %v", r.ID, r.Rule, r.Log)
		decided(t, r)
		if r.Status == conformance.Skip && strings.HasPrefix(r.ID, "pd-") {
			require.Contains(t, r.Log[0], "kvport conform runs it in its own", r.ID)
		}
	}
}

// In processes of their own nothing of a pair is skipped. KVPORT_SOAK runs all cases so.
func TestPDReferenceAsBinary(t *testing.T) {
	if testing.Short() {
		t.Skip("processes, each with the race detector in make race; make test runs them")
	}
	o := conformance.Options{Profiles: pdProfiles(), Only: []string{"pd-handoff", "pd-all-ranks", "pd-reordered", "pd-killed", "pd-stopped", "pd-taker-killed"}}
	if os.Getenv("KVPORT_SOAK") != "" {
		o.Only = nil
	}
	for _, r := range conformance.Check(t.Context(), conformance.Binary(plugin(t, mutants.PDProgram), nil), o) {
		require.NotEqual(t, conformance.Fail, r.Status, "%s (%s): %v", r.ID, r.Rule, r.Log)
		if decided(t, r) && strings.HasPrefix(r.ID, "pd-") {
			require.Equal(t, conformance.Pass, r.Status, "%s (%s): %v", r.ID, r.Rule, r.Log)
		}
	}
}
