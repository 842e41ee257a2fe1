package host

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/digest"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/mac"
	"github.com/kvport/kvport/internal/tracker"
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
	n, one := slotsIn(&l, size)
	if n = min(n, l.Blocks); n < 1 {
		return l, 0, fmt.Errorf("%d bytes of landing memory hold no block, one needs %d: %w", size, one, connector.ErrIncompatible)
	}
	l, size = packed(l, n, 0, 0)
	return l, size, nil
}

// slotsIn is how many blocks of a layout fit into size bytes, and what a single one needs.
func slotsIn(l *connector.Layout, size int64) (n int, one int64) {
	var slot, padding int64
	for _, s := range l.Segments {
		slot += s.Bytes
		padding += landingAlign
	}
	if slot > 0 {
		n = int(max(0, min((size-padding)/slot, connector.MaxBlocks)))
	}
	return n, slot + padding
}

// packed is a layout with n blocks and its segments one behind the other, from an offset of a region on. It needs size
// bytes there.
func packed(l connector.Layout, n int, region uint16, offset int64) (_ connector.Layout, size int64) {
	l.Blocks, l.Segments = n, slices.Clone(l.Segments)
	at := offset
	for i := range l.Segments {
		s := &l.Segments[i]
		s.Region, s.Offset, s.BlockStride = region, at, s.Bytes
		at += (int64(n)*s.Bytes + landingAlign - 1) / landingAlign * landingAlign
	}
	return l, at - offset
}

// landing is the landing memory of one rank.
type landing struct {
	region *Region
	kv     *connector.KV
}

// openLanding gives every rank landing memory, if the plugin may not map the cache.
func (h *Host) openLanding() error {
	if err := h.openSources(); err != nil || h.cfg.Settings.Trust != TrustStaged {
		return err
	}
	layout, size, err := landingLayout(h.eng.Layout, int64(h.cfg.Settings.LandingBytes))
	if err != nil {
		return errors.Join(fmt.Errorf("%w: kvport.landing_bytes: %w", ErrConfig, err), h.closeLanding())
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
	if h.sources != nil {
		errs = append(errs, h.sources.Close())
	}
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

// copyOut copies segments of a block to a landing slot, and makes their digests, unless the block is partial and has none. The digests
// are those of the bytes that were read here, in the cache, so what the plugin does to the copy is found when the block is loaded.
// The plugin reads the copy next, so it is written through the caches.
func (r *rank) copyOut(maker *digest.Maker, b connector.Block, slot connector.BlockID, segments []int) error {
	to := digest.Slot{KV: r.landing.kv, ID: slot}
	if b.Key != (connector.BlockKey{}) {
		return maker.CopyOut(r.kv, b, segments, to, mac.Cached)
	}
	for _, s := range segments {
		copy(to.KV.View(s, slot), r.kv.View(s, b.ID))
	}
	return nil
}

// verifyIn copies blocks from landing memory to the cache, and gives those that cannot be used, by reason. The plugin may still write landing
// memory, so nothing is verified there: each byte is read once, and what is verified is what was written to the cache. Until
// then nobody reads these blocks, and what fails is computed again, so bytes that are not verified yet do no harm there.
// The two lists name the same blocks in the same order; check has the keys.
func (r *rank) verifyIn(list []tracker.Copy, check []connector.Block) unreadable {
	stores := digest.StoresForLoad(int64(r.size(check)))
	return r.judge(check, func(i int) error {
		err := r.hasher.CopyIn(r.kv, check[i], digest.Slot{KV: r.landing.kv, ID: list[i].Slot}, stores)
		fault.Crash("host.load.copied")
		return err
	})
}

// copyIn copies whole blocks from landing memory to the cache, digests included, where there is nothing to verify them by.
func (r *rank) copyIn(list []tracker.Copy) {
	for _, c := range list {
		for _, s := range r.kv.Segments(c.Group) {
			copy(r.kv.View(s, c.Block), r.landing.kv.View(s, c.Slot))
		}
	}
}
