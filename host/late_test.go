package host

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/leaktest"
	"github.com/kvport/kvport/verify/testkit"
)

// A right plugin whose answers come after their requests have ended breaks no contract: operators have
// an alert on violations.
func TestLateAnswersAreNoViolations(t *testing.T) {
	r := newRig(t, rigOptions{extra: map[string]any{"match_ms": 30}})
	ks := keys(1, 2)
	for _, id := range []string{"a", "b", "c"} {
		require.True(t, r.Match(query(id, ks), nil).Later)
		r.send(&connector.Step{Ended: []connector.Ended{{Request: connector.RequestID(id), Reason: connector.ReasonAbort}}})
		r.next(Finished)
	}
	r.match(query("d", ks), nil) // after which all earlier answers have come
	require.Zero(t, r.metric("kvport_plugin_violations_total"))
	require.Positive(t, r.metric("kvport_plugin_late_answers_total"))
}

// A store that is slower than the deadline is a hit rate of 0 otherwise, and nothing says why.
func TestUndecidedMatchIsSaid(t *testing.T) {
	leaks := leaktest.Watch(t)
	o := rigOptions{extra: map[string]any{"match_ms": 120}, settings: map[string]any{"deadlines": map[string]any{"later": "40ms"}}}
	cfg, eng, opts := o.build(t)
	var log testkit.Log
	opts.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
	h, err := Open(t.Context(), cfg, eng, opts)
	require.NoError(t, err)
	r := &rig{Host: h, t: t, metrics: opts.Metrics.(*prometheus.Registry)}
	for _, id := range []string{"a", "b", "c"} {
		require.Equal(t, connector.Match{}, r.match(query(id, keys(1, 2)), nil))
	}
	require.InDelta(t, 3, r.metric("kvport_match_undecided_total"), 0)
	require.Equal(t, 1, strings.Count(log.String(), "match undecided after 40ms, counted as a miss; raise kvport.deadlines.later"), log.String())
	require.NoError(t, r.closeNow())
	count, sum := h.metrics.answerTimes(t)
	require.Positive(t, count)
	// What Match took, which no call of the engine's loop waits for. On a busy machine a call reaches the plugin
	// when its time is over, and answers at once.
	require.GreaterOrEqual(t, sum/float64(count), 0.03)
	leaks()
}

// answerTimes is the histogram of the plugin's answers to Match.
func (m *metrics) answerTimes(t *testing.T) (count uint64, sum float64) {
	t.Helper()
	var out dto.Metric
	require.NoError(t, m.answer.Write(&out))
	return out.GetHistogram().GetSampleCount(), out.GetHistogram().GetSampleSum()
}
