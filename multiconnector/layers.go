package multiconnector

import (
	"context"
	"fmt"
	"sync"

	"github.com/kvport/kvport/connector"
)

// errEarly is the error of a child that says it has stored what was not computed yet.
var errEarly = fmt.Errorf("it answered before all layers were computed: %w", connector.ErrIncompatible)

// SaveLayers implements connector.LayerWorker. A child with the power gets each layer as it becomes final, another one saves
// when the last one is.
func (w *worker) SaveLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, progress connector.Progress) error {
	return w.SaveLayersTelling(ctx, t, kv, progress, func() {})
}

// SaveLayersTelling is SaveLayers, which calls promised as SaveTelling does.
func (w *worker) SaveLayersTelling(ctx context.Context, t *connector.Transfer, kv *connector.KV, progress connector.Progress, promised func()) error {
	err := w.save(t, promised, func(child int, part *connector.Transfer) error {
		return w.layersTo(ctx, child, part, kv, &told{Progress: progress, all: kv.Layout().Layers()})
	})
	if err != nil {
		return err
	}
	return connector.AwaitLayers(ctx, progress, kv.Layout().Layers()) // a transfer without blocks asks no child
}

// layersTo saves a part to one child while its layers are computed.
func (w *worker) layersTo(ctx context.Context, child int, part *connector.Transfer, kv *connector.KV, progress *told) error {
	side, ok := connector.As[connector.LayerWorker](w.sides[child])
	if !ok || w.children[child].Info.Capabilities&connector.CanLayers == 0 {
		if err := connector.AwaitLayers(ctx, progress.Progress, progress.all); err != nil {
			return err
		}
		return w.sides[child].Save(ctx, part, kv)
	}
	err := side.SaveLayers(ctx, part, kv, progress)
	if err == nil && progress.layers() < progress.all {
		return errEarly
	}
	return err
}

// told is a Progress that remembers how many layers it has announced. A child in another process learns of a layer a little later, so
// one that answers before the last layer has reached it may pass: digests find what it has not read.
type told struct {
	connector.Progress
	all int

	mu   sync.Mutex
	most int
}

// Wait implements connector.Progress.
func (p *told) Wait(ctx context.Context, seen int) (int, error) {
	n, err := p.Progress.Wait(ctx, seen)
	p.mu.Lock()
	p.most = max(p.most, n)
	p.mu.Unlock()
	return n, err
}

func (p *told) layers() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.most
}
