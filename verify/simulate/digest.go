package simulate

import (
	"slices"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
)

// makeDigests is what the host does before a plugin may read blocks.
func (h *host) makeDigests(m *move) {
	for _, b := range m.Transfer.Blocks {
		if b.Key != (connector.BlockKey{}) {
			c := &h.e.mem[m.Rank][b.ID]
			c.sign(h.sum(c, b, m.Rank))
		}
	}
}

// makeTails is what the host does for partial blocks before a Holder may keep them.
func (h *host) makeTails(partial []connector.Block) {
	for _, b := range partial {
		for rank := range h.e.mem {
			c := &h.e.mem[rank][b.ID]
			c.sign(h.sum(c, b, rank))
		}
	}
}

// sum is a block's digest. Wrong hosts leave out what it is bound to.
func (h *host) sum(c *cell, b connector.Block, rank int) uint64 {
	if h.w.is(DigestWithoutKey) {
		b.Key = connector.BlockKey{}
	}
	if h.w.is(DigestWithoutPlace) {
		b.Group, rank = 0, 0
	}
	return c.digest(b, rank)
}

// cached is the memory of block i of a move in the engine's cache.
func (h *host) cached(m *move, i int) *cell { return &h.e.mem[m.Rank][m.Transfer.Blocks[i].ID] }

// skips is a host that checks nothing of some loads.
func (h *host) skips(m *move) bool {
	return h.w.is(TurnUnchecked) && m.grant.turn || h.w.is(OverlapEndUnchecked) && m.verified > 0
}

// skipsPartial says whether a partial block is not checked at the end of its load: the engine may have written its own tokens
// behind what it has verified layer by layer.
func (h *host) skipsPartial(m *move) bool { return h.w.is(PartialUnchecked) || m.verified == layers }

// checkDigests gives the blocks that should have arrived and are not what was saved, and those by a key that is not in the
// ring, of which nobody knows that.
func (h *host) checkDigests(m *move, at func(m *move, i int) *cell) (bad, foreign []connector.BlockID) {
	if h.skips(m) {
		return nil, nil
	}
	for _, b := range tracker.Arrived(m.Check, m.out.Err) {
		i := slices.IndexFunc(m.Check, func(k connector.Block) bool { return k.ID == b.ID })
		if m.Transfer.Blocks[i].Key == (connector.BlockKey{}) && h.skipsPartial(m) {
			continue
		}
		switch isBad, isForeign := h.wrong(m, i, at(m, i), 0); {
		case isForeign:
			foreign = append(foreign, b.ID)
		case isBad:
			bad = append(bad, b.ID)
		}
	}
	return bad, foreign
}

// wrong says whether a block that lacks no more than that many of its last layers is not what was saved, or by a key that is not in the ring.
func (h *host) wrong(m *move, i int, c *cell, short int) (bad, foreign bool) {
	b := m.Check[i]
	partial := b.Key == connector.BlockKey{}
	if !partial && c.foreign && !h.w.is(ForeignDamaged) {
		return false, !h.w.is(ForeignBelieved)
	}
	return partial || c.foreign || c.short > short || c.sum != h.sum(c, b, m.Rank), false
}
