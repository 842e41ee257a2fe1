package kernel

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestPool: every index once, on threads that are never used twice at a time, whatever the sizes; also
// after the workers have parked.
func TestPool(t *testing.T) {
	for _, threads := range []int{1, 2, 5} {
		c := newCompute(t, threads, Portable)
		busy := make([]atomic.Bool, threads)
		var twice atomic.Bool
		for round := range 2000 {
			n, grain := round%37, 1+round%5
			seen := make([]int32, n)
			c.Run(n, grain, func(thread, from, to int) {
				if busy[thread].Swap(true) {
					twice.Store(true)
				}
				for i := from; i < to; i++ {
					seen[i]++ // the race detector sees a second one
				}
				busy[thread].Store(false)
			})
			require.False(t, twice.Load(), "a thread works twice at a time")
			for i, times := range seen {
				require.EqualValues(t, 1, times, "%d threads, n %d, grain %d: index %d", threads, n, grain, i)
			}
			if round%500 == 0 {
				awaitParked(c.pool)
			}
		}
	}
}

// awaitParked returns when all workers have given up spinning.
func awaitParked(p *pool) {
	for i := range p.workers {
		for !p.workers[i].parked.Load() {
			// spin: a worker parks within microseconds of its last job
		}
	}
}

func TestOptions(t *testing.T) {
	for _, threads := range []int{-1, 1025} {
		_, err := New(Options{Threads: threads})
		require.ErrorContains(t, err, "threads")
	}
	c := newCompute(t, 3, Portable)
	require.Equal(t, 3, c.Threads())
	require.Equal(t, Portable, c.ISA())
	require.Positive(t, newCompute(t, 0, Auto).Threads())
	require.Equal(t, "f16", F16.String())
	require.Equal(t, "f32", F32.String())
}
