package conformance

import (
	"slices"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/digest"
)

// Sizes of the segments. They are all different and none divides another, so that a connector that
// takes one for the other is found out.
var segmentBytes = []int64{96, 160, 72}

const gap = 24 // guard bytes between blocks and segments

// interleaved puts all segments of block 0 before those of block 1, with gaps. Their sizes are segmentBytes, or those that are given.
func interleaved(blocks int, sizes ...int64) connector.Layout {
	if len(sizes) == 0 {
		sizes = segmentBytes
	}
	stride := int64(gap)
	for _, n := range sizes {
		stride += n + gap
	}
	l := connector.Layout{Name: "interleaved", Blocks: blocks, Groups: []connector.Group{{BlockTokens: blockTokens, Policy: connector.PolicyAll}}}
	at := int64(gap)
	for i, n := range sizes {
		l.Segments = append(l.Segments, connector.Segment{Layer: i, Offset: at, BlockStride: stride, Bytes: n})
		at += n + gap
	}
	return withDigest(l, 0)
}

// planes gives each segment an array of its own, with gaps between the blocks. The last layer's
// array comes first.
func planes(blocks int) connector.Layout {
	l := connector.Layout{Name: "planes", Blocks: blocks, Groups: []connector.Group{{BlockTokens: blockTokens, Policy: connector.PolicyAll}}}
	l.Segments = make([]connector.Segment, len(segmentBytes))
	at := int64(gap)
	for i := len(segmentBytes) - 1; i >= 0; i-- {
		n := segmentBytes[i]
		l.Segments[i] = connector.Segment{Layer: i, Offset: at, BlockStride: n + gap, Bytes: n}
		at += int64(blocks)*(n+gap) + gap
	}
	return withDigest(l, 0)
}

// dense has no gaps at all.
func dense(blocks int) connector.Layout {
	l := connector.Layout{Name: "dense", Blocks: blocks, Groups: []connector.Group{{BlockTokens: blockTokens, Policy: connector.PolicyAll}}}
	var at int64
	for i, n := range segmentBytes {
		l.Segments = append(l.Segments, connector.Segment{Layer: i, Offset: at, BlockStride: n, Bytes: n})
		at += int64(blocks) * n
	}
	return withDigest(l, 0)
}

// elsewhere has as many blocks as it is told, and its parts of a block have the sizes that they have in a layout, but no part lies where
// it does there: each has an array of its own, the last layer's comes first, and the digests are behind all.
func elsewhere(l connector.Layout, blocks int) connector.Layout {
	l.Blocks, l.Segments = blocks, slices.Clone(l.Segments)
	at := int64(gap)
	for _, digests := range []bool{false, true} {
		for i := range slices.Backward(l.Segments) {
			s := &l.Segments[i]
			if (s.Layer == connector.DigestLayer) != digests {
				continue
			}
			s.BlockStride = s.Bytes + gap
			if digests { // as a host places them
				at, s.BlockStride = (at+63)&^63, s.Bytes
			}
			s.Offset = at
			at += int64(blocks)*s.BlockStride + gap
		}
	}
	return l
}

// twoGroups is planes with the last layer in a group of its own.
func twoGroups() connector.Layout {
	l := planes(slots)
	l.Name = "two groups"
	l.Groups = append(l.Groups, connector.Group{BlockTokens: blockTokens, Policy: connector.PolicyTrailing, Trailing: 2})
	l.Segments[len(segmentBytes)-1].Group = 1
	digests := &l.Segments[len(segmentBytes)] // of the first group, which has one segment fewer now
	digests.Bytes = digest.SegmentSize(len(segmentBytes) - 1)
	digests.BlockStride = digests.Bytes
	return withDigest(l, 1)
}

// withDigest adds a group's digest segment behind everything, as a host does.
func withDigest(l connector.Layout, group uint16) connector.Layout {
	segments := 0
	for _, s := range l.Segments {
		if s.Group == group && s.Layer != connector.DigestLayer {
			segments++
		}
	}
	n := digest.SegmentSize(segments)
	l.Segments = append(l.Segments, connector.Segment{Layer: connector.DigestLayer, Group: group, Offset: (end(&l) + 63) &^ 63, BlockStride: n, Bytes: n})
	return l
}

// end is the size of the region a layout needs, with a gap behind.
func end(l *connector.Layout) int64 {
	var n int64
	for _, s := range l.Segments {
		n = max(n, s.Offset+int64(l.Blocks-1)*s.BlockStride+s.Bytes)
	}
	return n + gap
}
