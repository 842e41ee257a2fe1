package admission

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// A client gets seven eighths, and each further one seven eighths of what is left.
func TestRoomLeavesSome(t *testing.T) {
	r := Room{Bytes: 4096}
	fill := func(name string) (n int) {
		for r.Take(name, 1) == nil {
			n++
		}
		return n
	}
	require.Equal(t, []int{3584, 448, 56, 7}, []int{fill("a"), fill("b"), fill("c"), fill("d")})
	r.Give("a", 3584)
	require.Equal(t, 3585-448, fill("e"), "of what b, c and d leave")
	var refusal *RefusedError
	require.ErrorAs(t, r.Take("e", 1), &refusal)
	require.Equal(t, RefusedError{Bodies, shortestAfter}, *refusal)
}

// Whatever clients do: all together hold no more than there is, a client that holds nothing gets seven eighths of what is left,
// and in the end nothing is remembered.
func TestRoomProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := Room{Bytes: rapid.IntRange(0, 100).Draw(t, "bytes")}
		type taken struct {
			name string
			n    int
		}
		var all []taken
		held := 0
		for range rapid.IntRange(0, 50).Draw(t, "steps") {
			if len(all) > 0 && rapid.Bool().Draw(t, "give") {
				r.Give(all[0].name, all[0].n)
				held -= all[0].n
				all = all[1:]
				continue
			}
			one := taken{fmt.Sprint(rapid.IntRange(0, 3).Draw(t, "name")), rapid.IntRange(0, 60).Draw(t, "n")}
			nothing := r.names[one.name] == 0
			err := r.Take(one.name, one.n)
			if nothing {
				left := r.Bytes - held
				require.Equal(t, one.n <= left-left/8, err == nil)
			}
			if err == nil {
				all, held = append(all, one), held+one.n
			}
			require.LessOrEqual(t, held, r.Bytes)
		}
		for _, one := range all {
			r.Give(one.name, one.n)
		}
		require.Empty(t, r.names)
		require.Zero(t, r.held)
	})
}
