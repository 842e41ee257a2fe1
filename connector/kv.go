package connector

import "fmt"

// Policy says which blocks of a prefix a group needs before it can continue from there.
type Policy uint8

// The policies. The numbers are part of the wire protocol and never reused.
const (
	// PolicyAll needs every block of the prefix (full attention).
	PolicyAll Policy = 1 + iota
	// PolicyTrailing needs only the last Group.Trailing blocks (sliding window, state).
	PolicyTrailing
)

// DigestLayer is the Layer of the segment in which the host keeps its digests of a block. For a connector
// it is a segment like any other, saved and loaded with the block.
const DigestLayer = -1

// Group is a set of layers that share a block table.
type Group struct {
	BlockTokens int // tokens of a full block
	Policy      Policy
	Trailing    int // blocks needed under PolicyTrailing
}

// Segment is one layer's (or part of a layer's) array of blocks. Block b lies at
// Offset + b*BlockStride of region Region and is Bytes long. Connectors must use these numbers and
// assume no contiguity (rule LAYOUT-01; vLLM 0.32 gives strided views of one allocation).
type Segment struct {
	Layer       int
	Group       uint16
	Region      uint16
	Offset      int64
	BlockStride int64
	Bytes       int64
	// Planes and Heads say how a block can be cut; 0 means that it cannot be cut. A block consists of
	// Planes arrays of the same size, one after the other (such as keys and values). Each array has a row
	// for every token of the block, in order. A row has Heads parts of the same size, which are this rank's
	// share of all heads, in order of rank.
	Planes, Heads int
}

// Layout describes the paged cache of one rank. A block's content is opaque to connectors.
type Layout struct {
	Name     string // byte-layout id, for messages
	Blocks   int    // slots; valid BlockIDs are 0..Blocks-1
	Groups   []Group
	Segments []Segment
}

// Limits of a Layout: what a host refuses before it allocates anything.
const (
	MaxSegments = 1 << 16
	MaxGroups   = 32 // bits of Match.Groups
	MaxBlocks   = 1 << 30
)

// Validate checks the layout against regions of the given sizes in bytes. Errors wrap
// ErrIncompatible and name the field.
func (l *Layout) Validate(regions []int64) error {
	switch {
	case l.Blocks <= 0 || l.Blocks > MaxBlocks:
		return badLayout("blocks is %d, want 1..%d", l.Blocks, MaxBlocks)
	case len(l.Groups) == 0 || len(l.Groups) > MaxGroups:
		return badLayout("%d groups, want 1..%d", len(l.Groups), MaxGroups)
	case len(l.Segments) == 0 || len(l.Segments) > MaxSegments:
		return badLayout("%d segments, want 1..%d", len(l.Segments), MaxSegments)
	}
	for i, g := range l.Groups {
		if g.BlockTokens <= 0 {
			return badLayout("groups[%d].block_tokens is %d", i, g.BlockTokens)
		}
		if g.Policy != PolicyAll && (g.Policy != PolicyTrailing || g.Trailing <= 0) {
			return badLayout("groups[%d].policy is %d with trailing %d", i, g.Policy, g.Trailing)
		}
	}
	for i := range l.Segments {
		if err := l.validateSegment(i, regions); err != nil {
			return err
		}
	}
	return nil
}

