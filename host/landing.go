package host

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvport/kvport/connector"
)

// At trust level staged a plugin maps landing memory instead of the paged cache: a region with a few
// slots, each with room for one block. Before a save the host copies blocks to it, and after a load
// from it. To the plugin the slots are the cache.

// landingAlign is the alignment of segments in landing memory: a cache line.
const landingAlign = 64

// landingLayout is the layout of landing memory for a cache of layout l: the same segments, packed,
// with as many slots as fit into size bytes, but no more than l has blocks. The last result is the
// size in bytes that the region needs. Errors wrap connector.ErrIncompatible and say how much is
// needed.
func landingLayout(l connector.Layout, size int64) (connector.Layout, int64, error) {
	var slot, padding int64
	for _, s := range l.Segments {
		slot += s.Bytes
		padding += landingAlign
	}
	n := int64(0)
	if slot > 0 {
		n = min((size-padding)/slot, int64(l.Blocks))
	}
	if n < 1 {
		return l, 0, fmt.Errorf("%d bytes of landing memory hold no block, one needs %d: %w", size, slot+padding, connector.ErrIncompatible)
	}
	l.Blocks, l.Segments = int(n), slices.Clone(l.Segments)
	at := int64(0)
	for i := range l.Segments {
		s := &l.Segments[i]
		s.Region, s.Offset, s.BlockStride = 0, at, s.Bytes
		at += (n*s.Bytes + landingAlign - 1) / landingAlign * landingAlign
	}
	return l, at, nil
}

// landing is the landing memory of one rank.
type landing struct {
	region *Region
	kv     *connector.KV
}

// openLanding gives every rank landing memory, if the plugin may not map the cache.
func (h *Host) openLanding() error {
	if h.cfg.Settings.Trust != TrustStaged {
		return nil
	}
	layout, size, err := landingLayout(h.eng.Layout, int64(h.cfg.Settings.LandingBytes))
	if err != nil {
		return fmt.Errorf("%w: kvport.landing_bytes: %w", ErrConfig, err)
	}
	h.lands = &layout
	for _, r := range h.ranks {
		if r.landing, err = newLanding(layout, size); err != nil {
			return errors.Join(fmt.Errorf("landing memory of %d bytes: %w", size, err), h.closeLanding())
		}
	}
	return nil
}

// newLanding makes the landing memory of one rank.
func newLanding(layout connector.Layout, size int64) (*landing, error) {
	region, err := newRegion("kvport-landing", size)
	if err != nil {
		return nil, err
	}
	kv, err := connector.NewKV(layout, [][]byte{region.Bytes()})
	if err != nil {
		return nil, errors.Join(err, region.Close())
	}
	return &landing{region, kv}, nil
}

// closeLanding unmaps landing memory. No plugin may be at work.
func (h *Host) closeLanding() error {
	var errs []error
	for _, r := range h.ranks {
		if r.landing != nil {
			errs = append(errs, r.landing.region.Close())
		}
	}
	return errors.Join(errs...)
}

// mapped is what the plugin maps, by rank, and the layout of that memory.
func (h *Host) mapped() ([]*Region, connector.Layout) {
	if h.lands == nil {
		return h.eng.Ranks, h.eng.Layout
	}
	regions := make([]*Region, len(h.ranks))
	for i, r := range h.ranks {
		regions[i] = r.landing.region
	}
	return regions, *h.lands
}

// slots is how many landing slots a rank has; 0 without landing memory.
func (h *Host) slots() int {
	if h.lands == nil {
		return 0
	}
	return h.lands.Blocks
}

// copyBlock copies a whole block of a group, digests included, between two memories whose segments
// are alike.
func copyBlock(dst, src *connector.KV, group uint16, to, from connector.BlockID) {
	for _, s := range src.Segments(group) {
		copy(dst.View(s, to), src.View(s, from))
	}
}

// stage is one transfer on its way through landing memory.
type stage struct {
	t     *connector.Transfer // with the cache's blocks
	slots []connector.BlockID // of each block
}

// landed is the transfer as the plugin sees it.
func (s *stage) landed() *connector.Transfer {
	t := *s.t
	t.Blocks = slices.Clone(t.Blocks)
	for i := range t.Blocks {
		t.Blocks[i].ID = s.slots[i]
	}
	return &t
}

// out copies the transfer's blocks to landing memory.
func (s *stage) out(landing, cache *connector.KV) {
	for i, b := range s.t.Blocks {
		copyBlock(landing, cache, b.Group, s.slots[i], b.ID)
	}
}

// in copies those of the transfer's blocks to the cache that arrived, as err says. What the plugin
// writes from now on changes nothing: each byte is read once, and checked where nobody but the host
// can write.
func (s *stage) in(cache, landing *connector.KV, err error) {
	failed, some := failedBlocks(err)
	if err != nil && !some {
		return // nothing arrived
	}
	for i, b := range s.t.Blocks {
		if !slices.Contains(failed, s.slots[i]) {
			copyBlock(cache, landing, b.Group, b.ID, s.slots[i])
		}
	}
}

// noBlock stands for a slot that the plugin named and was not given.
const noBlock connector.BlockID = -1

// back translates the slots that an error names into the cache's blocks.
func (s *stage) back(err error) error {
	failed, some := failedBlocks(err)
	if !some {
		return err
	}
	ids := make([]connector.BlockID, len(failed))
	for i, slot := range failed {
		ids[i] = noBlock
		if at := slices.Index(s.slots, slot); at >= 0 {
			ids[i] = s.t.Blocks[at].ID
		}
	}
	return &connector.BlockError{Blocks: ids, Err: errors.Unwrap(asBlockError(err))}
}

func asBlockError(err error) *connector.BlockError {
	var some *connector.BlockError
	errors.As(err, &some)
	return some
}

// failedBlocks gives the blocks that an error names; some is false if it names none and so means all.
func failedBlocks(err error) (failed []connector.BlockID, some bool) {
	if e := asBlockError(err); e != nil && len(e.Blocks) > 0 {
		return e.Blocks, true
	}
	return nil, false
}
