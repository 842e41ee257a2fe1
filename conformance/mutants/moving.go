package mutants

import (
	"context"
	"errors"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvport/kvport/connector"
)

func workFaults() []fault { return append(loadFaults(), saveFaults()...) }

func loadFaults() []fault {
	return []fault{
		{"loads with a flipped bit", "round-trip", onLoad(func(c call) error {
			err := c.rightLoad()
			if err == nil {
				c.kv.View(c.kv.Segments(0)[0], c.t.Blocks[0].ID)[7] ^= 4
			}
			return err
		})},
		{"stops at the first absent block", "partial-load", onLoad(func(c call) error {
			for _, b := range c.t.Blocks {
				if err := c.loadBlock(b, c.kv); err != nil {
					return &connector.BlockError{Blocks: []connector.BlockID{b.ID}, Err: err}
				}
			}
			return c.fetched(c.t.Ticket)
		})},
		{"hides what is absent", "partial-load", onLoad(func(c call) error {
			var missing *connector.BlockError
			if err := c.rightLoad(); !errors.As(err, &missing) {
				return err
			}
			return nil
		})},
		{"clears the block behind the last", "load-granted", onLoad(func(c call) error {
			last := c.t.Blocks[len(c.t.Blocks)-1]
			if behind := c.kv.View(c.kv.Segments(last.Group)[0], last.ID+1); behind != nil {
				clear(behind)
			}
			return c.rightLoad()
		})},
		{"gives up on its transport when cancelled, which goes on", "load-ends", onLoad(func(c call) error {
			late := c
			late.ctx = context.Background()
			transport := time.AfterFunc(60*time.Millisecond, func() {
				defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
				defer func() { _ = recover() }() // the memory may be gone: a case is over
				_ = late.rightLoad()
			})
			soon, cancel := context.WithTimeout(c.ctx, 20*time.Millisecond)
			defer cancel()
			if <-soon.Done(); c.ctx.Err() != nil {
				return c.ctx.Err()
			}
			transport.Stop()
			return c.rightLoad()
		})},
		hangs(),
		oneAtATime(),
		{"fails without a reason", "error-kind", onLoad(func(c call) error {
			err := c.rightLoad()
			if missing, ok := errors.AsType[*connector.BlockError](err); ok {
				missing.Err = errors.New("sorry")
			}
			return err
		})},
	}
}

func saveFaults() []fault {
	return []fault{
		{"acknowledges saves it has not done yet", "visible", onSave(func(c call) error {
			for _, b := range c.t.Blocks {
				spans, err := c.kv.Spans(b)
				if err != nil {
					return err
				}
				key, data := c.key(b), slices.Concat(spans...)
				time.AfterFunc(40*time.Millisecond, func() { c.backend.put(key, data, false, &life{}) })
			}
			return nil
		})},
		{"takes the bytes out of the cache", "save-reads", onSave(func(c call) error {
			err := c.rightSave()
			clear(c.kv.View(c.kv.Segments(c.t.Blocks[0].Group)[0], c.t.Blocks[0].ID))
			return err
		})},
		{"stores half a block when cancelled", "cancelled-save", onSave(func(c call) error {
			if c.ctx.Err() != nil {
				for _, b := range c.t.Blocks {
					c.backend.put(c.key(b), make([]byte, 100), false, c.life)
				}
			}
			return c.rightSave()
		})},
	}
}

// hangs waits for its end when a context is done.
func hangs() fault {
	return fault{"waits for ever when its context is done", "done-context", func(_ *backend, w *wrappers) {
		w.worker = func(k *worker) connector.Worker {
			end := make(chan struct{})
			return &badWorker{
				worker: k,
				load: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
					if ctx.Err() != nil {
						<-end
					}
					return k.Load(ctx, t, kv)
				},
				close: sync.OnceValue(func() error {
					close(end)
					return nil
				}),
			}
		}
	}}
}

// oneAtATime refuses to load while it saves.
func oneAtATime() fault {
	return fault{"cannot load while it saves", "concurrent", func(_ *backend, w *wrappers) {
		w.worker = func(k *worker) connector.Worker {
			var saving atomic.Int64
			return &badWorker{
				worker: k,
				save: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
					saving.Add(1)
					defer saving.Add(-1)
					<-time.After(time.Millisecond)
					return k.Save(ctx, t, kv)
				},
				load: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
					if saving.Load() > 0 {
						return errors.New("the cache is being written")
					}
					return k.Load(ctx, t, kv)
				},
			}
		}
	}}
}

