package simulate

import (
	"slices"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/sched"
	"github.com/kvport/kvport/internal/tracker"
)

// What a lossy connector loads is unverified. Every slot remembers whether it was filled by one, or computed by a model that read
// such a slot: that is what must stay with its request. Nothing here asks the scheduler or the tracker what they
// think of a request.

// reads says whether a chunk attends to tainted slots, which only the request that loaded them may.
func (e *engine) reads(st *stream, c *sched.Chunk) (tainted bool) {
	if !e.w.opt.Lossy {
		return false
	}
	for rank := range e.mem {
		for g, table := range c.Blocks {
			for at := e.w.opt.first(g, c.Start, e.size) * e.size; at < c.Start; at++ {
				tainted = tainted || e.mem[rank][table[at/e.size]].tags[at%e.size].tainted
			}
		}
	}
	if !tainted {
		return false
	}
	if !st.tainted {
		e.w.fail('v', "%s: %s attends to what another request loaded, and nobody has verified", e.name, st.id)
	}
	e.w.stats.Tainted++
	if st.kept = nil; e.w.is(TaintHeld) {
		for _, table := range c.Blocks {
			st.kept = append(st.kept, slices.Clone(table))
		}
	}
	return true
}

// stays verifies that none of some blocks, which hold a request's tokens up to end, is tainted.
func (h *host) stays(what string, id connector.RequestID, blocks []connector.Block, end int) {
	if !h.w.opt.Lossy {
		return
	}
	for _, b := range blocks {
		first := position(blocks, b, end, h.e.size) * h.e.size
		for rank := range h.e.mem {
			for i, t := range h.e.mem[rank][b.ID].tags {
				if t.tainted && first+i < end {
					h.w.fail('v', "%s: block %d of %s is %s, and nobody has verified what it holds, or what that was computed from", h.e.name, b.ID, id, what)
					return
				}
			}
		}
	}
}

// checkTaint verifies what leaves a request with an event: what was saved, and what is held or promised.
func (h *host) checkTaint(g *grant, ev *tracker.Event) {
	switch ev.Kind { //nolint:exhaustive // with the others nothing leaves
	case tracker.Loaded:
		h.checkUnsigned(g, ev)
	case tracker.Saved:
		if len(ev.Failed) == 0 && !ev.Lost {
			h.stays("saved", ev.Request, g.blocks, g.end)
		}
	case tracker.Finished:
		if ev.Held || ev.Ticket != nil {
			h.stays("held or promised", ev.Request, g.blocks, g.end)
		}
	}
}

// unsigned is the host's part when an unverified load has returned. A wrong host makes digests of what nobody has verified.
func (h *host) unsigned(m *move) {
	arrived := tracker.Arrived(m.Transfer.Blocks, m.out.Err)
	if !h.w.opt.Lossy || m.out.Err != nil && len(arrived) == 0 {
		return
	}
	m.grant.dirty = true
	if !h.w.is(TaintSigned) {
		return
	}
	for _, b := range arrived {
		if c := &h.e.mem[m.Rank][b.ID]; b.Key != (connector.BlockKey{}) {
			c.sum = h.sum(c, b, m.Rank)
		}
	}
}

// checkUnsigned verifies that the blocks of an unverified load have no digests of what they hold: whoever gets them
// next would take them for verified.
func (h *host) checkUnsigned(g *grant, ev *tracker.Event) {
	if !g.dirty || ev.Lost {
		return
	}
	for _, b := range g.blocks {
		if b.Key == (connector.BlockKey{}) || slices.Contains(ev.Failed, b.ID) {
			continue
		}
		for rank := range h.e.mem {
			if c := &h.e.mem[rank][b.ID]; c.sum == h.sum(c, b, rank) {
				h.w.fail('v', "%s: block %d on rank %d was loaded for %s unverified, and has a digest that says it is right", h.e.name, b.ID, rank, ev.Request)
				return
			}
		}
	}
}

// unverified is whether the engine is told that nobody has verified a load, and notes which request has it.
func (h *host) unverified(r *report) bool {
	if r.grant == nil || !r.grant.dirty || len(r.Failed) == len(r.grant.blocks) {
		return r.Unverified
	}
	h.w.stats.Unverified++
	if st := h.e.streams[r.Request]; st != nil {
		st.tainted = true
	}
	return r.Unverified && !h.w.is(TaintUntold) && !h.forgets(r)
}

// forgets is a host for which a request's taint is over with its load, or with one that brought only a part.
func (h *host) forgets(r *report) bool {
	g := r.grant
	part := len(r.Failed) > 0 || g != nil && len(g.blocks) > 0 && position(g.blocks, g.blocks[0], g.end, h.e.size) > 0
	return h.w.is(TaintForgotten) || h.w.is(TaintPart) && part
}

// forgetTaint is what such a host makes of the end of a load.
func (h *host) forgetTaint(r *report) {
	if h.forgets(r) {
		h.do(h.tracker.Step(h.w.now, &connector.Step{ID: r.Step, Preempted: []connector.RequestID{r.Request}}, nil))
	}
}

// taints notes what a step means for tainted requests: they end, or lose their blocks.
func (h *host) taints(s *connector.Step) {
	for _, id := range s.Preempted {
		if st := h.e.streams[id]; st != nil {
			st.tainted = false
		}
	}
	for i := range s.Ended {
		st := h.e.streams[s.Ended[i].Request]
		if st == nil || !st.tainted {
			continue
		}
		h.w.stats.TaintedEnds++
		if h.w.is(TaintHeld) && st.kept != nil && st.req.Remote {
			h.holdAll(s, &s.Ended[i], st)
		}
	}
}

// holdAll is an engine that lets a request's taint go unheeded when it ends.
func (h *host) holdAll(s *connector.Step, e *connector.Ended, st *stream) {
	s.Preempted = append(s.Preempted, e.Request)
	e.Tokens, e.Remote, e.Weak, e.Blocks = len(st.tokens)-1, true, st.req.Turn, nil
	for g, table := range st.kept {
		for i, id := range table {
			if b := (connector.Block{ID: id, Group: uint16(g)}); id >= 0 && i*h.e.size < e.Tokens {
				if keys := st.req.Space.Keys(st.tokens[:e.Tokens], h.e.size); i < len(keys) {
					b.Key = keys[i]
				}
				e.Blocks = append(e.Blocks, b)
			}
		}
	}
}

// vouch notes that the blocks of a load are what a digest says: they are not tainted, wherever they come from.
func (h *host) vouch(m *move) {
	for _, b := range tracker.Arrived(m.Check, m.out.Err) {
		if c := &h.e.mem[m.Rank][b.ID]; !slices.Contains(m.out.Corrupt, b.ID) && !slices.Contains(m.out.Foreign, b.ID) {
			for i := range c.tags {
				c.tags[i].tainted = false
			}
		}
	}
}

// taintMutants are those that let out what nobody has verified.
func taintMutants() []MutantInfo {
	return []MutantInfo{
		{TaintSigned, "taint-signed", "blocks that nobody has verified get digests of what they hold", "rule TAINT-01"},
		{TaintUntold, "taint-untold", "the engine is not told that nobody has verified a load, and its prefix cache shares it", "rule TAINT-02"},
		{TaintPart, "taint-part", "a load that failed in part, or behind tokens that were there, counts as verified", "rule TAINT-02"},
		{TaintForgotten, "taint-forgotten", "that nobody has verified a load is forgotten when it is over, and what follows is saved and held", "rule TAINT-01"},
		{TaintHeld, "taint-held", "a request that ends is held with all that it has, whatever that was computed from", "rule TAINT-01"},
	}
}
