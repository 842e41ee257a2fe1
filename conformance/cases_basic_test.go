package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// What every case needs is judged first, and what it says stands first, whatever rules are more specific.
func TestBasicCasesComeFirst(t *testing.T) {
	for n, c := range basicCases() {
		require.Equal(t, c.ID, Cases()[n].ID)
	}
	require.Len(t, slices.DeleteFunc(Cases(), func(c Case) bool { return c.ID != "visible" }), 1)

	results := []Result{
		{ID: "visible", Rule: "WORK-05", Text: "One.", Status: Fail, Log: []string{"blocks offered after the save: got 0, want 2"}},
		{ID: "sides", Rule: "OPEN-01", Text: "Two.", Status: Fail, Log: []string{"gone"}},
		{ID: "batch-order", Rule: "SCHED-01", Text: "Three.", Status: Fail, Log: []string{"got 0, want 3"}},
	}
	summary := func() string {
		var b bytes.Buffer
		require.NoError(t, WriteSummary(&b, results))
		return b.String()
	}
	require.Regexp(t, `(?s)^These did not pass:\nfail  WORK-05     visible .*
        look at:  acknowledging a save before others can see it
Mend that first\. Most of the cases below do the same and more, so that they cannot be judged before visible passes:
fail  SCHED-01 .*\nfail  OPEN-01 `, summary())

	results[0].Rule = "OPEN-03" // most cases have one engine
	require.NotContains(t, summary(), "Mend that first")
	results[0].Status = Pass
	require.NotContains(t, summary(), "Mend that first")
	results[0].Status, results[0].required = Fail, "profile store requires this case"
	require.NotContains(t, summary(), "Mend that first", "it did not run")
	results = []Result{{ID: "visible", Rule: "OPEN-01", Status: Fail, Log: []string{"open"}}}
	require.NotContains(t, summary(), "Mend that first", "nothing is below it")
}

// Some faults break a rule of their own whatever the case is about.
func TestBlame(t *testing.T) {
	unanswered := errors.Join(errors.New("no answer"), context.DeadlineExceeded)
	long := time.Now().Add(-time.Minute)
	for name, c := range map[string]struct {
		body func(r *rig)
		want string
	}{
		"the first opening": {func(r *rig) { r.mustOpen(nil, errors.New("no such folder"), "open") }, "OPEN-01"},
		"a later opening": {func(r *rig) {
			r.ready = true
			r.mustOpen(nil, errors.New("no such folder"), "open")
		}, "RULE-01"},
		"an opening beside another engine": {func(r *rig) {
			besideAnother(r)
			r.mustOpen(&Instance{}, fmt.Errorf("somebody holds it: %w", connector.ErrIncompatible), "open")
		}, "OPEN-03"},
		"an opening that fails beside another engine": {func(r *rig) {
			besideAnother(r)
			r.mustOpen(&Instance{}, errors.New("the disk is full"), "open")
		}, "RULE-01"},
		"a close without an answer":               {func(r *rig) { r.must(r.endless(long, unanswered), "close") }, "LIFE-04"},
		"a close that fails":                      {func(r *rig) { r.must(r.endless(long, errors.New("disk")), "close") }, "RULE-01"},
		"a close that soon fails in its own time": {func(r *rig) { r.must(r.endless(time.Now(), unanswered), "close") }, "RULE-01"},
		"a close after another failure": {func(r *rig) {
			r.Errorf("block 1 is wrong")
			r.must(r.endless(long, unanswered), "close")
		}, "RULE-01"},
		"what comes first": {func(r *rig) {
			r.check(r.endless(long, unanswered), "close")
			r.mustAs("WORK-01", errors.New("save"), "save")
		}, "LIFE-04"},
	} {
		t.Run(name, func(t *testing.T) {
			result := run(t, time.Minute, func(c2 T, h Harness) { c.body(newRig(c2, h)) })
			require.Equal(t, Fail, result.Status)
			require.Equal(t, c.want, result.Rule, strings.Join(result.Log, "\n"))
		})
	}
}

// besideAnother has another engine of the case with a side open.
func besideAnother(r *rig) {
	r.ready, r.info.Scope = true, connector.ScopeNode
	r.opened[&engine{rig: r, inst: &Instance{}, workers: []connector.Worker{struct{ connector.Worker }{}}}] = true
}
