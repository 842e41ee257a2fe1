package host

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
)

// Layer-wise saves: the engine counts the layers of a step as it computes them, the host makes the
// digests of each layer and then announces it to the plugin through a counter in shared memory. The
// engine never waits.

// errEarly says that a plugin took for stored what was not computed yet.
var errEarly = fmt.Errorf("the connector answered before all layers were computed: %w", connector.ErrIncompatible)

// stepProgress is how far the engine has come with one step.
type stepProgress struct {
	connector.LayerCount
	transfers int // of the step that have not ended
	over      bool
}

// LayerWise reports whether the connector saves layers while others are computed. If so, the engine
// may hand over blocks that it is about to compute as Step.Computing, and then says with Layers how far
// it is, or with GiveUp that it failed. It never changes.
func (h *Host) LayerWise() bool { return h.layerWise }

// findLayerWise says whether the first generation saves layer by layer on every rank. A Planner decides
// about what was computed, so it gets no other saves.
func (h *Host) findLayerWise(g *generation) bool {
	if !h.cfg.Role.Saves() || h.caps&connector.CanPlan != 0 || h.info.Capabilities&connector.CanLayers == 0 {
		return false
	}
	for _, w := range g.workers {
		if _, ok := connector.As[connector.LayerWorker](w); !ok {
			return false
		}
	}
	return true
}

// Layers says that the first n layers of a step's Computing blocks are final in the cache. When n is the
// number of the layout's layers the step is over. It never blocks.
func (h *Host) Layers(step uint64, n int) {
	h.progressing(step, func(p *stepProgress) bool {
		p.Advance(n)
		return n >= h.layers
	})
}

// GiveUp says that the rest of a step's layers will not be computed: what was handed over as Computing
// is not saved. It never blocks, and does nothing when the step is over.
func (h *Host) GiveUp(step uint64) {
	h.progressing(step, func(p *stepProgress) bool {
		p.GiveUp()
		return true
	})
}

// progressing changes the progress of a step that is not over. From its end on its saves have a
// deadline.
func (h *Host) progressing(step uint64, change func(*stepProgress) (over bool)) {
	h.progressMu.Lock()
	p := h.progress[step]
	if p == nil || p.over {
		h.progressMu.Unlock()
		return
	}
	p.over = change(p)
	over := p.over
	h.progressMu.Unlock()
	if !over {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.do(h.tracker.Computed(time.Now(), step))
}

// beginProgress makes the progress of a step that is being computed.
func (h *Host) beginProgress(s *connector.Step) {
	if len(s.Computing) == 0 {
		return
	}
	h.progressMu.Lock()
	defer h.progressMu.Unlock()
	h.progress[s.ID] = &stepProgress{transfers: len(s.Computing) + len(s.Computed)}
}

// endProgress forgets the progress of a step when its last save has ended.
func (h *Host) endProgress(step uint64) {
	h.progressMu.Lock()
	defer h.progressMu.Unlock()
	if p := h.progress[step]; p != nil {
		if p.transfers--; p.transfers == 0 {
			delete(h.progress, step)
		}
	}
}

func (h *Host) progressOf(step uint64) *stepProgress {
	h.progressMu.Lock()
	defer h.progressMu.Unlock()
	return h.progress[step]
}

// saveLayers saves blocks of a step that is being computed, layer by layer where the plugin can, and
// otherwise when all are there.
func (h *Host) saveLayers(ctx context.Context, w connector.Worker, a *tracker.Move) error {
	step := h.progressOf(a.Step)
	if step == nil {
		return fmt.Errorf("step %d is unknown: %w", a.Step, connector.ErrGone)
	}
	p := &sealedProgress{inner: step, rank: h.ranks[a.Rank], move: a, layers: h.layers}
	t, kv := a.Seen(), p.rank.kv
	if p.rank.landing != nil {
		kv = p.rank.landing.kv
	}
	worker, ok := connector.As[connector.LayerWorker](w)
	if !ok { // another build of the plugin, after a restart
		for n := 0; n < h.layers; {
			var err error
			if n, err = p.Wait(ctx, n); err != nil {
				return err
			}
		}
		return a.Back(w.Save(ctx, t, kv))
	}
	err := worker.SaveLayers(ctx, t, kv, p)
	if err == nil && !p.complete() {
		err = errEarly
	}
	return a.Back(err)
}

// sealedProgress makes the digests of each layer before it says that the layer is final, and copies it
// to landing memory if the plugin reads from there.
type sealedProgress struct {
	inner  connector.Progress
	rank   *rank
	move   *tracker.Move
	layers int

	mu     sync.Mutex
	sealed int
}

// Wait implements connector.Progress.
func (p *sealedProgress) Wait(ctx context.Context, seen int) (int, error) {
	n, err := p.inner.Wait(ctx, seen)
	if err != nil {
		return 0, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if n > p.sealed {
		if err := p.seal(p.sealed, n); err != nil {
			return 0, err
		}
		p.sealed = n
	}
	return p.sealed, nil
}

func (p *sealedProgress) complete() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sealed >= p.layers
}

// seal makes ready the layers from one number to another.
func (p *sealedProgress) seal(from, to int) error {
	r, blocks := p.rank, p.move.Transfer.Blocks
	errs := make([]error, len(blocks))
	r.share(len(blocks), func(i int) {
		b := blocks[i]
		if b.Key == (connector.BlockKey{}) {
			return
		}
		segments := r.kv.Between(b.Group, from, to)
		if err := r.hasher.MakeSegments(r.kv, b, segments); err != nil {
			errs[i] = fmt.Errorf("digest of block %d: %w", b.ID, err)
			return
		}
		if r.landing != nil {
			for _, s := range segments {
				copy(r.landing.kv.View(s, p.move.Slots[i]), r.kv.View(s, b.ID))
			}
		}
	})
	return errors.Join(errs...)
}
