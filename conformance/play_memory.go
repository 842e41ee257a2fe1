package conformance

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"slices"

	"github.com/kvport/kvport/conformance/internal/model"
	"github.com/kvport/kvport/connector"
)

// layoutOf places the blocks of a history's caches: those of each group behind those of the last, with gaps or dense.
func layoutOf(s *model.Shape) connector.Layout {
	l := connector.Layout{Name: "random", Blocks: s.Slots}
	between := int64(0)
	if s.Gaps {
		between = gap
	}
	at, layer := between, 0
	for n, g := range s.Groups {
		group := connector.Group{BlockTokens: cmp.Or(s.Tokens, blockTokens), Policy: connector.PolicyAll}
		if g.Trailing > 0 {
			group.Policy, group.Trailing = connector.PolicyTrailing, g.Trailing
		}
		l.Groups = append(l.Groups, group)
		stride := between
		for i := range g.Segments {
			stride += g.Segment(i) + between
		}
		for i := range g.Segments {
			size := g.Segment(i)
			segment := connector.Segment{Layer: layer, Group: uint16(n), Offset: at, BlockStride: size, Bytes: size} //nolint:gosec // few groups
			if s.Gaps {                                                                                              // all segments of a block before those of the next
				segment.BlockStride = stride
				at += size + between
			} else {
				at += size * int64(s.Slots)
			}
			l.Segments = append(l.Segments, segment)
			layer++
		}
		if s.Gaps {
			at += stride * int64(s.Slots-1)
		}
		l = withDigest(l, uint16(n)) //nolint:gosec // few groups
		at = max(at, end(&l))
	}
	return l
}

// cache is the memory of one rank, and what must be in it.
type cache struct {
	kv   *connector.KV
	have []byte
	want []byte
	plan *connector.KV // of want
}

// caches are the ranks' memories, with nothing in them.
func (e *engine) caches() ([]cache, error) {
	out := make([]cache, len(e.kv))
	for rank, kv := range e.kv {
		have := kv.Region(0)
		want := bytes.Clone(have)
		plan, err := connector.NewKV(e.env.Layout, [][]byte{want})
		if err != nil {
			return nil, fmt.Errorf("cache: %w", err)
		}
		out[rank] = cache{kv, have, want, plan}
	}
	return out, nil
}

// moving is a transfer with the slots that it has.
type moving struct {
	engine   int
	save     bool
	refs     []model.Ref
	blocks   []connector.Block
	index    map[connector.BlockID]int
	transfer connector.Transfer
}

// poison is what lies in blocks before they are loaded.
const poison = 0xE1

// prepare gives a transfer its slots, fills those of a save and wipes those of a load.
func (p *player) prepare(c *model.Call) *moving {
	if c.Kind != model.Save && c.Kind != model.Load {
		return nil
	}
	m := &moving{engine: c.Engine, save: c.Kind == model.Save, refs: c.Blocks(&p.history.Shape), index: map[connector.BlockID]int{}}
	for n, ref := range m.refs {
		b := connector.Block{ID: p.next, Group: uint16(ref.Group)} //nolint:gosec // few groups
		if !ref.Tail {
			b.Key = p.keys[ref.Key]
		}
		if p.next++; int(p.next) == p.layout.Blocks {
			p.next = 0
		}
		m.blocks = append(m.blocks, b)
		m.index[b.ID] = n
		p.loaded[connector.Block{ID: b.ID, Group: b.Group}] = !m.save
		for rank := range p.mem {
			cache := &p.mem[rank]
			if m.save {
				p.write(cache.plan, b, ref, place{rank, c.Version})
			} else {
				spread(cache.plan, b, poison)
			}
			copyBlock(cache.kv, cache.plan, b)
		}
	}
	tokens := len(c.Keys) * p.blockTokens()
	if c.Tail {
		tokens++
	}
	m.transfer = connector.Transfer{Request: "request", Tokens: tokens, Blocks: m.blocks, Replace: c.Replace, Tenant: uint64(c.Tenant)} //nolint:gosec // not negative
	return m
}

// place is which bytes of a block are meant.
type place struct{ rank, version int }

