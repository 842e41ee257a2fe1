package storekit

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// TestItemErrors: the errors of items survive being made one and spread again, and corruption comes first.
func TestItemErrors(t *testing.T) {
	require.NoError(t, ItemError(make([]error, 3)))
	require.Equal(t, make([]error, 2), ErrorsOf(nil, 2))
	other, corrupt := errors.New("other"), fmt.Errorf("damaged: %w", connector.ErrCorrupt)
	err := ItemError([]error{other, nil, corrupt})
	failed, ok := errors.AsType[*connector.ItemError](err)
	require.True(t, ok)
	require.Equal(t, []int{0, 2}, failed.Items)
	require.ErrorIs(t, err, connector.ErrCorrupt)
	outdated := fmt.Errorf("old: %w", connector.ErrOutdated)
	require.ErrorIs(t, ItemError([]error{other, outdated}), connector.ErrOutdated)
	require.NotErrorIs(t, ItemError([]error{outdated, corrupt}), connector.ErrOutdated)
	require.Equal(t, []error{corrupt, nil, corrupt}, ErrorsOf(err, 3))
	require.Equal(t, []error{corrupt, nil}, ErrorsOf(err, 2), "an item that does not exist is nobody's")
	require.Equal(t, []error{other, other}, ErrorsOf(other, 2))
	unnamed := &connector.ItemError{Err: other}
	require.Equal(t, []error{unnamed, unnamed}, ErrorsOf(unnamed, 2))
}

func TestParallel(t *testing.T) {
	for _, workers := range []int{0, 1, 3, 20} {
		var calls [10]atomic.Int32
		Parallel(len(calls), workers, func(i int) { calls[i].Add(1) })
		for i := range calls {
			require.EqualValues(t, 1, calls[i].Load())
		}
		Parallel(0, workers, func(int) { t.Error("nothing to do") })
	}
}

func TestCounts(t *testing.T) {
	type numbers struct {
		A      uint64 `stat:"a_total" help:"A."`
		Hidden uint64
		B      uint64 `stat:"b" help:"B."`
	}
	var c Counts[numbers]
	c.Count(func(now *numbers) { now.A, now.B, now.Hidden = 3, 6, 9 })
	c.Count(func(now *numbers) { now.A++ })
	require.Equal(t, []connector.StatInfo{{Name: "x_a_total", Help: "A.", Kind: connector.Counter}, {Name: "x_b", Help: "B.", Kind: connector.Gauge}}, Infos[numbers]("x_"))
	require.Equal(t, []connector.Stat{{Name: "x_a_total", Value: 4}, {Name: "x_b", Value: 6}}, Stats("x_", c.Now()))
}
