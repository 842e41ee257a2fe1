package host

import (
	"context"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
)

// Layer-wise loads: the plugin says which layers have arrived, the host checks the digests of each, and the engine
// computes with those that are right while others are on their way. When the load is over all of it is checked
// as always, and only that makes what was computed count.

// arrival names a load that the engine has begun to use.
type arrival struct {
	step    uint64
	request connector.RequestID
}

// loadOrOverlap is load, and lets the engine use layers as they come if the tracker says so and the plugin can. It returns
// how many layers the engine may have used.
func (h *Host) loadOrOverlap(ctx context.Context, r *rank, w connector.Worker, a *tracker.Move) (used int, err error) {
	loader, ok := connector.As[connector.LayerLoader](w)
	if !a.Overlap || !ok {
		return 0, h.load(ctx, r, w, a)
	}
	count := &connector.LayerCount{}
	watching, stop := context.WithCancel(ctx)
	over := make(chan struct{})
	go func() {
		defer close(over)
		used = h.verifyLayers(watching, r, a, count)
	}()
	err = loader.LoadLayers(ctx, a.Transfer, r.kv, count)
	stop()
	<-over
	return used, err
}

// verifyLayers checks layers as they arrive, until one is wrong, all are right or ctx is done. It is the check of the
// whole load that says which blocks failed, and why. It returns how many were right.
func (h *Host) verifyLayers(ctx context.Context, r *rank, a *tracker.Move, count *connector.LayerCount) (n int) {
	for n < h.layers {
		final, err := count.Wait(ctx, n)
		if final = min(final, h.layers); err != nil || final <= n {
			return n
		}
		bad := r.judge(a.Check, func(i int) error {
			return r.hasher.CheckSegments(r.kv, a.Check[i], r.kv.Between(a.Check[i].Group, n, final))
		})
		if len(bad.corrupt)+len(bad.foreign)+len(bad.outdated) > 0 {
			return n
		}
		n = final
		h.mu.Lock()
		h.do(h.tracker.Verified(time.Now(), a.ID, n))
		h.mu.Unlock()
	}
	return n
}

// checkUsed checks what has arrived of a load of which the engine may have used layers. Into those layers of a partial
// block it may have written what it computed, so they are not what was loaded any more; they were right before.
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
	count := h.arriving[name]
	if count == nil {
		count = &connector.LayerCount{}
		h.arriving[name] = count
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
