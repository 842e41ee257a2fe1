package sdk

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/lookupbuffer"
)

// slowBuffer fills one item in each quarter of selectPatience, in order. Items of taken keys are not there.
type slowBuffer struct {
	lookupbuffer.Buffer
	taken map[connector.StoreKey]bool // by another load, as soon as the first item is filled
	done  map[connector.StoreKey]bool
}

func (b *slowBuffer) Lookup(_ context.Context, runs [][]connector.StoreKey) ([]int, error) {
	found := make([]int, len(runs))
	for i, run := range runs {
		if !b.done[run[0]] && (len(b.done) == 0 || !b.taken[run[0]]) {
			found[i] = 1
		}
	}
	return found, nil
}

func (b *slowBuffer) DropSelect(ctx context.Context, items []connector.Item) error {
	for i := range items {
		if b.taken[items[i].Key] {
			<-ctx.Done()
		}
		select {
		case <-ctx.Done():
			failed := &connector.ItemError{Err: ctx.Err()}
			for j := i; j < len(items); j++ {
				failed.Items = append(failed.Items, j)
			}
			return failed
		case <-time.After(selectPatience / 4):
			b.done[items[i].Key] = true
		}
	}
	return nil
}

// A load that takes long is not one that another load was faster than: blocks that are still there are loaded.
func TestSlowSelect(t *testing.T) {
	for name, taken := range map[string]int{"all there": -1, "the last taken": 19} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := &slowBuffer{taken: map[connector.StoreKey]bool{}, done: map[connector.StoreKey]bool{}}
				items := make([]connector.Item, 20)
				for i := range items {
					items[i].Key = connector.StoreKey{byte(i)}
					b.taken[items[i].Key] = i == taken
				}
				err := (&bufferStore{b}).Get(t.Context(), items)
				if taken < 0 {
					require.NoError(t, err)
					require.Len(t, b.done, len(items))
					return
				}
				var failed *connector.ItemError
				require.ErrorAs(t, err, &failed)
				require.Equal(t, []int{taken}, failed.Items)
				require.ErrorIs(t, err, connector.ErrGone)
				require.ErrorContains(t, err, "taken by another load")
				require.Len(t, b.done, len(items)-1)
			})
		})
	}
}

// A block that a whole selectPatience does not bring is gone, whatever Lookup says.
func TestSelectThatBringsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		item := connector.Item{Key: connector.StoreKey{1}}
		b := &slowBuffer{taken: map[connector.StoreKey]bool{item.Key: true}, done: map[connector.StoreKey]bool{}}
		began := time.Now()
		require.ErrorIs(t, (&bufferStore{b}).Get(t.Context(), []connector.Item{item}), connector.ErrGone)
		require.Equal(t, selectPatience, time.Since(began))
	})
}

// The caller's own deadline ends a load that takes long.
func TestSlowSelectEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &slowBuffer{done: map[connector.StoreKey]bool{}}
		items := make([]connector.Item, 20)
		for i := range items {
			items[i].Key = connector.StoreKey{byte(i)}
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*selectPatience+selectPatience/8)
		defer cancel()
		var failed *connector.ItemError
		require.ErrorAs(t, (&bufferStore{b}).Get(ctx, items), &failed)
		require.Len(t, failed.Items, len(items)-len(b.done))
		require.ErrorIs(t, failed, context.DeadlineExceeded)
	})
}
