// Package digest makes and checks the checksums by which a host notices that KV bytes were damaged
// or mixed up on their way through a connector.
//
// Every layer of every block has a digest of 16 bytes. It covers the bytes and what they are: the
// block's key, its group, the rank's shard, the layer and the fingerprints. So a block that
// arrives whole but is another one is noticed too. Digests lie in a segment of the cache like any
// other, which connectors store and load with the block.
package digest

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"hash"
	"slices"
	"sync"

	"github.com/zeebo/xxh3"

	"github.com/kvport/kvport/connector"
)

// Size is the length of one digest in bytes.
const Size = 16

// align is the alignment of digest segments: a cache line.
const align = 64

// Binding is what a digest ties bytes to, in addition to the Hasher's own engine and shard. Either Key or
// Hold says which block it is.
type Binding struct {
	Key      connector.BlockKey
	Hold     connector.HoldID // blocks without a key: the hold that keeps them ...
	Position int              // ... and the block's place in it
	Group    uint16
	Segment  int // index among the group's segments, digests not counted
	Layer    int
}

// bindingSize is the length of an encoded Binding with the data's length and the Hasher's scope.
const bindingSize = 32 + 8 + 8 + 8 + 8 + 8 + 8 + sha256.Size

// Hasher makes and checks the digests of one rank's cache. It is safe for concurrent use.
type Hasher struct {
	scope  [sha256.Size]byte // of all that is the same for every block
	secret []byte
	macs   sync.Pool // of *keyed, with a secret only
}

// keyed is the reusable state of one keyed computation.
type keyed struct {
	mac hash.Hash
	buf [bindingSize]byte
	sum [sha256.Size]byte
}

// New makes the hasher of one rank. Without a secret it uses XXH3-128, against damage; with one
// HMAC-SHA256 cut to 128 bits, against somebody who can write the store but does not know the
// secret, at a fraction of the speed.
func New(model, shape connector.Fingerprint, shard connector.Shard, secret []byte) *Hasher {
	buf := make([]byte, 0, 128)
	buf = append(buf, "kvport/digest/1"...)
	buf = append(append(buf, model[:]...), shape[:]...)
	for _, n := range []int{shard.Rank, shard.World, shard.First, shard.Count} {
		buf = binary.LittleEndian.AppendUint64(buf, uint64(n))
	}
	h := &Hasher{scope: sha256.Sum256(buf), secret: slices.Clone(secret)}
	return h
}

// Sum is the digest of one segment of one block.
func (h *Hasher) Sum(data []byte, b Binding) [Size]byte {
	if len(h.secret) > 0 {
		return h.keyedSum(data, &b)
	}
	var buf [Size + bindingSize]byte
	sum := xxh3.Hash128(data).Bytes()
	copy(buf[:], sum[:])
	h.bind((*[bindingSize]byte)(buf[Size:]), &b, len(data))
	return xxh3.Hash128(buf[:]).Bytes()
}

func (h *Hasher) keyedSum(data []byte, b *Binding) [Size]byte {
	k, ok := h.macs.Get().(*keyed)
	if !ok {
		k = &keyed{mac: hmac.New(sha256.New, h.secret)}
	}
	defer h.macs.Put(k)
	k.mac.Reset()
	h.bind(&k.buf, b, len(data))
	k.mac.Write(k.buf[:])
	k.mac.Write(data)
	return [Size]byte(k.mac.Sum(k.sum[:0]))
}

// bind writes what the digest covers in addition to the data. Every field has its fixed place, so no two
// bindings are written alike.
func (h *Hasher) bind(to *[bindingSize]byte, b *Binding, size int) {
	out := append(to[:0], b.Key[:]...)
	for _, n := range [...]uint64{uint64(b.Hold), uint64(b.Position), uint64(b.Group), uint64(b.Segment), uint64(b.Layer), uint64(size)} {
		out = binary.LittleEndian.AppendUint64(out, n)
	}
	copy(to[len(out):], h.scope[:])
}

// Make computes the digests of a full block and writes them into its digest segment. Errors wrap
// ErrIncompatible.
func (h *Hasher) Make(kv *connector.KV, b connector.Block) error {
	return h.MakeSegments(kv, b, kv.Segments(b.Group))
}

// MakeSegments is Make for some of the block's segments; the digests of the others stay as they are.
func (h *Hasher) MakeSegments(kv *connector.KV, b connector.Block, segments []int) error {
	return h.each(kv, b, segments, func(sum [Size]byte, stored []byte, _ int) error {
		copy(stored, sum[:])
		return nil
	})
}

// Check compares a full block with the digests in its digest segment. Damage is ErrCorrupt and
// names the block and the first damaged layer; a block that has no digests is ErrIncompatible.
func (h *Hasher) Check(kv *connector.KV, b connector.Block) error {
	return h.each(kv, b, kv.Segments(b.Group), func(sum [Size]byte, stored []byte, layer int) error {
		if subtle.ConstantTimeCompare(sum[:], stored) == 0 {
			return fmt.Errorf("block %d of group %d, layer %d: digest differs: %w", b.ID, b.Group, layer, connector.ErrCorrupt)
		}
		return nil
	})
}

// each visits the computed and the stored digest of the given segments of a block, in layout order.
func (h *Hasher) each(kv *connector.KV, b connector.Block, wanted []int, visit func(sum [Size]byte, stored []byte, layer int) error) error {
	if b.Key == (connector.BlockKey{}) {
		return fmt.Errorf("block %d of group %d is partial, it has no digest: %w", b.ID, b.Group, connector.ErrIncompatible)
	}
	segments := kv.Segments(b.Group)
	layers := kv.Layout().Segments
	at := slices.IndexFunc(segments, func(s int) bool { return layers[s].Layer == connector.DigestLayer })
	if at < 0 {
		return fmt.Errorf("group %d has no digest segment: %w", b.Group, connector.ErrIncompatible)
	}
	digests := kv.View(segments[at], b.ID)
	if len(digests) != Size*(len(segments)-1) {
		return fmt.Errorf("block %d of group %d: %d bytes of digests for %d segments: %w",
			b.ID, b.Group, len(digests), len(segments)-1, connector.ErrIncompatible)
	}
	bind := Binding{Key: b.Key, Group: b.Group}
	for i, s := range segments {
		if i == at {
			if len(wanted) > 0 && wanted[0] == s {
				wanted = wanted[1:] // the digests have none themselves
			}
			continue
		}
		if len(wanted) > 0 && wanted[0] == s {
			wanted, bind.Layer = wanted[1:], layers[s].Layer
			sum := h.Sum(kv.View(s, b.ID), bind)
			if err := visit(sum, digests[bind.Segment*Size:][:Size], bind.Layer); err != nil {
				return err
			}
		}
		bind.Segment++
	}
	return nil
}

// WithSegments adds to a layout without digests one digest segment for each group, behind the
// first regionSize bytes of region 0, and gives the region's new size. The argument is not changed.
func WithSegments(l connector.Layout, regionSize int64) (connector.Layout, int64) {
	l.Groups, l.Segments = slices.Clone(l.Groups), slices.Clone(l.Segments)
	counts := make([]int64, len(l.Groups))
	for _, s := range l.Segments {
		counts[s.Group]++
	}
	for group, n := range counts {
		if n == 0 {
			continue
		}
		offset := (regionSize + align - 1) / align * align
		l.Segments = append(l.Segments, connector.Segment{
			Layer: connector.DigestLayer, Group: uint16(group), Offset: offset, BlockStride: n * Size, Bytes: n * Size,
		})
		regionSize = offset + int64(l.Blocks)*n*Size
	}
	return l, regionSize
}
