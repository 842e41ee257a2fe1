package placement

import (
	"encoding/binary"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/place"
)

// lie writes something into memory, or says something.
func (l *lane) lie() {
	w := l.w
	w.stats.Lies++
	slot := place.Slot(w.rng.IntN(w.g.Slots))
	switch w.rng.IntN(7) {
	case 0: // a word
		l.v.Store(page+headerSize*int64(slot), uint64(place.NewWord(uint64(w.rng.IntN(6)), place.State(w.rng.IntN(6)))))
	case 1: // the word that the slot has, in another state
		l.v.Store(page+headerSize*int64(slot), uint64(place.NewWord(w.word(slot).Generation(), place.State(w.rng.IntN(6)))))
	case 2: // any word of a header, bit by bit
		at := page + headerSize*int64(slot) + int64(8*w.rng.IntN(16))
		l.v.Store(at, w.arena.Load(at)^1<<w.rng.IntN(64))
	case 3:
		l.forge(slot)
	case 4: // bytes of any block
		tag := tagOf(w.rng.IntN(blocks), w.rng.IntN(ranks), w.epoch, uint64(w.rng.IntN(20)))
		binary.LittleEndian.PutUint64(w.raw[w.tagAt(slot, w.rng.IntN(2)):], tag)
	case 5:
		l.tell(place.Notice{Slots: l.anySlots()})
	case 6:
		l.answer()
	}
}

// forge writes a header whose check is right.
func (l *lane) forge(slot place.Slot) {
	w := l.w
	h := place.Header{
		Serial: uint64(w.rng.IntN(30)), Key: connector.StoreKey{byte(w.rng.IntN(blocks)), byte(w.rng.IntN(ranks))},
		Length: uint32(w.rng.IntN(slotBytes + 2)), Part: uint16(w.rng.IntN(3)), Parts: uint16(w.rng.IntN(4)),
		Lead: place.Slot(w.rng.IntN(w.g.Slots + 1)), Epoch: uint64(w.rng.IntN(int(w.epoch) + 2)),
	}
	if w.rng.IntN(3) > 0 {
		h.Length, h.Group = slotBytes, uint16(h.Key[1])
	}
	generation := uint64(w.rng.IntN(6))
	words := h.Encode(slot, generation)
	for i, word := range words {
		l.v.Store(page+headerSize*int64(slot)+8+int64(8*i), word)
	}
	l.v.Store(page+headerSize*int64(slot), uint64(place.NewWord(generation, place.Ready)))
}

func (l *lane) anySlots() (slots []place.Slot) {
	for range l.w.rng.IntN(4) {
		slots = append(slots, place.Slot(l.w.rng.IntN(l.w.g.Slots+1)))
	}
	return slots
}

// answer says anything to a request, and sometimes lends slots, twice or not.
func (l *lane) answer() {
	w := l.w
	if len(w.requests) == 0 {
		return
	}
	m := w.requests[0]
	w.requests = w.requests[1:]
	if m.request == nil {
		return
	}
	a := place.Answer{Verdict: place.Verdict(w.rng.IntN(5)), Slots: l.anySlots()}
	if w.rng.IntN(2) == 0 {
		a.Verdict, a.Slots = place.Granted, nil
		for i := range m.request.Parts {
			slot := place.Slot((int(m.request.Serial) + i) % w.g.Slots)
			if w.rng.IntN(3) > 0 {
				l.v.Store(page+headerSize*int64(slot), uint64(w.word(slot)&^0xff)+256|uint64(place.Lent))
			}
			a.Slots = append(a.Slots, slot)
		}
	}
	w.answers[m.request.Serial] = a
}
