package simulate

import (
	"errors"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
)

// Stores may have blocks whose digests were made with a key that is not in the ring: by engines of somebody else, by ones whose
// key was dropped, or by somebody who forges. Whether such a block is right nobody can say. It is a miss and no damage,
// so that no one is blamed for it, and the next save of it replaces it.

// noteForeign notes what a load has found, or a save has replaced.
func (h *host) noteForeign(m *move) {
	g := m.grant
	switch {
	case m.Kind == tracker.Save && m.Transfer.Replace: // what a load has found meanwhile was there before
		h.replaced(m)
		return
	case m.Kind != tracker.Load || m.Source != nil || g == nil:
		return
	case h.due[g.obligation] != g: // the transfer was lost before this call of it came back, so nobody looks at what it brings
		return
	}
	g.damaged = g.damaged || isCorrupt(m.out.Err)
	for _, b := range tracker.Arrived(m.Check, m.out.Err) {
		c := &h.e.mem[m.Rank][b.ID]
		switch {
		case b.Key == (connector.BlockKey{}):
			g.damaged = true
		case c.foreign:
			h.w.stats.Foreign++
			g.foreign = append(g.foreign, b.ID)
		case c.sum != c.digest(b, m.Rank):
			g.damaged = true
		}
	}
	if !g.turn { // what an earlier turn left counts as gone, whatever is wrong with it
		h.remembers(m)
	}
}

// remembers notes the blocks that the next save has to replace.
func (h *host) remembers(m *move) {
	for _, b := range m.Transfer.Blocks {
		for _, id := range m.out.Foreign {
			if b.ID == id {
				h.unread[b.Key] = h.found
			}
		}
		h.found++ // at most one more that the tracker remembers
	}
}

// replaces verifies that a save replaces what was found to be by another key, as far back as hosts remember.
func (h *host) replaces(m *move) {
	if m.Kind != tracker.Save {
		return
	}
	if h.w.is(ForeignKept) {
		m.Transfer.Replace = false
	}
	for _, b := range m.Transfer.Blocks {
		found, is := h.unread[b.Key]
		if is && h.found-found < remembered && !m.Transfer.Replace {
			h.w.fail('k', "%s: a save of %s leaves alone block %d, which is stored by a key that is not in the ring", h.e.name, m.Transfer.Request, b.ID)
		}
	}
	h.replaced(m) // also if it fails: another save may be under way
}

// replaced forgets what a save replaces.
func (h *host) replaced(m *move) {
	for _, b := range m.Transfer.Blocks {
		delete(h.unread, b.Key)
	}
}

// remembered is how many blocks that cannot be used a host remembers at least.
const remembered = 32

// checkForeign verifies that blocks by another key are a miss, and that nobody is blamed for them.
func (h *host) checkForeign(g *grant, ev *tracker.Event) {
	if ev.Kind != tracker.Loaded || ev.Lost || len(g.foreign) == 0 {
		return
	}
	failed := map[connector.BlockID]bool{}
	for _, id := range ev.Failed {
		failed[id] = true
	}
	for _, id := range g.foreign {
		if !failed[id] {
			h.w.fail('k', "%s: block %d, by a key that is not in the ring, counts as loaded for %s", h.e.name, id, ev.Request)
			return
		}
	}
	if !g.damaged && (errors.Is(ev.Err, connector.ErrCorrupt) || ev.Damaged > 0) {
		h.w.fail('k', "%s: blocks by a key that is not in the ring count as damaged for %s", h.e.name, ev.Request)
	}
}

// foreignMutants are those that take a block by another key for what it is not.
func foreignMutants() []MutantInfo {
	return []MutantInfo{
		{ForeignBelieved, "foreign-believed", "a block by a key that is not in the ring counts as loaded", "rule HOST-06"},
		{ForeignDamaged, "foreign-damaged", "a block by a key that is not in the ring counts as damaged", "rule HOST-06"},
		{ForeignKept, "foreign-kept", "a save leaves a block alone that was found to be by a key that is not in the ring", "rule HOST-06"},
	}
}
