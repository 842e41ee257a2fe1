package tracker

import (
	"hash/fnv"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// explain prints how a failed run came to its end.
func (w *world) explain(seed uint64) {
	if w.t.Failed() {
		w.t.Logf("seed %d", seed)
		for _, line := range w.log[max(0, len(w.log)-60):] {
			w.t.Log(line)
		}
	}
}

func TestBookUnderRandomFaults(t *testing.T) {
	seeds, steps := 2000, 300
	if testing.Short() {
		seeds = 300
	}
	if os.Getenv("KVPORT_SOAK") != "" {
		seeds = 100_000
	}
	events, empty, alone, counters := 0, 0, 0, Counters{}
	for seed := range uint64(seeds) {
		w := newWorld(t, seed)
		func() {
			defer w.explain(seed)
			w.run(steps)
		}()
		events += w.events
		empty += w.empty
		alone += w.alone
		c := w.b.Counters()
		counters.Kills += c.Kills
		counters.Retries += c.Retries
		counters.Violations += c.Violations
		counters.Unknown += c.Unknown
	}
	require.NotZero(t, empty)
	require.NotZero(t, alone)
	require.NotZero(t, counters.Kills)
	require.NotZero(t, counters.Retries)
	require.NotZero(t, counters.Violations)
	require.NotZero(t, counters.Unknown)
	t.Logf("%d seeds, %d inputs, %d events, %d resets, %d loads without a plugin, %+v", seeds, seeds*steps, events, empty, alone, counters)
}

func TestEqualInputsGiveEqualActions(t *testing.T) {
	for seed := range uint64(50) {
		var sums [2]uint64
		for i := range sums {
			w := newWorld(t, seed)
			w.run(200)
			h := fnv.New64()
			for _, line := range w.log {
				h.Write([]byte(line))
			}
			sums[i] = h.Sum64()
		}
		require.Equal(t, sums[0], sums[1], "seed %d", seed)
	}
}
