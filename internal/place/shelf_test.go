package place

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// shelfRig is a plugin with an index of its own, and a host that reads what it says.
type shelfRig struct {
	*testing.T
	g     Geometry
	arena Memory
	host  *Host
	shelf *Shelf
}

func newShelfRig(t *testing.T) *shelfRig {
	g := Fit(1<<16, 1000, 8)
	require.Equal(t, 8, g.Slots)
	r := &shelfRig{T: t, g: g}
	var err error
	r.arena, err = Private(make([]byte, g.ArenaBytes()))
	require.NoError(t, err)
	r.host, err = NewReader(r.arena, g)
	require.NoError(t, err)
	r.open()
	return r
}

// open begins the next life of the plugin.
func (r *shelfRig) open() (found []Found, torn int) {
	r.host.Died()
	o, err := r.host.Reopen()
	require.NoError(r, err)
	r.shelf, found, torn, err = OpenShelf(r.arena, r.g, ShelfOpening{Epoch: o.Epoch, Serial: r.host.Draw(1000)}, 0)
	require.NoError(r, err)
	return found, torn
}

func (r *shelfRig) write(s Slot, n byte) {
	r.shelf.Begin(s)
	copy(r.shelf.Bytes(s, 1000), bytes.Repeat([]byte{n}, 1000))
	r.shelf.Publish(s, &Header{Key: connector.StoreKey{n}, Length: 1000})
}

// read is what the host finds of a block.
func (r *shelfRig) read(n byte) ([]byte, error) {
	refs, err := r.host.Find([]connector.StoreKey{{n}}, 0)
	if err != nil {
		return nil, err
	}
	pin, err := r.host.Pin(refs[0])
	if err != nil {
		return nil, err
	}
	b := bytes.Clone(pin.Bytes())
	return b, pin.Release(0)
}

// TestShelf: the host finds what a plugin names that writes its slots itself, until the plugin gives it up, also over the
// plugin's death (rule PLACE-20).
func TestShelf(t *testing.T) {
	r := newShelfRig(t)
	r.write(3, 1)
	r.write(5, 2)
	_, err := r.read(1)
	require.ErrorIs(t, err, ErrMiss, "nobody has told the host")
	require.NoError(t, r.host.Notice(&Notice{Slots: []Slot{3}}, 0))
	require.NoError(t, r.host.Notice(&Notice{Slots: []Slot{5}}, 0))
	require.ErrorIs(t, r.host.Notice(&Notice{Slots: []Slot{6}}, 0), ErrGone)
	for n := range byte(2) {
		b, err := r.read(n + 1)
		require.NoError(t, err)
		require.Equal(t, bytes.Repeat([]byte{n + 1}, 1000), b)
	}

	found, torn := r.open()
	require.Zero(t, torn)
	require.Len(t, found, 2)
	require.Equal(t, []Slot{3, 5}, []Slot{found[0].Slot, found[1].Slot})
	_, err = r.read(1)
	require.NoError(t, err, "what is kept over the death stays known")

	refs, err := r.host.Find([]connector.StoreKey{{1}}, 0)
	require.NoError(t, err)
	pin, err := r.host.Pin(refs[0])
	require.NoError(t, err)
	r.shelf.Retire(3)
	r.write(3, 1)
	require.ErrorIs(t, pin.Release(0), ErrGone, "the same block again is another use")
	_, err = r.read(1)
	require.ErrorIs(t, err, ErrMiss)

	r.host.Forget()
	_, err = r.read(2)
	require.ErrorIs(t, err, ErrMiss)
	require.NoError(t, r.host.Notice(&Notice{Slots: []Slot{5}}, 0))
	_, err = r.read(2)
	require.NoError(t, err)
}

// TestDrop: a slot that does not hold what it should is given up in that use, and nothing else is.
func TestDrop(t *testing.T) {
	r := newShelfRig(t)
	learn := func(s Slot) { require.NoError(t, r.host.Notice(&Notice{Slots: []Slot{s}}, 0)) }
	find := func() Ref {
		refs, err := r.host.Find([]connector.StoreKey{{1}}, 0)
		require.NoError(t, err)
		return refs[0]
	}
	r.write(3, 1)
	learn(3)
	first := find()
	r.write(5, 1) // replaced, while somebody who has first finds out that slot 3 is wrong
	learn(5)
	require.Equal(t, Slot(5), find().Slot)
	r.host.Drop(first)
	require.Equal(t, Slot(5), find().Slot)
	r.write(3, 2)
	learn(3)
	r.host.Drop(first)
	_, err := r.read(2)
	require.NoError(t, err, "another use of the slot")
	r.host.Drop(find())
	_, err = r.read(1)
	require.ErrorIs(t, err, ErrMiss)
	require.ErrorIs(t, r.host.Notice(&Notice{Slots: []Slot{5}}, 0), ErrGone)
}

