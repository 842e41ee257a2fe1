package mutants

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
)

// derived plants another derivation of store keys.
func derived(key func(connector.BlockKey, connector.Fingerprint, uint16, connector.Shard) connector.StoreKey) func(*backend, *wrappers) {
	return func(b *backend, _ *wrappers) { b.key = key }
}

func rankFaults() []fault {
	right := connector.NewStoreKey
	return []fault{
		{"knows even and odd ranks only", "three-shards", derived(func(k connector.BlockKey, f connector.Fingerprint, g uint16, s connector.Shard) connector.StoreKey {
			s.Rank &= 1
			return right(k, f, g, s)
		})},
		{"keeps the rank in three bits", "many-shards", derived(func(k connector.BlockKey, f connector.Fingerprint, g uint16, s connector.Shard) connector.StoreKey {
			s.Rank &= 7
			return right(k, f, g, s)
		})},
		{"ignores the number of ranks", "other-world", derived(func(k connector.BlockKey, f connector.Fingerprint, g uint16, s connector.Shard) connector.StoreKey {
			s.World = 0
			return right(k, f, g, s)
		})},
		{"asks two ranks", "rank-missing", onMatch(func(s *scheduler, qs []connector.Query) []connector.Match {
			few := &scheduler{backend: s.backend, env: s.env}
			key := s.backend.key
			out := make([]connector.Match, len(qs))
			for i, q := range qs {
				out[i] = few.match(q, func(g int, k connector.BlockKey) bool {
					for rank := range min(2, s.env.World) {
						if _, ok := s.backend.get(key(k, s.env.Shape, uint16(g), connector.Shard{Rank: rank, World: s.env.World})); !ok {
							return false
						}
					}
					return true
				})
			}
			return out
		})},
	}
}

// rankOrderFaults mix up when and how ranks come and fail.
func rankOrderFaults() []fault {
	return []fault{
		{"names all blocks when one is absent", "rank-fails", onLoad(func(c call) error {
			err := c.rightLoad()
			if missing, ok := errors.AsType[*connector.BlockError](err); ok {
				missing.Blocks = nil
				for _, b := range c.t.Blocks {
					missing.Blocks = append(missing.Blocks, b.ID)
				}
			}
			return err
		})},
		{"wants rank 0 to open first", "rank-orders", func(_ *backend, w *wrappers) {
			var ready atomic.Bool
			w.worker = func(k *worker) connector.Worker {
				if k.env.Rank == 0 {
					ready.Store(true)
				}
				works := ready.Load()
				return &badWorker{
					worker: k,
					save: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
						if !works {
							return connector.ErrGone
						}
						return k.Save(ctx, t, kv)
					},
					close: func() error {
						ready.Store(false)
						return nil
					},
				}
			}
		}},
		{"saves for one rank at a time", "ranks-together", func(_ *backend, w *wrappers) {
			var saving atomic.Int64
			w.worker = func(k *worker) connector.Worker {
				return &badWorker{worker: k, save: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
					if saving.Add(1) > 1 {
						saving.Add(-1)
						return errors.New("another rank saves")
					}
					defer saving.Add(-1)
					<-time.After(3 * time.Millisecond)
					return k.Save(ctx, t, kv)
				}}
			}
		}},
	}
}

func groupFaults() []fault {
	right := connector.NewStoreKey
	return []fault{
		{"asks the first group only", "group-missing", onMatch(func(s *scheduler, qs []connector.Query) []connector.Match {
			return s.matchAs(qs, s.env.Layout.Groups[:1])
		})},
		{"wants every block of every group", "group-trailing", onMatch(func(s *scheduler, qs []connector.Query) []connector.Match {
			groups := slices.Clone(s.env.Layout.Groups)
			for g := range groups {
				groups[g].Policy = connector.PolicyAll
			}
			return s.matchAs(qs, groups)
		})},
		{"takes the second group's blocks for the first's", "group-strides", onLoad(func(c call) error {
			err := c.rightLoad()
			for _, b := range c.t.Blocks {
				if data, ok := c.backend.get(c.key(b)); ok && b.Group == 1 {
					copy(c.kv.View(c.kv.Segments(0)[0], b.ID), data)
				}
			}
			return err
		})},
		{"ignores the rank in the second group", "group-ranks", derived(func(k connector.BlockKey, f connector.Fingerprint, g uint16, s connector.Shard) connector.StoreKey {
			if g == 1 {
				s.Rank = 0
			}
			return right(k, f, g, s)
		})},
	}
}

// matchAs matches as if the cache had other groups.
func (s *scheduler) matchAs(qs []connector.Query, groups []connector.Group) []connector.Match {
	env := s.env
	env.Layout.Groups = groups
	other := &scheduler{backend: s.backend, env: env}
	out, _ := other.Match(context.Background(), qs)
	return out
}
