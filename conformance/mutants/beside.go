package mutants

import (
	"context"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

// diskTime is how long a wrong call takes, so that another of the same blocks comes within it also on a busy machine.
const diskTime = 5 * time.Millisecond

// besideMutants are wrong for a call beside another of the same blocks.
func besideMutants() []Mutant {
	const name = "beside-cancelled"
	return []Mutant{
		mutant("a store whose loads of one block all end when the first is cancelled", name, loadsTogether),
		mutant("a store that takes a save for done which another has begun", name, func(s *badStore) {
			var mu sync.Mutex
			under := map[connector.StoreKey]bool{}
			s.put = func(ctx context.Context, items []connector.Item) error {
				for n, it := range items {
					mu.Lock()
					was := under[it.Key]
					under[it.Key] = true
					mu.Unlock()
					if was && !it.Replace {
						continue
					}
					if n == 0 {
						pause(diskTime)
					}
					err := s.memory.Put(ctx, []connector.Item{it})
					mu.Lock()
					delete(under, it.Key)
					mu.Unlock()
					if err != nil {
						return err
					}
				}
				return nil
			}
		}),
	}
}

// flight is one reading of a block, for all that want it at that moment.
type flight struct {
	done chan struct{}
	data []byte
	err  error
}

// loadsTogether plants loads that read a block once for all, with the context of the first.
func loadsTogether(s *badStore) {
	var mu sync.Mutex
	flights := map[connector.StoreKey]*flight{}
	read := func(ctx context.Context, f *flight, it connector.Item) {
		defer close(f.done)
		select {
		case <-time.After(diskTime):
		case <-ctx.Done():
			f.err = ctx.Err()
			return
		}
		f.data = make([]byte, it.Size())
		f.err = s.memory.Get(ctx, []connector.Item{{Key: it.Key, Spans: [][]byte{f.data}}})
	}
	load := func(ctx context.Context, it connector.Item) error {
		mu.Lock()
		f := flights[it.Key]
		first := f == nil
		if first {
			f = &flight{done: make(chan struct{})}
			flights[it.Key] = f
		}
		mu.Unlock()
		if first {
			read(ctx, f, it)
			mu.Lock()
			delete(flights, it.Key)
			mu.Unlock()
		}
		select {
		case <-f.done:
		case <-ctx.Done():
			return ctx.Err()
		}
		data := f.data
		for _, span := range it.Spans {
			if f.err == nil {
				data = data[copy(span, data):]
			}
		}
		return f.err
	}
	s.get = func(ctx context.Context, items []connector.Item) error {
		failed := &connector.ItemError{}
		for i, it := range items {
			if err := load(ctx, it); err != nil {
				failed.Items, failed.Err = append(failed.Items, i), err
			}
		}
		if failed.Err != nil {
			return failed
		}
		return nil
	}
}
