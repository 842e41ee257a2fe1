package fairlru

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// use uses keys one after the other.
func use(t *Table, client uint64, keys ...uint64) {
	for _, key := range keys {
		t.Use(key, client)
	}
}

func keys(t *Table) (list []uint64) {
	for key := range t.All() {
		list = append(list, key)
	}
	slices.Sort(list)
	return list
}

// A client alone has the whole table, and loses what it has not used for longest.
func TestOneClient(t *testing.T) {
	x := New(3)
	use(x, 7, 1, 2, 3, 1, 4)
	require.Equal(t, []uint64{1, 3, 4}, keys(x))
	_, known := x.Find(2)
	require.False(t, known)
	slot, known := x.Use(5, 7)
	require.False(t, known, "the slot was another's")
	require.Equal(t, []uint64{1, 4, 5}, keys(x))
	again, known := x.Find(5)
	require.True(t, known)
	require.Equal(t, slot, again)
	x.Remove(1)
	x.Remove(1)
	use(x, 7, 6)
	require.Equal(t, []uint64{4, 5, 6}, keys(x), "there was room")
}

// However much one client uses, the others keep what is not more than their share.
func TestShares(t *testing.T) {
	x := New(90)
	key := uint64(0)
	add := func(client uint64, n int) {
		for range n {
			key++
			x.Use(key, client)
		}
	}
	add(1, 10)
	add(2, 50)
	add(3, 1000)
	require.Equal(t, 10, x.lists[1].size)
	require.InDelta(t, 40, x.lists[2].size, 1)
	add(2, 1000)
	add(1, 1000)
	add(3, 1000)
	for _, l := range x.lists[1:4] {
		require.InDelta(t, 30, l.size, 1)
	}
	require.Equal(t, 90, x.Len())
}

// What others use, too, is not pushed out by a client that has much.
func TestSharedKeys(t *testing.T) {
	x := New(10)
	use(x, 1, 100, 101)
	use(x, 2, 1, 2, 3, 4, 100, 101)
	for key := range uint64(50) {
		use(x, 2, 200+key)
	}
	require.Equal(t, 2, x.lists[1].size)
	_, known := x.Find(100)
	require.True(t, known)
	use(x, 3, 101)
	require.Equal(t, []int{2, 8, 0}, []int{x.lists[1].size, x.lists[2].size, x.lists[3].size})
	use(x, 3, 249)
	require.Equal(t, []int{2, 7, 1}, []int{x.lists[1].size, x.lists[2].size, x.lists[3].size})
	for key := range uint64(50) {
		use(x, 2, 300+key)
	}
	_, known = x.Find(249)
	require.True(t, known, "it would be gone if it still counted to the other one")
}

// A large table compares clients only now and then, and shares are right all the same, up to a few keys.
func TestLargeTable(t *testing.T) {
	x := New(100_000)
	for key := range uint64(300_000) {
		x.Use(key, 5)
	}
	for key := range uint64(300_000) {
		x.Use(1<<32+key, 6+key%2)
	}
	for _, l := range x.lists[5:8] {
		require.InDelta(t, 100_000/3, l.size, 100)
	}
	require.Equal(t, 100_000, x.Len())
}

// Whatever is used and removed: the table knows no more keys than it may, gives each its own slot, and the lists of clients
// have all of them. A client that has less than the fair share of all clients loses nothing.
func TestTableProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		most := rapid.IntRange(1, 12).Draw(t, "most")
		x := New(most)
		for range rapid.IntRange(1, 80).Draw(t, "steps") {
			key, client := rapid.Uint64Range(0, 30).Draw(t, "key"), rapid.Uint64Range(0, 3).Draw(t, "client")
			before, room := x.lists, x.Len() < most
			if rapid.IntRange(0, 4).Draw(t, "what") == 0 {
				x.Remove(key)
				_, known := x.Find(key)
				require.False(t, known)
				check(t, x, most)
				continue
			}
			_, was := x.Find(key)
			slot, known := x.Use(key, client)
			require.Equal(t, was, known)
			got, known := x.Find(key)
			require.True(t, known)
			require.Equal(t, got, slot)
			check(t, x, most)
			for c, l := range x.lists[:4] {
				if !was && l.size < before[c].size {
					require.False(t, room)
					largest := slices.MaxFunc(before[:], func(a, b list) int { return a.size - b.size })
					require.Equal(t, largest.size, before[c].size, "the one that has most loses")
				}
			}
		}
	})
}

// check walks through the lists in both directions.
func check(t *rapid.T, x *Table, most int) {
	require.LessOrEqual(t, x.Len(), most)
	seen := map[int32]bool{}
	for c, l := range x.lists[:4] {
		size, before := 0, int32(-1)
		for at := l.oldest; at >= 0; before, at = at, x.entries[at].newer {
			e := x.entries[at]
			require.Equal(t, before, e.older)
			require.Equal(t, c, int(e.client))
			slot, known := x.slots[e.key]
			require.True(t, known)
			require.Equal(t, at, slot)
			require.False(t, seen[at])
			seen[at] = true
			size++
		}
		require.Equal(t, before, l.newest)
		require.Equal(t, size, l.size)
	}
	require.Len(t, seen, x.Len())
}

// UseAt does what Use does, whatever has become of the slot in which the key was.
func TestUseAt(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x, y := New(8), New(8)
		slots := map[uint64]int{}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			key := rapid.Uint64Range(0, 20).Draw(t, "key")
			if rapid.IntRange(0, 4).Draw(t, "remove") == 0 {
				x.Remove(key)
				y.Remove(key)
				continue
			}
			client := rapid.Uint64Range(0, 3).Draw(t, "client")
			at, seen := slots[key]
			if !seen {
				at = rapid.IntRange(-1, 9).Draw(t, "slot")
			}
			slot, known := x.UseAt(at, key, client)
			again, as := y.Use(key, client)
			require.Equal(t, again, slot)
			require.Equal(t, as, known)
			require.Equal(t, y.lists, x.lists)
			slots[key] = slot
		}
	})
}
