package place

import (
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvport/kvport/connector"
)

// indexModel is an index as simple as can be: a block is its parts.
type indexModel struct {
	keys  map[connector.StoreKey]*[]Ref
	slots map[Slot]*[]Ref
}

func (m *indexModel) vacate(s Slot) {
	block := m.slots[s]
	if block == nil {
		return
	}
	for _, r := range *block {
		if m.keys[r.Part.Key] == block {
			delete(m.keys, r.Part.Key)
		}
		delete(m.slots, r.Slot)
	}
}

func (m *indexModel) room(refs []Ref) (higher, lower []Ref) {
	for _, r := range refs {
		m.vacate(r.Slot)
	}
	for _, r := range refs {
		for _, old := range m.find(r.Part.Key) {
			if old.serial > r.serial {
				higher = append(higher, old)
			} else {
				lower = append(lower, old)
			}
		}
	}
	return higher, lower
}

func (m *indexModel) insert(refs []Ref) {
	block := &refs
	for _, r := range refs {
		m.slots[r.Slot] = block
		m.keys[r.Part.Key] = block
	}
}

func (m *indexModel) find(k connector.StoreKey) (found []Ref) {
	if block := m.keys[k]; block != nil {
		for _, r := range *block {
			if r.Part.Key == k {
				found = []Ref{r}
			}
		}
	}
	return found
}

func (m *indexModel) len() int {
	blocks := map[*[]Ref]bool{}
	for _, b := range m.keys {
		blocks[b] = true
	}
	return len(blocks)
}

// TestIndex: whatever comes into the index and goes, in whatever order, it says what the model says, also where all keys have the same hash.
func TestIndex(t *testing.T) { rapid.Check(t, indexAgreesWithModel) }

func indexAgreesWithModel(t *rapid.T) {
	const slots, keys = 8, 10
	x, m := newIndex(slots), &indexModel{keys: map[connector.StoreKey]*[]Ref{}, slots: map[Slot]*[]Ref{}}
	x.heads = x.heads[:rapid.SampledFrom([]int{1, 2, len(x.heads)}).Draw(t, "chains")]
	slot := rapid.Custom(func(t *rapid.T) Slot { return Slot(rapid.IntRange(0, slots-1).Draw(t, "slot")) })
	var seen []Ref
	t.Repeat(map[string]func(*rapid.T){
		"insert": func(t *rapid.T) {
			serial, generation := rapid.Uint64Range(0, 4).Draw(t, "serial"), rapid.Uint64Range(0, 2).Draw(t, "generation")
			var refs []Ref
			for _, s := range rapid.SliceOfNDistinct(slot, 1, 3, rapid.ID).Draw(t, "slots") {
				k := connector.StoreKey{31: byte(rapid.IntRange(1, keys).Draw(t, "key"))} // the other bytes are the same
				refs = append(refs, Ref{s, Part{Key: k, Length: uint32(serial), Group: uint16(s)}, serial, generation})
			}
			wantHigher, wantLower := m.room(refs)
			higher, lower := x.room(refs)
			require.Equal(t, wantHigher, higher)
			require.Equal(t, wantLower, lower)
			if len(higher) == 0 {
				m.insert(refs)
				x.insert(refs)
			}
			seen = append(seen, refs...)
		},
		"vacate": func(t *rapid.T) {
			s := slot.Draw(t, "slot")
			x.vacate(s)
			m.vacate(s)
		},
		"clear": func(*rapid.T) {
			x.clear()
			clear(m.keys)
			clear(m.slots)
		},
		"has": func(t *rapid.T) {
			if len(seen) == 0 {
				return
			}
			r := rapid.SampledFrom(seen).Draw(t, "what was seen")
			block := m.slots[r.Slot]
			require.Equal(t, block != nil && slices.Contains(*block, r), x.has(&r))
			if block != nil {
				require.ElementsMatch(t, *block, x.block(r.Slot))
			}
		},
		"": func(t *rapid.T) {
			require.Equal(t, m.len(), x.len())
			for k := range byte(keys + 2) {
				k := connector.StoreKey{31: k}
				require.Equal(t, m.find(k), append([]Ref(nil), x.find([]connector.StoreKey{k})...))
			}
			x.within(t, keys)
		},
	})
}

// within says that each slot in a chain is in one, once, and that no other slot is.
func (x *index) within(t *rapid.T, keys int) {
	seen := map[Slot]bool{}
	for _, link := range x.heads {
		for ; link != 0; link = x.slots[link-1].next {
			require.False(t, seen[Slot(link-1)], "a chain meets itself or another one")
			seen[Slot(link-1)] = true
		}
	}
	require.LessOrEqual(t, len(seen), keys, "of each key one slot")
	for s := range x.slots {
		require.Equal(t, x.slots[s].listed, seen[Slot(s)])
	}
}

// TestIndexFindsLongRuns: a lookup of many keys finds all before the first one that is missing.
func TestIndexFindsLongRuns(t *testing.T) {
	const slots = 3*atOnce + 1
	x := newIndex(slots)
	keys := make([]connector.StoreKey, slots)
	for i := range keys {
		keys[i] = connector.StoreKey{byte(i), byte(i >> 8), 1}
		refs := []Ref{{Slot: Slot(i), Part: Part{Key: keys[i]}}}
		x.room(refs)
		x.insert(refs)
	}
	for _, gone := range []Slot{slots - 1, 2*atOnce + 1, 2 * atOnce, atOnce - 1, 0} {
		x.vacate(gone)
		refs := x.find(keys)
		require.Len(t, refs, int(gone))
		for i := range refs {
			require.Equal(t, keys[i], refs[i].Part.Key)
		}
	}
}

// TestIndexSize: what the index takes follows from the number of slots, and what it knows of a slot is one cache line.
func TestIndexSize(t *testing.T) {
	require.EqualValues(t, lineSize, unsafe.Sizeof(resident{}))
	for _, slots := range []int{1, 2, 3, 4, 5, 1000, 1 << 16} {
		x := newIndex(slots)
		require.Len(t, x.slots, slots)
		require.GreaterOrEqual(t, len(x.heads), 2*slots, "chains are short")
		require.LessOrEqual(t, len(x.heads), 4*slots)
	}
}
