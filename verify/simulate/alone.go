package simulate

import (
	"slices"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
)

// While no plugin is up, a host whose connector places answers from what is resident, and loads it by itself (rule PLACE-28). What is
// resident here is what the store has; the copy takes its time, whatever becomes of plugins meanwhile.

// own is what a host is doing without a plugin.
type own struct {
	asks  []*tracker.Ask
	moves []*move
}

func (o *own) busy() bool { return len(o.asks)+len(o.moves) > 0 }

// askAlone takes on a question that no plugin answers.
func (h *host) askAlone(a *tracker.Ask) {
	h.w.mix('j', uint64(a.ID))
	if !h.w.opt.Placed || h.proc != nil && !h.proc.isDown || len(a.Query.Ticket) > 0 {
		h.w.fail('c', "%s is asked by itself about %s", h.e.name, a.Query.Request)
	}
	h.own.asks = append(h.own.asks, a)
}

// loadAlone takes on a load that no plugin makes.
func (h *host) loadAlone(m *move) {
	planless := h.can&connector.CanPlan != 0 // whoever is up may have made no plan for it
	if !h.w.opt.Placed || m.Kind != tracker.Load || m.Slots != nil || h.proc != nil && !h.proc.isDown && !planless {
		h.w.fail('c', "%s makes a %s of %s by itself", h.e.name, m.Kind, m.Transfer.Request)
	}
	h.checkTicketUse(m)
	m.byLayer = m.Overlap
	h.own.moves = append(h.own.moves, m)
}

// workAlone does one piece of it; false if there is nothing to do.
func (h *host) workAlone(d *rng) bool {
	if !h.own.busy() {
		return false
	}
	if i := d.n(len(h.own.asks) + len(h.own.moves)); i < len(h.own.asks) {
		h.answerAlone(i, d.n(3) == 0)
	} else {
		h.copyAlone(i-len(h.own.asks), d)
	}
	return true
}

// answerAlone answers a question with what is resident. sure says that the connector has nothing else.
func (h *host) answerAlone(i int, sure bool) {
	a, o := h.own.asks[i], &h.w.opt
	h.own.asks = append(h.own.asks[:i:i], h.own.asks[i+1:]...)
	q := &a.Query
	m := connector.Match{Async: true, Tokens: max(0, h.w.store.prefix(q.Keys, q.Computed/o.BlockTokens, o)*o.BlockTokens-q.Computed)}
	if m.Tokens > 0 {
		h.offers.heard[q.Request] = q.Ticket != nil
	}
	h.w.stats.AloneAsks++
	_, actions := h.tracker.Found(h.w.now, a.ID, m, q.Computed+m.Tokens >= len(q.Keys)*o.BlockTokens && m.Tokens > 0, sure)
	h.do(actions)
}

// answerAskAlone answers a question at once, while the engine's loop waits.
func (h *host) answerAskAlone(id connector.RequestID) {
	for i, a := range h.own.asks {
		if a.Query.Request == id {
			h.answerAlone(i, len(h.own.asks)%2 == 0)
			return
		}
	}
}

// copyAlone copies a block of a load, or a layer of one, or ends the load.
func (h *host) copyAlone(i int, d *rng) {
	m := h.own.moves[i]
	if n := len(m.Transfer.Blocks); !m.canceled && m.done < m.items() {
		at, layer := m.done%n, m.done/n
		m.done++
		h.copySlot(m, at, layer, d)
		if m.byLayer && !m.out.Absent {
			h.judgeCopied(m, at, layer)
			if at == n-1 {
				h.tellCopied(m, layer+1)
			}
		}
		if !m.out.Absent {
			return
		}
	}
	h.own.moves = append(h.own.moves[:i:i], h.own.moves[i+1:]...)
	h.endAlone(m)
}

// copySlot copies a block from where it is resident, or one layer of it (rule PLACE-36).
func (h *host) copySlot(m *move, at, layer int, d *rng) {
	b, to := m.Transfer.Blocks[at], h.cached(m, at)
	from := h.w.store.cells[storeKey{b.Key, b.Group, uint8(m.Rank)}]
	switch {
	case m.grant == nil || !m.grant.open:
		h.w.fail('c', "%s writes block %d for a load of its own of %s, which is over for the engine", h.e.name, b.ID, m.Transfer.Request)
	case m.spoilt[at]:
	case from == nil || len(m.Check) != len(m.Transfer.Blocks) || d.n(40) == 0 || m.changed(to, from, layer): // its slot is given up meanwhile
		if m.out.Absent = m.verified == 0 || h.w.is(AloneAgain) || h.tracker.Retract(m.ID); !m.out.Absent {
			m.lacks(b)
			m.spoil(to, at, layer)
		}
	case m.byLayer && layer > 0:
		to.short = layers - 1 - layer
	default:
		to.set(from)
		if m.byLayer {
			to.short = layers - 1
		}
	}
}

