package mutants

import (
	"context"
	"encoding/json"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvport/kvport/connector"
)

// bare has the core methods only.
type bare struct{ connector.Scheduler }

func openFaults() []fault {
	return []fault{
		{"claims powers that the sides lack", "describe", func(_ *backend, w *wrappers) {
			w.scheduler = func(s *scheduler) connector.Scheduler { return bare{s} }
		}},
		{"accepts any field", "unknown-field", func(_ *backend, w *wrappers) {
			w.decode = func(json.RawMessage) error { return nil }
		}},
		{"needs its scheduler side before its worker side", "sides", func(_ *backend, w *wrappers) {
			var opened atomic.Bool
			w.scheduler = func(s *scheduler) connector.Scheduler {
				opened.Store(true)
				return &closing{s, func() { opened.Store(false) }}
			}
			w.worker = func(k *worker) connector.Worker {
				ready := opened.Load()
				return &badWorker{worker: k, save: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
					if !ready {
						return connector.ErrGone
					}
					return k.Save(ctx, t, kv)
				}}
			}
		}},
		{"leaks a descriptor in every side", "close-frees", func(_ *backend, w *wrappers) {
			open := leak()
			w.scheduler = func(s *scheduler) connector.Scheduler {
				open()
				return s
			}
		}},
	}
}

// leak opens a file in each call but the first few.
func leak() func() {
	const few = 3
	var mu sync.Mutex
	var kept []*os.File
	calls := 0
	return func() {
		mu.Lock()
		defer mu.Unlock()
		if calls++; calls <= few {
			return
		}
		if f, err := os.Open(os.DevNull); err == nil {
			kept = append(kept, f)
		}
	}
}

// closing is a scheduler side that says when it closes.
type closing struct {
	*scheduler
	closed func()
}

// Close implements connector.Scheduler.
func (c *closing) Close() error {
	c.closed()
	return c.scheduler.Close()
}

func matchFaults() []fault {
	return []fault{
		{"answers a batch from the back", "batch-order", onMatch(func(s *scheduler, qs []connector.Query) []connector.Match {
			out, _ := s.Match(context.Background(), qs)
			slices.Reverse(out)
			return out
		})},
		{"misses when asked often", "match-repeat", func(b *backend, w *wrappers) {
			var asked atomic.Int64
			onMatch(func(s *scheduler, qs []connector.Query) []connector.Match {
				if asked.Add(1) > 40 {
					return make([]connector.Match, len(qs))
				}
				out, _ := s.Match(context.Background(), qs)
				return out
			})(b, w)
		}},
		rememberingProbes(),
		{"counts from the start of the prompt", "computed", onMatch(func(s *scheduler, qs []connector.Query) []connector.Match {
			out := make([]connector.Match, len(qs))
			for i, q := range qs {
				computed := q.Computed
				q.Computed = 0
				if out[i] = s.match(q, s.present); out[i].Tokens <= computed {
					out[i] = connector.Match{}
				}
			}
			return out
		})},
		{"claims the partial block at the end of the prompt", "computed", onMatch(func(s *scheduler, qs []connector.Query) []connector.Match {
			out, _ := s.Match(context.Background(), qs)
			for i, q := range qs {
				if out[i].Tokens > 0 && q.Computed+out[i].Tokens == len(q.Keys)*s.env.Layout.Groups[0].BlockTokens {
					out[i].Tokens = q.Tokens - q.Computed
				}
			}
			return out
		})},
		{"looks at 1,000 keys at most", "large-batch", onMatch(func(s *scheduler, qs []connector.Query) []connector.Match {
			out := make([]connector.Match, len(qs))
			for i, q := range qs {
				q.Keys = q.Keys[:min(len(q.Keys), 1000)]
				out[i] = s.match(q, s.present)
			}
			return out
		})},
		{"counts blocks behind a hole", "prefix-hole", onMatch(func(s *scheduler, qs []connector.Query) []connector.Match {
			out := make([]connector.Match, len(qs))
			size := s.env.Layout.Groups[0].BlockTokens
			for i, q := range qs {
				for n := q.Computed / size; n < len(q.Keys); n++ {
					if s.present(0, q.Keys[n]) {
						out[i] = connector.Match{Tokens: out[i].Tokens + size, Async: true}
					}
				}
			}
			return out
		})},
	}
}

