package serve

import (
	"context"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// oneByOne is a server that answers one request after the other.
type oneByOne struct {
	turn chan struct{}
	each time.Duration
}

func (s *oneByOne) Send(_ context.Context, _ *Request, piece func()) (Answer, error) {
	s.turn <- struct{}{}
	<-time.After(s.each)
	<-s.turn
	piece()
	return Answer{Completed: 1}, nil
}

// served is what a server that takes so long for each request does with 10 requests a second.
func served(t *testing.T, each time.Duration, warmUp float64, seeds int) (r *Result) {
	synctest.Test(t, func(t *testing.T) {
		w := DefaultWorkload()
		w.Requests, w.Rate, w.WarmUp, w.CoolDown = 400, 10, warmUp, 5
		r = &Result{Setup: "s", SLOs: []SLO{{TTFT: time.Second}}}
		for seed := range seeds {
			r.Add(Run(t.Context(), &oneByOne{make(chan struct{}, 1), each}, w.Draw(uint64(seed)), RunOptions{Timeout: time.Hour}))
		}
	})
	return r
}

// A queue that grows is noticed: of a server that is 25 % too slow a fifth of the requests is left over. One that keeps up is not overloaded, though
// requests wait there.
func TestOverloaded(t *testing.T) {
	slow := served(t, 125*time.Millisecond, 10, 10)
	require.InDelta(t, 0.2, slow.Growth(), 0.06)
	require.True(t, slow.Overloaded())

	busy := served(t, 80*time.Millisecond, 30, 3)
	require.Greater(t, busy.Quantile(TTFT, 0.5), 120.0, "requests wait for others")
	require.InDelta(t, 0, busy.Growth(), 0.03)
	require.False(t, busy.Overloaded())

	little := &Result{queues: []queue{{10, 12, 40, true}, {12, 10, 40, true}, {9, 14, 40, true}, {10, 9, 40, true}}}
	require.InDelta(t, 0.025, little.Growth(), 1e-9)
	require.False(t, little.Overloaded(), "chance explains as much")

	emit, rows := collect()
	require.NoError(t, Rows([]*Result{busy, {Setup: "slow", SLOs: slow.SLOs, Runs: slow.Runs, queues: slow.queues}}, emit))
	require.Contains(t, rows, "s: queue growth")
	require.NotContains(t, rows, "s: overloaded")
	require.InDelta(t, slow.Growth(), *rows["slow: overloaded"].Value, 1e-4)
	require.NotNil(t, rows["slow : s, TTFT p50"].Value)
	require.Nil(t, rows["slow : s, TTFT p50"].Ratio)
	require.NotContains(t, rows, "slow : s, TTFT p50, 95 % from")
	var text strings.Builder
	require.NoError(t, Table(&text, []*Result{slow, busy}))
	require.Contains(t, text.String(), "s: overloaded: its queue grew by ")
	require.NotContains(t, text.String(), "beside", "nor is anything compared with a setup that is overloaded")

	cold := served(t, 125*time.Millisecond, 0, 1)
	require.True(t, math.IsNaN(cold.Growth()), "an empty server's queue grows in any case")
	require.False(t, cold.Overloaded())
}

// Few requests for each seed are no growth by themselves: the queue is looked at when a request leaves, at both ends.
func TestGrowthOfShortRuns(t *testing.T) {
	const seeds, requests = 4000, 13
	r := &Result{Setup: "s"}
	w := DefaultWorkload()
	w.Requests, w.Rate, w.WarmUp, w.CoolDown = requests, 0.5, 30, 4
	for seed := range uint64(seeds) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var run []Outcome
		for _, q := range w.Draw(seed) {
			run = append(run, Outcome{At: q.At, Aside: q.Aside, End: q.At + time.Duration(rng.ExpFloat64()*float64(2*time.Second))})
		}
		r.queues = append(r.queues, queueOf(run))
	}
	mean, deviation := r.growth()
	require.Less(t, deviation, 0.003)
	require.InDelta(t, 0, mean, 4*deviation, "about one request of 13 if it began with the first that counts")
}

// What leaves before and after those that count is sent, and is not in the numbers.
func TestAside(t *testing.T) {
	w := DefaultWorkload()
	w.Requests, w.Rate, w.WarmUp, w.CoolDown = 50, 10, 6, 4
	list := w.Draw(3)
	first, last := -1, -1
	for i, r := range list {
		if !r.Aside {
			if first < 0 {
				first = i
			}
			last = i
		}
	}
	require.Equal(t, 49, last-first, "those that count are together")
	require.InDelta(t, 60, first, 25)
	require.InDelta(t, 40, len(list)-1-last, 20)
	require.GreaterOrEqual(t, list[first].At, 6*time.Second)
	require.Less(t, list[first-1].At, 6*time.Second)
	require.LessOrEqual(t, list[len(list)-1].At-list[last].At, 4*time.Second)

	r := served(t, time.Millisecond, 5, 1)
	require.Equal(t, 400, r.Counts().Requests)
	require.Len(t, r.Runs[0], 400)
	require.InEpsilon(t, 10, r.Goodput(r.SLOs[0]), 0.2, "seconds are those of the requests that count")
	require.NoError(t, w.Check())
	for _, bad := range []float64{-1, math.NaN(), math.Inf(1), 1e9} {
		w.WarmUp = bad
		require.ErrorContains(t, w.Check(), "warm_up_seconds is ")
		w.WarmUp, w.CoolDown = 0, bad
		require.ErrorContains(t, w.Check(), "cool_down_seconds is ")
		w.CoolDown = 0
	}
}
