package simulate

import (
	"slices"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/ticket"
	"github.com/kvport/kvport/internal/tracker"
)

// The engines of a world may have blocks of two sizes, of which one is a multiple of the other. What a producer
// holds in blocks of its size then goes token by token into those of the consumer. No digest verifies that, so the
// modelled connector writes nothing wrong here, and the producer confirms that it still held what was read.

// size is how many tokens a block of an engine has.
func (o *Options) size(engine int) int {
	if o.OtherTokens > 0 && engine%2 == 1 {
		return o.OtherTokens
	}
	return o.BlockTokens
}

// smallest is the smallest block size of a world.
func (o *Options) smallest() int {
	if o.OtherTokens > 0 {
		return min(o.BlockTokens, o.OtherTokens)
	}
	return o.BlockTokens
}

// base is what the shapes of all engines have in common.
func base() connector.Fingerprint { return connector.Fingerprint{1} }

func (e *engine) shape() connector.Fingerprint { return connector.Fingerprint{1, byte(e.size)} }

// openReshape has the guard accept tickets of engines with blocks of another size.
func (h *host) openReshape() {
	if o := &h.w.opt; o.OtherTokens > 0 {
		h.guard.Reshape(base(), o.Unverified || h.w.is(ReshapeUnasked))
	}
}

// cutOf is the part of a ticket that is for engines of other shapes.
func cutOf(t *tracker.Ticket) ticket.Cut {
	if t.Cut.BlockTokens == 0 {
		return ticket.Cut{}
	}
	return ticket.Cut{Base: base(), BlockTokens: t.Cut.BlockTokens, Last: t.Cut.Last, Tail: t.Cut.Tail}
}

// opened is what a ticket says to the tracker.
func (h *host) opened(q *connector.Query, e *ticket.Envelope) *tracker.Ticket {
	t := &tracker.Ticket{
		Tokens: e.Tokens, Lease: e.Lease, Plugin: e.Plugin, Reshaped: e.Shape != h.e.shape(),
		Cut: tracker.Cut{BlockTokens: e.Cut.BlockTokens, Last: e.Cut.Last, Tail: e.Cut.Tail},
	}
	if h.w.is(ReshapeUncompared) && t.Reshaped {
		n := min(t.Tokens, q.Tokens) / t.Cut.BlockTokens * t.Cut.BlockTokens
		t.Tokens, t.Cut.Last = n, h.e.sched.Address(q.Request, t.Cut.BlockTokens, n)
	}
	return t
}

// mistaken is the ticket of another client that waits: what it says about the prompt is all that tells engines with
// other blocks.
func (r *routing) mistaken(t []byte, d *rng) []byte {
	o := &r.w.opt
	if o.OtherTokens == 0 || o.Rough == 0 || r.w.quiet || d.n(2) > 0 {
		return t
	}
	for _, c := range r.wants {
		if c.ticket != nil {
			return c.ticket
		}
	}
	return t
}

// reshape is the connector's Reshape, of one block: it fills the tokens that the transfer covers from what the
// producer holds.
func (p *proc) reshape(m *move, b connector.Block, i int, c *cell, f Fault) {
	t, size := m.Transfer, p.h.e.size
	end := t.From + t.Tokens
	first := position(t.Blocks, b, end, size) * size
	complete := f != faultPartial
	for at := first; complete && at < min(first+size, end); at++ {
		from := p.producerOf(m)
		if from == nil {
			complete = false
			break
		}
		var slot tag
		slot, complete = from.token(m, b.Group, at)
		if complete {
			c.tags[at-first], c.sum = slot, uint64(m.ID) // where digests are it may write anything
			c.tags[at-first].tainted = true
		}
	}
	switch from := p.producerOf(m); {
	case !complete && !p.h.w.is(ReshapePart):
		m.missing = append(m.missing, b.ID)
	case from != nil && i == len(t.Blocks)-1 && m.Rank == 0:
		from.proc.taken = append(from.proc.taken, from.kept.id)
	}
}

// producer is a hold that can be read now.
type producer struct {
	proc *proc
	kept *kept
}

// producerOf finds the hold that a reshaped load reads, nil if nothing keeps its blocks any more.
func (p *proc) producerOf(m *move) *producer {
	t, ok := parseTicket(m.Transfer.Ticket)
	if !ok {
		return nil
	}
	from := p.h.w.pluginOf(t)
	if from == nil || from.n != t.life {
		return nil
	}
	for _, k := range from.holds {
		if k.id == t.hold && from.h.keeps(k) {
			return &producer{from, k}
		}
	}
	return nil
}

// keeps says whether the host still has the blocks of a hold pinned.
func (h *host) keeps(k *kept) bool {
	for _, l := range h.holds {
		if l.id == k.id && slices.Equal(l.blocks, k.blocks) {
			return true
		}
	}
	return false
}

// token is one token of what a producer holds.
func (p *producer) token(m *move, group uint16, at int) (tag, bool) {
	size := p.proc.h.e.size
	ordinal, place := at/size, at%size
	if p.proc.h.w.is(ReshapeOffByOne) {
		ordinal = max(0, ordinal-1)
	}
	if at >= p.kept.tokens {
		return tag{}, false
	}
	for _, b := range p.kept.blocks {
		if b.Group == group && position(p.kept.blocks, b, p.kept.tokens, size) == ordinal {
			return p.proc.h.e.mem[m.Rank][b.ID].tags[place], true
		}
	}
	return tag{}, false
}

// reshaped is the host's part when a reshaped load has returned. A wrong host makes digests of what nobody has verified.
func (h *host) reshaped(m *move) {
	arrived := tracker.Arrived(m.Transfer.Blocks, m.out.Err)
	if !m.Reshaped || m.out.Err != nil && len(arrived) == 0 {
		return
	}
	h.w.stats.Reshaped++
	m.grant.reshaped = true
	if !h.w.is(TaintSigned) {
		return
	}
	for _, b := range arrived {
		if c := &h.e.mem[m.Rank][b.ID]; b.Key != (connector.BlockKey{}) {
			c.sum = h.sum(c, b, m.Rank)
		}
	}
}
