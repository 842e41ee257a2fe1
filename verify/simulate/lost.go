package simulate

import (
	"errors"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/sched"
	"github.com/kvport/kvport/internal/tracker"
)

// A dead plugin may leave somebody behind who can write its blocks for ever, a peer that nobody can end. What the plugin
// had then must never be used again; everything else goes on.

// mayLose says whether the world can do without the blocks of some calls and holds.
func (h *host) mayLose(moves []*move, holds map[obligation]*lease) bool {
	o := &h.w.opt
	if !o.Orphans || h.w.quiet {
		return false
	}
	blocks := map[connector.BlockID]bool{}
	for _, m := range moves {
		for _, b := range m.grant.blocks {
			blocks[b.ID] = true
		}
	}
	for _, l := range holds {
		for _, b := range l.blocks {
			blocks[b.ID] = true
		}
	}
	return h.tracker.Counters().Lost+len(blocks) <= o.mostLost()
}

// serveHolds is a plugin that renews holds and reports what was fetched, or dies with those that may be lost.
func (h *host) serveHolds(p *proc, d *rng, f Fault) {
	switch mayDie := len(h.holds) > 0 && h.mayLose(p.moves, h.holds); {
	case mayDie && p.comp != nil && d.n(8) == 0:
		p.comp.crash(d)
		return
	case mayDie && p.comp == nil && d.n(2) == 0:
		p.crash()
		return
	}
	h.renew(p, d)
	p.consume(f)
}

// abandon ends a generation that has left somebody behind.
func (h *host) abandon(moves []*move) {
	h.w.say("%s: somebody may write the blocks of plugin generation %d for ever", h.e.name, h.n)
	h.orphans = append(h.orphans, moves...)
	if h.w.is(AbandonedIsReaped) {
		h.do(h.tracker.Reaped(h.w.now, h.n))
		return
	}
	h.e.sources = [windows][]*cell{} // the next life has other memory
	h.do(h.tracker.Abandoned(h.w.now, h.n))
}

// loseCall is the same for one call of a composite: the part that works on it is gone, and the rest goes on.
func (h *host) loseCall(p *proc, d *rng) bool {
	if !h.w.opt.Tells || len(p.moves) == 0 || p.dying || d.n(3) == 0 {
		return false
	}
	m := p.moves[d.n(len(p.moves))]
	if m.lost || !h.mayLose([]*move{m}, nil) {
		return false
	}
	h.w.say("%s: somebody may go on with a %s of %s for ever", h.e.name, m.Kind, m.Transfer.Request)
	h.orphans = append(h.orphans, m)
	h.do(h.tracker.Lose(h.w.now, m.ID))
	return true
}

// giveLost tells the engine that a transfer or a hold is over whose blocks it must not use again.
func (h *host) giveLost(r *report) {
	h.w.stats.Lost++
	switch {
	case h.w.is(LostIsFree):
		h.give(r)
	case r.Kind == tracker.Released && h.w.is(LostHoldUntold):
	case r.Kind == tracker.Released:
		h.w.stats.LostHolds++
		h.e.sched.LostHold(r.Step, r.Request)
	default:
		h.forget(r.grant)
		if r.Kind == tracker.Loaded {
			h.e.loadEnded(r.Request, false)
		}
		h.e.sched.Lost(r.Step, r.Request, r.Kind == tracker.Loaded)
	}
}

// fits says whether an engine has blocks for some tokens, lost ones left out.
func (e *engine) fits(tokens int) bool {
	o, lost := &e.w.opt, 0
	if e.host != nil {
		lost = e.host.tracker.Counters().Lost
	}
	return (tokens+e.size-1)/e.size*o.Groups <= o.Blocks-lost
}

// mayFail says whether a request has a reason to end with an error.
func (e *engine) mayFail(st *stream, err error) bool {
	return errors.Is(err, sched.ErrLoadFailed) && e.w.opt.FailLoads || errors.Is(err, sched.ErrNoRoom) && !e.fits(len(st.tokens))
}

// haunt lets those who were left behind write.
func (h *host) haunt(d *rng) {
	for _, m := range h.orphans {
		if m.Kind != tracker.Load || d.n(4) > 0 {
			continue
		}
		i := d.n(len(m.Transfer.Blocks))
		if !m.grant.open {
			h.w.fail('c', "%s: somebody whom a dead plugin left behind writes block %d, which is in use again", h.e.name, m.Transfer.Blocks[i].ID)
			return
		}
		if m.Source != nil { // it has none of the cache
			c := m.reads[d.n(len(m.reads))].at
			c.tags[d.n(len(c.tags))].kv ^= 1 << d.n(64)
			continue
		}
		c := h.seen(m, i)
		c.orphan()
		c.tags[d.n(len(c.tags))].kv ^= 1 << d.n(64)
	}
}
