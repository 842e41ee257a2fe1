package mutants

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/kvport/kvport/connector"
)

// ringFaults are what goes wrong when there are more calls, sides or blocks than somebody thought.
func ringFaults() []fault {
	const few = 64
	return []fault{
		{"has room for 64 loads", "many-calls", func(_ *backend, w *wrappers) {
			var loads atomic.Int64
			w.worker = func(k *worker) connector.Worker {
				return &badWorker{worker: k, load: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
					if loads.Add(1) > few {
						return errors.New("full")
					}
					return k.Load(ctx, t, kv)
				}}
			}
		}},
		{"loads 128 blocks of a transfer", "mixed-sizes", onLoad(func(c call) error {
			t := *c.t
			t.Blocks = t.Blocks[:min(len(t.Blocks), 2*few)]
			c.t = &t
			return c.rightLoad()
		})},
		{"has room for 64 sides", "side-after-side", func(_ *backend, w *wrappers) {
			var sides atomic.Int64
			w.worker = func(k *worker) connector.Worker {
				mine := sides.Add(1)
				return &badWorker{worker: k, save: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
					if mine > few {
						return connector.ErrGone
					}
					return k.Save(ctx, t, kv)
				}}
			}
		}},
	}
}
