package simulate

import (
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
)

// meanwhile is a plugin at work while the engine computes what it was already given to save.
func (e *engine) meanwhile(st *connector.Step) {
	if st == nil || len(st.Computing) == 0 {
		return
	}
	h := e.host
	for n := h.rng.n(4); n > 0 && h.proc != nil && !h.proc.dying; n-- {
		h.proc.work(&h.rng, faultNone)
	}
	if e.w.opt.Rough > 0 && !e.w.quiet && h.proc != nil && h.proc.hung.IsZero() && h.rng.n(16) == 0 {
		h.proc.answerEarly()
	}
}

// computed says that the blocks of a step are final, one layer after the other.
func (e *engine) computed(st *connector.Step) {
	if st == nil || len(st.Computing) == 0 {
		return
	}
	for n := range layers {
		e.host.do(e.host.tracker.Layers(e.w.now, st.ID, n+1))
	}
}

// layers are those of every cache. The model computes them at once.
const layers = 2

// advance lets a call know how many layers of its blocks are final.
func (h *host) advance(a tracker.Advance) {
	if h.proc == nil {
		return
	}
	for _, m := range h.proc.moves {
		if m.ID == a.ID {
			m.Layers = max(m.Layers, a.Layers)
		}
	}
}

// answerEarly is a plugin that takes for stored what is not computed yet.
func (p *proc) answerEarly() {
	for _, m := range p.moves {
		if m.waits() && !m.answered && !m.stuck {
			m.end(nil, p)
		}
	}
}

// noteEarly notes such an answer.
func (h *host) noteEarly(m *move) {
	if !m.Computing || m.out.Err != nil || m.out.Layers >= layers {
		return
	}
	m.grant.early = true
	h.w.stats.Early++
	if h.w.is(EarlyIsStored) {
		m.out.Layers = layers
	}
}

// waits says that a save has to wait for the layers of its blocks.
func (m *move) waits() bool { return m.Computing && m.Layers < layers }

// tellStored reports that a save has stored everything that a ticket promises, and lets the save continue on the
// same blocks for others.
func (p *proc) tellStored(m *move, d *rng) {
	h := p.h
	m.told = true
	h.do(h.tracker.Stored(h.w.now, m.ID))
	for i, b := range m.Transfer.Blocks {
		if i > 0 && d.n(2) == 0 {
			continue
		}
		m.again = append(m.again, b)
	}
}
