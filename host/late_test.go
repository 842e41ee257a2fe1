package host

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

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

// slowStore is a scheduler side that takes a while over a Match, and does not look at its deadline.
type slowStore struct {
	noScheduler
	takes time.Duration
}

func (s slowStore) Match(ctx context.Context, qs []connector.Query) ([]connector.Match, error) {
	<-time.After(s.takes)
	return s.noScheduler.Match(ctx, qs)
}

// A store that is slower than the deadline is a hit rate of 0 otherwise, and nothing says why.
func TestUndecidedMatchIsSaid(t *testing.T) {
	leaks := leaktest.Watch(t)
	synctest.Test(t, func(t *testing.T) {
		var log testkit.Log
		const later, takes = 40 * time.Millisecond, 120 * time.Millisecond
		r := inProcess(t, rigOptions{
			log:      slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn})),
			settings: map[string]any{"deadlines": map[string]any{"later": later.String()}},
		}, slowStore{takes: takes})
		miss := func(id string) {
			t.Helper()
			began := time.Now()
			require.Equal(t, connector.Match{}, r.match(query(id, keys(1, 2)), nil))
			require.Equal(t, later, time.Since(began))
		}
		said := func() int {
			return strings.Count(log.String(), "match undecided after 40ms, counted as a miss; raise kvport.deadlines.later")
		}
		for _, id := range []string{"a", "b", "c"} {
			miss(id)
		}
		require.InDelta(t, 3, r.metric("kvport_match_undecided_total"), 0)
		require.Equal(t, 1, said(), log.String())
		<-time.After(missedEvery)
		miss("d")
		require.InDelta(t, 4, r.metric("kvport_match_undecided_total"), 0)
		require.Equal(t, 2, said(), log.String())
		require.Contains(t, log.String(), "matches=1 not_logged=2")
		require.NoError(t, r.closeNow())
		count, sum := r.Host.metrics.answerTimes(t)
		require.Positive(t, count)
		require.InDelta(t, takes.Seconds(), sum/float64(count), 1e-6, "what Match took, which no call of the engine's loop waits for")
	})
	leaks()
}

// answerTimes is the histogram of the plugin's answers to Match.
func (m *metrics) answerTimes(t *testing.T) (count uint64, sum float64) {
	t.Helper()
	var out dto.Metric
	require.NoError(t, m.answer.Write(&out))
	return out.GetHistogram().GetSampleCount(), out.GetHistogram().GetSampleSum()
}
