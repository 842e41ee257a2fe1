package placement

import (
	"encoding/binary"

	"github.com/kvport/kvport/internal/place"
)

// supervises kills the plugin now and then, starts its next life, and resets.
func (w *world) supervises() {
	for !w.ending {
		pause := 20 + w.rng.IntN(200)
		for range pause {
			if w.ending {
				break
			}
			w.current.before(access{wait: yes})
			w.now += int64(w.rng.IntN(2))
		}
		if w.ending && w.lane != nil && !w.liars {
			return
		}
		if !w.ending && w.rng.IntN(3) == 0 {
			w.reset()
		} else {
			w.die()
			for range w.rng.IntN(80) { // the host goes on with what is resident
				w.current.before(access{wait: yes})
			}
			w.reopen()
		}
	}
}

// reset has the plugin answer a reset, if it lives long enough.
func (w *world) reset() {
	w.stats.Resets++
	for b := range w.acks {
		w.takeBack(b)
	}
	w.epoch++
	epoch := w.epoch
	if w.o.Mutant != ResetUntold {
		epoch = w.host.Reset()
	}
	w.requests = append(w.requests, message{reset: epoch})
}

// die kills the plugin where it is.
func (w *world) die() {
	w.stats.Deaths++
	if w.o.Mutant != NoFence {
		w.lane.kill()
	}
	w.lane = nil
	w.requests = nil
	clear(w.answers)
	w.life++
	w.host.Died()
	if w.liars {
		w.distrust()
	}
	if w.o.Damage && w.rng.IntN(2) == 0 {
		w.damage(place.Slot(w.rng.IntN(w.g.Slots)))
	}
}

// damage makes the header of a READY slot one of another block.
func (w *world) damage(slot place.Slot) {
	at := page + headerSize*int(slot) + 16
	if w.state(slot) != place.Ready || w.owner[slot] != nil || w.raw[at] == small {
		return // there is no other block with one part
	}
	w.stats.Lies++
	w.distrust()
	w.raw[at] ^= 1
}

// repair makes the checks of all headers right.
func (w *world) repair() {
	for slot := range place.Slot(w.g.Slots) {
		at := page + headerSize*int64(slot)
		var h place.Header
		copy(h.Key[:], w.raw[at+16:at+48])
		word := func(o int64) uint64 { return binary.LittleEndian.Uint64(w.raw[at+o:]) }
		h.Serial, h.Length, h.Group, h.Part = word(8), uint32(word(48)), uint16(word(48)>>32), uint16(word(48)>>48)
		h.Parts, h.Lead, h.Tenant, h.Expires, h.Epoch = uint16(word(56)), place.Slot(word(56)>>32), word(64), int64(word(72)), word(80)
		words := h.Encode(slot, w.word(slot).Generation())
		w.arena.Store(at+88, words[len(words)-1])
	}
}

// reopen starts the next life, once the host's writers have ended.
func (w *world) reopen() {
	for {
		opening, err := w.host.Reopen()
		if err == nil {
			w.opening = opening
			break
		}
		if w.o.Mutant == NoBarrier {
			w.opening.Serial = 1 << 31
			w.openLane()
		}
		w.current.before(access{wait: yes})
	}
	if w.o.Mutant == AdoptUnchecked {
		w.repair()
	}
	if w.o.Mutant == IndexDropped {
		w.host.Forget()
	}
	if w.o.Mutant == LifeStartsOver {
		w.startOver()
	}
	w.liars = false
	w.openLane()
}

// distrust takes back all that was acknowledged, also what is about to be.
func (w *world) distrust() {
	for b := range w.acks {
		w.takeBack(b)
		w.evicted[b]++
	}
}
