package lookupbuffer_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/lookupbuffer"
	"github.com/kvport/kvport/lookupbuffer/lookupbuffertest"
	"github.com/kvport/kvport/pipe/pipetest"
)

// wrong is a buffer in memory with one fault.
type wrong struct {
	*lookupbuffer.Memory
	lookup func(m *lookupbuffer.Memory, ctx context.Context, runs [][]connector.StoreKey) ([]int, error)
	insert func(m *lookupbuffer.Memory, ctx context.Context, items []connector.Item) error
	take   func(m *lookupbuffer.Memory, ctx context.Context, items []connector.Item) error
}

func (w *wrong) Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
	if w.lookup != nil {
		return w.lookup(w.Memory, ctx, runs)
	}
	return w.Memory.Lookup(ctx, runs)
}

func (w *wrong) Insert(ctx context.Context, items []connector.Item) error {
	if w.insert != nil {
		return w.insert(w.Memory, ctx, items)
	}
	return w.Memory.Insert(ctx, items)
}

func (w *wrong) DropSelect(ctx context.Context, items []connector.Item) error {
	if w.take != nil {
		return w.take(w.Memory, ctx, items)
	}
	return w.Memory.DropSelect(ctx, items)
}

// fault is one wrong buffer and the case that must find it.
type fault struct {
	name, caseName string
	w              wrong
	capacity       int64
}

func wrongSelects() []fault {
	return []fault{
		{name: "drops before it has placed", caseName: "failed-placement", w: wrong{take: func(m *lookupbuffer.Memory, ctx context.Context, items []connector.Item) error {
			err := m.DropSelect(ctx, items)
			if failed, ok := errors.AsType[*connector.ItemError](err); ok {
				for _, i := range failed.Items {
					_ = m.DropSelect(ctx, []connector.Item{room(items[i].Key)})
				}
			}
			return err
		}}},
		{name: "does not wait", caseName: "select-waits", w: wrong{take: func(m *lookupbuffer.Memory, _ context.Context, items []connector.Item) error {
			done, cancel := context.WithTimeout(context.Background(), time.Millisecond)
			defer cancel()
			return m.DropSelect(done, items)
		}}},
		{name: "names every item of a call that failed in part", caseName: "not-there", w: wrong{take: func(m *lookupbuffer.Memory, ctx context.Context, items []connector.Item) error {
			err := m.DropSelect(ctx, items)
			if failed, ok := errors.AsType[*connector.ItemError](err); ok {
				failed.Items = nil
				for i := range items {
					failed.Items = append(failed.Items, i)
				}
			}
			return err
		}}},
		{name: "ignores that it was cancelled", caseName: "cancelled-select", w: wrong{take: func(m *lookupbuffer.Memory, ctx context.Context, items []connector.Item) error {
			later, cancel := context.WithTimeout(context.WithoutCancel(ctx), 100*time.Millisecond)
			defer cancel()
			return errors.Join(m.DropSelect(later, items), ctx.Err())
		}}},
		{name: "serves one selection at a time", caseName: "two-selections", w: wrong{take: oneAtATime()}},
	}
}

// oneAtATime gives each block to one selection, even if others wait for it, too.
func oneAtATime() func(*lookupbuffer.Memory, context.Context, []connector.Item) error {
	var mu sync.Mutex
	return func(m *lookupbuffer.Memory, ctx context.Context, items []connector.Item) error {
		mu.Lock()
		defer mu.Unlock()
		return m.DropSelect(ctx, items)
	}
}

func wrongInserts() []fault {
	return []fault{
		{name: "counts behind a hole", caseName: "lookup", w: wrong{lookup: func(m *lookupbuffer.Memory, ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
			found := make([]int, len(runs))
			for i, keys := range runs {
				for _, k := range keys {
					n, err := m.Lookup(ctx, [][]connector.StoreKey{{k}})
					if err != nil {
						return nil, err
					}
					found[i] += n[0]
				}
			}
			return found, nil
		}}},
		{name: "does not replace", caseName: "insert-twice", w: wrong{insert: func(m *lookupbuffer.Memory, ctx context.Context, items []connector.Item) error {
			for i := range items {
				items[i].Replace = false
			}
			return m.Insert(ctx, items)
		}}},
		{name: "holds more than it may", caseName: "full", capacity: 64 * capacity},
		{name: "waits for room", caseName: "full", w: wrong{insert: func(m *lookupbuffer.Memory, ctx context.Context, items []connector.Item) error {
			if m.Bytes()+int64(items[0].Size()) > capacity {
				<-ctx.Done()
			}
			return m.Insert(ctx, items)
		}}},
	}
}

func room(k connector.StoreKey) connector.Item {
	return connector.Item{Key: k, Spans: [][]byte{make([]byte, 40_000)}}
}

// TestWrongBuffers: each fault is found by the case that is named for it.
func TestWrongBuffers(t *testing.T) {
	for _, f := range append(wrongSelects(), wrongInserts()...) {
		t.Run(f.caseName+"/"+f.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			h := lookupbuffertest.Harness{Capacity: capacity, Open: func(lookupbuffertest.T) lookupbuffertest.Ends {
				w := f.w
				w.Memory = lookupbuffer.NewMemory(lookupbuffer.Options{Bytes: max(capacity, f.capacity)})
				return one(&w)
			}}
			failed := pipetest.Failed(ctx, func(r pipetest.T) {
				for _, c := range lookupbuffertest.Cases() {
					if c.Name == f.caseName {
						c.Run(r, h)
					}
				}
			})
			require.True(t, failed, "nobody noticed")
		})
	}
}
