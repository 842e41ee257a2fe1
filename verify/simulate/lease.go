package simulate

import (
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

// lease is a hold as the engine knows it.
type lease struct {
	blocks []connector.Block
	sums   []uint64 // of rank 0's content, which must not change
	id     connector.HoldID
	ttl    time.Duration
	began  time.Time
	until  time.Time

	consumers int
}

// renew is a consumer at work: the plugin asks that some holds stay longer. What the host then says decides
// until when the plugin may vouch for them.
func (h *host) renew(p *proc, d *rng) {
	if p.isDown || !p.hung.IsZero() {
		return
	}
	list := p.someHolds(d)
	if p.comp != nil {
		list = p.comp.renewals(d)
	}
	over := map[connector.HoldID]bool{}
	if !h.w.is(RenewalLost) {
		h.tracker.Renewed(h.w.now, p.n, list)
		for _, id := range h.tracker.Over(p.n) {
			over[id] = !h.w.is(RenewalOfNone)
		}
	}
	for key, l := range h.holds {
		if !slices.Contains(list, l.id) || over[l.id] {
			continue
		}
		until := h.w.now.Add(l.ttl)
		if until.After(l.began.Add(holdMax)) {
			h.w.fail('e', "%s: the hold of %s is renewed for longer than any hold may last", h.e.name, key.request)
		}
		if until.After(l.until) {
			l.until = until
		}
		h.w.stats.Renewed++
	}
	for _, id := range list {
		if !over[id] && !h.isOpen(id) {
			h.w.fail('e', "%s: hold %d is renewed, and is not there", h.e.name, id)
		}
	}
}

// someHolds are those whose consumers are at work.
func (p *proc) someHolds(d *rng) (list []connector.HoldID) {
	for _, k := range p.holds {
		if d.n(3) == 0 {
			list = append(list, k.id)
		}
	}
	return list
}

// isOpen says whether a hold is open for the engine.
func (h *host) isOpen(id connector.HoldID) bool {
	for _, l := range h.holds {
		if l.id == id {
			return true
		}
	}
	return false
}
