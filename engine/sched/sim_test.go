package sched

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSimulation plays thousands of seeds; see world for what it checks.
func TestSimulation(t *testing.T) {
	seeds := uint64(6000)
	if testing.Short() {
		seeds = 500
	}
	seen, steps, preemptions := map[string]int{}, 0, 0
	for seed := range seeds {
		w, err := play(seed)
		require.NoError(t, err, "seed %d, step %d", seed, w.steps)
		for what, n := range w.seen {
			seen[what] += n
		}
		steps += w.steps
		preemptions += w.s.stats.Preemptions
	}
	t.Logf("%d seeds, %d steps, %d preemptions, %v", seeds, steps, preemptions, seen)
	for _, what := range []string{
		"abort in state 0", "abort in state 1", "abort in state 2", "abort in state 3", "abort in state 4",
		"later", "hold", "query that holds", "query that finds more", "query that finds", "id used again", "failed load", "compute failed",
		"computed from unverified KV", "tainted request that hands over its first tokens", "tainted request that hands over nothing",
		"clean request that loaded dirty blocks and computed them again", "reason 1", "reason 2", "reason 3", "reason 4",
	} {
		require.Positive(t, seen[what], "%s never happened", what)
	}
	require.Positive(t, preemptions)
}

// TestSameSeedSameRun checks that a run is a function of its seed: no map order or clock gets in.
func TestSameSeedSameRun(t *testing.T) {
	for seed := range uint64(100) {
		a, err := play(seed)
		require.NoError(t, err)
		b, err := play(seed)
		require.NoError(t, err)
		require.Equal(t, a.log, b.log, "seed %d", seed)
		require.Equal(t, a.steps, b.steps)
	}
}