// TestRun: the run ends with the first block that is nowhere, or was given up, and goes on where that one lies elsewhere by now.
func TestRun(t *testing.T) {
	r := newShelfRig(t)
	keys := []connector.StoreKey{{1}, {2}, {3}, {4}}
	for i, slot := range []Slot{6, 2, 4} {
		r.write(slot, byte(i+1))
		require.NoError(t, r.host.Notice(&Notice{Slots: []Slot{slot}}, 0))
	}
	require.Equal(t, 3, r.host.Run(keys, 0))
	require.Zero(t, r.host.Run(keys[3:], 0))
	require.Zero(t, r.host.Run(nil, 0))
	r.shelf.Retire(2)
	require.Equal(t, 1, r.host.Run(keys, 0))
	require.Equal(t, 1, r.host.Run(keys[2:], 0), "what lies behind is still there")
	r.write(5, 2)
	require.NoError(t, r.host.Notice(&Notice{Slots: []Slot{5}}, 0))
	require.Equal(t, 3, r.host.Run(keys, 0))
	r.shelf.Begin(6) // it is replaced
	require.Zero(t, r.host.Run(keys, 0))
}

// TestWrong: a slot that does not hold what its header says is known until it gets another use, named or not, also over the death
// of the plugin.
func TestWrong(t *testing.T) {
	r := newShelfRig(t)
	for slot, next := range map[Slot]func(){
		1: func() { r.shelf.Retire(1) },
		2: func() { r.write(2, 9) },
		3: func() { r.shelf.Begin(3) },
	} {
		require.False(t, r.host.Wrong())
		r.write(slot, 1)
		require.NoError(t, r.host.Notice(&Notice{Slots: []Slot{slot}}, 0))
		refs, err := r.host.Find([]connector.StoreKey{{1}}, 0)
		require.NoError(t, err)
		r.host.Drop(refs[0])
		require.True(t, r.host.Wrong())
		r.host.Forget()
		r.open()
		require.True(t, r.host.Wrong(), "what it holds is what it was")
		next()
		require.False(t, r.host.Wrong(), "slot %d has another use", slot)
	}
}

// TestTake: one Shelf of a life uses an arena at a time; a life that died does not keep the next one out.
func TestTake(t *testing.T) {
	r := newShelfRig(t)
	require.True(t, Take(r.arena, 7))
	require.False(t, Take(r.arena, 7))
	Leave(r.arena, 7)
	require.True(t, Take(r.arena, 7))
	require.True(t, Take(r.arena, 9), "the life with 7 died")
	require.False(t, Take(r.arena, 9))
	Leave(r.arena, 7)
	require.False(t, Take(r.arena, 9), "it is not that one's any more")
}

// TestReaderLeavesAnArenaFresh: before the first life nothing is written, so that the plugin need not look at all headers.
func TestReaderLeavesAnArenaFresh(t *testing.T) {
	g := Geometry{Slots: 4, SlotBytes: 1000}
	arena := make([]byte, g.ArenaBytes())
	memory, err := Private(arena)
	require.NoError(t, err)
	h, err := NewReader(memory, g)
	require.NoError(t, err)
	o, err := h.Reopen()
	require.NoError(t, err)
	require.Equal(t, make([]byte, len(arena)), arena)
	header := g.wordAt(3)
	arena[header] = byte(Ready) // what nobody would write there, to see whether it is looked at
	_, found, torn, err := OpenShelf(memory, g, ShelfOpening{Epoch: o.Epoch, Serial: h.Draw(1000)}, 0)
	require.NoError(t, err)
	require.Empty(t, found)
	require.Zero(t, torn)
	require.EqualValues(t, Ready, arena[header])
	h.Died()
	_, err = h.Reopen()
	require.NoError(t, err)
	require.True(t, g.markedOne(memory, arenaMagic))
	_, _, torn, err = OpenShelf(memory, g, ShelfOpening{Epoch: o.Epoch, Serial: h.Draw(1000)}, 0)
	require.NoError(t, err)
	require.Equal(t, 1, torn)
	require.EqualValues(t, Free, arena[header])
}