// write writes the bytes of a block as a save has them.
func (p *player) write(kv *connector.KV, b connector.Block, ref model.Ref, at place) {
	for n, s := range kv.Segments(b.Group) {
		if p.engine.isDigest(s) {
			continue
		}
		stream(kv.View(s, b.ID), p.contentSeed(ref, at, n))
	}
	if !ref.Tail {
		p.engine.seal(kv, b)
	}
}

// contentSeed is what makes the bytes of a segment of a block unique. Those of a seed that is a multiple of plainIn do not look random;
// a block that is saved in several versions has a segment that does.
func (p *player) contentSeed(ref model.Ref, at place, segment int) uint64 {
	h := fnv.New64a()
	if !ref.Tail {
		_, _ = h.Write(p.keys[ref.Key][:])
	}
	var b [8]byte
	for _, n := range []int{ref.Group, at.rank, at.version, segment} {
		binary.LittleEndian.PutUint64(b[:], uint64(n)) //nolint:gosec // not negative
		_, _ = h.Write(b[:])
	}
	if segment == 0 && at.version > 0 {
		return h.Sum64() | 1
	}
	return h.Sum64()
}

// plainIn is of how many segments one has bytes that do not look random.
const plainIn = 8

// stream fills bytes from a seed.
func stream(to []byte, seed uint64) {
	if seed%plainIn == 0 {
		fillWith(to, byte(seed>>8)*byte(seed>>7&1)) // zeros in every other one
		return
	}
	for len(to) > 0 {
		seed += 0x9E3779B97F4A7C15
		z := (seed ^ seed>>30) * 0xBF58476D1CE4E5B9
		z = (z ^ z>>27) * 0x94D049BB133111EB
		z ^= z >> 31
		if len(to) < 8 {
			var rest [8]byte
			binary.LittleEndian.PutUint64(rest[:], z)
			copy(to, rest[:])
			return
		}
		binary.LittleEndian.PutUint64(to, z)
		to = to[8:]
	}
}

func spread(kv *connector.KV, b connector.Block, with byte) {
	for _, s := range kv.Segments(b.Group) {
		view := kv.View(s, b.ID)
		for i := range view {
			view[i] = with
		}
	}
}

func copyBlock(to, from *connector.KV, b connector.Block) {
	for _, s := range to.Segments(b.Group) {
		copy(to.View(s, b.ID), from.View(s, b.ID))
	}
}

func sameBlock(a, b *connector.KV, of connector.Block) bool {
	return !slices.ContainsFunc(a.Segments(of.Group), func(s int) bool { return !bytes.Equal(a.View(s, of.ID), b.View(s, of.ID)) })
}

// look says what lies in the blocks of a load, and takes it for what belongs there from now on.
func (p *player) look(m *moving, res *model.Result) {
	if m == nil || m.save {
		return
	}
	for rank := range res.Ranks {
		moved, cache := &res.Ranks[rank], &p.mem[rank]
		if !moved.Called {
			continue
		}
		moved.Found = make([]model.Found, len(m.blocks))
		for n, b := range m.blocks {
			if !moved.Whole && !moved.Failed[n] {
				moved.Found[n] = p.found(cache, b, m.refs[n], rank)
			}
			copyBlock(cache.plan, cache.kv, b)
		}
	}
}

// found says what lies in a block.
func (p *player) found(c *cache, b connector.Block, ref model.Ref, rank int) model.Found {
	digest := false
	for v := range p.versions {
		p.write(c.plan, b, ref, place{rank, v})
		if sameBlock(c.plan, c.kv, b) {
			return model.Found{What: model.Exact, Ref: ref, Rank: rank, Version: v}
		}
		digest = digest || p.differs(c, b) == 1 && p.digestDiffers(c, b)
	}
	if digest {
		return model.Found{What: model.Digest}
	}
	spread(c.plan, b, poison)
	if sameBlock(c.plan, c.kv, b) {
		return model.Found{What: model.Untouched}
	}
	if f, is := p.another(c, b, ref); is {
		return f
	}
	for v := range p.versions {
		p.write(c.plan, b, ref, place{rank, v})
		if p.partly(c, b) {
			return model.Found{What: model.Torn}
		}
	}
	return model.Found{What: model.Unknown}
}

