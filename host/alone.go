package host

import (
	"context"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
)

// While no plugin is up the host answers from what is placed, and loads it by itself (rule PLACE-28). Nothing here uses a generation:
// what one that is at its end is asked is never answered.

// askAlone answers a query from what is placed. The caller holds mu.
func (h *Host) askAlone(a *tracker.Ask) {
	id, q := a.ID, a.Query
	h.work.Go(func() { // a long prompt has many keys to look for, and nobody waits for mu meanwhile
		m, whole, sure := h.place.matchAlone(&q)
		h.mu.Lock()
		defer h.mu.Unlock()
		given, actions := h.tracker.Found(time.Now(), id, m, whole, sure)
		if given {
			h.answeredAlone()
		}
		h.do(actions)
		h.wakeWaiter(q.Request)
	})
}

// answeredAlone counts a match that was answered without a plugin.
func (h *Host) answeredAlone() {
	h.metrics.placedMatches.Inc()
	h.metrics.aloneMatches.Inc()
}

// probePlaced answers a query that belongs to no request without the plugin, whether one is up or not.
func (h *Host) probePlaced(q *connector.Query, up bool) (connector.Match, bool) {
	if up {
		return h.matchPlaced(q)
	}
	m, _, sure := h.place.matchAlone(q)
	if !sure && m.Tokens == 0 {
		return m, false
	}
	h.answeredAlone()
	return m, true
}

// loadAlone loads what is placed. The caller holds mu.
func (h *Host) loadAlone(a *tracker.Move) {
	ctx, cancel := context.WithDeadline(context.Background(), a.Deadline)
	h.alone[a.ID] = cancel
	h.work.Go(func() {
		defer cancel()
		out, over := h.loadPlaced(ctx, h.ranks[a.Rank], a)
		out.Absent = !over
		h.mu.Lock()
		defer h.mu.Unlock()
		if !h.tracker.Taking() {
			h.metrics.alone.Add(float64(out.Placed))
		}
		delete(h.alone, a.ID)
		h.do(h.tracker.Moved(time.Now(), a.ID, out))
	})
}

// cancelCall ends the wait of a call. The caller holds mu.
func (h *Host) cancelCall(id tracker.CallID) {
	if cancel := h.alone[id]; cancel != nil {
		cancel()
		return
	}
	h.gen.cancelCall(id)
}

// cancelAlone ends all loads without a plugin. The caller holds mu.
func (h *Host) cancelAlone() {
	for _, cancel := range h.alone {
		cancel()
	}
}
