package connector

import (
	"encoding/binary"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// validLayout has two groups in two regions of 1024 bytes.
func validLayout() Layout {
	return Layout{
		Name: "test", Blocks: 4,
		Groups: []Group{{BlockTokens: 16, Policy: PolicyAll}, {BlockTokens: 8, Policy: PolicyTrailing, Trailing: 2}},
		Segments: []Segment{
			{Layer: 0, Group: 0, Region: 0, Offset: 0, BlockStride: 100, Bytes: 60},
			{Layer: 1, Group: 1, Region: 1, Offset: 24, BlockStride: 250, Bytes: 250},
			{Layer: 2, Group: 0, Region: 0, Offset: 60, BlockStride: 100, Bytes: 40},
			{Layer: DigestLayer, Group: 0, Region: 0, Offset: 960, BlockStride: 16, Bytes: 16},
		},
	}
}

func TestLayoutValidate(t *testing.T) {
	regions := []int64{1024, 1024}
	l := validLayout()
	require.NoError(t, l.Validate(regions))
	require.EqualValues(t, 116, l.BlockBytes(0))
	require.EqualValues(t, 250, l.BlockBytes(1))
	require.Zero(t, l.BlockBytes(7))

	for _, c := range []struct {
		name   string
		change func(*Layout)
		want   string
	}{
		{"no blocks", func(l *Layout) { l.Blocks = 0 }, "blocks"},
		{"many blocks", func(l *Layout) { l.Blocks = MaxBlocks + 1 }, "blocks"},
		{"no groups", func(l *Layout) { l.Groups = nil }, "0 groups"},
		{"many groups", func(l *Layout) { l.Groups = make([]Group, MaxGroups+1) }, "33 groups"},
		{"no segments", func(l *Layout) { l.Segments = nil }, "0 segments"},
		{"many segments", func(l *Layout) { l.Segments = make([]Segment, MaxSegments+1) }, "65537 segments"},
		{"tokens", func(l *Layout) { l.Groups[1].BlockTokens = 0 }, "groups[1].block_tokens"},
		{"policy", func(l *Layout) { l.Groups[0].Policy = 0 }, "groups[0].policy"},
		{"unknown policy", func(l *Layout) { l.Groups[0].Policy = 3 }, "groups[0].policy"},
		{"trailing", func(l *Layout) { l.Groups[1].Trailing = 0 }, "groups[1].policy"},
		{"group", func(l *Layout) { l.Segments[2].Group = 2 }, "segments[2] names group 2"},
		{"region", func(l *Layout) { l.Segments[2].Region = 2 }, "segments[2] names"},
		{"offset", func(l *Layout) { l.Segments[3].Offset = -1 }, "segments[3] has offset -1"},
		{"bytes", func(l *Layout) { l.Segments[3].Bytes = 0 }, "segments[3] has"},
		{"stride", func(l *Layout) { l.Segments[3].BlockStride = 15 }, "segments[3] has"},
		{"zero stride", func(l *Layout) { l.Segments[3].BlockStride = 0 }, "segments[3] has"},
		{"last block", func(l *Layout) { l.Segments[3].Offset++ }, "segments[3] ends beyond region 0"},
		{"one block more", func(l *Layout) { l.Blocks++ }, "ends beyond"},
		{"bytes overflow", func(l *Layout) { l.Segments[1].Bytes, l.Segments[1].BlockStride = math.MaxInt64, math.MaxInt64 }, "segments[1] ends"},
		{"offset overflow", func(l *Layout) { l.Segments[1].Offset = math.MaxInt64 }, "segments[1] ends"},
		{"stride overflow", func(l *Layout) { l.Segments[1].BlockStride = math.MaxInt64 }, "segments[1] ends"},
	} {
		l := validLayout()
		c.change(&l)
		err := l.Validate(regions)
		require.ErrorIs(t, err, ErrIncompatible, c.name)
		require.ErrorContains(t, err, c.want, c.name)
		_, err = NewKV(l, [][]byte{make([]byte, 1024), make([]byte, 1024)})
		require.ErrorIs(t, err, ErrIncompatible, c.name)
	}
	require.ErrorIs(t, l.Validate(nil), ErrIncompatible)
	require.ErrorIs(t, l.Validate([]int64{1024, 0}), ErrIncompatible)
}

// In a layout that Validate accepts, View never leaves the region: each view is where the numbers say,
// complete, and limited to its block.
func TestViewsStayInsideTheirRegion(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.Int64Range(1, 300).Draw(t, "size")
		number := rapid.OneOf(rapid.Int64Range(-2, 320), rapid.Int64())
		l := Layout{Blocks: rapid.IntRange(-1, 12).Draw(t, "blocks"), Groups: []Group{{BlockTokens: 1, Policy: PolicyAll}}}
		for range rapid.IntRange(1, 3).Draw(t, "segments") {
			l.Segments = append(l.Segments, Segment{
				Offset: number.Draw(t, "offset"), BlockStride: number.Draw(t, "stride"), Bytes: number.Draw(t, "bytes"),
			})
		}
		region := make([]byte, size)
		kv, err := NewKV(l, [][]byte{region})
		if err != nil {
			require.ErrorIs(t, err, ErrIncompatible)
			return
		}
		for i, s := range l.Segments {
			for b := range BlockID(l.Blocks) {
				v := kv.View(i, b)
				require.Len(t, v, int(s.Bytes))
				require.Equal(t, len(v), cap(v), "an append must not reach the next block")
				require.Same(t, &region[s.Offset+int64(b)*s.BlockStride], &v[0])
			}
		}
	})
}

