package place

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"

	"github.com/kvport/kvport/connector"
)

// Header says what a READY slot holds. Its place and its words are those of rule PLACE-01.
type Header struct {
	Serial  uint64 // drawn by the host for each save; 0: promoted by a plugin that does not know it
	Key     connector.StoreKey
	Length  uint32 // bytes of the part
	Group   uint16
	Part    uint16 // which of the block's parts this is
	Parts   uint16 // parts of the block, which are kept and given up together
	Lead    Slot   // the slot of part 0
	Tenant  uint64
	Expires int64  // Unix time in ms; 0: never
	Epoch   uint64 // of the host, when the block was saved or promoted
}

// headerWords is the number of a header's words after the first, the last of which is the check.
const headerWords = 11

// sum is the check of a header: it covers the slot's number and its generation too, so that a header is right only where
// and when it was written.
func sum(s Slot, generation uint64, words *[headerWords]uint64) uint64 {
	var b [8 * (headerWords + 1)]byte
	binary.LittleEndian.PutUint64(b[0:], uint64(s))
	binary.LittleEndian.PutUint64(b[8:], generation)
	for i, w := range words[:headerWords-1] {
		binary.LittleEndian.PutUint64(b[16+8*i:], w)
	}
	return xxh3.Hash(b[:])
}

// Encode is the header as the words that follow the slot's word.
func (h *Header) Encode(s Slot, generation uint64) (words [headerWords]uint64) {
	words[0] = h.Serial
	for i := range 4 {
		words[1+i] = binary.LittleEndian.Uint64(h.Key[8*i:])
	}
	words[5] = uint64(h.Length) | uint64(h.Group)<<32 | uint64(h.Part)<<48
	words[6] = uint64(h.Parts) | uint64(h.Lead)<<32
	words[7] = h.Tenant
	words[8] = uint64(h.Expires)
	words[9] = h.Epoch
	words[10] = sum(s, generation, &words)
	return words
}

// decode reads a header; false if its words are not what was written for this slot and generation, or a part of it is
// impossible.
func (h *Header) decode(g Geometry, s Slot, generation uint64, words *[headerWords]uint64) bool {
	h.Serial = words[0]
	for i := range 4 {
		binary.LittleEndian.PutUint64(h.Key[8*i:], words[1+i])
	}
	h.Length, h.Group, h.Part = uint32(words[5]), uint16(words[5]>>32), uint16(words[5]>>48)
	h.Parts, h.Lead = uint16(words[6]), Slot(words[6]>>32)
	h.Tenant, h.Expires, h.Epoch = words[7], int64(words[8]), words[9]
	return words[headerWords-1] == sum(s, generation, words) && words[6]>>16&0xffff == 0 &&
		int64(h.Length) <= g.SlotBytes && h.Part < h.Parts && g.has(h.Lead)
}

func (h *Header) expired(now int64) bool { return h.Expires != 0 && h.Expires <= now }

// loadHeader reads the words of a header one by one; decode says whether they belong together.
func (g Geometry) loadHeader(arena Memory, s Slot) (words [headerWords]uint64) {
	for i := range words {
		words[i] = arena.Load(g.wordAt(s) + 8 + int64(8*i))
	}
	return words
}

func (g Geometry) storeHeader(arena Memory, s Slot, words *[headerWords]uint64) {
	for i, w := range words {
		arena.Store(g.wordAt(s)+8+int64(8*i), w)
	}
}
