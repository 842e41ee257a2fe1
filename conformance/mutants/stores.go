package mutants

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

// memory is a correct Store.
type memory struct {
	mu     sync.Mutex
	blocks map[connector.StoreKey][]byte
}

// Lookup implements connector.Store.
func (m *memory) Lookup(_ context.Context, runs [][]connector.StoreKey) ([]int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	found := make([]int, len(runs))
	for i, keys := range runs {
		for found[i] < len(keys) && m.blocks[keys[found[i]]] != nil {
			found[i]++
		}
	}
	return found, nil
}

// Get implements connector.Store.
func (m *memory) Get(ctx context.Context, items []connector.Item) error {
	failed := &connector.ItemError{}
	for i, it := range items {
		m.mu.Lock()
		data, err := m.blocks[it.Key], ctx.Err()
		m.mu.Unlock()
		if err == nil && data == nil {
			err = connector.ErrGone
		}
		if err != nil {
			failed.Items, failed.Err = append(failed.Items, i), err
			continue
		}
		for _, s := range it.Spans {
			data = data[copy(s, data):]
		}
	}
	if failed.Err != nil {
		return failed
	}
	return nil
}

// same reports whether a block is there as it is.
func (m *memory) same(it connector.Item) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return sameVersion(m.blocks[it.Key], it.Spans)
}

// Put implements connector.Store.
func (m *memory) Put(ctx context.Context, items []connector.Item) error {
	for _, it := range items {
		if err := ctx.Err(); err != nil {
			return err
		}
		data := slices.Concat(it.Spans...)
		m.mu.Lock()
		if old := m.blocks[it.Key]; old == nil || it.Replace || !sameVersion(old, it.Spans) {
			m.blocks[it.Key] = data
		}
		m.mu.Unlock()
	}
	return nil
}

// Close implements connector.Store.
func (m *memory) Close() error { return nil }

// badStore is a Store with some calls replaced.
type badStore struct {
	*memory
	lookup   func([][]connector.StoreKey) ([]int, error)
	get, put func(context.Context, []connector.Item) error
	close    func() error
}

// Lookup implements connector.Store.
func (s *badStore) Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
	if s.lookup != nil {
		return s.lookup(runs)
	}
	return s.memory.Lookup(ctx, runs)
}

// Get implements connector.Store.
func (s *badStore) Get(ctx context.Context, items []connector.Item) error {
	if s.get != nil {
		return s.get(ctx, items)
	}
	return s.memory.Get(ctx, items)
}

// Put implements connector.Store.
func (s *badStore) Put(ctx context.Context, items []connector.Item) error {
	if s.put != nil {
		return s.put(ctx, items)
	}
	return s.memory.Put(ctx, items)
}

// Close implements connector.Store.
func (s *badStore) Close() error {
	if s.close != nil {
		return s.close()
	}
	return s.memory.Close()
}

// storePlugin makes a connector of a Store that change made wrong. Engines share the blocks.
func storePlugin(change func(*badStore)) connector.Plugin {
	m := &memory{blocks: map[connector.StoreKey][]byte{}}
	d := sdk.Definition{Name: "StoreConnector", Version: "1", Scope: connector.ScopeNode}
	return sdk.FromStore(d, func(context.Context, connector.Env, config) (connector.Store, error) {
		s := &badStore{memory: m}
		change(s)
		return s, nil
	})
}

// StoreReference is a correct connector made of a Store in memory.
func StoreReference() connector.Plugin { return storePlugin(func(*badStore) {}) }

// AskAgain is a correct connector that has no room for more than eight blocks of a call at first: it answers ErrBusy, and takes them when it is
// asked again.
func AskAgain() connector.Plugin {
	const room = 8
	return storePlugin(func(s *badStore) {
		var asked sync.Map
		s.put = func(ctx context.Context, items []connector.Item) error {
			if len(items) > room {
				if _, again := asked.LoadOrStore(items[0].Key, true); !again {
					return connector.ErrBusy
				}
			}
			return s.memory.Put(ctx, items)
		}
	})
}

