package mutants

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
)

// slotFaults are about slots: how large they are, and who gives them back.
func slotFaults() []Unseen {
	return []Unseen{
		planted(groups, "has slots as large as the first block that a rank saves", "WORK-01", func(_ *backend, w *wrappers) {
			w.worker = func(k *worker) connector.Worker {
				var size atomic.Int64
				return &badWorker{worker: k, save: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
					return call{k, ctx, t, kv}.stores(func(data []byte) []byte {
						size.CompareAndSwap(0, int64(len(data)))
						return data[:min(len(data), int(size.Load()))]
					})
				}}
			}
		}).or("STORE-04", "WORK-08", "LAYOUT-03").also("shapes"),
		shared(states, "never frees the slots of a save that was cancelled", "WORK-01", func(*memory) func(*badStore) {
			const count = 300
			var lost atomic.Int64
			return func(s *badStore) {
				s.put = func(ctx context.Context, items []connector.Item) error {
					if lost.Load() >= count {
						return errors.New("no slot is free")
					}
					err := s.memory.Put(ctx, items)
					if err != nil {
						lost.Add(int64(len(items)))
					}
					return err
				}
			}
		}).or("STORE-04", "STORE-05", "STORE-06"),
	}
}

// stores saves what change makes of the bytes of each block.
func (c call) stores(change func([]byte) []byte) error {
	for _, b := range c.t.Blocks {
		if err := c.ctx.Err(); err != nil {
			return err
		}
		if b.Key == (connector.BlockKey{}) {
			continue
		}
		spans, err := c.kv.Spans(b)
		if err != nil {
			return err
		}
		old, _ := c.backend.get(c.key(b))
		c.backend.put(c.key(b), change(slices.Concat(spans...)), c.t.Replace || !sameVersion(old, spans), c.life)
		c.note(b)
	}
	return nil
}

// behindFaults do something behind a call that comes too late by then.
func behindFaults() []Unseen {
	late := planted(lateness, "writes into the blocks of a load that was cancelled, a fifth of a second later", "WORK-04", onLoad(func(c call) error {
		if len(c.t.Blocks) <= 6 {
			return c.rightLoad()
		}
		pause(time.Millisecond) // a disk's time
		err := c.rightLoad()
		if c.ctx.Err() == nil {
			return err
		}
		blocks, kv := slices.Clone(c.t.Blocks), c.kv
		time.AfterFunc(200*time.Millisecond, func() {
			touching(func() {
				for _, b := range blocks {
					if spans, err := kv.Spans(b); err == nil {
						spans[0][0] ^= 1
					}
				}
			})
		})
		return err
	})).or("WORK-01", "WORK-03", "WORK-06", "KEY-06")
	late.Racy = true
	return []Unseen{
		late,
		planted(states, "writes behind a reset what a long save before it has stored", "RESET-01", onSave(func(c call) error {
			const long = 8
			if err := c.rightSave(); err != nil || len(c.t.Blocks) <= long {
				return err
			}
			queued := map[connector.StoreKey][]byte{}
			for _, b := range c.t.Blocks {
				if data, stored := c.backend.get(c.key(b)); stored {
					queued[c.key(b)] = data
				}
			}
			backend := c.backend
			time.AfterFunc(5*time.Millisecond, func() { // when its turn in the queue comes
				backend.mu.Lock()
				defer backend.mu.Unlock()
				maps.Copy(backend.blocks, queued)
			})
			return nil
		})).or("STORE-06", "WORK-01"),
	}
}

// touching touches memory that may be gone.
func touching(touch func()) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() { _ = recover() }()
	touch()
}

