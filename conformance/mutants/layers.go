package mutants

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvport/kvport/connector"
)

// SaveLayers implements connector.LayerWorker: it copies each layer when it is final, and stores the
// blocks when it has them all.
func (w *worker) SaveLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, p connector.Progress) error {
	c := layerCall{call{w, ctx, t, kv}, p}
	return c.collect(kv.Layout().Layers(), kv.Between)
}

// layerCall is one SaveLayers.
type layerCall struct {
	call
	progress connector.Progress
}

// collect copies the segments that between names as layers become final, until the given number are, and then
// stores the blocks.
func (c layerCall) collect(layers int, between func(group uint16, from, to int) []int) error {
	copies := make([]map[int][]byte, len(c.t.Blocks))
	for i := range copies {
		copies[i] = map[int][]byte{}
	}
	for n := 0; n < layers; {
		final, err := c.progress.Wait(c.ctx, n)
		if err != nil {
			return fmt.Errorf("layer %d of %d: %w", n, layers, err)
		}
		for i, b := range c.t.Blocks {
			for _, s := range between(b.Group, n, final) {
				copies[i][s] = slices.Clone(c.kv.View(s, b.ID))
			}
		}
		n = final
	}
	for i, b := range c.t.Blocks {
		if b.Key == (connector.BlockKey{}) {
			continue
		}
		var data []byte
		for _, s := range c.kv.Segments(b.Group) {
			data = append(data, copies[i][s]...)
		}
		c.backend.put(c.key(b), data, c.t.Replace, c.life)
		c.note(b)
	}
	return nil
}

// right saves as the reference does.
func (c layerCall) right() error {
	return c.collect(c.layers(), c.kv.Between)
}

func (c layerCall) layers() int { return c.kv.Layout().Layers() }

// waitFor waits until the given number of layers are final.
func (c layerCall) waitFor(layers int) error {
	for n := 0; n < layers; {
		var err error
		if n, err = c.progress.Wait(c.ctx, n); err != nil {
			return err
		}
	}
	return nil
}

// onLayers plants a SaveLayers.
func onLayers(f func(layerCall) error) func(*backend, *wrappers) {
	return func(_ *backend, w *wrappers) {
		w.worker = func(k *worker) connector.Worker { return &badWorker{worker: k, layers: f} }
	}
}

func layerFaults() []fault {
	return append(layerReadFaults(), layerWaitFaults()...)
}

// layerReadFaults read or store at the wrong time.
func layerReadFaults() []fault {
	return []fault{
		{"reads all layers when the first is final", "layer-order", onLayers(func(c layerCall) error { return c.readAt(1) })},
		{"takes each announcement for one layer", "layer-jump", onLayers(layerCall.oneEach)},
		{"reads the digests with the first layer", "layer-digests", onLayers(layerCall.digestsFirst)},
		{"reads all layers when the first is final, for those who have loaded before", "layer-read", readsForLoaders},
		{"offers partial blocks that were in no save", "layer-read", offersTails},
		{"takes every group for the first", "layer-groups", onLayers(layerCall.firstGroup)},
		{"acknowledges when all layers but one are stored", "layer-last", onLayers(func(c layerCall) error {
			err := c.waitFor(c.layers() - 1)
			if err == nil {
				c.put(c.copyAll())
			}
			return err
		})},
		{"acknowledges and stores afterwards", "layer-match", onLayers(func(c layerCall) error { return c.waitFor(c.layers()) })},
		{"refuses blocks that it has", "layer-again", onLayers(layerCall.refuseKnown)},
		{"ignores Replace layer by layer", "layer-again", onLayers(func(c layerCall) error {
			t := *c.t
			t.Replace, c.t = false, &t
			return c.right()
		})},
		{"stores what came until the engine gave up", "layer-give-up", onLayers(func(c layerCall) error {
			err := c.waitFor(c.layers())
			c.put(c.copyAll())
			return err
		})},
		{"stores the layers of the first rank for all", "layer-ranks", onLayers(layerCall.firstRank)},
	}
}

// readsForLoaders plants a worker that reads too early once somebody has loaded.
func readsForLoaders(_ *backend, w *wrappers) {
	var loaded atomic.Bool
	w.worker = func(k *worker) connector.Worker {
		return &badWorker{
			worker: k,
			load: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
				loaded.Store(true)
				return k.Load(ctx, t, kv)
			},
			layers: func(c layerCall) error {
				if loaded.Load() {
					return c.readAt(1)
				}
				return c.right()
			},
		}
	}
}

// offersTails offers what a ticket's request has computed behind its full blocks, and loads nothing there.
func offersTails(b *backend, w *wrappers) {
	const more = 2
	onSchedule(func(s *badScheduler) {
		s.match = func(ctx context.Context, qs []connector.Query) ([]connector.Match, error) {
			out, err := s.scheduler.Match(ctx, qs)
			for i := range out {
				if qs[i].Ticket != nil && out[i].Tokens > 0 {
					out[i].Tokens += more
				}
			}
			return out, err
		}
	})(b, w)
	w.worker = func(k *worker) connector.Worker {
		return &badWorker{worker: k, load: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
			full := *t
			full.Blocks = slices.DeleteFunc(slices.Clone(t.Blocks), func(b connector.Block) bool { return b.Key == connector.BlockKey{} })
			return k.Load(ctx, &full, kv)
		}}
	}
}

