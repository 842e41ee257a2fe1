package host

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/internal/place"
)

// reads are those of slots from..to-1.
func reads(from, to int) (refs []place.Ref) {
	for s := from; s < to; s++ {
		refs = append(refs, place.Ref{Slot: place.Slot(s)})
	}
	return refs
}

func TestUses(t *testing.T) {
	var u uses
	require.Empty(t, u.take())
	u.note(reads(1, 4))
	u.note(reads(2, 3))
	require.Equal(t, []uint32{1, 3, 2, 2}, u.take(), "in the order of the last reads")
	require.Empty(t, u.take(), "each read is told once")
	for range 10 {
		u.note(reads(7, 8))
	}
	require.Equal(t, []uint32{7, 7, 7}, u.take())

	u.note(reads(0, mostTold-1))
	u.note(reads(mostTold, mostTold+1))
	u.note(reads(mostTold, mostTold+1))
	told := u.take()
	require.Len(t, told, mostTold)
	require.Equal(t, uint32(mostTold), told[mostTold-1])
	require.Equal(t, []uint32{mostTold}, u.take(), "the rest is for the next call")

	u.note(reads(0, mostUsed+2))
	require.Equal(t, uint32(2), u.take()[0], "what was not read for longest is forgotten")
	require.LessOrEqual(t, len(u.of), mostUsed)
	require.LessOrEqual(t, len(u.order), 2*mostUsed+mostTold)
}

// Rule PLACE-23: who reads the same blocks again and again pushes nobody's uses out.
func TestUsesOfOthersStay(t *testing.T) {
	var u uses
	u.note(reads(0, 10))
	for range mostUsed/100 + 1 {
		u.note(reads(100, 200))
	}
	told := u.take()
	require.Equal(t, []uint32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, told[:10])
	require.Len(t, told, 10+100*mostTimes)
	require.LessOrEqual(t, len(u.order), 2*mostUsed+mostTold)
	require.Len(t, slices.Compact(told), 110)
}
