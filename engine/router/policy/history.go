package policy

import (
	"math/bits"
	"slices"

	"github.com/kvport/kvport/engine/router/internal/fairlru"
)

// history remembers which instances have computed or loaded which pieces of prompts. It forgets the least
// recently used pieces of the client that has most, and the end of a prompt before its beginning.
type history struct {
	pieces *fairlru.Table
	words  int      // of 64 places each
	bits   []uint64 // words for each slot of pieces: one bit for the place of each instance
	used   []bool   // by place: it may hold something
	rest   []uint64
	found  []int // slots of the pieces that look has found last, which add is likely to need next
}

func newHistory(pieces int) *history { return &history{pieces: fairlru.New(pieces), words: 1} }

// row is the bits of a slot.
func (h *history) row(slot int) []uint64 { return h.bits[slot*h.words : (slot+1)*h.words] }

// fit makes room for a place.
func (h *history) fit(place int) {
	for len(h.used) <= place {
		h.used = append(h.used, false)
	}
	words := place/64 + 1
	if words <= h.words {
		return
	}
	wide := make([]uint64, len(h.bits)/h.words*words)
	for i := range len(h.bits) / h.words {
		copy(wide[i*words:], h.row(i))
	}
	h.bits = wide
	h.words = words
}

// forget removes what is known about a place.
func (h *history) forget(place int) {
	if place >= len(h.used) || !h.used[place] {
		return
	}
	h.used[place] = false
	for i := place / 64; i < len(h.bits); i += h.words {
		h.bits[i] &^= 1 << (place % 64)
	}
}

// look calls held with the number of leading pieces of the prompt that each place has, if that is not 0.
func (h *history) look(pieces []uint64, held func(place, pieces int)) {
	h.rest = append(h.rest[:0], make([]uint64, h.words)...)
	h.found = h.found[:0]
	for n, piece := range pieces {
		var row []uint64
		if slot, known := h.pieces.Find(piece); known {
			row = h.row(slot)
			h.found = append(h.found, slot)
		}
		if n == 0 {
			copy(h.rest, row)
		}
		left := uint64(0)
		for w := range h.rest {
			has := uint64(0)
			if row != nil {
				has = row[w]
			}
			report(h.rest[w]&^has, w, n, held)
			h.rest[w] &= has
			left |= h.rest[w]
		}
		if left == 0 {
			return
		}
	}
	for w := range h.rest {
		report(h.rest[w], w, len(pieces), held)
	}
}

// report calls held for the places of one word, which have that number of pieces.
func report(word uint64, w, pieces int, held func(place, pieces int)) {
	for ; word != 0 && pieces > 0; word &= word - 1 {
		held(w*64+bits.TrailingZeros64(word), pieces)
	}
}

// find is the bits of a piece; nil if it is not known.
func (h *history) find(piece uint64) []uint64 {
	if slot, known := h.pieces.Find(piece); known {
		return h.row(slot)
	}
	return nil
}

// add notes that places hold all pieces of a prompt of a client. The beginning is the last that is used.
func (h *history) add(pieces []uint64, client uint64, places ...int) {
	for _, place := range places {
		h.used[place] = true
	}
	for i, piece := range slices.Backward(pieces) {
		at := -1
		if i < len(h.found) {
			at = h.found[i]
		}
		slot, known := h.pieces.UseAt(at, piece, client)
		if slot*h.words == len(h.bits) {
			h.bits = append(h.bits, make([]uint64, h.words)...)
		}
		row := h.row(slot)
		if !known {
			clear(row)
		}
		for _, place := range places {
			row[place/64] |= 1 << (place % 64)
		}
	}
}

// drop notes that a place does not hold these pieces.
func (h *history) drop(pieces []uint64, place int) {
	for _, piece := range pieces {
		if row := h.find(piece); row != nil {
			row[place/64] &^= 1 << (place % 64)
		}
	}
}
