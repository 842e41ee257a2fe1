package simulate

import "github.com/kvport/kvport/connector"

// meanwhile is a plugin at work while the engine computes what it was already given to save.
func (e *engine) meanwhile(st *connector.Step) {
	if st == nil || len(st.Computing) == 0 {
		return
	}
	h := e.host
	for n := h.rng.n(4); n > 0 && h.proc != nil && !h.proc.dying; n-- {
		h.proc.work(&h.rng, faultNone)
	}
}

// computed says that the blocks of a step are final.
func (e *engine) computed(st *connector.Step) {
	if st == nil || len(st.Computing) == 0 {
		return
	}
	e.host.final = st.ID
	e.host.do(e.host.tracker.Computed(e.w.now, st.ID))
}

// waits says that a save has to wait for the layers of its blocks.
func (h *host) waits(m *move) bool {
	return m.Computing && m.Step > h.final && !h.w.is(LayerEarly)
}

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
