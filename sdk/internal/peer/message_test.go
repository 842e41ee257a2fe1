package peer

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestRecent(t *testing.T) {
	r := newRecent[int, string](3)
	for k := range 5 {
		r.set(k, "first")
	}
	_, known := r.get(1)
	require.False(t, known, "it is older than three")
	r.set(2, "second")
	value, known := r.get(2)
	require.True(t, known)
	require.Equal(t, "second", value)
	r.set(5, "first")
	_, known = r.get(2)
	require.False(t, known, "to be set does not make it younger")

	r.remove(3)
	r.set(3, "again")
	r.set(6, "first")
	value, _ = r.get(3)
	require.Equal(t, "again", value, "that it was there before does not make it older")
}

// recent behaves like a list of the keys in the order of their addition, cut at its limit.
func TestRecentModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type added struct {
			key  int
			live bool
		}
		limit := rapid.IntRange(1, 5).Draw(t, "limit")
		r := newRecent[int, int](limit)
		var model []added
		values := map[int]int{}
		at := func(k int) int {
			for i, a := range model {
				if a.key == k && a.live {
					return i
				}
			}
			return -1
		}
		for n := range rapid.IntRange(0, 60).Draw(t, "steps") {
			k := rapid.IntRange(0, 6).Draw(t, "key")
			if rapid.Bool().Draw(t, "remove") {
				r.remove(k)
				if i := at(k); i >= 0 {
					model[i].live = false
				}
			} else {
				r.set(k, n)
				values[k] = n
				if at(k) < 0 {
					model = append(model, added{k, true})
				}
				model = model[max(0, len(model)-limit):]
			}
			live := 0
			for k := range 7 {
				value, known := r.get(k)
				require.Equal(t, at(k) >= 0, known)
				if known {
					live++
					require.Equal(t, values[k], value)
				}
			}
			require.Len(t, r.entries, live)
			require.LessOrEqual(t, len(r.order), limit)
		}
	})
}