// validateSegment makes sure that every block of segment i lies inside its region.
func (l *Layout) validateSegment(i int, regions []int64) error {
	s := l.Segments[i]
	if int(s.Group) >= len(l.Groups) || int(s.Region) >= len(regions) {
		return badLayout("segments[%d] names group %d and region %d", i, s.Group, s.Region)
	}
	if s.Offset < 0 || s.Bytes <= 0 || s.BlockStride < s.Bytes {
		return badLayout("segments[%d] has offset %d, bytes %d, stride %d", i, s.Offset, s.Bytes, s.BlockStride)
	}
	if per := int64(s.Planes) * int64(s.Heads) * int64(l.Groups[s.Group].BlockTokens); s.Planes < 0 || s.Heads < 0 || (s.Planes == 0) != (s.Heads == 0) || per > 0 && s.Bytes%per != 0 {
		return badLayout("segments[%d] of %d bytes has %d planes of %d heads", i, s.Bytes, s.Planes, s.Heads)
	}
	size := regions[s.Region]
	if s.Bytes > size || s.Offset > size-s.Bytes || int64(l.Blocks-1) > (size-s.Bytes-s.Offset)/s.BlockStride {
		return badLayout("segments[%d] ends beyond region %d of %d bytes", i, s.Region, size)
	}
	return nil
}

func badLayout(format string, args ...any) error {
	return fmt.Errorf("layout: %s: %w", fmt.Sprintf(format, args...), ErrIncompatible)
}

// BlockBytes is the size of one block of a group over all its segments, digest included.
func (l *Layout) BlockBytes(group uint16) int64 {
	var n int64
	for _, s := range l.Segments {
		if s.Group == group {
			n += s.Bytes
		}
	}
	return n
}

// KV is a worker's window onto the paged cache of its rank. It copies nothing and is safe for concurrent
// use. A call may touch only the blocks of its Transfer.
type KV struct {
	layout  Layout
	regions [][]byte
	byGroup [][]int // segment indexes of each group, in layout order
}

// NewKV wraps the regions of a layout. The KV keeps both arguments, and the caller must not unmap a region
// before the last use of any view. Errors wrap ErrIncompatible.
func NewKV(layout Layout, regions [][]byte) (*KV, error) {
	sizes := make([]int64, len(regions))
	for i, r := range regions {
		sizes[i] = int64(len(r))
	}
	if err := layout.Validate(sizes); err != nil {
		return nil, err
	}
	kv := &KV{layout: layout, regions: regions, byGroup: make([][]int, len(layout.Groups))}
	for i, s := range layout.Segments {
		kv.byGroup[s.Group] = append(kv.byGroup[s.Group], i)
	}
	return kv, nil
}

// Layout describes the memory. The caller must not change it.
func (kv *KV) Layout() *Layout { return &kv.layout }

// Region returns all bytes of one region, for a connector that must register memory before it moves bytes
// there. It returns nil for an index out of range.
func (kv *KV) Region(i int) []byte {
	if i < 0 || i >= len(kv.regions) {
		return nil
	}
	return kv.regions[i]
}

// View returns the bytes of one block in one segment, in place. Its capacity ends with the block, so an
// append cannot reach the next one. View returns nil for an index out of range.
func (kv *KV) View(segment int, block BlockID) []byte {
	if segment < 0 || segment >= len(kv.layout.Segments) || block < 0 || int(block) >= kv.layout.Blocks {
		return nil
	}
	s := &kv.layout.Segments[segment]
	at := s.Offset + int64(block)*s.BlockStride
	return kv.regions[s.Region][at : at+s.Bytes : at+s.Bytes]
}

// Segments lists the indexes of a group's segments in layout order. The caller must not change it.
func (kv *KV) Segments(group uint16) []int {
	if int(group) >= len(kv.byGroup) {
		return nil
	}
	return kv.byGroup[group]
}

// Spans returns all bytes of one block: one view for each segment of its group, in layout order. Errors
// name the block and wrap ErrIncompatible.
func (kv *KV) Spans(b Block) ([][]byte, error) {
	segments := kv.Segments(b.Group)
	if len(segments) == 0 || b.ID < 0 || int(b.ID) >= kv.layout.Blocks {
		return nil, fmt.Errorf("block %d of group %d is not in the cache: %w", b.ID, b.Group, ErrIncompatible)
	}
	spans := make([][]byte, len(segments))
	for i, s := range segments {
		spans[i] = kv.View(s, b.ID)
	}
	return spans, nil
}
