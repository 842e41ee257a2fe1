package tier

import (
	"encoding/binary"
	"sync/atomic"
	"unsafe"

	"github.com/zeebo/xxh3"

	"github.com/kvport/kvport/connector"
)

// Both tiers are a row of slots of one size with a row of headers before them:
//
//	0      superblock: magic, version, slot size, number of slots, checksum
//	4096   headers, 128 bytes each
//	       slots, from the next multiple of 4096 on
//
// A slot is written between two states of its header: it is taken out of use, filled, and made ready
// when all of it is there. Whoever finds it in between finds no block (rule OFF-02).
const (
	superSize  = 4096
	headerSize = 128
	slotAlign  = 64
	magic      = "kvport tier 1\n\x00\x00"
)

// The states of a slot. Any other value is a damaged header.
const (
	stateFree    = 0
	stateWriting = 0x57524954
	stateReady   = 0x52454459
)

// header is what is known of the block in a slot.
type header struct {
	length     uint32 // of the block in bytes
	generation uint64 // grows with every write: the order of writing
	key        connector.StoreKey
	expires    int64 // Unix time in ms; 0: never
	tenant     uint64
	data       xxh3.Uint128 // of the block's bytes; zero in memory, where a reader's host has a digest
}

// encode writes all but the state, which comes first.
func (h *header) encode(b []byte) {
	binary.LittleEndian.PutUint32(b[4:], h.length)
	binary.LittleEndian.PutUint64(b[8:], h.generation)
	copy(b[16:48], h.key[:])
	binary.LittleEndian.PutUint64(b[48:], uint64(h.expires))
	binary.LittleEndian.PutUint64(b[56:], h.tenant)
	binary.LittleEndian.PutUint64(b[64:], h.data.Lo)
	binary.LittleEndian.PutUint64(b[72:], h.data.Hi)
	binary.LittleEndian.PutUint64(b[80:], xxh3.Hash(b[4:80]))
}

// decode reads a header; false if its bytes are not what was written.
func (h *header) decode(b []byte) bool {
	h.length = binary.LittleEndian.Uint32(b[4:])
	h.generation = binary.LittleEndian.Uint64(b[8:])
	copy(h.key[:], b[16:48])
	h.expires = int64(binary.LittleEndian.Uint64(b[48:]))
	h.tenant = binary.LittleEndian.Uint64(b[56:])
	h.data = xxh3.Uint128{Lo: binary.LittleEndian.Uint64(b[64:]), Hi: binary.LittleEndian.Uint64(b[72:])}
	return binary.LittleEndian.Uint64(b[80:]) == xxh3.Hash(b[4:80])
}

// shape is the geometry of a row of slots.
type shape struct {
	slotBytes int64 // the largest block
	slots     int
}

// fit is how many slots of the given size fit into total bytes.
func fit(total, slotBytes int64) shape {
	s := shape{slotBytes: slotBytes}
	s.slots = int(min(MaxEntries, max(0, (total-superSize)/(s.stride()+headerSize))))
	for s.slots > 0 && need(s.slots, slotBytes) > total { // what aligning the slots costs
		s.slots--
	}
	return s
}

// need is how many bytes n slots take.
func need(n int, slotBytes int64) int64 {
	s := shape{slotBytes: slotBytes, slots: n}
	return s.dataAt() + int64(n)*s.stride()
}

func (s shape) stride() int64 { return (s.slotBytes + slotAlign - 1) &^ (slotAlign - 1) }

func (s shape) headerAt(id uint32) int64 { return superSize + int64(id)*headerSize }

func (s shape) dataAt() int64 {
	return (superSize + int64(s.slots)*headerSize + superSize - 1) &^ (superSize - 1)
}

func (s shape) slotAt(id uint32) int64 { return s.dataAt() + int64(id)*s.stride() }

// super is the superblock, as far as it says something.
func (s shape) super() []byte {
	b := make([]byte, 64)
	copy(b, magic)
	binary.LittleEndian.PutUint64(b[16:], uint64(s.slotBytes))
	binary.LittleEndian.PutUint64(b[24:], uint64(s.slots))
	binary.LittleEndian.PutUint64(b[32:], xxh3.Hash(b[:32]))
	return b
}

// word is a state in shared memory. It is stored after what it vouches for, also in the eyes of the
// process that finds it when this one is dead.
func word(b []byte) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&b[0])) }
