package sdk

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// saveLayers calls the worker's SaveLayers with the counter that a message names.
func (w *side) saveLayers(m *kvportv1.SaveLayers) (func(context.Context, *connector.Transfer, *connector.KV) error, error) {
	s, err := wire.LayersFromProto(m)
	if err != nil {
		return nil, err
	}
	worker, of, err := counted[connector.LayerWorker](w, connector.CanLayers, s.Slot, s.Call)
	return func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
		return worker.SaveLayers(ctx, t, kv, &boardProgress{of})
	}, err
}

// counted is the worker side as one that goes layer by layer, if it can and has counters for that, and the counter of one
// call.
func counted[T any](w *side, bit connector.Capability, slot int, call uint32) (T, counter, error) {
	worker, err := power[T](w.worker, bit)
	if err != nil {
		return worker, counter{}, err
	}
	if w.board == nil {
		return worker, counter{}, fmt.Errorf("%v: the side was opened without counters: %w", bit, connector.ErrIncompatible)
	}
	return worker, counter{board: w.board, slot: slot, call: call, layers: w.kv.Layout().Layers()}, nil
}

// counter is what host and plugin count the layers of one call with, in shared memory.
type counter struct {
	board  *shm.BoardView
	slot   int
	call   uint32
	layers int
}

// boardProgress is the Progress of one call: the host advances its counter.
type boardProgress struct{ counter }

// Wait implements connector.Progress.
func (p *boardProgress) Wait(ctx context.Context, seen int) (int, error) {
	if seen < 0 || seen >= p.layers {
		return 0, fmt.Errorf("wait for more than %d of %d layers: %w", seen, p.layers, connector.ErrIncompatible)
	}
	n, err := p.board.Wait(ctx, p.slot, p.call, uint32(seen))
	switch {
	case errors.Is(err, shm.ErrNotMine), err == nil && n == shm.GivenUp:
		return 0, fmt.Errorf("the engine has given up computing: %w", connector.ErrGone)
	case err != nil:
		return 0, err
	}
	return min(int(n), p.layers), nil
}

// loadLayers calls the worker's LoadLayers, and counts with the counter that a message names.
func (w *side) loadLayers(m *kvportv1.LoadLayers) (func(context.Context, *connector.Transfer, *connector.KV) error, error) {
	l, err := wire.LayersFromProto(m)
	if err != nil {
		return nil, err
	}
	worker, of, err := counted[connector.LayerLoader](w, connector.CanOverlap, l.Slot, l.Call)
	return func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
		return worker.LoadLayers(ctx, t, kv, &boardArrivals{counter: of})
	}, err
}

// boardArrivals are the Arrivals of one call: a counter in shared memory that the host looks at.
type boardArrivals struct {
	counter

	mu   sync.Mutex
	told int
}

// Advance implements connector.Arrivals.
func (a *boardArrivals) Advance(n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if n = min(n, a.layers); n > a.told {
		a.told = n
		a.board.Set(a.slot, a.call, uint32(n))
	}
}
