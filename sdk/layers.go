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

// mover moves the blocks of a transfer.
type mover = func(context.Context, *connector.Transfer, *connector.KV) error

// saveLayers calls the worker's SaveLayers with the counter that a message names.
func (w *side) saveLayers(m *kvportv1.SaveLayers) (mover, error) {
	s, err := wire.SaveLayersFromProto(m)
	if err != nil {
		return nil, err
	}
	p := &boardProgress{board: w.board, slot: s.Slot, call: s.Call, layers: w.kv.Layout().Layers()}
	return counted[connector.LayerWorker, connector.Progress](w, connector.CanLayers, p, connector.LayerWorker.SaveLayers)
}

// counted makes a mover of the worker side's method that goes layer by layer, if it has it and there are counters for that.
func counted[T, C any](w *side, bit connector.Capability, count C, move func(T, context.Context, *connector.Transfer, *connector.KV, C) error) (mover, error) {
	worker, err := power[T](w.worker, bit)
	if err != nil {
		return nil, err
	}
	if w.board == nil {
		return nil, fmt.Errorf("%v: the side was opened without counters: %w", bit, connector.ErrIncompatible)
	}
	return func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
		return move(worker, ctx, t, kv, count)
	}, nil
}

// boardProgress is the Progress of one call: a counter that the host advances in shared memory.
type boardProgress struct {
	board  *shm.BoardView
	slot   int
	call   uint32
	layers int
}

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
func (w *side) loadLayers(m *kvportv1.LoadLayers) (mover, error) {
	l, err := wire.LoadLayersFromProto(m)
	if err != nil {
		return nil, err
	}
	a := &boardArrivals{board: w.board, slot: l.Slot, call: l.Call, layers: w.kv.Layout().Layers()}
	return counted[connector.LayerLoader, connector.Arrivals](w, connector.CanOverlap, a, connector.LayerLoader.LoadLayers)
}

// boardArrivals are the Arrivals of one call: a counter in shared memory that the host looks at.
type boardArrivals struct {
	board  *shm.BoardView
	slot   int
	call   uint32
	layers int

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
