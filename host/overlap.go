package host

import (
	"context"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
)

// Layer-wise loads: the plugin says which layers have arrived, the host checks the digests of each, and the engine
// computes with those that are right while others are on their way. When the load is over all of it is checked
// as always, and only that makes what was computed count. What the host itself copies out of slots is in placelayers.go.

// arrival names a load that the engine has begun to use.
type arrival struct {
	step    uint64
	request connector.RequestID
}

// loadOrOverlap is load, and lets the engine use layers as they come if it asks for that, the tracker says so and the plugin
// can. It returns whether a layer was verified, which the engine may be using now, and slots that the plugin names.
func (h *Host) loadOrOverlap(ctx context.Context, r *rank, w connector.Worker, a *tracker.Move) (placed []uint32, announced bool, err error) {
	loader, ok := connector.As[connector.LayerLoader](w)
	if !a.Overlap || !ok || r.landing != nil || !h.opts.Overlap(a.Step, a.Transfer.Request) {
		placed, err = h.load(ctx, r, w, a)
		return placed, false, err
	}
	count := &connector.LayerCount{}
	watching, stop := context.WithCancel(ctx)
	verified := make(chan int, 1)
	go func() { verified <- h.verifyLayers(watching, r, a, count) }()
	err = loader.LoadLayers(ctx, a.Transfer, r.kv, count)
	stop()
	return nil, <-verified > 0, err
}

// verifyLayers checks layers as they arrive, until one is wrong, all are right or ctx is done, and returns how many are. It
// is the check of the whole load that says which blocks failed, and why.
func (h *Host) verifyLayers(ctx context.Context, r *rank, a *tracker.Move, count *connector.LayerCount) (n int) {
	for n < h.layers {
		final, err := count.Wait(ctx, n)
		if final = min(final, h.layers); err != nil || final <= n {
			return n
		}
		if ctx.Err() != nil {
			return n // all of it is about to be checked at once
		}
		bad := r.judge(a.Check, func(i int) error {
			return r.hasher.CheckSegments(r.kv, a.Check[i], r.kv.Between(a.Check[i].Group, n, final))
		})
		if len(bad.corrupt)+len(bad.foreign)+len(bad.outdated) > 0 {
			return n
		}
		n = final
		h.verified(a.ID, n)
	}
	return n
}

// verified tells the tracker that n layers of what a call loads are right.
func (h *Host) verified(id tracker.CallID, n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.do(h.tracker.Verified(time.Now(), id, n))
}

// arriving says to the engine which layers of a load it may use, and remembers which it was given: into those of a partial
// block it writes what it computes, so they are not what was loaded any more. Its methods are safe for concurrent use.
type arriving struct {
	connector.LayerCount

	mu     sync.Mutex
	used   int           // layers that the engine was given
	checks int           // checks of the whole load that run: meanwhile the engine is given no more
	over   chan struct{} // closed when the last of these checks is over

	told bool // the engine knows of it; guarded by Host.mu
}

// Wait implements connector.Progress. It gives one layer more than the engine has seen: what the engine was given is not
// checked again.
func (a *arriving) Wait(ctx context.Context, seen int) (int, error) {
	for {
		if _, err := a.LayerCount.Wait(ctx, seen); err != nil {
			return 0, err
		}
		a.mu.Lock()
		if a.checks == 0 || seen < a.used {
			a.used = max(a.used, seen+1)
			a.mu.Unlock()
			return seen + 1, nil
		}
		over := a.over
		a.mu.Unlock()
		select {
		case <-over:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// beginCheck says how many layers the engine was given; it is given no more before endCheck.
func (a *arriving) beginCheck() (used int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.checks++; a.checks == 1 {
		a.over = make(chan struct{})
	}
	return a.used
}

// endCheck says whether no other check runs.
func (a *arriving) endCheck() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.checks--; a.checks == 0 {
		close(a.over)
	}
	return a.checks == 0
}

// arrivingAs gives what the engine learns of a load. The caller holds h.mu.
func (h *Host) arrivingAs(name arrival) *arriving {
	a := h.arriving[name]
	if a == nil {
		a = &arriving{}
		h.arriving[name] = a
	}
	return a
}

// checkOverlapped checks what has arrived of a load that the engine may be using, or may begin to use when the other ranks
// have the first layer.
func (h *Host) checkOverlapped(r *rank, a *tracker.Move, check []connector.Block) unreadable {
	name := arrival{a.Step, a.Transfer.Request}
	h.mu.Lock()
	given := h.arrivingAs(name)
	used := given.beginCheck()
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if given.endCheck() && !given.told {
			delete(h.arriving, name)
		}
	}()
	return r.checkUsed(a, check, used)
}

// checkUsed checks blocks, except the layers of a partial block that the engine was given.
func (r *rank) checkUsed(a *tracker.Move, check []connector.Block, used int) unreadable {
	partial := map[connector.Block]bool{} // without keys
	for _, b := range a.Transfer.Blocks {
		if b.Key == (connector.BlockKey{}) {
			partial[b] = true
		}
	}
	return r.judge(check, func(i int) error {
		b, from := check[i], 0
		if partial[connector.Block{ID: b.ID, Group: b.Group}] {
			from = used
		}
		return r.hasher.CheckSegments(r.kv, b, r.kv.Between(b.Group, from, r.kv.Layout().Layers()))
	})
}

// tellArriving says which layers of a load are verified. The caller holds h.mu.
func (h *Host) tellArriving(b *tracker.Event) {
	name := arrival{b.Step, b.Request}
	count := h.arrivingAs(name)
	if !count.told {
		count.told = true
		defer h.events.put(Event{Kind: Arriving, Request: b.Request, Step: b.Step, Layers: count})
	}
	count.Advance(b.Layers)
}

// endArriving says how a load ended to an engine that has begun to use it. The caller holds h.mu.
func (h *Host) endArriving(b *tracker.Event) {
	name := arrival{b.Step, b.Request}
	count := h.arriving[name]
	if count == nil {
		return
	}
	delete(h.arriving, name)
	if len(b.Failed) == 0 && !b.Lost {
		count.Advance(h.layers)
	}
	count.GiveUp()
}
