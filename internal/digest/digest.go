// Package digest makes and checks the digests by which a host notices that KV bytes were damaged, forged or
// mixed up on their way through a connector.
//
// Every layer of every block has a digest of 16 bytes. It covers the bytes and what they are: the
// block's key, its group, the rank's shard, the layer and the fingerprints. So a block that
// arrives whole but is another one is noticed too. Digests lie in a segment of the cache like any
// other, which connectors store and load with the block. A block's part of that segment begins with a
// header of 16 bytes, which names the edition and the key of the block's digests:
//
//	0  1  edition: 1 (XXH3-128, no key) or 2 (AEGIS-128X2 as a MAC)
//	1  7  zero
//	8  8  id of the key, as in the ring; zero in edition 1
//
// A reader of one edition never believes the other, since everybody can make digests of edition 1.
package digest

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/zeebo/xxh3"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/mac"
)

// Size is the length of one digest in bytes.
const Size = 16

// headerSize is the length of what precedes a block's digests.
const headerSize = 16

// align is the alignment of digest segments: a cache line.
const align = 64

// Binding is what a digest ties bytes to, in addition to the Hasher's own engine and shard.
type Binding struct {
	Key     connector.BlockKey // a part of a block has a key of its own while it is handed over
	Group   uint16
	Segment int // index among the group's segments, digests not counted
	Layer   int
}

// header is how a block's part of a digest segment begins.
type header [headerSize]byte

// boundSize is the length of a header, a Binding and the data's length, encoded.
const boundSize = headerSize + 32 + 8 + 8 + 8 + 8

// Hasher makes and checks the digests of one rank's cache. It is safe for concurrent use.
type Hasher struct {
	keys  Keys
	scope mac.Scope
	plain [sha256.Size]byte // the scope, for edition 1
	ready atomic.Pointer[subkeys]
}

// New makes the hasher of one rank of an engine, which may be another one.
func New(keys Keys, model, shape connector.Fingerprint, shard connector.Shard) *Hasher {
	buf := make([]byte, 0, 128)
	buf = append(buf, "kvport/digest/1"...)
	buf = append(append(buf, model[:]...), shape[:]...)
	for _, n := range []int{shard.Rank, shard.World, shard.First, shard.Count} {
		buf = binary.LittleEndian.AppendUint64(buf, uint64(n))
	}
	return &Hasher{
		keys: keys, plain: sha256.Sum256(buf),
		scope: mac.Scope{Purpose: purpose, Model: model, Shape: shape, Shard: shard},
	}
}

// subkeys are those of the ring as it is now.
func (h *Hasher) subkeys() (*subkeys, error) {
	ring, ready := h.keys.ring.Ring(), h.ready.Load()
	if ready != nil && ready.ring == ring {
		return ready, nil
	}
	ready, err := derive(ring, h.keys.tenant, &h.scope)
	if err != nil {
		return nil, fmt.Errorf("keys of digests: %w", err)
	}
	h.ready.Store(ready)
	return ready, nil
}

// Maker makes digests with one key, also when the ring changes meanwhile: all digests of a block have to be made with
// the same one.
type Maker struct {
	plain  *[sha256.Size]byte // edition 1
	mac    *mac.MAC           // edition 2
	header header
}

// Maker is one that has the first key of the ring as it is now.
func (h *Hasher) Maker() (Maker, error) {
	if h.keys.ring == nil {
		return h.unkeyed(), nil
	}
	ready, err := h.subkeys()
	if err != nil {
		return Maker{}, err
	}
	return keyed(&ready.keys[0]), nil
}

func (h *Hasher) unkeyed() Maker { return Maker{plain: &h.plain, header: header{editionXXH3}} }

func keyed(k *subkey) Maker {
	m := Maker{mac: k.mac, header: header{editionKeyed}}
	copy(m.header[8:], k.id[:])
	return m
}