func TestKVIsBoundsChecked(t *testing.T) {
	kv, err := NewKV(validLayout(), [][]byte{make([]byte, 1024), make([]byte, 1024)})
	require.NoError(t, err)
	require.Equal(t, "test", kv.Layout().Name)
	require.Equal(t, []int{0, 2, 3}, kv.Segments(0))
	require.Equal(t, []int{1}, kv.Segments(1))
	require.Nil(t, kv.Segments(2))
	for _, at := range [][2]int{{-1, 0}, {4, 0}, {0, -1}, {0, 4}, {0, math.MaxInt32}} {
		require.Nil(t, kv.View(at[0], BlockID(at[1])))
	}

	spans, err := kv.Spans(Block{ID: 3})
	require.NoError(t, err)
	require.Len(t, spans, 3)
	spans[1][0] = 9
	require.Equal(t, byte(9), kv.View(2, 3)[0], "in place")
	require.Equal(t, 116, Item{Spans: spans}.Size())
	for _, b := range []Block{{ID: 4}, {ID: -1}, {Group: 2}, {Group: math.MaxUint16}} {
		_, err := kv.Spans(b)
		require.ErrorIs(t, err, ErrIncompatible)
	}
}

func FuzzLayout(f *testing.F) {
	seed := func(numbers ...uint64) (raw []byte) {
		for _, n := range numbers {
			raw = binary.LittleEndian.AppendUint64(raw, n)
		}
		return append(raw, 0, 0)
	}
	f.Add(uint16(1024), 4, seed(0, 100, 60))
	f.Add(uint16(1024), 2, seed(math.MaxInt64, math.MaxInt64, math.MaxInt64))
	f.Fuzz(func(t *testing.T, size uint16, blocks int, raw []byte) {
		if len(raw) < 26 {
			return
		}
		number := func(i int) int64 { return int64(binary.LittleEndian.Uint64(raw[8*i:])) }
		segment := Segment{Offset: number(0), BlockStride: number(1), Bytes: number(2), Group: uint16(raw[24]), Region: uint16(raw[25])}
		l := Layout{Blocks: blocks, Groups: []Group{{BlockTokens: 1, Policy: PolicyAll}}, Segments: []Segment{segment}}
		kv, err := NewKV(l, [][]byte{make([]byte, size)})
		if err != nil {
			require.ErrorIs(t, err, ErrIncompatible)
			return
		}
		require.Len(t, kv.View(0, BlockID(blocks-1)), int(segment.Bytes))
		require.Nil(t, kv.View(0, BlockID(blocks)))
	})
}
