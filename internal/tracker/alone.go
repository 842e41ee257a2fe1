package tracker

import (
	"context"
	"time"

	"github.com/kvport/kvport/connector"
)

// While no generation takes calls, the host answers questions from what the connector has placed, and loads it by itself (rule PLACE-28).
// Such calls have generation 0, which no process has: neither the end of one nor a deadline for it concerns them. What is not
// there waits for the next generation, as everything would without this.

// alone says that the host may be asked in place of a generation. What comes with a ticket is the connector's.
func (b *Tracker) alone(t connector.Ticket) bool { return b.cfg.Placed && !b.closed && len(t) == 0 }

// taking is the generation that takes calls; 0: none does.
func (b *Tracker) taking() uint64 {
	if b.state != up {
		return 0
	}
	return b.gen
}

// Taking says whether a generation takes calls.
func (b *Tracker) Taking() bool { return b.state == up }

// goOnAlone has the host try what a generation that takes no more calls had not begun, or leaves without an answer.
func (b *Tracker) goOnAlone(now time.Time) {
	if !b.cfg.Placed {
		return
	}
	for _, o := range sorted(b.ops) {
		b.startReady(o)
	}
	for _, r := range sorted(b.requests) {
		b.askAgain(now, r)
	}
}

// Found brings what the host has found for an Ask without a generation, and says whether that is the answer now. whole says that it is
// all that the request needs, and sure that the connector has nothing else. A part is the best so far while the next generation may
// be up soon, which may have more: it is the answer when the time of Later is over, or at once if none comes up for a while.
func (b *Tracker) Found(now time.Time, id CallID, answer connector.Match, whole, sure bool) (given bool, actions []Action) {
	r := b.asks[id]
	if r == nil {
		b.counters.Unknown++
		return false, nil
	}
	delete(b.asks, id)
	m := &r.match
	m.ask = 0
	if m.outdated() {
		b.askAgain(now, r)
		return false, b.take()
	}
	given = b.state == broken || whole || sure && m.asked.Computed+answer.Tokens >= min(r.need, b.limit(&m.query))
	if given || answer.Tokens > 0 {
		m.hear(answer)
		m.unsure = !sure
	}
	switch {
	case given:
		b.settleMatch(now, r)
	case b.state == up:
		b.askAgain(now, r)
	}
	return given, b.take()
}

// forgetAnswers drops, when no generation will come up for a while, what former ones have said they have, and has the host asked.
func (b *Tracker) forgetAnswers(now time.Time) {
	for _, r := range sorted(b.requests) {
		m := &r.match
		switch {
		case !b.alone(m.query.Ticket):
		case m.open && m.ask == 0:
			m.end, m.groups = 0, 0
			b.askAgain(now, r)
		case m.known:
			r.match = match{query: m.query}
		}
	}
}

// mayLoadAlone says that the host may load an op by itself.
func (b *Tracker) mayLoadAlone(o *op) bool {
	return o.kind == Load && o.source == nil && !o.canceled && b.alone(o.t.Ticket)
}

// startAlone has the host try the calls that it has not tried yet. They need no slots of landing memory.
func (b *Tracker) startAlone(o *op) {
	for _, c := range o.calls {
		if c.state == ready && !c.looked {
			b.start(c, 0)
		}
	}
}

// absent says that not all of a call is placed: it is the next generation's, if that may have it.
func (b *Tracker) absent(now time.Time, c *call) {
	o := c.op
	c.state = ready
	switch {
	case o.canceled:
		b.failReady(now, o, context.Canceled)
	case o.noPlan != nil:
		b.failReady(now, o, o.noPlan)
	case b.closed || b.state == broken:
		b.failReady(now, o, connector.ErrGone)
	case !now.Before(o.deadline):
		b.failReady(now, o, errLate)
	default:
		b.startReady(o)
	}
}

// unplan goes on with a transfer for which the connector makes no plan. What is placed is loaded without one, the whole of it; the rest
// fails: nothing has touched its blocks.
func (b *Tracker) unplan(now time.Time, o *op, err error) {
	o.planning = false
	if !b.mayLoadAlone(o) {
		o.fail(o.t.Blocks, err)
		b.endOp(now, o)
		return
	}
	o.noPlan = err
	b.split(o, []*connector.Transfer{&o.t})
	b.startAlone(o)
	b.endIfOver(now, o)
}
