package placement

import (
	"encoding/binary"
	"fmt"
	"unsafe"

	"github.com/kvport/kvport/internal/place"
)

// The geometry of every world's slots.
const (
	slotBytes  = 16 // two tags
	page       = 4096
	headerSize = 128
	lineSize   = 64
)

// shared is the memory of a world, and what is wrong with it.
type shared struct {
	g            place.Geometry
	arena, words place.Memory
	raw          []byte
	mutant       Mutant
	careful      bool // the plugin is supposed to look at pins, and to write its own slots only
	careless     bool // it takes every pin for 0
	liar         bool // it lies
	copying      []int
	owner        []*actor // the writer of the host that a slot is lent to
	current      *actor   // who runs; nil: nobody is asked to wait
	violation    error
}

func aligned(n int64) []byte {
	words := make([]uint64, (n+7)/8)
	return unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), n)
}

func newShared(slots int, m Mutant) (*shared, error) {
	g := place.Geometry{Slots: slots, SlotBytes: slotBytes}
	s := &shared{g: g, raw: aligned(g.ArenaBytes()), mutant: m, careful: true, copying: make([]int, slots), owner: make([]*actor, slots)}
	var err error
	if s.arena, err = place.Map(s.raw); err != nil {
		return nil, err
	}
	s.words, err = place.Map(aligned(g.WordsBytes()))
	return s, err
}

func (s *shared) fail(format string, args ...any) {
	if s.violation == nil {
		s.violation = fmt.Errorf(format, args...)
	}
}

// slotOf is the slot of a word of a header or of bytes in the arena; false for the first page.
func (s *shared) slotOf(at int64) (place.Slot, bool) {
	data := s.data()
	switch {
	case at < page:
		return 0, false
	case at < page+int64(s.g.Slots)*headerSize:
		return place.Slot((at - page) / headerSize), true
	}
	return place.Slot((at - data) / 64), at >= data
}

func (s *shared) data() int64 { return s.g.ArenaBytes() - int64(s.g.Slots)*64 }

func (s *shared) tagAt(slot place.Slot, half int) int64 {
	return s.data() + 64*int64(slot) + 8*int64(half)
}

// view is one of the memories as one end sees it: place.Memory. Whichever actor runs makes the access.
type view struct {
	s      *shared
	words  bool
	plugin bool
}

// views are both memories of one end.
func (s *shared) views(plugin bool) (arena, words *view) {
	return &view{s: s, plugin: plugin}, &view{s: s, plugin: plugin, words: true}
}

func (v *view) mem() place.Memory {
	if v.words {
		return v.s.words
	}
	return v.s.arena
}

func (v *view) before(at int64, write, locked bool) {
	v.turn(at, write, locked)
	if write {
		v.may(at)
	}
}

// turn waits until it is this access's turn.
func (v *view) turn(at int64, write, locked bool) {
	if at < 0 || at%8 != 0 || at > v.mem().Size()-8 {
		v.s.fail("an access at %d, outside the memory", at)
	}
	if a := v.s.current; a != nil {
		a.before(access{at: at, words: v.words, write: write, locked: locked})
	}
}

// may checks who writes which word (rule PLACE-03).
func (v *view) may(at int64) {
	if v.words {
		if v.plugin {
			v.s.fail("the plugin wrote a word of the host")
		}
		return
	}
	slot, ok := v.s.slotOf(at)
	switch {
	case !ok:
	case !v.plugin && v.s.owner[slot] != v.s.current && v.s.current != nil:
		v.s.fail("the host wrote slot %d, which it was not lent", slot)
	case v.plugin && v.s.careful && v.s.owner[slot] != nil && v.s.state(slot) == place.Lent:
		v.s.fail("the plugin wrote slot %d, which is lent", slot)
	}
}

func (s *shared) word(slot place.Slot) place.Word {
	return place.Word(s.arena.Load(page + headerSize*int64(slot)))
}

func (s *shared) state(slot place.Slot) place.State { return s.word(slot).State() }

// isWord says whether at is the first word of a header.
func (v *view) isWord(at int64) bool {
	return !v.words && at >= page && at < page+int64(v.s.g.Slots)*headerSize && (at-page)%headerSize == 0
}

func (v *view) isPin(at int64) bool { return v.words && at >= page && (at-page)%lineSize == 0 }

// buffer is the one of whoever runs.
func (v *view) buffer() *buffer {
	if v.s.current == nil {
		return nil
	}
	return v.s.current.buffer
}

func (v *view) release() {
	if a := v.s.current; a != nil {
		a.release()
	}
}