// WorksBehind is a correct connector that goes on to work for some seconds behind some of the loads that fail.
func WorksBehind() connector.Plugin {
	return storePlugin(func(s *badStore) {
		var failed atomic.Int64
		s.get = func(ctx context.Context, items []connector.Item) error {
			err := s.memory.Get(ctx, items)
			if err != nil && failed.Add(1)%4 == 0 {
				go func() { <-time.After(3 * time.Second) }()
			}
			return err
		}
	})
}

func mutant(name, caseID string, change func(*badStore)) Mutant {
	return Mutant{Name: name, Case: caseID, Plugin: func() connector.Plugin { return storePlugin(change) }}
}

// sharing is a store whose engines share what change keeps; change is called once for all of them.
func sharing(name, caseID string, change func(*memory) func(*badStore)) Mutant {
	m := shared("", name, "", change).Mutant
	m.Case = caseID
	return m
}

// shortened is a store that knows keys by a part of their bytes.
func shortened(name string, from, to int) Mutant {
	short := func(k connector.StoreKey) (s connector.StoreKey) {
		copy(s[:], k[from:to])
		return s
	}
	items := func(of []connector.Item) []connector.Item {
		of = slices.Clone(of)
		for i := range of {
			of[i].Key = short(of[i].Key)
		}
		return of
	}
	return mutant(name, "near-keys", func(s *badStore) {
		s.lookup = func(runs [][]connector.StoreKey) ([]int, error) {
			runs = slices.Clone(runs)
			for i := range runs {
				runs[i] = slices.Clone(runs[i])
				for n := range runs[i] {
					runs[i][n] = short(runs[i][n])
				}
			}
			return s.memory.Lookup(context.Background(), runs)
		}
		s.get = func(ctx context.Context, of []connector.Item) error { return s.memory.Get(ctx, items(of)) }
		s.put = func(ctx context.Context, of []connector.Item) error { return s.memory.Put(ctx, items(of)) }
	})
}

// badStores are the faults that authors of a Store can make.
func badStores() []Mutant {
	return slices.Concat(shortKeys(), badReaders(), badWriters(), agers(), contentMutants(), shapeMutants(), lastingMutants(), besideMutants(), []Mutant{earlyOffer(), leftOut()})
}

// shortKeys know keys by a part of their bytes.
func shortKeys() []Mutant {
	return []Mutant{
		shortened("a store that knows keys by their first 3 bytes", 0, 3),
		shortened("a store that knows keys by their first 7 bytes", 0, 7),
		shortened("a store that knows keys by their last 3 bytes", 29, 32),
		shortened("a store that knows keys by their last 7 bytes", 25, 32),
	}
}

func badReaders() []Mutant {
	return []Mutant{
		mutant("a store that counts keys behind a hole", "prefix-hole", func(s *badStore) {
			s.lookup = func(runs [][]connector.StoreKey) ([]int, error) {
				s.mu.Lock()
				defer s.mu.Unlock()
				found := make([]int, len(runs))
				for i, keys := range runs {
					for _, k := range keys {
						if s.blocks[k] != nil {
							found[i]++
						}
					}
				}
				return found, nil
			}
		}),
		mutant("a store that answers its first run only", "batch-order", func(s *badStore) {
			s.lookup = func(runs [][]connector.StoreKey) ([]int, error) {
				found, err := s.memory.Lookup(context.Background(), runs[:1])
				return append(found, make([]int, len(runs)-1)...), err
			}
		}),
		mutant("a store that gives up at the first absent item", "partial-load", func(s *badStore) {
			s.get = func(ctx context.Context, items []connector.Item) error {
				err := s.memory.Get(ctx, items)
				if missing, ok := errors.AsType[*connector.ItemError](err); ok {
					missing.Items = missing.Items[:1]
				}
				return err
			}
		}),
		mutant("a store that reads on when its context has ended", "amid-call", func(s *badStore) {
			s.get = func(ctx context.Context, items []connector.Item) error {
				<-time.After(6 * time.Second) // a database that takes its time
				return s.memory.Get(ctx, items)
			}
		}),
		mutant("a store that writes on when its context has ended", "amid-call", func(s *badStore) {
			s.put = func(ctx context.Context, items []connector.Item) error {
				<-time.After(6 * time.Second)
				return s.memory.Put(ctx, items)
			}
		}),
		mutant("a store that reads what it does not have as zeros", "other-key", func(s *badStore) {
			s.get = func(ctx context.Context, items []connector.Item) error {
				var missing *connector.ItemError
				if err := s.memory.Get(ctx, items); !errors.As(err, &missing) {
					return err
				}
				for _, i := range missing.Items {
					for _, span := range items[i].Spans {
						clear(span)
					}
				}
				return nil
			}
		}),
	}
}

