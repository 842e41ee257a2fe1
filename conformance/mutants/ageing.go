package mutants

import (
	"context"
	"slices"

	"github.com/kvport/kvport/connector"
)

// agers become slower with what they store.
func agers() []Mutant {
	return []Mutant{
		mutant("a store that looks for a block among all that it has", "ageing", func(s *badStore) {
			keys := s.list(func([]connector.StoreKey) {})
			s.lookup = func(runs [][]connector.StoreKey) ([]int, error) {
				s.mu.Lock()
				defer s.mu.Unlock()
				found := make([]int, len(runs))
				for i, run := range runs {
					for found[i] < len(run) && slices.Contains(*keys, run[found[i]]) {
						found[i]++
					}
				}
				return found, nil
			}
		}),
		mutant("a store that sorts all that it has with each save", "ageing", func(s *badStore) {
			s.list(func(keys []connector.StoreKey) {
				slices.SortFunc(keys, func(a, b connector.StoreKey) int { return slices.Compare(a[:], b[:]) })
			})
		}),
	}
}

// list has a store keep its keys in a list, guarded by s.mu, and do something with that at each save.
func (s *badStore) list(do func([]connector.StoreKey)) *[]connector.StoreKey {
	var keys []connector.StoreKey
	s.put = func(ctx context.Context, items []connector.Item) error {
		s.mu.Lock()
		for _, it := range items {
			keys = append(keys, it.Key)
		}
		do(keys)
		s.mu.Unlock()
		return s.memory.Put(ctx, items)
	}
	return &keys
}