// changed says that a slot does not hold the block any more of which the layers before were copied.
func (m *move) changed(to, from *cell, layer int) bool {
	return m.byLayer && (from.short > 0 || layer > 0 && !to.equal(from))
}

// judgeCopied verifies what has just been copied of a block, once: nothing is looked at again (rule PLACE-36).
func (h *host) judgeCopied(m *move, at, layer int) {
	if m.spoilt[at] || h.w.is(AloneUnchecked) {
		return
	}
	b := m.Check[at]
	switch bad, foreign := h.wrong(m, at, h.cached(m, at), layers-1-layer); {
	case foreign:
		m.out.Foreign = append(m.out.Foreign, b.ID)
	case bad:
		m.out.Corrupt = append(m.out.Corrupt, b.ID)
	default:
		return
	}
	if m.spoilt == nil {
		m.spoilt = map[int]bool{}
	}
	m.spoilt[at] = true
}

// tellCopied says that the first layers of a load of the host's own are right.
func (h *host) tellCopied(m *move, n int) {
	switch {
	case len(m.missing)+len(m.out.Corrupt)+len(m.out.Foreign) == 0:
		m.verified = n
		h.do(h.tracker.Verified(h.w.now, m.ID, n))
	case m.verified == 0 || h.tracker.Retract(m.ID):
		m.out.Absent = true
	}
}

// checkCopied verifies that a look at the whole copy would find nothing more than was found while it was made.
func (h *host) checkCopied(m *move) {
	bad, foreign := h.checkDigests(m, h.cached)
	for _, id := range slices.Concat(bad, foreign) {
		if !slices.Contains(m.out.Corrupt, id) && !slices.Contains(m.out.Foreign, id) {
			h.w.fail('c', "%s: block %d of a load of its own of %s was verified layer by layer, and is wrong", h.e.name, id, m.Transfer.Request)
		}
	}
}

// endAlone verifies what was copied whole, and tells the tracker.
func (h *host) endAlone(m *move) {
	switch {
	case m.canceled:
		m.out = tracker.Outcome{Err: errCanceled}
	case m.out.Absent:
	case m.byLayer && !h.w.is(AloneUnchecked):
		if len(m.missing) > 0 {
			m.out.Err = &connector.BlockError{Blocks: m.missing, Err: connector.ErrGone}
		}
		h.checkCopied(m)
		h.vouch(m)
		h.noteForeign(m)
		h.w.stats.AloneLayers++
		if m.out.Err == nil && len(m.out.Corrupt)+len(m.out.Foreign) == 0 {
			h.w.stats.Alone++
		}
	default:
		bad, foreign := h.checkDigests(m, h.cached)
		if m.out.Absent = len(bad)+len(foreign) > 0 && !h.w.is(AloneUnchecked); !m.out.Absent {
			h.vouch(m)
			h.w.stats.Alone++
		}
	}
	if h.w.tracing() {
		h.w.say("%s: a load of its own for %s on rank %d is over, not there: %v", h.e.name, m.Transfer.Request, m.Rank, m.out.Absent)
	}
	h.do(h.tracker.Moved(h.w.now, m.ID, m.out))
}

// cancelAlone cancels a load of the host's own; false if it is none.
func (h *host) cancelAlone(id tracker.CallID) bool {
	for _, m := range h.own.moves {
		if m.ID == id {
			m.canceled = true
			return true
		}
	}
	return false
}

// aloneMutants are those of what a host does without a plugin.
func aloneMutants() []MutantInfo {
	return []MutantInfo{
		{AloneUnchecked, "alone-unchecked", "what the host loads while no plugin is up is not verified", "rules PLACE-08 and PLACE-28"},
		{AloneAgain, "alone-again", "a load by the host alone of which layers were announced is made again by the next plugin", "rule PLACE-36"},
	}
}