func badWriters() []Mutant {
	return []Mutant{
		mutant("a store that never overwrites", "replace", func(s *badStore) {
			s.put = func(ctx context.Context, items []connector.Item) error {
				for _, it := range items {
					it.Replace = false
					if err := s.memory.Put(ctx, []connector.Item{it}); err != nil {
						return err
					}
				}
				return nil
			}
		}),
		mutant("a store that shows blocks before they are whole", "cancelled-save", func(s *badStore) {
			s.put = func(ctx context.Context, items []connector.Item) error {
				if ctx.Err() != nil {
					items = slices.Clone(items)
					for i := range items {
						items[i].Spans = items[i].Spans[:1]
					}
				}
				return s.memory.Put(context.WithoutCancel(ctx), items)
			}
		}),
		mutant("a store that forgets when it closes", "reopen", func(s *badStore) {
			s.close = func() error {
				s.mu.Lock()
				defer s.mu.Unlock()
				clear(s.blocks)
				return nil
			}
		}),
		mutant("a store that evicts what was just stored", "visible", func(s *badStore) {
			s.put = func(ctx context.Context, items []connector.Item) error {
				err := s.memory.Put(ctx, items)
				s.mu.Lock()
				defer s.mu.Unlock()
				for k := range s.blocks {
					if len(s.blocks) > 1 {
						delete(s.blocks, k)
					}
				}
				return err
			}
		}),
	}
}

// earlyOffer counts a block as present from the beginning of its Put on.
func earlyOffer() Mutant {
	return mutant("a store that offers what it is still writing", "offered-whole", func(s *badStore) {
		var mu sync.Mutex
		underWay := map[connector.StoreKey]bool{}
		mark := func(items []connector.Item, is bool) {
			mu.Lock()
			defer mu.Unlock()
			for _, it := range items {
				underWay[it.Key] = is
			}
		}
		s.put = func(ctx context.Context, items []connector.Item) error {
			mark(items, true)
			defer mark(items, false)
			pause(200 * time.Millisecond) // a Match and a Load of another goroutine come within it
			return s.memory.Put(ctx, items)
		}
		s.lookup = func(runs [][]connector.StoreKey) ([]int, error) {
			found, err := s.memory.Lookup(context.Background(), runs)
			mu.Lock()
			defer mu.Unlock()
			for i, keys := range runs {
				for found[i] < len(keys) && underWay[keys[found[i]]] {
					found[i]++
				}
			}
			return found, err
		}
	})
}

// leftOut does not store the last of many blocks, and finds none while it stores some: nothing that it offers is wrong.
func leftOut() Mutant {
	return mutant("a store that leaves out the last of many blocks", "offered-whole", func(s *badStore) {
		const many = 4
		var writing atomic.Int32
		s.put = func(ctx context.Context, items []connector.Item) error {
			writing.Add(1)
			defer writing.Add(-1)
			if len(items) > many {
				items = items[:len(items)-1]
			}
			return s.memory.Put(ctx, items)
		}
		s.lookup = func(runs [][]connector.StoreKey) ([]int, error) {
			if writing.Load() > 0 {
				return nil, connector.ErrBusy
			}
			return s.memory.Lookup(context.Background(), runs)
		}
	})
}