// memoryFaults are about what a connector remembers of its blocks.
func memoryFaults() []Unseen {
	return []Unseen{
		shared(states, "gives replaced blocks their old bytes again when it closes", "STORE-06", func(*memory) func(*badStore) {
			first := map[connector.StoreKey][]byte{}
			return func(s *badStore) {
				s.put = func(ctx context.Context, items []connector.Item) error {
					s.mu.Lock()
					for _, it := range items {
						if old := s.blocks[it.Key]; it.Replace && old != nil && first[it.Key] == nil {
							first[it.Key] = old
						}
					}
					s.mu.Unlock()
					return s.memory.Put(ctx, items)
				}
				s.close = func() error {
					s.mu.Lock()
					defer s.mu.Unlock()
					maps.Copy(s.blocks, first)
					clear(first)
					return nil
				}
			}
		}).or("WORK-01", "STORE-01"),
		shared(ageing, "keeps the first bytes of each block when it tidies up its log", "STORE-06", func(*memory) func(*badStore) {
			const long = 40
			first := map[connector.StoreKey][]byte{}
			entries := 0
			return func(s *badStore) {
				s.put = func(ctx context.Context, items []connector.Item) error {
					err := s.memory.Put(ctx, items)
					s.mu.Lock()
					defer s.mu.Unlock()
					for _, it := range items {
						if data := s.blocks[it.Key]; data != nil && first[it.Key] == nil {
							first[it.Key] = data
						}
					}
					if entries += len(items); entries > long {
						maps.Copy(s.blocks, first)
						clear(first)
						entries = 0
					}
					return err
				}
			}
		}).or("WORK-01", "STORE-01"),
		planted(states, "remembers what another engine had not saved when it asked for a long prompt", "WORK-05", absences).or("STORE-01", "STORE-02", "GROUP-03"),
	}
}

// absences plants a memory of what was absent, which forgets only what the engine saves itself.
func absences(_ *backend, w *wrappers) {
	type part struct {
		engine string
		group  uint16
		key    connector.BlockKey
	}
	const long = 8
	var mu sync.Mutex
	absent := map[part]bool{}
	w.scheduler = func(s *scheduler) connector.Scheduler {
		return &badScheduler{scheduler: s, match: func(_ context.Context, qs []connector.Query) ([]connector.Match, error) {
			mu.Lock()
			defer mu.Unlock()
			out := make([]connector.Match, len(qs))
			for i, q := range qs {
				out[i] = s.match(q, func(g int, k connector.BlockKey) bool {
					p := part{s.env.Engine, uint16(g), k} //nolint:gosec // few groups
					is := !absent[p] && s.present(g, k)
					if !is && len(q.Keys) > long {
						absent[p] = true
					}
					return is
				})
			}
			return out, nil
		}}
	}
	saved := func(engine string, t *connector.Transfer, err error) error {
		mu.Lock()
		defer mu.Unlock()
		for _, b := range t.Blocks {
			delete(absent, part{engine, b.Group, b.Key})
		}
		return err
	}
	w.worker = func(k *worker) connector.Worker {
		return &badWorker{
			worker: k,
			save: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
				return saved(k.env.Engine, t, k.Save(ctx, t, kv))
			},
			layers: func(c layerCall) error {
				return saved(k.env.Engine, c.t, k.SaveLayers(c.ctx, c.t, c.kv, c.progress))
			},
		}
	}
}

// answerFaults are about what a call answers when there is much of it, or when several run.
func answerFaults() []Unseen {
	return []Unseen{
		unseen(large, "names absent items of a large load by their places in the order of the keys", "WORK-02", func(s *badStore) {
			s.get = func(ctx context.Context, items []connector.Item) error {
				if len(items) > 16 {
					items = slices.Clone(items)
					slices.SortStableFunc(items, func(a, b connector.Item) int { return bytes.Compare(a.Key[:], b.Key[:]) })
				}
				return s.memory.Get(ctx, items)
			}
		}).or("WORK-01", "STORE-01").also("large-batch"),
		unseen(acks, "acknowledges a long save whose context ends amid it", "WORK-05", func(s *badStore) {
			s.put = func(ctx context.Context, items []connector.Item) error {
				const batch = 16
				if err := s.memory.Put(ctx, items[:min(batch, len(items))]); err != nil || len(items) <= batch {
					return err
				}
				pause(time.Millisecond)              // a disk's time
				_ = s.memory.Put(ctx, items[batch:]) // fails if the context has ended
				return nil
			}
		}).or("WORK-01", "WORK-02", "STORE-05", "STORE-06"),
		shared(acks, "takes three saves at a time and drops the fourth", "WORK-05", func(*memory) func(*badStore) {
			var running atomic.Int64
			return func(s *badStore) {
				s.put = func(ctx context.Context, items []connector.Item) error {
					defer running.Add(-1)
					if running.Add(1) > 3 {
						return ctx.Err()
					}
					pause(time.Millisecond) // a disk's time
					return s.memory.Put(ctx, items)
				}
			}
		}).or("WORK-01", "WORK-02", "STORE-03", "STORE-05", "STORE-06", "STORE-01"),
	}
}
