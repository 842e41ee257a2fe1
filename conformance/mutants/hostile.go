package mutants

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
)

// hostileFaults are wrong answers to input that makes no sense, and to cancellation.
func hostileFaults() []fault {
	return append(inputFaults(), []fault{
		{"takes a passed deadline for a load that is done", "past-deadline", onLoad(func(c call) error {
			if c.ctx.Err() == nil {
				return c.rightLoad()
			}
			return nil
		})},
		{"calls a cancelled load done", "cancel-storm", onLoad(func(c call) error {
			if errors.Is(c.ctx.Err(), context.Canceled) {
				return nil
			}
			return c.rightLoad()
		})},
		{"takes what a cancelled Match did not find for absent", "cancelled-match", func(_ *backend, w *wrappers) {
			absent := map[connector.BlockKey]bool{}
			w.scheduler = func(s *scheduler) connector.Scheduler {
				return &badScheduler{scheduler: s, match: func(ctx context.Context, qs []connector.Query) ([]connector.Match, error) {
					out := make([]connector.Match, len(qs))
					for i, q := range qs {
						out[i] = s.match(q, func(g int, k connector.BlockKey) bool {
							absent[k] = absent[k] || ctx.Err() != nil
							return !absent[k] && s.present(g, k)
						})
					}
					return out, ctx.Err()
				}}
			}
		}},
	}...)
}

func inputFaults() []fault {
	return []fault{
		{"takes an unknown block for another", "hostile-blocks", onLoad(func(c call) error {
			t := *c.t
			t.Blocks = slices.Clone(t.Blocks)
			for i := range t.Blocks {
				t.Blocks[i].ID = max(0, min(t.Blocks[i].ID, connector.BlockID(c.env.Layout.Blocks-1)))
				t.Blocks[i].Group = 0
			}
			c.t = &t
			return c.rightLoad()
		})},
		{"offers the prompt's length", "hostile-queries", onMatch(func(s *scheduler, qs []connector.Query) []connector.Match {
			out, _ := s.Match(context.Background(), qs)
			for i, q := range qs {
				if q.Computed+out[i].Tokens == len(q.Keys)*s.env.Layout.Groups[0].BlockTokens {
					out[i].Tokens = max(0, min(q.Tokens, math.MaxInt32)-q.Computed)
				}
			}
			return out
		})},
		{"believes any ticket", "hostile-ticket", onMatch(func(s *scheduler, qs []connector.Query) []connector.Match {
			out, _ := s.Match(context.Background(), qs)
			for i, q := range qs {
				if len(q.Ticket) > 0 {
					out[i].Tokens = len(q.Keys)*s.env.Layout.Groups[0].BlockTokens - q.Computed
				}
			}
			return out
		})},
		{"wants at least one block", "no-blocks", onSave(func(c call) error {
			if len(c.t.Blocks) == 0 {
				return errors.New("nothing to save")
			}
			return c.rightSave()
		})},
		{"fills one block a key", "repeated-key", onLoad(func(c call) error {
			t := *c.t
			seen := map[connector.BlockKey]bool{}
			t.Blocks = slices.DeleteFunc(slices.Clone(t.Blocks), func(b connector.Block) bool {
				again := seen[b.Key]
				seen[b.Key] = true
				return again
			})
			c.t = &t
			return c.rightLoad()
		})},
		{"fails where two saves share a block", "shared-save", exclusive().plant},
		{"moves 4,096 blocks at most", "huge-batch", onSave(func(c call) error {
			if len(c.t.Blocks) > 4096 {
				return fmt.Errorf("%d blocks", len(c.t.Blocks))
			}
			return c.rightSave()
		})},
		{"logs every failure", "quiet", onLoad(func(c call) error {
			err := c.rightLoad()
			if err != nil {
				c.env.Log.Warn("load failed", "error", err)
			}
			return err
		})},
	}
}

// lifeFaults are wrong ways to open and close.
func lifeFaults() []fault {
	return []fault{
		{"closes everything with the first side", "reopen-orders", counted(func(sides *atomic.Int64) { sides.Store(0) })},
		{"counts a second Close", "close-twice", counted(func(sides *atomic.Int64) { sides.Add(-1) })},
		{"opens with anything", "bad-env", func(_ *backend, w *wrappers) {
			w.check = func(*connector.Env) error { return nil }
		}},
		{"serves its newest worker side only", "many-sides", func(_ *backend, w *wrappers) {
			var newest atomic.Int64
			w.worker = func(k *worker) connector.Worker {
				mine := newest.Add(1)
				return &badWorker{worker: k, save: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
					if newest.Load() != mine {
						return connector.ErrGone
					}
					return k.Save(ctx, t, kv)
				}}
			}
		}},
		{"waits for cancelled calls when it closes", "close-after-cancel", func(_ *backend, w *wrappers) {
			w.worker = func(k *worker) connector.Worker {
				var cancelled atomic.Bool
				return &badWorker{
					worker: k,
					load: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
						err := k.Load(ctx, t, kv)
						<-ctx.Done()
						cancelled.Store(true)
						return err
					},
					close: func() error {
						if cancelled.Load() {
							pause(2500 * time.Millisecond)
						}
						return nil
					},
				}
			}
		}},
		{"waits when it closes for the transaction that a miss has left open", "close-after-miss", func(_ *backend, w *wrappers) {
			w.worker = func(k *worker) connector.Worker {
				var left atomic.Bool
				return &badWorker{
					worker: k,
					load: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
						err := k.Load(ctx, t, kv)
						left.Store(left.Load() || errors.Is(err, connector.ErrGone))
						return err
					},
					close: func() error {
						if left.Load() {
							pause(10 * time.Second) // longer than a busy machine stretches the 2 s
						}
						return nil
					},
				}
			}
		}},
		{"opens a file for every Describe", "describe-pure", func(_ *backend, w *wrappers) { w.describe = leak() }},
		{"has two names", "manifest", func(_ *backend, w *wrappers) {
			w.info = func(i *connector.Info) { i.Name = "OtherConnector" }
		}},
	}
}

// counted plants sides that save only while the count of open ones is above 0.
func counted(closed func(*atomic.Int64)) func(*backend, *wrappers) {
	return func(_ *backend, w *wrappers) {
		var sides atomic.Int64
		w.scheduler = func(s *scheduler) connector.Scheduler {
			sides.Add(1)
			return &closing{s, func() { closed(&sides) }}
		}
		w.worker = func(k *worker) connector.Worker {
			sides.Add(1)
			return &badWorker{
				worker: k,
				save: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
					if sides.Load() <= 0 {
						return connector.ErrGone
					}
					return k.Save(ctx, t, kv)
				},
				close: func() error {
					closed(&sides)
					return nil
				},
			}
		}
	}
}
