package simulate

import (
	"errors"
	"slices"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
)

// turn is an answer that a client may go on from: the next prompt begins with all of it.
type turn struct {
	tokens []int32
	salt   string
	ticket []byte
	round  int // how many turns there were
}

// keepTurn remembers an answer and the ticket of the engine that made it. Most clients go on soon.
func (r *routing) keepTurn(c *client, ticket []byte) {
	if ticket == nil || r.given {
		return
	}
	r.turns = append(r.turns, turn{slices.Concat(c.prompt, c.got), c.salt, ticket, c.round + 1})
	if len(r.turns) > 8 {
		r.turns = r.turns[1:]
	}
	if d := rng(c.n); d.n(3) > 0 && c.round < 3 {
		r.goOn(&d, len(r.turns)-1)
	}
}

// goOn brings a client whose prompt is the next turn of a conversation. Its ticket goes to the prefill engine.
func (r *routing) goOn(d *rng, i int) bool {
	t := r.turns[i]
	prompt := slices.Clone(t.tokens)
	for n := 1 + d.n(4); n > 0; n-- {
		prompt = append(prompt, int32(d.n(7)))
	}
	if len(prompt)+8 > r.room() {
		return false
	}
	r.enter(prompt, t.salt, 1+d.n(7))
	c := r.live[len(r.live)-1]
	c.turn, c.round = t.ticket, t.round
	if d.n(8) > 0 { // otherwise somebody else goes on from there, too
		r.turns = slices.Delete(r.turns, i, i+1)
	}
	if len(r.turns) > 0 && d.n(16) == 0 {
		c.turn = r.turns[0].ticket // routers mistake conversations
	}
	return true
}

// turnUse is what a request has made of the ticket of an earlier turn.
type turnUse struct{ load *grant }

// useTurn verifies that such a ticket serves one load.
func (h *host) useTurn(m *move) {
	use := h.turns[m.Transfer.Request]
	if use == nil || m.Kind != tracker.Load {
		return
	}
	if use.load != nil && use.load != m.grant {
		h.w.fail('t', "%s loads for %s a second time by the ticket of an earlier turn", h.e.name, m.Transfer.Request)
	}
	if use.load == nil {
		h.w.stats.TurnLoads++
		if h.w.opt.Children {
			h.w.stats.ChildTurns++
		}
	}
	use.load, m.grant.turn = m.grant, true
}

// checkTurn verifies that an offer from an earlier turn is worth a load.
func (h *host) checkTurn(q *connector.Query, m connector.Match) {
	if h.turns[q.Request] != nil && !m.Later && m.Tokens > 0 && m.Tokens < h.w.opt.Threshold {
		h.w.fail('t', "%s: %d tokens of an earlier turn are offered to %s, and %d are worth a load", h.e.name, m.Tokens, q.Request, h.w.opt.Threshold)
	}
}

// checkWeak verifies that what the next turn may want keeps no block, and that what was reused counts as
// gone, not as damaged.
func (h *host) checkWeak(g *grant, ev *tracker.Event) {
	switch {
	case g.weak && ev.Held:
		h.w.fail('e', "%s keeps the blocks of %s for a turn that may never come", h.e.name, ev.Request)
	case g.weak && ev.Ticket != nil:
		h.w.stats.Turns++
	case g.turn && errors.Is(ev.Err, connector.ErrCorrupt) && !g.claimed:
		h.w.fail('t', "%s: blocks of an earlier turn that were reused count as damaged for %s", h.e.name, ev.Request)
	}
}
