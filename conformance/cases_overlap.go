package conformance

import (
	"errors"
	"slices"
	"sync"

	"github.com/kvport/kvport/connector"
)

// overlapCase is a case of a connector whose loads say which layers have arrived.
func overlapCase(id, rule, text string, body func(*rig)) Case {
	return Case{
		ID: id, Rule: rule, Text: text, Profiles: []Profile{LayerWise}, Needs: connector.CanOverlap,
		Run: rigged(connector.CanOverlap, false, body), Optional: true, // a connector may save layer by layer and load whole blocks
	}
}

func overlapCases() []Case {
	return []Case{
		overlapCase("overlap-order", "OVERLAP-01", "When a layer is announced, its bytes are in place in all blocks.", overlapOrder),
		overlapCase("overlap-digests", "OVERLAP-01", "When a layer is announced, its digests are in place in all blocks.", overlapDigests),
		overlapCase("overlap-still", "OVERLAP-01", "What was announced is not written any more.", overlapStill),
		overlapCase("overlap-missing", "OVERLAP-01", "No layer is announced of a load that lacks a block; that block is named, as by Load.", overlapMissing),
		overlapCase("overlap-whole", "OVERLAP-02", "LoadLayers returns nil only when all blocks are filled.", overlapWhole),
	}
}

// announced calls a function with each number of layers that is announced.
type announced func(n int)

// Advance implements connector.Arrivals.
func (f announced) Advance(n int) { f(n) }

// overlapping is a transfer that brings stored blocks to other places, which are wiped.
func (e *engine) overlapping() (t connector.Transfer, to []connector.Block) {
	e.Helper()
	keys := e.keys(4)
	from := blocks(0, keys...)
	to = blocks(6, keys...)
	e.save(from...)
	t = transfer(to)
	if e.info.Capabilities&connector.CanHold != 0 && e.match(keys...) < len(keys) { // found by ticket only
		end := ended("request", from)
		end.Tokens = len(keys) * blockTokens
		t.Tokens, t.Ticket = end.Tokens, e.finish(end)[0].Ticket
	}
	e.wipe(0, to...)
	return t, to
}

// loadLayers loads a transfer on every rank and passes on what is announced.
func (e *engine) loadLayers(t *connector.Transfer, arrived func(kv *connector.KV, n int)) error {
	e.Helper()
	todo, err := e.planned(e.Context(), *t, false)
	if err != nil {
		return err
	}
	for i := range todo {
		for rank, kv := range e.kv {
			loader, ok := connector.As[connector.LayerLoader](e.workers[rank])
			if !ok {
				e.Errorf("Info claims overlap, the worker side does not have it")
				e.FailNow()
			}
			call := func() error {
				return loader.LoadLayers(e.Context(), &todo[i], kv, announced(func(n int) { arrived(kv, n) }))
			}
			for w := e.patience(soon); ; e.pause(askAgain) {
				err := call()
				if err == nil {
					break
				}
				if !errors.Is(err, connector.ErrBusy) || w.over() {
					return err
				}
			}
		}
	}
	return nil
}

// layerSegments are the segments of a group that belong to the first n layers, without digests.
func (e *engine) layerSegments(kv *connector.KV, group uint16, n int) []int {
	return slices.DeleteFunc(kv.Between(group, 0, n), e.isDigest)
}

func overlapOrder(r *rig) {
	e := r.engine(setup{})
	for range 3 {
		t, to := e.overlapping()
		var mu sync.Mutex
		wrong := map[int]bool{}
		err := e.loadLayers(&t, func(kv *connector.KV, n int) {
			for _, b := range to {
				for _, s := range e.layerSegments(kv, b.Group, n) {
					content := e.stream(b, 0, s)
					if slices.ContainsFunc(kv.View(s, b.ID), func(have byte) bool { return have != byte(content.Uint32()) }) {
						mu.Lock()
						wrong[n] = true
						mu.Unlock()
					}
				}
			}
		})
		r.must(err, "load layer by layer")
		mu.Lock()
		for n := range wrong {
			r.Errorf("%d layers were announced before their bytes were in place", n)
		}
		mu.Unlock()
		e.holds(to...)
	}
}

func overlapDigests(r *rig) {
	e := r.engine(setup{})
	t, to := e.overlapping()
	var mu sync.Mutex
	wrong := map[int]bool{}
	err := e.loadLayers(&t, func(kv *connector.KV, n int) {
		for _, b := range to {
			if e.hasher().CheckSegments(kv, b, e.layerSegments(kv, b.Group, n)) != nil {
				mu.Lock()
				wrong[n] = true
				mu.Unlock()
			}
		}
	})
	r.must(err, "load layer by layer")
	mu.Lock()
	defer mu.Unlock()
	for n := range wrong {
		r.Errorf("%d layers were announced, and not all of their digests were in place", n)
	}
	e.holds(to...)
}

func overlapStill(r *rig) {
	e := r.engine(setup{})
	t, to := e.overlapping()
	type piece struct {
		kv      *connector.KV
		segment int
		block   connector.Block
	}
	var mu sync.Mutex
	marked := map[piece]byte{} // the first bytes that were changed when their layers were announced, as they were
	err := e.loadLayers(&t, func(kv *connector.KV, n int) {
		mu.Lock()
		defer mu.Unlock()
		for _, b := range to {
			for _, s := range e.layerSegments(kv, b.Group, n) {
				p := piece{kv, s, b}
				if _, before := marked[p]; !before {
					marked[p] = kv.View(s, b.ID)[0]
					kv.View(s, b.ID)[0] ^= 0xFF
				}
			}
		}
	})
	r.must(err, "load layer by layer")
	mu.Lock()
	defer mu.Unlock()
	for p, was := range marked {
		first := &p.kv.View(p.segment, p.block.ID)[0]
		if *first != was^0xFF {
			r.Errorf("segment %d of block %d was written after its layer was announced", p.segment, p.block.ID)
		}
		*first = was
	}
	e.holds(to...)
}

func overlapMissing(r *rig) {
	e := r.engine(setup{})
	t, to := e.overlapping()
	lacks := &t.Blocks[len(t.Blocks)-1]
	lacks.Key = e.keys(1)[0]
	var mu sync.Mutex
	most := 0
	err := e.loadLayers(&t, func(_ *connector.KV, n int) {
		mu.Lock()
		defer mu.Unlock()
		most = max(most, n)
	})
	e.failed(err, lacks.ID)
	mu.Lock()
	defer mu.Unlock()
	r.equal(0, most, "layers announced of a load that lacks a block")
	e.holds(to[:len(to)-1]...)
}

func overlapWhole(r *rig) {
	e := r.engine(setup{})
	for range 3 {
		t, to := e.overlapping()
		r.must(e.loadLayers(&t, func(*connector.KV, int) {}), "load layer by layer")
		e.holds(to...)
	}
}
