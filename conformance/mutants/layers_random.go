package mutants

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"

	"github.com/kvport/kvport/connector"
)

// manyLayerFaults are about saves that wait for layers beside others, and for jumps that no case makes.
func manyLayerFaults() []Unseen {
	return []Unseen{
		layerUnseen("gives up all saves when the engine gives up one", givesUpAll, "LAYER-05"),
		layerUnseen("saves three transfers at a time", threeAtATime, "LAYER-05", "LAYER-03"),
		layerUnseen("waits whatever its context says when it has two layers", onLayers(layerCall.deafLater), "LAYER-04"),
		layerUnseen("takes a jump in the middle for one layer", onLayers(layerCall.missesJumps), "LAYER-01", "LAYER-02", "STORE-05").also("layer-deep"),
		layerUnseen("takes a jump in a second group for one layer", onLayers(layerCall.missesJumpsBehind), "LAYER-01", "LAYER-02", "STORE-05"),
		layerUnseen("forgets what was stored when the engine gives up", onLayers(func(c layerCall) error {
			err := c.right()
			if errors.Is(err, connector.ErrGone) {
				c.backend.forget(c.t, c.key)
			}
			return err
		}), "STORE-05", "LAYER-02"),
	}
}

func layerUnseen(name string, plant func(*backend, *wrappers), rules ...string) Unseen {
	u := planted(manyLayers, name, "", plant)
	u.Case, u.Rules = "random-layers", rules
	return u
}

// forget removes the blocks of a transfer.
func (b *backend) forget(t *connector.Transfer, key func(connector.Block) connector.StoreKey) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, block := range t.Blocks {
		delete(b.blocks, key(block))
	}
}

// missesJumps reads only the last layer of a jump that neither begins with the first nor ends with the last.
func (c layerCall) missesJumps() error {
	return c.collect(c.layers(), func(group uint16, from, to int) []int {
		if from > 0 && to < c.layers() {
			from = to - 1
		}
		return c.kv.Between(group, from, to)
	})
}

// missesJumpsBehind reads only the last layer of a jump in each group but the first.
func (c layerCall) missesJumpsBehind() error {
	return c.collect(c.layers(), func(group uint16, from, to int) []int {
		if group > 0 && to < c.layers() {
			from = to - 1
		}
		return c.kv.Between(group, from, to)
	})
}

// deafLater heeds its context only until more than one layer is final.
func (c layerCall) deafLater() error {
	if _, err := c.progress.Wait(c.ctx, min(1, c.layers()-1)); err != nil {
		return err
	}
	c.ctx = context.WithoutCancel(c.ctx)
	return c.right()
}

// DropsDamaged is a right connector that drops what it has of a block as soon as a save with Replace begins, which calls it damaged.
func DropsDamaged() connector.Plugin {
	b := newBackend()
	var w wrappers
	onLayers(func(c layerCall) error {
		if c.t.Replace {
			c.backend.forget(c.t, c.key)
		}
		return c.right()
	})(b, &w)
	return b.plugin(w)
}

// givesUpAll plants a SaveLayers that fails with any other.
func givesUpAll(b *backend, w *wrappers) {
	var mu sync.Mutex
	running := map[int]context.CancelFunc{}
	last := 0
	onLayers(func(c layerCall) error {
		ctx, stop := context.WithCancel(c.ctx)
		defer stop()
		mu.Lock()
		last++
		own := last
		running[own] = stop
		mu.Unlock()
		c.ctx = ctx
		err := c.right()
		mu.Lock()
		defer mu.Unlock()
		delete(running, own)
		if errors.Is(err, connector.ErrGone) {
			for _, other := range slices.Collect(maps.Values(running)) {
				other()
			}
		}
		return err
	})(b, w)
}

// threeAtATime plants a SaveLayers that begins when fewer than three others are under way.
func threeAtATime(b *backend, w *wrappers) {
	room := make(chan struct{}, 3)
	onLayers(func(c layerCall) error {
		select {
		case room <- struct{}{}:
		case <-c.ctx.Done():
			return c.ctx.Err()
		}
		defer func() { <-room }()
		return c.right()
	})(b, w)
}
