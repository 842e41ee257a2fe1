package mutants

import (
	"bytes"
	"context"
	"crypto/sha256"
	"slices"
	"sync"

	"github.com/kvport/kvport/connector"
)

// contentMutants are right for bytes that look random, and wrong for those that repeat or are zero.
func contentMutants() []Mutant {
	return []Mutant{
		mutant("a store that leaves holes where spans are zero, and reads nothing there", "plain-bytes", leavesHoles),
		mutant("a store that takes blocks for the same whose first 64 bytes are", "plain-bytes", func(s *badStore) {
			s.first(func(it connector.Item) [32]byte {
				data := slices.Concat(it.Spans...)
				return sha256.Sum256(data[:min(64, len(data))])
			})
		}),
		sharing("a store that keeps equal spans once, and gives them up with the first of their blocks", "plain-bytes", keepsOnce),
	}
}

// leavesHoles plants a store that writes no zeros, as for a sparse file, and leaves alone on a load what it has not written.
func leavesHoles(s *badStore) {
	s.get = func(ctx context.Context, items []connector.Item) error {
		copies := make([]connector.Item, len(items))
		for i, it := range items {
			copies[i] = it
			copies[i].Spans = nil
			for _, span := range it.Spans {
				copies[i].Spans = append(copies[i].Spans, bytes.Clone(span))
			}
		}
		err := s.memory.Get(ctx, copies)
		for i, it := range items {
			for n, span := range it.Spans {
				if from := copies[i].Spans[n]; !zero(from) {
					copy(span, from)
				}
			}
		}
		return err
	}
}

func zero(data []byte) bool { return !slices.ContainsFunc(data, func(b byte) bool { return b != 0 }) }

// first has a store keep, of all blocks with one sum, what the first had.
func (s *badStore) first(sum func(connector.Item) [32]byte) {
	var mu sync.Mutex
	known := map[[32]byte][]byte{}
	s.put = eachItem(s.memory.Put, func(it connector.Item) connector.Item {
		mu.Lock()
		defer mu.Unlock()
		of := sum(it)
		data := slices.Concat(it.Spans...)
		if have := known[of]; len(have) == len(data) {
			it.Spans = [][]byte{have}
			return it
		}
		known[of] = data
		return it
	})
}

// keepsOnce plants a store that keeps spans under their sums and counts no blocks that have them.
func keepsOnce(*memory) func(*badStore) {
	var mu sync.Mutex
	spans := map[[32]byte][]byte{}
	blocks := map[connector.StoreKey][][32]byte{}
	return func(s *badStore) {
		s.put = func(ctx context.Context, items []connector.Item) error {
			if err := s.memory.Put(ctx, items); err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			for _, it := range items {
				var sums [][32]byte
				for _, span := range it.Spans {
					sums = append(sums, sha256.Sum256(span))
				}
				for _, old := range blocks[it.Key] {
					if !slices.Contains(sums, old) {
						delete(spans, old)
					}
				}
				for n, span := range it.Spans {
					spans[sums[n]] = bytes.Clone(span)
				}
				blocks[it.Key] = sums
			}
			return nil
		}
		s.get = func(ctx context.Context, items []connector.Item) error {
			failed := &connector.ItemError{Err: connector.ErrGone}
			err := s.memory.Get(ctx, items)
			mu.Lock()
			defer mu.Unlock()
			for i, it := range items {
				for _, sum := range blocks[it.Key] {
					if spans[sum] == nil {
						failed.Items = append(failed.Items, i)
						break
					}
				}
			}
			if err != nil || failed.Items == nil {
				return err
			}
			return failed
		}
	}
}