// readAt reads everything when the given number of layers are final.
func (c layerCall) readAt(layers int) error {
	err := c.waitFor(layers)
	early := c.copyAll()
	if err == nil {
		err = c.waitFor(c.layers())
	}
	if err == nil {
		c.put(early)
	}
	return err
}

// oneEach reads the last of the layers that are announced together.
func (c layerCall) oneEach() error {
	got := map[int]bool{}
	for n := 0; n < c.layers(); {
		final, err := c.progress.Wait(c.ctx, n)
		if err != nil {
			return err
		}
		for _, s := range c.kv.Between(0, final-1, final) {
			got[s] = true
		}
		n = final
	}
	copies := c.copyAll()
	for i, b := range c.t.Blocks {
		at := 0
		for _, s := range c.kv.Segments(b.Group) {
			size := len(c.kv.View(s, b.ID))
			if !got[s] {
				clear(copies[i][at : at+size])
			}
			at += size
		}
	}
	c.put(copies)
	return nil
}

func (c layerCall) digestsFirst() error {
	return c.collect(c.layers(), func(group uint16, from, to int) []int {
		var out []int
		for _, s := range c.kv.Segments(group) {
			layer := c.kv.Layout().Segments[s].Layer
			if layer >= from && layer < to || layer == connector.DigestLayer && from == 0 {
				out = append(out, s)
			}
		}
		return out
	})
}

func (c layerCall) firstGroup() error {
	most := 0
	for _, s := range c.kv.Segments(0) {
		most = max(most, c.kv.Layout().Segments[s].Layer+1)
	}
	return c.readAt(most)
}

func (c layerCall) refuseKnown() error {
	for _, b := range c.t.Blocks {
		if _, have := c.backend.get(c.key(b)); have {
			return fmt.Errorf("block %d is stored already", b.ID)
		}
	}
	return c.right()
}

func (c layerCall) firstRank() error {
	if err := c.waitFor(c.layers()); err != nil || c.env.Rank > 0 {
		return err
	}
	for rank := range c.env.World {
		w := &worker{backend: c.backend, env: c.env, life: c.life}
		w.env.Rank = rank
		if err := w.Save(c.ctx, c.t, c.kv); err != nil {
			return err
		}
	}
	return nil
}

// layerWaitFaults wait in a wrong way.
func layerWaitFaults() []fault {
	return []fault{
		{"takes the end of the engine's patience for the end of the layers", "layer-give-up-first", onLayers(func(c layerCall) error {
			if c.waitFor(c.layers()) == nil {
				return c.right()
			}
			return nil
		})},
		{"waits for layers whatever its context says", "layer-cancel", onLayers(func(c layerCall) error {
			c.ctx = context.WithoutCancel(c.ctx)
			return c.right()
		})},
		{"saves one transfer's layers at a time", "layer-many", func(b *backend, w *wrappers) {
			var one sync.Mutex
			onLayers(func(c layerCall) error {
				one.Lock()
				defer one.Unlock()
				return c.right()
			})(b, w)
		}},
		{"saves nothing else while it waits for layers", "layer-beside", func(_ *backend, w *wrappers) {
			var one sync.Mutex
			w.worker = func(k *worker) connector.Worker {
				return &badWorker{
					worker: k,
					layers: func(c layerCall) error {
						one.Lock()
						defer one.Unlock()
						return c.right()
					},
					save: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
						one.Lock()
						defer one.Unlock()
						return k.Save(ctx, t, kv)
					},
				}
			}
		}},
		{"asks for the next layer again and again", "layer-idle", onLayers(func(c layerCall) error {
			impatient, cancel := context.WithCancel(c.ctx)
			cancel()
			for n := 0; n < c.layers(); {
				final, err := c.progress.Wait(impatient, n)
				switch {
				case err == nil:
					n = final
				case !errors.Is(err, context.Canceled) || c.ctx.Err() != nil:
					return err
				}
			}
			return c.right()
		})},
	}
}

// copyAll is what the blocks hold now.
func (c layerCall) copyAll() [][]byte {
	out := make([][]byte, len(c.t.Blocks))
	for i, b := range c.t.Blocks {
		for _, s := range c.kv.Segments(b.Group) {
			out[i] = append(out[i], c.kv.View(s, b.ID)...)
		}
	}
	return out
}

// put stores copies of the blocks.
func (c layerCall) put(copies [][]byte) {
	for i, b := range c.t.Blocks {
		c.backend.put(c.key(b), copies[i], c.t.Replace, c.life)
		c.note(b)
	}
}
