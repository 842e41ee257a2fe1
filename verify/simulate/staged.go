package simulate

import (
	"slices"

	"github.com/kvport/kvport/connector"
)

// At trust level staged a plugin sees landing memory only: the host copies what is saved out to it,
// and in what was loaded, and checks it where the plugin cannot write.

// occupy notes which call has the landing slots of a move, and verifies that no other call that
// may still touch them had them.
func (h *host) occupy(m *move) {
	if h.w.opt.Slots == 0 {
		return
	}
	if len(m.Slots) != len(m.Transfer.Blocks) {
		h.w.fail('c', "%s: a %s of %d blocks has %d landing slots", h.e.name, m.Kind, len(m.Transfer.Blocks), len(m.Slots))
		return
	}
	h.w.stats.Staged++
	for _, s := range m.Slots {
		if old := h.slots[m.Rank][s]; old != nil && !old.reported && slices.Contains(h.proc.moves, old) {
			h.w.fail('c', "%s: landing slot %d of rank %d is given to a %s of %s while a %s of %s has it",
				h.e.name, s, m.Rank, m.Kind, m.Transfer.Request, old.Kind, old.Transfer.Request)
			return
		}
		h.slots[m.Rank][s] = m
	}
}

// shareSlots is a host that lets several calls use the same slots.
func (h *host) shareSlots(m *move) {
	if h.w.is(SlotsShared) {
		m.Slots = slices.Clone(m.Slots)
		for i := range m.Slots {
			m.Slots[i] = connector.BlockID(i)
		}
	}
}

// seen is the memory of block i of a move as the plugin sees it.
func (h *host) seen(m *move, i int) *cell {
	if m.Slots != nil {
		return &h.e.landing[m.Rank][m.Slots[i]]
	}
	return &h.e.mem[m.Rank][m.Transfer.Blocks[i].ID]
}

// copyOut is what happens before a plugin reads what it must save.
func (h *host) copyOut(m *move) {
	for _, c := range m.Out() {
		h.e.landing[m.Rank][c.Slot].set(&h.e.mem[m.Rank][c.Block])
	}
}

// copyIn takes what arrived, as the plugin's answer says.
func (h *host) copyIn(m *move) {
	for _, c := range m.In(m.out.Err) {
		h.e.mem[m.Rank][c.Block].set(&h.e.landing[m.Rank][c.Slot])
	}
}

// lacks notes that a block of a call failed, under the name by which the plugin knows it.
func (m *move) lacks(b connector.Block) {
	m.missing = append(m.missing, m.Seen().Blocks[slices.Index(m.Transfer.Blocks, b)].ID)
}

// orphan forgets where the content of a block came from: what a load leaves in it may be the right KV by
// chance, but no cache has served it.
func (c *cell) orphan() {
	for i := range c.tags {
		c.tags[i].life = 0
	}
}

func (c *cell) set(from *cell) {
	copy(c.tags, from.tags)
	c.sum, c.foreign, c.short = from.sum, from.foreign, from.short
}

// scribbleAtTimes is a plugin that writes where it has no business, because of a fault or, in a rough world, of itself.
func (p *proc) scribbleAtTimes(d *rng, f Fault) {
	o := &p.h.w.opt
	if f == faultScribble || o.Slots > 0 && o.Rough > 0 && !p.h.w.quiet && d.n(10) == 1 {
		p.scribble(d)
	}
}

// scribble is an untrusted plugin writing to any landing slot at any time.
func (p *proc) scribble(d *rng) {
	n := p.h.w.opt.Slots
	if n == 0 {
		return
	}
	rank, slots := d.n(p.h.w.opt.Ranks), []connector.BlockID{connector.BlockID(d.n(n))}
	if d.n(2) == 0 && len(p.moves) > 0 { // where it does harm
		if m := p.moves[d.n(len(p.moves))]; len(m.Slots) > 0 {
			rank, slots = m.Rank, m.Slots
		}
	}
	p.scribbleOn(rank, slots, d)
}

func (p *proc) scribbleOn(rank int, slots []connector.BlockID, d *rng) {
	for _, s := range slots {
		c := &p.h.e.landing[rank][s]
		c.tags[d.n(len(c.tags))].kv ^= 1 << d.n(64)
		if d.n(4) == 0 {
			c.sum ^= 1
		}
	}
}