// believed is the Maker that must have made the digests behind a header.
func (h *Hasher) believed(head header) (Maker, error) {
	id := keyID(head[8:])
	edition := int(head[0])
	switch {
	case edition == 0, [7]byte(head[1:8]) != [7]byte{}, edition == editionXXH3 && id != keyID{}:
		return Maker{}, fmt.Errorf("the header of its digests is damaged: %w", connector.ErrCorrupt)
	case edition != h.keys.Edition():
		return Maker{}, &EditionError{Edition: edition}
	case edition == editionXXH3:
		return h.unkeyed(), nil
	}
	ready, err := h.subkeys()
	if err != nil {
		return Maker{}, err
	}
	if k := ready.find(id); k != nil {
		return keyed(k), nil
	}
	return Maker{}, &ForeignKeyError{ID: id.String()}
}

// Sum is the digest of one segment of one block.
func (m *Maker) Sum(data []byte, b *Binding) (sum [Size]byte) {
	var bound [boundSize]byte
	m.bind(bound[:0], b, len(data))
	if m.mac != nil {
		m.mac.Sum(&sum, bound[:], data)
		return sum
	}
	var buf [Size + boundSize + sha256.Size]byte
	whole := xxh3.Hash128(data).Bytes()
	copy(buf[copy(buf[:], whole[:]):], bound[:])
	copy(buf[Size+boundSize:], m.plain[:])
	return xxh3.Hash128(buf[:]).Bytes()
}

// bind appends what the digest covers in addition to the data. Every field has its fixed place, so no two
// bindings are written alike.
func (m *Maker) bind(to []byte, b *Binding, size int) {
	to = append(append(to, m.header[:]...), b.Key[:]...)
	for _, n := range [...]uint64{uint64(b.Group), uint64(b.Segment), uint64(b.Layer), uint64(size)} {
		to = binary.LittleEndian.AppendUint64(to, n)
	}
}

// Make computes the digests of a full block and writes them into its digest segment. Errors wrap
// ErrIncompatible, unless a key of the ring cannot be used.
func (h *Hasher) Make(kv *connector.KV, b connector.Block) error {
	m, err := h.Maker()
	if err != nil {
		return err
	}
	return m.Make(kv, b)
}

// Make is Make of the Hasher, with this key.
func (m *Maker) Make(kv *connector.KV, b connector.Block) error {
	return m.MakeSegments(kv, b, kv.Segments(b.Group))
}

// MakeSegments is Make for some of the block's segments; the digests of the others stay as they are. If it is called
// for one part of a block after the other, it must be with the same Maker.
func (m *Maker) MakeSegments(kv *connector.KV, b connector.Block, segments []int) error {
	p, err := placeOf(kv, b)
	if err != nil {
		return err
	}
	return p.make(m, segments)
}

func (p *place) make(m *Maker, segments []int) error {
	copy(p.stored, m.header[:])
	err := p.each(m, segments, func(sum [Size]byte, stored []byte, _ int) error {
		copy(stored, sum[:])
		return nil
	})
	if err == nil && p.to.KV != nil && slices.Contains(segments, p.digests) {
		copy(p.to.view(p.digests), p.stored)
	}
	return err
}

// Check compares a full block with the digests in its digest segment. Damage and forgery are ErrCorrupt, and what can be
// neither confirmed nor denied is a *ForeignKeyError or an *EditionError; a block that has no digests is ErrIncompatible. The
// error names the block, and for a digest that differs the first such layer.
func (h *Hasher) Check(kv *connector.KV, b connector.Block) error {
	p, err := placeOf(kv, b)
	if err != nil {
		return err
	}
	return p.check(h, p.segments)
}

// CheckSegments is Check of some of a block's segments; all of its digests must be there.
func (h *Hasher) CheckSegments(kv *connector.KV, b connector.Block, segments []int) error {
	p, err := placeOf(kv, b)
	if err != nil {
		return err
	}
	return p.check(h, segments)
}