// differs counts the segments of a block that are not as planned.
func (p *player) differs(c *cache, b connector.Block) (n int) {
	for _, s := range c.kv.Segments(b.Group) {
		if !bytes.Equal(c.kv.View(s, b.ID), c.plan.View(s, b.ID)) {
			n++
		}
	}
	return n
}

func (p *player) digestDiffers(c *cache, b connector.Block) bool {
	all := c.kv.Segments(b.Group)
	s := all[len(all)-1]
	return p.engine.isDigest(s) && !bytes.Equal(c.kv.View(s, b.ID), c.plan.View(s, b.ID))
}

// partly reports whether a segment of a block, or the beginning of one, is as planned.
func (p *player) partly(c *cache, b connector.Block) bool {
	const beginning = 16
	for _, s := range c.kv.Segments(b.Group) {
		have, want := c.kv.View(s, b.ID), c.plan.View(s, b.ID)
		n := min(beginning, len(have))
		if !p.engine.isDigest(s) && (bytes.Equal(have[:n], want[:n]) || bytes.Equal(have[len(have)-n:], want[len(want)-n:])) {
			return true
		}
	}
	return false
}

// another finds the block whose bytes lie in a block that should have others: all but its digests.
func (p *player) another(c *cache, b connector.Block, own model.Ref) (model.Found, bool) {
	first := c.kv.View(c.kv.Segments(b.Group)[0], b.ID)
	probe := make([]byte, min(16, len(first)))
	for k := range p.keys {
		for group := range p.history.Shape.Groups {
			for rank := range p.history.Shape.Ranks {
				for v := range p.versions {
					ref, at := model.Ref{Key: model.Key(k), Group: group}, place{rank, v}
					if group != own.Group && p.contentSeed(ref, at, 0)%plainIn == 0 {
						continue // zeros are those of many
					}
					stream(probe, p.contentSeed(ref, at, 0))
					if bytes.Equal(probe, first[:len(probe)]) && (group != own.Group || p.whole(c, b, ref, at)) {
						return model.Found{What: model.Exact, Ref: ref, Rank: rank, Version: v}, true
					}
				}
			}
		}
	}
	return model.Found{}, false
}

// whole reports whether all of a block's bytes but the digests are those of a place.
func (p *player) whole(c *cache, b connector.Block, ref model.Ref, at place) bool {
	p.write(c.plan, b, ref, at)
	return p.differs(c, b) == 0 || p.differs(c, b) == 1 && p.digestDiffers(c, b)
}

// strays are the changes of memory that no call of the step may make. Each is told once.
func (p *player) strays(moves []*moving) (out []model.Stray) {
	saved := map[connector.Block]bool{}
	for _, m := range moves {
		if m != nil && m.save && m.engine == p.number {
			for _, b := range m.blocks {
				saved[connector.Block{ID: b.ID, Group: b.Group}] = true
			}
		}
	}
	for rank := range p.mem {
		c := &p.mem[rank]
		if bytes.Equal(c.have, c.want) {
			continue
		}
		at := firstDifference(c.have, c.want)
		stray := model.Stray{Engine: p.number, Rank: rank, What: model.OfNobody, Where: fmt.Sprintf("byte %d of the cache of rank %d, behind a segment", at, rank)}
		if id, segment, in := p.owner(int64(at)); in {
			stray.Where = fmt.Sprintf("slot %d, segment %d, rank %d", id, segment, rank)
			switch b := (connector.Block{ID: id, Group: p.layout.Segments[segment].Group}); {
			case saved[b]:
				stray.What = model.OfSaved
			case p.loaded[b]:
				stray.What = model.Later
			default:
				stray.What = model.OfOthers
			}
		}
		copy(c.want, c.have)
		out = append(out, stray)
	}
	return out
}

// owner is the block at an offset of the cache.
func (p *player) owner(at int64) (id connector.BlockID, segment int, in bool) {
	for n, s := range p.layout.Segments {
		if into := at - s.Offset; into >= 0 && into/s.BlockStride < int64(p.layout.Blocks) && into%s.BlockStride < s.Bytes {
			return connector.BlockID(into / s.BlockStride), n, true //nolint:gosec // below Blocks
		}
	}
	return 0, 0, false
}
