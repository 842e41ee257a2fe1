package mutants_test

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
)

// named are the cases that each look for one fault, of the profiles of the connector that need no process.
func named(m mutants.Unseen) (ids []string) {
	for _, c := range conformance.Cases() {
		if slices.Contains(m.Also, c.ID) {
			continue
		}
		of := func(p conformance.Profile) bool { return slices.Contains(c.Profiles, p) }
		if of := ofPairs(m.Case); of != nil {
			if !strings.HasPrefix(c.ID, "random") && slices.ContainsFunc(of, func(p conformance.Profile) bool { return slices.Contains(c.Profiles, p) }) {
				ids = append(ids, c.ID)
			}
			continue
		}
		powers := of(conformance.Power) && os.Getenv("KVPORT_SOAK") != ""
		if !strings.HasPrefix(c.ID, "random") && (of(conformance.Store) || of(conformance.MultiRank) || of(conformance.Groups) || powers || m.Config != "" && of(conformance.Offload)) {
			ids = append(ids, c.ID)
		}
	}
	return ids
}

// ofPairs are the profiles of the connectors in which only a case of steps finds the fault.
func ofPairs(caseID string) []conformance.Profile {
	switch caseID {
	case "random-holds":
		return []conformance.Profile{conformance.PDProducer, conformance.PDConsumer}
	case "random-reshape":
		return []conformance.Profile{conformance.Reshape}
	case "random-turns":
		return []conformance.Profile{conformance.Bidirectional, conformance.PDProducer, conformance.PDConsumer}
	case "random-layers":
		return []conformance.Profile{conformance.LayerWise}
	}
	return nil
}

func configOf(m mutants.Mutant) json.RawMessage {
	if m.Config == "" {
		return nil
	}
	return json.RawMessage(m.Config)
}

// faultsAreFound plays random histories of one case against each wrong connector that only they find, and expects the rule that says so. It
// plays one in oneIn of them, and with KVPORT_SOAK=1 all.
func faultsAreFound(t *testing.T, caseID string, oneIn int) {
	t.Helper()
	if testing.Short() {
		t.Skip("with -short, which the race stage uses: the random histories of right connectors, which run there, are the same code")
	}
	n := -1
	for _, m := range mutants.RandomlyFound() {
		if m.Case != caseID {
			continue
		}
		n++
		t.Run(m.Name, func(t *testing.T) {
			if os.Getenv("KVPORT_SOAK") == "" && n%oneIn > 0 {
				t.Skipf("one in %d; all with KVPORT_SOAK=1", oneIn)
			}
			var r conformance.Result
			passed := false
			for seed := uint64(1); seed < 12 && r.Status != conformance.Fail; seed++ {
				// A busy machine plays fewer histories in the budget; the first one that fails ends it. A quarter of the deadline is for shortening it.
				o := conformance.Options{Only: []string{m.Case}, Seed: seed, Budget: 4900 * time.Millisecond, Deadline: 14 * time.Second}
				r = conformance.Check(t.Context(), conformance.InProcess(m.Plugin(), configOf(m.Mutant)), o)[0]
				passed = passed || r.Status == conformance.Pass
			}
			if !passed && !decided(t, r) {
				t.SkipNow()
			}
			require.Equal(t, conformance.Fail, r.Status, "nobody noticed: %v", r.Log)
			t.Log(r.Took.Round(1e6), r.Log[0], "\n   "+strings.Join(r.Transcript, "\n   "))
			shortlySaid(t, m, r)
		})
	}
}

// shortlySaid expects that a failure names the rule, and shows a short history.
func shortlySaid(t *testing.T, m mutants.Unseen, r conformance.Result) {
	t.Helper()
	require.Contains(t, m.Rules, r.Rule, fmt.Sprint(r.Log))
	require.True(t, strings.HasPrefix(r.Log[0], r.Rule+": "), r.Log[0])
	require.LessOrEqual(t, len(r.Transcript), 15)
}

// Work that goes on behind calls that have returned ends by itself, and is no growth.
func TestWorkBehindIsNoGrowth(t *testing.T) {
	if testing.Short() {
		t.Skip("waits some seconds for the work to end")
	}
	o := conformance.Options{Only: []string{"random-growth"}, Budget: 300 * time.Millisecond}
	r := conformance.Check(t.Context(), conformance.InProcess(mutants.WorksBehind(), nil), o)[0]
	if decided(t, r) {
		require.Equal(t, conformance.Pass, r.Status, "%v", r.Log)
	}
}

// budgetFor is how long random histories look for a fault. A busy machine plays fewer of them in that time; the first one that fails ends it.
func budgetFor(m mutants.Unseen) time.Duration {
	switch {
	case m.Long:
		return 30 * time.Second
	case m.Case == "random-growth":
		return 2 * time.Second
	}
	return 4900 * time.Millisecond
}

// notNamed expects that no case but those that a wrong connector names finds it.
func notNamed(t *testing.T, m mutants.Unseen, maker func() (conformance.Harness, error)) {
	t.Helper()
	for _, r := range conformance.Check(t.Context(), maker, conformance.Options{Only: named(m), Seed: 7}) {
		require.NotEqual(t, conformance.Fail, r.Status, "%s finds it: %v", r.ID, r.Log)
		decided(t, r)
	}
	for _, id := range m.Also {
		r := conformance.Check(t.Context(), maker, conformance.Options{Only: []string{id}, Seed: 7})[0]
		require.True(t, r.Status == conformance.Fail || !decided(t, r), "%s does not find it: %v", id, r.Log)
	}
}

// What no case looks for is found by random histories, and the report names the rule and shows a short history.
func TestOnlyRandomHistoriesFind(t *testing.T) {
	if testing.Short() {
		t.Skip("with -short, which the race stage uses: each takes up to a minute under the race detector, where other tests play the same histories")
	}
	classes := map[string]bool{}
	all, only := mutants.RandomlyFound(), 0
	for n, m := range all {
		if len(m.Also) == 0 {
			classes[m.Class] = true
			only++
		}
		t.Run(m.Name, func(t *testing.T) {
			if os.Getenv("KVPORT_SOAK") == "" && n%12 > 0 {
				t.Skip("one in twelve; all with KVPORT_SOAK=1")
			}
			start := conformance.InProcess
			if m.Racy {
				start = conformance.Wire // a data race by definition, which the race detector does not see through the protocol
			}
			maker := func() (conformance.Harness, error) { return start(m.Plugin(), configOf(m.Mutant))() } // each with a store of its own
			notNamed(t, m, maker)
			if m.Case == "random-holds" && os.Getenv("KVPORT_SOAK") == "" {
				t.Skip("TestHoldFaults finds all of this case")
			}
			var r conformance.Result
			passed := false
			for seed := uint64(1); seed < 8 && r.Status != conformance.Fail; seed++ {
				r = conformance.Check(t.Context(), maker, conformance.Options{Only: []string{m.Case}, Seed: seed, Budget: budgetFor(m), Deadline: 2 * time.Minute})[0]
				passed = passed || r.Status == conformance.Pass
			}
			if !passed && !decided(t, r) {
				t.SkipNow()
			}
			require.Equal(t, conformance.Fail, r.Status, "nobody noticed: %v", r.Log)
			t.Log(r.Took.Round(1e6), r.Log[0], "\n   "+strings.Join(r.Transcript, "\n   "))
			shortlySaid(t, m, r)
		})
	}
	require.GreaterOrEqual(t, only, 45)
	t.Logf("%d wrong connectors, %d of which no other case finds, of %d classes", len(all), only, len(classes))
}