func layoutFaults() []fault {
	return []fault{
		{"takes the blocks of a segment for one array", "strided-bytes", onLoad(func(c call) error {
			if err := c.rightLoad(); err != nil {
				return err
			}
			for _, b := range c.t.Blocks {
				data, _ := c.backend.get(c.key(b))
				for _, s := range c.kv.Segments(b.Group) {
					data = data[copy(packed(c.kv, s, b.ID), data):]
				}
			}
			return nil
		})},
		{"writes whole cache lines", "guard-bytes", onLoad(func(c call) error {
			err := c.rightLoad()
			for _, b := range c.t.Blocks {
				view := c.kv.View(c.kv.Segments(b.Group)[0], b.ID)
				clear(unsafe.Slice(&view[0], len(view)+8)[len(view):])
			}
			return err
		})},
		{"keeps layers only", "digest-span", onLoad(func(c call) error {
			err := c.rightLoad()
			for _, b := range c.t.Blocks {
				for _, s := range c.kv.Segments(b.Group) {
					if c.kv.Layout().Segments[s].Layer == connector.DigestLayer {
						clear(c.kv.View(s, b.ID))
					}
				}
			}
			return err
		})},
	}
}

// packed is where a block would lie if there were no stride.
func packed(kv *connector.KV, segment int, id connector.BlockID) []byte {
	first := kv.View(segment, 0)
	return unsafe.Slice((*byte)(unsafe.Add(unsafe.Pointer(&first[0]), int(id)*len(first))), len(first))
}

func storeFaults() []fault {
	return []fault{
		{"forgets when its worker side closes", "reopen", func(b *backend, w *wrappers) {
			w.worker = func(k *worker) connector.Worker {
				return &badWorker{worker: k, close: func() error {
					b.mu.Lock()
					defer b.mu.Unlock()
					clear(b.blocks)
					return nil
				}}
			}
		}},
		{"asks rank 0 only", "all-ranks", onMatch(func(s *scheduler, qs []connector.Query) []connector.Match {
			out := make([]connector.Match, len(qs))
			for i, q := range qs {
				out[i] = s.match(q, func(_ int, k connector.BlockKey) bool {
					_, ok := s.backend.get(s.backend.key(k, s.env.Shape, 0, connector.Shard{World: s.env.World}))
					return ok
				})
			}
			return out
		})},
		exclusive(),
		{"refuses what it has", "put-twice", onSave(func(c call) error {
			for _, b := range c.t.Blocks {
				if _, known := c.backend.get(c.key(b)); known && !c.t.Replace {
					return errors.New("block exists")
				}
			}
			return c.rightSave()
		})},
		{"never overwrites", "replace", onSave(func(c call) error {
			t := *c.t
			t.Replace = false
			c.t = &t
			return c.rightSave()
		})},
	}
}

// exclusive lets one writer at a key and fails the other.
func exclusive() fault {
	return fault{"fails the second of two writers", "two-engines", func(_ *backend, w *wrappers) {
		var mu sync.Mutex
		writing := map[connector.StoreKey]bool{}
		w.worker = func(k *worker) connector.Worker {
			return &badWorker{worker: k, save: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
				first := k.key(t.Blocks[0])
				mu.Lock()
				taken := writing[first]
				writing[first] = true
				mu.Unlock()
				if taken {
					return errors.New("block is locked")
				}
				<-time.After(3 * time.Millisecond)
				err := k.Save(ctx, t, kv)
				mu.Lock()
				delete(writing, first)
				mu.Unlock()
				return err
			}}
		}
	}}
}

func keyFaults() []fault {
	type derive = func(connector.BlockKey, connector.Fingerprint, uint16, connector.Shard) connector.StoreKey
	with := func(key derive) func(*backend, *wrappers) {
		return func(b *backend, _ *wrappers) { b.key = key }
	}
	right := connector.NewStoreKey
	return []fault{
		{"stores blocks without a key", "partial-block", func(_ *backend, w *wrappers) {
			w.worker = func(k *worker) connector.Worker {
				name := func(t *connector.Transfer) *connector.Transfer { // gives the partial block a key
					c := *t
					c.Blocks = slices.Clone(t.Blocks)
					for i := range c.Blocks {
						if c.Blocks[i].Key == (connector.BlockKey{}) {
							c.Blocks[i].Key[0] = 1
						}
					}
					return &c
				}
				return &badWorker{
					worker: k,
					save: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
						return k.Save(ctx, name(t), kv)
					},
					load: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
						return k.Load(ctx, name(t), kv)
					},
				}
			}
		}},
		{"ignores the Shape", "other-shape", with(func(k connector.BlockKey, _ connector.Fingerprint, g uint16, s connector.Shard) connector.StoreKey {
			return right(k, connector.Fingerprint{}, g, s)
		})},
		{"uses half of the key", "other-key", with(func(k connector.BlockKey, f connector.Fingerprint, g uint16, s connector.Shard) connector.StoreKey {
			return right(connector.BlockKey(append(k[:16:16], make([]byte, 16)...)), f, g, s)
		})},
		{"ignores the rank", "other-rank", with(func(k connector.BlockKey, f connector.Fingerprint, g uint16, _ connector.Shard) connector.StoreKey {
			return right(k, f, g, connector.Shard{})
		})},
		{"ignores the group", "other-group", with(func(k connector.BlockKey, f connector.Fingerprint, _ uint16, s connector.Shard) connector.StoreKey {
			return right(k, f, 0, s)
		})},
	}
}
