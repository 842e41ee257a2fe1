package connector

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// A block whose size differs from the engine's takes as many of the engine's blocks as hold its tokens.
func TestArenaSize(t *testing.T) {
	l := &Layout{Blocks: 1, Groups: []Group{{BlockTokens: 16}}, Segments: []Segment{{Bytes: 1000}}}
	const each = 1000 + ArenaBlockHead
	for _, c := range []struct{ blocks, tokens, want int64 }{
		{0, 64, 7},
		{10, 0, 7 + 10*each},
		{10, 16, 7 + 10*each},
		{10, 64, 7 + 40*each},
		{10, 70, 7 + 50*each},
		{10, 1, 7 + 10*each},
		{1 << 40, 1 << 50, math.MaxInt64},
		{math.MaxInt64, 17, math.MaxInt64},
		{10, math.MaxInt64, math.MaxInt64},
	} {
		info := &Info{ArenaBytes: 7, ArenaBlocks: c.blocks, ArenaBlockTokens: c.tokens}
		require.Equal(t, c.want, info.ArenaSize(l, 1), "%+v", c)
	}
	require.EqualValues(t, 3*40*each, (&Info{ArenaBlocks: 10, ArenaBlockTokens: 64}).ArenaSize(l, 3))
}