// rememberingProbes takes what a probe did not find for absent from then on.
func rememberingProbes() fault {
	return fault{"remembers what a probe found absent", "probe", func(b *backend, w *wrappers) {
		absent := map[connector.BlockKey]bool{}
		onMatch(func(s *scheduler, qs []connector.Query) []connector.Match {
			out := make([]connector.Match, len(qs))
			for i, q := range qs {
				out[i] = s.match(q, func(g int, k connector.BlockKey) bool {
					if q.Request == "" && !s.present(g, k) {
						absent[k] = true
					}
					return !absent[k] && s.present(g, k)
				})
			}
			return out
		})(b, w)
	}}
}

// onSchedule plants a scheduler side.
func onSchedule(change func(*badScheduler)) func(*backend, *wrappers) {
	return func(_ *backend, w *wrappers) {
		w.scheduler = func(s *scheduler) connector.Scheduler {
			bad := &badScheduler{scheduler: s}
			change(bad)
			return bad
		}
	}
}

func powerFaults() []fault {
	return slices.Concat(planFaults(), holdPowerFaults(), leaseFaults(), []fault{
		{"says reset and keeps all", "reset", onSchedule(func(b *badScheduler) {
			b.reset = func(context.Context) (bool, error) { return true, nil }
		})},
	})
}

// planFaults are about what a Plan moves.
func planFaults() []fault {
	return []fault{
		{"plans a block that the Step does not hold", "plan-within-step", onSchedule(func(b *badScheduler) {
			b.plan = func(ctx context.Context, step *connector.Step) (*connector.Plan, error) {
				p, err := b.scheduler.Plan(ctx, step)
				for i, s := range p.Saves {
					extra := s.Blocks[len(s.Blocks)-1]
					extra.ID++
					p.Saves[i].Blocks = append(slices.Clone(s.Blocks), extra)
				}
				return p, err
			}
		})},
		{"saves blocks that were given back", "plan-given-back", onSchedule(func(b *badScheduler) {
			b.plan = func(_ context.Context, step *connector.Step) (*connector.Plan, error) {
				return &connector.Plan{Loads: step.Admitted, Saves: step.Computed}, nil
			}
		})},
	}
}

// holdPowerFaults are about what is held and how that is reported.
func holdPowerFaults() []fault {
	return []fault{
		{"answers ended requests from the back", "hold-order", onSchedule(func(b *badScheduler) {
			b.finish = func(ctx context.Context, ended []connector.Ended) ([]connector.Hold, error) {
				holds, err := b.scheduler.Finish(ctx, ended)
				slices.Reverse(holds)
				return holds, err
			}
		})},
		{"holds without a consumer", "hold-order", onSchedule(func(b *badScheduler) {
			b.finish = func(ctx context.Context, ended []connector.Ended) ([]connector.Hold, error) {
				all := slices.Clone(ended)
				for i := range all {
					all[i].Remote = true
				}
				return b.scheduler.Finish(ctx, all)
			}
		})},
		{"reports a hold twice", "hold-consumed", onSchedule(func(b *badScheduler) {
			b.consumed = func(ctx context.Context) ([]connector.HoldID, error) {
				ids, err := b.scheduler.Consumed(ctx)
				return append(ids, ids...), err
			}
		})},
		{"has a waiter for each call, which outlives it", "hold-consumed", onSchedule(func(b *badScheduler) {
			b.consumed = func(ctx context.Context) ([]connector.HoldID, error) {
				heard := make(chan []connector.HoldID, 1)
				go func() {
					ids, _ := b.scheduler.Consumed(context.WithoutCancel(ctx))
					heard <- ids
				}()
				select {
				case ids := <-heard:
					return ids, nil
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			}
		})},
		{"polls instead of waiting", "hold-waits", onSchedule(func(b *badScheduler) {
			b.consumed = func(context.Context) ([]connector.HoldID, error) { return nil, nil }
		})},
	}
}

// leaseFaults are about renewals.
func leaseFaults() []fault {
	return []fault{
		{"waits for a renewal as long as there is none", "lease-soon", onSchedule(func(b *badScheduler) {
			b.renewals = func(ctx context.Context, _ []connector.HoldID) ([]connector.HoldID, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			}
		})},
		{"keeps holds that are over", "lease-open", onSchedule(func(b *badScheduler) {
			var last connector.HoldID
			b.finish = func(ctx context.Context, ended []connector.Ended) ([]connector.Hold, error) {
				holds, err := b.scheduler.Finish(ctx, ended)
				last = holds[len(holds)-1].ID
				return holds, err
			}
			b.renewals = func(context.Context, []connector.HoldID) ([]connector.HoldID, error) {
				return []connector.HoldID{last}, nil
			}
		})},
	}
}
