package policy

import "math/bits"

// history remembers which instances have computed or loaded which pieces of prompts. It has two generations: what is
// used goes to the young one, and when that is full, it becomes the old one and what was in the old one is forgotten.
// So it forgets the pieces that were not used for longest, and the end of a prompt before its beginning.
type history struct {
	most       int // pieces of one generation
	words      int // of 64 places each
	young, old generation
	used       []bool  // by place: it may hold something
	at         []int32 // scratch: rows of the last prompt in young, or -1
	rest       []uint64
}

// generation holds a row of bits for each piece, one bit for the place of each instance.
type generation struct {
	rows map[uint64]int32 // piece -> row
	bits []uint64         // words for each row
}

func newHistory(pieces int) *history {
	return &history{most: max(1, pieces/2), words: 1, young: newGeneration(), old: newGeneration()}
}

func newGeneration() generation { return generation{rows: map[uint64]int32{}} }

// row is the bits of a row.
func (g *generation) row(i int32, words int) []uint64 {
	return g.bits[int(i)*words : (int(i)+1)*words]
}

// fit makes room for a place.
func (h *history) fit(place int) {
	for len(h.used) <= place {
		h.used = append(h.used, false)
	}
	words := place/64 + 1
	if words <= h.words {
		return
	}
	for _, g := range []*generation{&h.young, &h.old} {
		wide := make([]uint64, len(g.bits)/h.words*words)
		for i := range len(g.bits) / h.words {
			copy(wide[i*words:], g.row(int32(i), h.words))
		}
		g.bits = wide
	}
	h.words = words
}

// forget removes what is known about a place.
func (h *history) forget(place int) {
	if place >= len(h.used) || !h.used[place] {
		return
	}
	h.used[place] = false
	for _, g := range []*generation{&h.young, &h.old} {
		for i := place / 64; i < len(g.bits); i += h.words {
			g.bits[i] &^= 1 << (place % 64)
		}
	}
}

// look calls held with the number of leading pieces of the prompt that each place has, if that is not 0. It remembers
// where the pieces are for add.
func (h *history) look(pieces []uint64, held func(place, pieces int)) {
	h.at = h.at[:0]
	h.rest = append(h.rest[:0], make([]uint64, h.words)...)
	for n, piece := range pieces {
		i, row := h.find(piece)
		h.at = append(h.at, i)
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

// find is the bits of a piece, and its row if that is in the young generation, else -1.
func (h *history) find(piece uint64) (young int32, row []uint64) {
	if i, ok := h.young.rows[piece]; ok {
		return i, h.young.row(i, h.words)
	}
	if i, ok := h.old.rows[piece]; ok {
		return -1, h.old.row(i, h.words)
	}
	return -1, nil
}

// add notes that the places hold all pieces of the prompt for which look was called last.
func (h *history) add(pieces []uint64, places []int) {
	if len(h.young.rows)+len(pieces) > h.most && len(h.young.rows) > 0 {
		h.old, h.young = h.young, newGeneration()
		h.at = h.at[:0] // those were rows of the generation that is old now
	}
	for _, place := range places {
		h.used[place] = true
	}
	for n, piece := range pieces {
		var row []uint64
		if n < len(h.at) && h.at[n] >= 0 {
			row = h.young.row(h.at[n], h.words)
		} else {
			row = h.promote(piece)
		}
		for _, place := range places {
			row[place/64] |= 1 << (place % 64)
		}
	}
}

// note notes that a place holds all pieces of a prompt.
func (h *history) note(pieces []uint64, place int) {
	h.look(pieces, func(int, int) {})
	h.add(pieces, []int{place})
}

// drop notes that a place does not hold these pieces.
func (h *history) drop(pieces []uint64, place int) {
	for _, piece := range pieces {
		for _, g := range []*generation{&h.young, &h.old} {
			if i, ok := g.rows[piece]; ok {
				g.row(i, h.words)[place/64] &^= 1 << (place % 64)
			}
		}
	}
}

// promote finds the bits of a piece in the young generation, or makes them there from those of the old one.
func (h *history) promote(piece uint64) []uint64 {
	young, row := h.find(piece)
	if young >= 0 {
		return row
	}
	young = int32(len(h.young.rows))
	h.young.rows[piece] = young
	h.young.bits = append(h.young.bits, make([]uint64, h.words)...)
	to := h.young.row(young, h.words)
	copy(to, row)
	return to
}
