package digest

import (
	"fmt"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/mac"
)

// nonTemporalFrom is the size from which a load is written past the caches. From 1 MiB on, copying and then reading took 0.81 to 0.98 of
// the time that it took through the caches if the destination was in none of them, as blocks are that the engine has not used for a
// while. Below, there is less to gain, and more to lose if the destination is in a cache after all (record 152 has the table).
const nonTemporalFrom = 1 << 20

// StoresForLoad is how a load of size bytes in all is written. Whoever reads a copy at once writes it through the caches instead.
func StoresForLoad(size int64) mac.Stores {
	if size >= nonTemporalFrom {
		return mac.NonTemporal
	}
	return mac.Cached
}

// Slot is where a block is copied from or to: a place in memory that has the segments of the cache.
type Slot struct {
	KV *connector.KV
	ID connector.BlockID
}

func (s *Slot) view(segment int) []byte { return s.KV.View(segment, s.ID) }

// CopyOut is MakeSegments for a block whose segments it also copies to a slot. Others may change the slot meanwhile: the digests are those
// of the bytes that were read in the cache. They follow when their own segment is among the segments.
func (m *Maker) CopyOut(kv *connector.KV, b connector.Block, segments []int, to Slot, stores mac.Stores) error {
	p, err := placeOf(kv, b)
	if err != nil {
		return err
	}
	p.to, p.stores = to, stores
	if err := p.fits(&to, segments); err != nil {
		return err
	}
	return p.make(m, segments)
}

// CopyIn copies a block from a slot to its place in the cache, and is Check of the copy. Others may change the slot meanwhile: each byte is
// read there once, and what was read is both written and checked. If the check fails, the copy may not be whole.
func (h *Hasher) CopyIn(kv *connector.KV, b connector.Block, from Slot, stores mac.Stores) error {
	if err := CopyDigests(kv, b, from); err != nil {
		return err
	}
	return h.CopySegments(kv, b, kv.Segments(b.Group), from, stores)
}

// CopyDigests copies a block's digests from a slot to the cache, before anything of them is believed.
func CopyDigests(kv *connector.KV, b connector.Block, from Slot) error {
	p, err := placeOf(kv, b)
	if err == nil {
		err = p.fits(&from, p.segments)
	}
	if err != nil {
		return err
	}
	copy(p.stored, from.view(p.digests))
	return nil
}

// CopySegments is CopyIn of some of a block's segments, whose digests CopyDigests has copied: once, so that all segments are those which these
// digests name, however the slot changes between two calls. The digests of an honest slot name one version of the block.
func (h *Hasher) CopySegments(kv *connector.KV, b connector.Block, segments []int, from Slot, stores mac.Stores) error {
	p, err := placeOf(kv, b)
	if err != nil {
		return err
	}
	p.to, p.from, p.stores = p.from, from, stores
	if err := p.fits(&from, segments); err != nil {
		return err
	}
	return p.check(h, segments)
}

// fits says whether some of the block's segments, and its digests, are as long in a slot as in the cache. Errors wrap ErrIncompatible.
func (p *place) fits(s *Slot, segments []int) error {
	for _, segment := range segments {
		if err := p.fit(s, segment); err != nil {
			return err
		}
	}
	return p.fit(s, p.digests)
}

func (p *place) fit(s *Slot, segment int) error {
	if have, want := len(s.view(segment)), len(p.kv.View(segment, p.block.ID)); have != want {
		return fmt.Errorf("block %d of group %d: slot %d has %d bytes for segment %d, want %d: %w",
			p.block.ID, p.block.Group, s.ID, have, segment, want, connector.ErrIncompatible)
	}
	return nil
}

// Copy is Sum of src, which it also writes to the beginning of dst; dst must be as long. It gives the same guarantees as mac.Hash.Copy if
// others cannot write dst (ownsDst), or else src. With a key it reads src once. Without one it takes two passes, and digests
// what others cannot write: src before the copy, or dst after it.
func (m *Maker) Copy(dst, src []byte, ownsDst bool, b *Binding, stores mac.Stores) (sum [Size]byte) {
	dst = dst[:len(src):len(dst)]
	if m.mac == nil {
		if ownsDst {
			copy(dst, src)
			return m.Sum(dst, b)
		}
		sum = m.Sum(src, b)
		copy(dst, src)
		return sum
	}
	var bound [boundSize]byte
	m.bind(bound[:0], b, len(src))
	var h mac.Hash
	m.mac.Begin(&h, bound[:])
	h.Copy(dst, src, stores)
	h.Sum(&sum)
	return sum
}
