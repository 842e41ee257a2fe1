package place

import (
	"errors"
	"fmt"
)

// Slot is the number of a slot, from 0.
type Slot uint32

// Geometry is how many slots there are and how large one is. It is the host's: a plugin is told, and nobody reads it
// from shared memory.
type Geometry struct {
	Slots     int
	SlotBytes int64 // the largest part that fits, with its digests
}

// The layout of both memories, in bytes (rules PLACE-01 and PLACE-02).
const (
	page       = 4096
	headerSize = 128
	slotAlign  = 64
	lineSize   = 64 // what a slot has of the host's words

	arenaMagic = 0x3165_6361_6c70_766b // "kvplace1"
	wordsMagic = 0x3164_726f_7770_766b // "kvpword1"

	userAt = 24 // of the arena: see Take

	maxSlots = 1 << 30
	maxBytes = 1 << 45
)

// ErrGeometry says that slots cannot be as they are described, or that a memory has another size or was laid out by
// another version.
var ErrGeometry = errors.New("slots do not fit the memory")

// Validate returns an error that wraps ErrGeometry if there cannot be such slots.
func (g Geometry) Validate() error {
	if g.Slots < 1 || g.Slots > maxSlots || g.SlotBytes < 1 || g.SlotBytes > 1<<32-1 || int64(g.Slots) > maxBytes/(g.stride()+headerSize) {
		return fmt.Errorf("%d slots of %d bytes: %w", g.Slots, g.SlotBytes, ErrGeometry)
	}
	return nil
}

// ArenaBytes is the size of the memory that has headers and slots.
func (g Geometry) ArenaBytes() int64 { return g.bytesAt(Slot(g.Slots)) }

// WordsBytes is the size of the memory that has the host's words.
func (g Geometry) WordsBytes() int64 { return g.pinAt(Slot(g.Slots)) }

// SlotAt is where a slot's bytes begin, and Stride is from there to the next slot's.
func (g Geometry) SlotAt(s Slot) int64 { return g.bytesAt(s) }

// Stride is the distance of two slots.
func (g Geometry) Stride() int64 { return g.stride() }

func (g Geometry) has(s Slot) bool { return int64(s) < int64(g.Slots) }

func (g Geometry) stride() int64 { return (g.SlotBytes + slotAlign - 1) &^ (slotAlign - 1) }

// wordAt is where a slot's header begins, with its word.
func (g Geometry) wordAt(s Slot) int64 { return page + int64(s)*headerSize }

// bytesAt is where a slot's bytes begin.
func (g Geometry) bytesAt(s Slot) int64 {
	return (g.wordAt(Slot(g.Slots))+page-1)&^(page-1) + int64(s)*g.stride()
}

func (g Geometry) pinAt(s Slot) int64 { return page + int64(s)*lineSize }

func (g Geometry) useAt(s Slot) int64 { return g.pinAt(s) + 8 }

// bytes are the first n bytes of a slot.
func (g Geometry) bytes(arena Memory, s Slot, n uint32) []byte {
	return arena.Bytes(g.bytesAt(s), int64(n))
}

// markOne writes the first words of a memory, which say how it is laid out.
func (g Geometry) markOne(m Memory, magic uint64) {
	m.Store(0, magic)
	m.Store(8, uint64(g.SlotBytes))
	m.Store(16, uint64(g.Slots))
}

// marked returns an error that wraps ErrGeometry if the first words are not those that markOne writes.
func (g Geometry) marked(arena, words Memory) error {
	if !g.markedOne(arena, arenaMagic) || !g.markedOne(words, wordsMagic) {
		return fmt.Errorf("the first words of the memory are not those of %d slots of %d bytes: %w", g.Slots, g.SlotBytes, ErrGeometry)
	}
	return nil
}

func (g Geometry) markedOne(m Memory, magic uint64) bool {
	return m.Load(0) == magic && m.Load(8) == uint64(g.SlotBytes) && m.Load(16) == uint64(g.Slots)
}

// fitsArena returns an error that wraps ErrGeometry if the arena does not have the size that the slots need.
func (g Geometry) fitsArena(arena Memory) error {
	if err := g.Validate(); err != nil {
		return err
	}
	if arena.Size() != g.ArenaBytes() {
		return fmt.Errorf("an arena of %d bytes, want %d: %w", arena.Size(), g.ArenaBytes(), ErrGeometry)
	}
	return nil
}

// fits returns an error that wraps ErrGeometry if the memories do not have the sizes that the slots need.
func (g Geometry) fits(arena, words Memory) error {
	if err := g.Validate(); err != nil {
		return err
	}
	if arena.Size() != g.ArenaBytes() || words.Size() != g.WordsBytes() {
		return fmt.Errorf("memories of %d and %d bytes, want %d and %d: %w", arena.Size(), words.Size(), g.ArenaBytes(), g.WordsBytes(), ErrGeometry)
	}
	return nil
}
