package mutants

import (
	"context"
	"crypto/sha256"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

// lastingMutants are wrong a while after they were opened, or after many calls.
func lastingMutants() []Mutant {
	return []Mutant{
		{Name: "a store that goes on with the context with which it was opened", Case: "round-trip", Plugin: opensWith},
		{Name: "a store that takes a time of 3600 seconds for one of milliseconds", Case: "idle", Config: `{"ttl_seconds": 3600}`, Plugin: tooShort},
		mutant("a store that gives up blocks after 3.6 seconds, and no option says so", "idle", gives36),
		mutant("a store whose first load after three idle seconds fails", "idle", func(s *badStore) {
			var last atomic.Int64
			last.Store(time.Now().UnixNano())
			s.get = func(ctx context.Context, items []connector.Item) error {
				now := time.Now().UnixNano()
				if time.Duration(now-last.Swap(now)) > 3*time.Second {
					return errors.New("write: broken pipe")
				}
				return s.memory.Get(ctx, items)
			}
		}),
		mutant("a store that never gets back what a cancelled load has of its 8 places", "random-growth", func(s *badStore) {
			var taken atomic.Int64
			s.get = func(ctx context.Context, items []connector.Item) error {
				if taken.Load() >= 8 {
					return errors.New("too many loads")
				}
				taken.Add(1)
				err := s.memory.Get(ctx, items)
				if ctx.Err() == nil {
					taken.Add(-1)
				}
				return err
			}
		}),
		mutant("a store that reads what it has replaced from a memory of what it has loaded", "replace", remembersLoads),
		mutant("a store that finds a block by 24 bits of a sum where the key is not there", "ageing", bySum),
		sharing("a store that numbers its pages with 13 bits", "ageing", thirteenBits),
	}
}

// remembersLoads plants a memory of what was loaded, which a save does not change.
func remembersLoads(s *badStore) {
	own := &memory{blocks: map[connector.StoreKey][]byte{}}
	s.get = func(ctx context.Context, items []connector.Item) error {
		if own.Get(ctx, items) == nil {
			return nil
		}
		if err := s.memory.Get(ctx, items); err != nil {
			return err
		}
		return own.Put(ctx, items)
	}
}

func opensWith() connector.Plugin {
	m := &memory{blocks: map[connector.StoreKey][]byte{}}
	d := sdk.Definition{Name: "StoreConnector", Version: "1", Scope: connector.ScopeNode}
	return sdk.FromStore(d, func(opened context.Context, _ connector.Env, _ config) (connector.Store, error) {
		s := &badStore{memory: m}
		s.get = func(_ context.Context, items []connector.Item) error { return m.Get(opened, items) }
		s.put = func(_ context.Context, items []connector.Item) error { return m.Put(opened, items) }
		return s, nil
	})
}

// timed is the config of a store that gives up blocks.
type timed struct {
	TTL int `json:"ttl_seconds,omitempty" jsonschema:"minimum=0,default=0,description=How long a block may be loaded; 0: for ever." jsonschema_extras:"bounds=seconds"`
}

// tooShort keeps blocks for a thousandth of the time that its config says.
func tooShort() connector.Plugin {
	m := &memory{blocks: map[connector.StoreKey][]byte{}}
	d := sdk.Definition{Name: "StoreConnector", Version: "1", Scope: connector.ScopeNode}
	return sdk.FromStore(d, func(_ context.Context, _ connector.Env, c timed) (connector.Store, error) {
		s := &badStore{memory: m}
		givesUp(s, time.Duration(c.TTL)*time.Millisecond)
		return s, nil
	})
}

func gives36(s *badStore) { givesUp(s, 3600*time.Millisecond) }

// givesUp plants a time after which blocks are given up; 0: never.
func givesUp(s *badStore, limit time.Duration) {
	saved := map[connector.StoreKey]time.Time{}
	s.put = func(ctx context.Context, items []connector.Item) error {
		s.mu.Lock()
		for _, it := range items {
			saved[it.Key] = time.Now()
		}
		s.mu.Unlock()
		return s.memory.Put(ctx, items)
	}
	s.lookup = func(runs [][]connector.StoreKey) ([]int, error) {
		s.mu.Lock()
		for k, at := range saved {
			if limit > 0 && time.Since(at) > limit {
				delete(saved, k)
				delete(s.blocks, k)
			}
		}
		s.mu.Unlock()
		return s.memory.Lookup(context.Background(), runs)
	}
}

// bySum plants an index of sums for what is not found by its key.
func bySum(s *badStore) {
	sums := map[[3]byte]connector.StoreKey{}
	sum := func(k connector.StoreKey) (out [3]byte) {
		all := sha256.Sum256(k[:])
		copy(out[:], all[:])
		return out
	}
	found := func(k connector.StoreKey) connector.StoreKey {
		s.mu.Lock()
		defer s.mu.Unlock()
		if other, known := sums[sum(k)]; known && s.blocks[k] == nil {
			return other
		}
		return k
	}
	s.put = func(ctx context.Context, items []connector.Item) error {
		if err := s.memory.Put(ctx, items); err != nil {
			return err
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, it := range items {
			sums[sum(it.Key)] = it.Key
		}
		return nil
	}
	s.lookup = func(runs [][]connector.StoreKey) ([]int, error) {
		for i := range runs {
			runs[i] = slices.Clone(runs[i])
			for n, k := range runs[i] {
				runs[i][n] = found(k)
			}
		}
		return s.memory.Lookup(context.Background(), runs)
	}
	s.get = eachItem(s.memory.Get, func(it connector.Item) connector.Item {
		it.Key = found(it.Key)
		return it
	})
}

// thirteenBits plants pages, of which the 8,193rd is the first again: a block has one, and a slow machine stores 20,000.
func thirteenBits(*memory) func(*badStore) {
	const size, count = 512, 1 << 13
	pages := map[int][]byte{}
	at := map[connector.StoreKey]int{}
	next := 0
	return func(s *badStore) {
		s.put = func(ctx context.Context, items []connector.Item) error {
			if err := s.memory.Put(ctx, items); err != nil {
				return err
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			for _, it := range items {
				if _, known := at[it.Key]; !known {
					at[it.Key] = next % count
					next += (it.Size() + size - 1) / size
				}
				data := s.blocks[it.Key]
				for n := 0; n*size < len(data); n++ {
					pages[(at[it.Key]+n)%count] = data[n*size : min((n+1)*size, len(data))]
				}
			}
			return nil
		}
		s.get = func(ctx context.Context, items []connector.Item) error {
			if err := s.memory.Get(ctx, items); err != nil {
				return err
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			for _, it := range items {
				var data []byte
				for n := 0; n*size < it.Size(); n++ {
					data = append(data, pages[(at[it.Key]+n)%count]...)
				}
				for _, span := range it.Spans {
					data = data[copy(span, data):]
				}
			}
			return nil
		}
	}
}
