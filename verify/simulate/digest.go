package simulate

import (
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
)

// makeDigests is what the host does before a plugin may read blocks.
func (h *host) makeDigests(m *move) {
	for _, b := range m.Transfer.Blocks {
		if b.Key != (connector.BlockKey{}) {
			c := &h.e.mem[m.Rank][b.ID]
			c.sum = c.digest(b, m.Rank)
		}
	}
}

// makeTails is what the host does for partial blocks before a Holder may keep them.
func (h *host) makeTails(ended []connector.Ended) {
	for i := range ended {
		for _, b := range tracker.Tail(&ended[i]) {
			for rank := range h.e.mem {
				c := &h.e.mem[rank][b.ID]
				c.sum = c.digest(b, rank)
			}
		}
	}
}

// checkDigests gives the blocks that should have arrived and are not what was saved.
func (h *host) checkDigests(m *move) []connector.BlockID {
	missing, some := failedBlocks(m.out.Err)
	if m.out.Err != nil && !some {
		return nil
	}
	var bad []connector.BlockID
	for _, b := range m.Check {
		c := &h.e.mem[m.Rank][b.ID]
		if !missing[b.ID] && (b.Key == (connector.BlockKey{}) || c.sum != c.digest(b, m.Rank)) {
			bad = append(bad, b.ID)
		}
	}
	h.w.stats.Damaged += len(bad)
	return bad
}
