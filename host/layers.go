package host

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/digest"
	"github.com/kvport/kvport/internal/tracker"
)

// Layer-wise saves: the engine counts the layers of a step as it computes them, the host makes the
// digests of each layer and then announces it to the plugin through a counter in shared memory. The
// engine never waits.

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
	h.mu.Lock()
	defer h.mu.Unlock()
	h.do(h.tracker.Layers(time.Now(), step, n))
}

// GiveUp says that the rest of a step's layers will not be computed: what was handed over as Computing
// is not saved. It never blocks, and does nothing when the step is over.
func (h *Host) GiveUp(step uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.do(h.tracker.GiveUp(time.Now(), step))
}

// follow gives a call that saves what is being computed the count of its layers. The caller holds h.mu.
func (g *generation) follow(a *tracker.Move) *connector.LayerCount {
	if !a.Computing {
		return nil
	}
	g.layers[a.ID] = &connector.LayerCount{}
	g.advance(tracker.Advance{ID: a.ID, Layers: a.Layers, GivenUp: a.GivenUp})
	return g.layers[a.ID]
}

// advance tells a call what has become of its layers. The caller holds h.mu; g may be nil.
func (g *generation) advance(a tracker.Advance) {
	if g == nil || g.layers[a.ID] == nil {
		return
	}
	g.layers[a.ID].Advance(a.Layers)
	if a.GivenUp {
		g.layers[a.ID].GiveUp()
	}
}

// tellingLayerSaver is a worker that knows before its SaveLayers is over that what a ticket promises is stored.
type tellingLayerSaver interface {
	SaveLayersTelling(ctx context.Context, t *connector.Transfer, kv *connector.KV, progress connector.Progress, promised func()) error
}

// saveLayers saves blocks that are being computed.
func (h *Host) saveLayers(ctx context.Context, w connector.Worker, p *sealedProgress) error {
	t, kv := p.move.Seen(), p.rank.kv
	if p.rank.landing != nil {
		kv = p.rank.landing.kv
	}
	if s, tells := w.(tellingLayerSaver); tells {
		return s.SaveLayersTelling(ctx, t, kv, p, func() { h.stored(p.move.ID) })
	}
	return saveLayersTo(ctx, w, t, kv, p)
}

// saveLayersTo saves layer by layer where the plugin can, otherwise when all are there.
func saveLayersTo(ctx context.Context, w connector.Worker, t *connector.Transfer, kv *connector.KV, progress connector.Progress) error {
	if worker, ok := connector.As[connector.LayerWorker](w); ok {
		return worker.SaveLayers(ctx, t, kv, progress)
	}
	if err := untilFinal(ctx, progress, kv.Layout().Layers()); err != nil { // another build of the plugin, after a restart
		return err
	}
	return w.Save(ctx, t, kv)
}

// untilFinal waits until all layers are final.
func untilFinal(ctx context.Context, progress connector.Progress, layers int) (err error) {
	for n := 0; n < layers && err == nil; {
		n, err = progress.Wait(ctx, n)
	}
	return err
}

// sealedProgress makes the digests of each layer before it says that the layer is final, and copies it
// to landing memory if the plugin reads from there.
type sealedProgress struct {
	inner connector.Progress
	rank  *rank
	move  *tracker.Move

	mu     sync.Mutex
	sealed int
	maker  *digest.Maker // of all layers: see digest.Maker
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

// told is how many layers the plugin knows to be final.
func (p *sealedProgress) told() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sealed
}

// seal makes ready the layers from one number to another.
func (p *sealedProgress) seal(from, to int) error {
	r, blocks := p.rank, p.move.Transfer.Blocks
	if p.maker == nil {
		maker, err := r.hasher.Maker()
		if err != nil {
			return err
		}
		p.maker = &maker
	}
	errs := make([]error, len(blocks))
	r.share(len(blocks), func(i int) {
		b := blocks[i]
		if b.Key == (connector.BlockKey{}) {
			return
		}
		var err error
		if segments := r.kv.Between(b.Group, from, to); r.landing != nil {
			err = r.copyOut(p.maker, b, p.move.Slots[i], segments)
		} else {
			err = p.maker.MakeSegments(r.kv, b, segments)
		}
		if err != nil {
			errs[i] = fmt.Errorf("digest of block %d: %w", b.ID, err)
		}
	})
	return errors.Join(errs...)
}