// Load is one access.
func (v *view) Load(at int64) uint64 {
	v.before(at, false, false)
	value := v.mem().Load(at)
	if b := v.buffer(); b != nil {
		value = b.forward(v.words, at, value)
	}
	if v.plugin && v.isPin(at) {
		if v.s.mutant == PinsIgnored || v.s.careless || v.s.mutant == PinsForgotten && v.s.current != nil && v.s.current.opens {
			value = 0
		}
		v.release()
	} else if !v.plugin && v.isWord(at) {
		v.release()
	}
	return value
}

// Store is one access, or what a mutant makes of it.
func (v *view) Store(at int64, value uint64) {
	value = v.changed(at, value)
	w := place.Word(value)
	retires := v.plugin && v.isWord(at) && w.State() == place.Retired
	switch {
	case retires && v.s.mutant == RetireSkipped:
	case retires && v.s.mutant == RetireAfterLook && v.s.current != nil:
		v.s.current.held = append(v.s.current.held, func() { v.store(at, value) })
	default:
		v.store(at, value)
	}
}

func (v *view) store(at int64, value uint64) {
	if b := v.buffer(); b != nil {
		v.may(at)
		b.push(v, at, value)
		return
	}
	v.before(at, true, false)
	v.put(at, value)
}

// put makes a store seen by all.
func (v *view) put(at int64, value uint64) {
	if v.plugin && v.isWord(at) {
		slot, _ := v.s.slotOf(at)
		if s := place.Word(value).State(); s != place.Ready && s != place.Retired {
			v.s.unread(slot)
		}
	} else if slot, ok := v.s.slotOf(at); !v.words && ok && at >= v.s.data() {
		v.s.unread(slot)
	}
	v.mem().Store(at, value)
}

// unread checks that nobody reads a slot that gets another use (rule PLACE-04).
func (s *shared) unread(slot place.Slot) {
	if s.careful && s.copying[slot] > 0 {
		s.fail("slot %d gets another use while it is read", slot)
	}
}

// changed is what a mutant without generations stores.
func (v *view) changed(at int64, value uint64) uint64 {
	if v.s.mutant == NoGeneration && v.isWord(at) {
		return uint64(place.NewWord(1, place.Word(value).State()))
	}
	return value
}

// CompareAndSwap is one access, which waits for the stores before it. A plugin that lies may have lent the slot to another save before this
// one has published it: then it is no fault of the host if it fails, and writes nothing.
func (v *view) CompareAndSwap(at int64, old, with uint64) bool {
	v.turn(at, true, true)
	if !v.s.liar {
		v.may(at)
	}
	ok := v.mem().CompareAndSwap(at, old, v.changed(at, with))
	if ok && v.s.liar {
		v.may(at)
	}
	return ok
}

// Add is one access, which waits for the stores before it.
func (v *view) Add(at int64, delta uint64) {
	if b := v.buffer(); b != nil && b.plainAdd {
		v.Store(at, v.Load(at)+delta)
		return
	}
	add := func() {
		v.before(at, true, true)
		v.mem().Add(at, delta)
	}
	if v.s.mutant == LookBeforePin && !v.plugin && delta == 1 {
		v.s.current.held = append(v.s.current.held, add)
		return
	}
	add()
}

// Bytes are never further than a slot.
func (v *view) Bytes(at, n int64) []byte {
	if d := at - v.s.data(); d < 0 || d%64 != 0 || n < 0 || n > slotBytes || at+n > v.s.g.ArenaBytes() {
		v.s.fail("%d bytes at %d are not in one slot", n, at)
		return make([]byte, max(n, 0))
	}
	return v.mem().Bytes(at, n)
}

// Size is that of the memory.
func (v *view) Size() int64 { return v.mem().Size() }

// readTag and writeTag access one half of a slot's bytes.
func (s *shared) readTag(slot place.Slot, half int) uint64 {
	at := s.tagAt(slot, half)
	s.current.before(access{at: at})
	return binary.LittleEndian.Uint64(s.raw[at:])
}

func (v *view) writeTag(slot place.Slot, half int, tag uint64) {
	v.store(v.s.tagAt(slot, half), tag)
}

// slotOfBytes is the slot that bytes in place belong to.
func (s *shared) slotOfBytes(b []byte) place.Slot {
	if len(b) == 0 {
		return 0
	}
	at := int64(uintptr(unsafe.Pointer(&b[0])) - uintptr(unsafe.Pointer(&s.raw[0])))
	return place.Slot((at - s.data()) / 64)
}