// TestReaderHasNoWords: a host without words reads, and lends nothing.
func TestReaderHasNoWords(t *testing.T) {
	r := newShelfRig(t)
	_, err := r.host.Reserve([]Part{{Key: connector.StoreKey{1}, Length: 1000}}, 0, false)
	require.ErrorIs(t, err, ErrVoid)
	for _, g := range []Geometry{{}, {Slots: 7, SlotBytes: 1000}} {
		_, err := NewReader(r.arena, g)
		require.ErrorIs(t, err, ErrGeometry)
	}
}

// TestShelfRecovers: the next life keeps whole blocks of serials that were drawn, of each key the last, and nothing else.
func TestShelfRecovers(t *testing.T) {
	r := newShelfRig(t)
	for s := range Slot(6) {
		r.write(s, byte(s))
	}
	r.shelf.Begin(2)                                                                                         // dies while it writes
	r.write(6, 4)                                                                                            // again
	r.shelf.Publish(7, &Header{Key: connector.StoreKey{9}, Length: 1000, Expires: -1})                       // over
	r.shelf.Retire(5)                                                                                        // given up
	r.arena.Store(r.g.wordAt(0)+16, r.arena.Load(r.g.wordAt(0)+16)^1)                                        // damaged
	forged := Header{Serial: 1 << 50, Key: connector.StoreKey{8}, Length: 1000, Parts: 1, Lead: 1, Epoch: 1} // never drawn
	words := forged.Encode(1, Word(r.arena.Load(r.g.wordAt(1))).Generation())
	r.g.storeHeader(r.arena, 1, &words)
	found, torn := r.open()
	require.Equal(t, 3, torn, "begun, damaged, forged")
	var slots []Slot
	for _, f := range found {
		slots = append(slots, f.Slot)
	}
	require.Equal(t, []Slot{3, 6}, slots, "in the order of writing")
	for s := range Slot(8) {
		_, whole := r.shelf.Header(s)
		require.Equal(t, s == 3 || s == 6, whole, "slot %d", s)
	}
}

// TestShelfOverAnything: whatever is in the memory, a life opens, and nothing that it keeps has a wrong check.
func TestShelfOverAnything(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 0))
	for range 200 {
		r := newShelfRig(t)
		r.write(1, 1)
		for range 20 {
			r.arena.Store(rng.Int64N(r.g.bytesAt(0)/8)*8, rng.Uint64())
		}
		found, _ := r.open()
		for _, f := range found {
			require.Equal(t, Slot(1), f.Slot)
			require.Equal(t, connector.StoreKey{1}, f.Key)
		}
		r.write(1, 7)
		require.NoError(t, r.host.Notice(&Notice{Slots: []Slot{1}}, 0))
		_, err := r.read(7)
		require.NoError(t, err)
	}
}

// Rule PLACE-07: of a key the block with the highest serial counts, so what it replaced does not come back when its own time is over.
func TestReplacedStaysGone(t *testing.T) {
	for now, slots := range map[int64][]Slot{3: {1}, 10: nil} {
		g := Geometry{Slots: 2, SlotBytes: 64}
		arena, err := Private(make([]byte, g.ArenaBytes()))
		require.NoError(t, err)
		shelf, _, _, err := OpenShelf(arena, g, ShelfOpening{Epoch: 1, Serial: 1}, 0)
		require.NoError(t, err)
		for slot, expires := range []int64{0, 5} { // it dies before it gives the first up
			shelf.Begin(Slot(slot))
			shelf.Publish(Slot(slot), &Header{Key: connector.StoreKey{1}, Length: 8, Expires: expires})
		}
		_, found, _, err := OpenShelf(arena, g, ShelfOpening{Epoch: 1, Serial: 100}, now)
		require.NoError(t, err)
		var got []Slot
		for _, f := range found {
			got = append(got, f.Slot)
		}
		require.Equal(t, slots, got)
	}
}