func (p *place) check(h *Hasher, segments []int) error {
	b := &p.block
	m, err := h.believed(header(p.stored[:headerSize]))
	if err != nil {
		return fmt.Errorf("block %d of group %d: %w", b.ID, b.Group, err)
	}
	return p.each(&m, segments, func(sum [Size]byte, stored []byte, layer int) error {
		if subtle.ConstantTimeCompare(sum[:], stored) == 0 {
			return fmt.Errorf("block %d of group %d, layer %d: digest differs: %w", b.ID, b.Group, layer, connector.ErrCorrupt)
		}
		return nil
	})
}

// place is where a block and its digests are.
type place struct {
	kv       *connector.KV
	block    connector.Block
	segments []int // of the block's group
	digests  int   // the one with the digests
	stored   []byte
	from     Slot // what is digested
	to       Slot // where it is copied; no KV: nowhere
	stores   mac.Stores
}

// placeOf finds a block's digests. Errors wrap ErrIncompatible.
func placeOf(kv *connector.KV, b connector.Block) (place, error) {
	if b.Key == (connector.BlockKey{}) {
		return place{}, fmt.Errorf("block %d of group %d is partial, it has no digest: %w", b.ID, b.Group, connector.ErrIncompatible)
	}
	p := place{kv: kv, block: b, segments: kv.Segments(b.Group), from: Slot{kv, b.ID}}
	layers := kv.Layout().Segments
	at := slices.IndexFunc(p.segments, func(s int) bool { return layers[s].Layer == connector.DigestLayer })
	if at < 0 {
		return place{}, fmt.Errorf("group %d has no digest segment: %w", b.Group, connector.ErrIncompatible)
	}
	p.digests = p.segments[at]
	p.stored = kv.View(p.digests, b.ID)
	if int64(len(p.stored)) != SegmentSize(len(p.segments)-1) {
		return place{}, fmt.Errorf("block %d of group %d: %d bytes of digests for %d segments: %w",
			b.ID, b.Group, len(p.stored), len(p.segments)-1, connector.ErrIncompatible)
	}
	return p, nil
}

// sum computes the digest of a segment, and copies the segment if it belongs elsewhere.
func (p *place) sum(m *Maker, segment int, b *Binding) [Size]byte {
	if p.to.KV == nil {
		return m.Sum(p.from.view(segment), b)
	}
	return m.Copy(p.to.view(segment), p.from.view(segment), p.to.KV == p.kv, b, p.stores)
}

// each visits the computed and the stored digest of the wanted segments of a block, in layout order.
func (p *place) each(m *Maker, wanted []int, visit func(sum [Size]byte, stored []byte, layer int) error) error {
	layers := p.kv.Layout().Segments
	bind := Binding{Key: p.block.Key, Group: p.block.Group}
	for _, s := range p.segments {
		asked := len(wanted) > 0 && wanted[0] == s
		if asked {
			wanted = wanted[1:]
		}
		if bind.Layer = layers[s].Layer; bind.Layer == connector.DigestLayer {
			continue // the digests have none themselves
		}
		if asked {
			sum := p.sum(m, s, &bind)
			if err := visit(sum, p.stored[headerSize+bind.Segment*Size:][:Size], bind.Layer); err != nil {
				return err
			}
		}
		bind.Segment++
	}
	return nil
}

// SegmentSize is how many bytes of a digest segment a block has whose group has that many other segments.
func SegmentSize(segments int) int64 { return headerSize + int64(segments)*Size }

// WithSegments adds to a layout without digests one digest segment for each group, behind the
// first regionSize bytes of region 0, and gives the region's new size. The argument is not changed.
func WithSegments(l connector.Layout, regionSize int64) (connector.Layout, int64) {
	l.Groups, l.Segments = slices.Clone(l.Groups), slices.Clone(l.Segments)
	counts := make([]int, len(l.Groups))
	for _, s := range l.Segments {
		counts[s.Group]++
	}
	for group, n := range counts {
		if n == 0 {
			continue
		}
		offset, size := (regionSize+align-1)/align*align, SegmentSize(n)
		l.Segments = append(l.Segments, connector.Segment{
			Layer: connector.DigestLayer, Group: uint16(group), Offset: offset, BlockStride: size, Bytes: size,
		})
		regionSize = offset + int64(l.Blocks)*size
	}
	return l, regionSize
}
