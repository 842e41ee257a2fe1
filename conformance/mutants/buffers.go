package mutants

import (
	"context"
	"errors"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/lookupbuffer"
	"github.com/kvport/kvport/sdk"
)

// badBuffer is a buffer in memory with some calls replaced.
type badBuffer struct {
	*lookupbuffer.Memory
	lookup func(m *lookupbuffer.Memory, ctx context.Context, runs [][]connector.StoreKey) ([]int, error)
	insert func(m *lookupbuffer.Memory, ctx context.Context, items []connector.Item) error
	take   func(m *lookupbuffer.Memory, ctx context.Context, items []connector.Item) error
}

// Lookup implements lookupbuffer.Buffer.
func (b *badBuffer) Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
	if b.lookup != nil {
		return b.lookup(b.Memory, ctx, runs)
	}
	return b.Memory.Lookup(ctx, runs)
}

// Insert implements lookupbuffer.Buffer.
func (b *badBuffer) Insert(ctx context.Context, items []connector.Item) error {
	if b.insert != nil {
		return b.insert(b.Memory, ctx, items)
	}
	return b.Memory.Insert(ctx, items)
}

// DropSelect implements lookupbuffer.Buffer.
func (b *badBuffer) DropSelect(ctx context.Context, items []connector.Item) error {
	if b.take != nil {
		return b.take(b.Memory, ctx, items)
	}
	return b.Memory.DropSelect(ctx, items)
}

// Close keeps the blocks, which all engines share.
func (b *badBuffer) Close() error { return nil }

// BufferReference is a correct connector made of a buffer in memory that all engines share.
func BufferReference() connector.Plugin { return bufferPlugin(&badBuffer{}) }

func bufferPlugin(b *badBuffer) connector.Plugin {
	b.Memory = lookupbuffer.NewMemory(lookupbuffer.Options{Bytes: 1 << 26})
	d := sdk.Definition{Name: "BufferReference", Version: "1", Scope: connector.ScopeNode}
	return sdk.FromBuffer(d, func(context.Context, connector.Env, config) (lookupbuffer.Buffer, error) { return b, nil })
}

func bufferMutant(name, caseID string, b *badBuffer) Mutant {
	return Mutant{Name: name, Case: caseID, Plugin: func() connector.Plugin {
		fresh := *b
		return bufferPlugin(&fresh)
	}}
}

// drop takes blocks out without placing them.
func drop(m *lookupbuffer.Memory, items []connector.Item) {
	for _, it := range items {
		thrown := connector.Item{Key: it.Key, Spans: [][]byte{make([]byte, it.Size())}}
		if found, _ := m.Read(it.Key, func([]byte) error { return nil }); found {
			_ = m.DropSelect(context.Background(), []connector.Item{thrown})
		}
	}
}

func zeros(items []connector.Item) {
	for _, it := range items {
		for _, s := range it.Spans {
			clear(s)
		}
	}
}

// bufferMutants are wrong buffers.
func bufferMutants() []Mutant {
	everything := func(_ *lookupbuffer.Memory, _ context.Context, runs [][]connector.StoreKey) ([]int, error) {
		found := make([]int, len(runs))
		for i := range runs {
			found[i] = len(runs[i])
		}
		return found, nil
	}
	return []Mutant{
		bufferMutant("a buffer whose insert waits for a reader at capacity", "buffer-full", &badBuffer{
			insert: func(m *lookupbuffer.Memory, ctx context.Context, items []connector.Item) error {
				if m.Bytes() > 10_000 {
					<-ctx.Done()
					return ctx.Err()
				}
				return m.Insert(ctx, items)
			},
		}),
		bufferMutant("a buffer that drops before it places", "buffer-cancelled", &badBuffer{
			take: func(m *lookupbuffer.Memory, ctx context.Context, items []connector.Item) error {
				if ctx.Err() != nil {
					drop(m, items)
				}
				return m.DropSelect(ctx, items)
			},
		}),
		twoLoadsMutant(),
		bufferMutant("a buffer that gives zeros for what it does not have", "buffer-gone", &badBuffer{
			lookup: everything,
			take: func(_ *lookupbuffer.Memory, _ context.Context, items []connector.Item) error {
				zeros(items)
				return nil
			},
		}),
		bufferMutant("a buffer that fails whole when a part is absent", "buffer-part", &badBuffer{
			lookup: everything,
			take: func(m *lookupbuffer.Memory, ctx context.Context, items []connector.Item) error {
				for _, it := range items {
					if found, _ := m.Read(it.Key, func([]byte) error { return nil }); !found {
						return connector.ErrGone
					}
				}
				return m.DropSelect(ctx, items)
			},
		}),
		bufferMutant("a buffer that mixes up the blocks of one selection", "buffer-take", &badBuffer{
			take: func(m *lookupbuffer.Memory, ctx context.Context, items []connector.Item) error {
				err := m.DropSelect(ctx, items)
				if len(items) > 1 && len(items[0].Spans) > 0 {
					copy(items[0].Spans[0], items[1].Spans[0])
				}
				return err
			},
		}),
		onceMutant(),
		{Name: "a buffer connector whose ranks share one part", Case: "buffer-ranks", Plugin: func() connector.Plugin {
			s := &peerSides{env: func(env *connector.Env) { env.Rank = 0 }}
			p := bufferPlugin(&badBuffer{})
			worker := s.wrap(p).Worker
			p.Worker = worker
			return p
		}},
	}
}

// twoLoadsMutant starves the second consumer of a prefix: it waits for a block that is gone.
func twoLoadsMutant() Mutant {
	var mu sync.Mutex
	taking := map[connector.StoreKey]bool{}
	return bufferMutant("a buffer that gives the second of two selections damaged bytes", "buffer-two-loads", &badBuffer{
		lookup: func(_ *lookupbuffer.Memory, _ context.Context, runs [][]connector.StoreKey) ([]int, error) {
			found := make([]int, len(runs))
			for i := range runs {
				found[i] = len(runs[i])
			}
			return found, nil
		},
		take: func(m *lookupbuffer.Memory, ctx context.Context, items []connector.Item) error {
			mu.Lock()
			defer mu.Unlock()
			if len(items) > 0 && taking[items[0].Key] {
				zeros(items)
				return nil
			}
			for _, it := range items {
				taking[it.Key] = true
			}
			return m.DropSelect(ctx, items)
		},
	})
}

// onceMutant remembers what was taken for ever.
func onceMutant() Mutant {
	var mu sync.Mutex
	taken := map[connector.StoreKey]bool{}
	return bufferMutant("a buffer that takes a key in once", "buffer-again", &badBuffer{
		insert: func(m *lookupbuffer.Memory, ctx context.Context, items []connector.Item) error {
			mu.Lock()
			defer mu.Unlock()
			var errs []error
			for _, it := range items {
				if !taken[it.Key] {
					taken[it.Key] = true
					errs = append(errs, m.Insert(ctx, []connector.Item{it}))
				}
			}
			return errors.Join(errs...)
		},
	})
}
