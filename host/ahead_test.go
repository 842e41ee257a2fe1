package host

import (
	"context"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// countingScheduler notes how many queries each call of Match has.
type countingScheduler struct {
	connector.Scheduler
	calls []int
}

func (s *countingScheduler) Match(_ context.Context, qs []connector.Query) ([]connector.Match, error) {
	s.calls = append(s.calls, len(qs))
	return make([]connector.Match, len(qs)), nil
}

// The connector is asked first, and in a call without the others, what the engine waits for (rule AGENT-16).
func TestAheadIsACallOfItsOwn(t *testing.T) {
	s := &countingScheduler{}
	g := &generation{sched: s, h: &Host{
		cfg: &Config{Settings: DefaultSettings()}, metrics: &metrics{answer: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "answer"})},
	}}
	answers := 0
	ask := func(ahead bool) job {
		return job{ask: &askJob{ahead: ahead, answer: func(connector.Match, error) { answers++ }}}
	}
	batch := []job{ask(false), ask(true), ask(true), ask(false), ask(false)}
	for len(batch) > 0 {
		var err error
		batch, err = g.callNext(t.Context(), batch)
		require.NoError(t, err)
	}
	require.Equal(t, []int{1, 2, 2}, s.calls)
	require.Equal(t, 5, answers)
}
