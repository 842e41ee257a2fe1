package placement

import (
	"errors"

	"github.com/kvport/kvport/internal/place"
)

// writes saves blocks, as long as the world goes on.
func (w *world) writes() {
	for !w.ending {
		w.current.until(func() bool { return w.ending || w.lane != nil })
		w.save(w.rng.IntN(blocks), w.rng.IntN(4) == 0)
	}
}

func (w *world) save(block int, replace bool) {
	if replace && w.o.Mutant == ReplaceInPlace {
		w.overwrite(block)
		return
	}
	s, err := w.host.Reserve(partsOf(block), 1, replace)
	if err != nil {
		return // somebody else saves it, or the plugin is dead
	}
	life, serial, evictions, from := w.life, s.Request().Serial, w.evicted[block], w.source()
	w.requests = append(w.requests, message{request: s.Request(), block: block})
	w.current.until(func() bool { _, ok := w.answers[serial]; return ok || w.life != life })
	answer, ok := w.answers[serial]
	if !ok {
		s.Drop()
		return
	}
	delete(w.answers, serial)
	verdict, err := s.Accept(&answer, w.now)
	switch {
	case !w.check("answer", err, from):
		w.useAnyway(block, s, &answer, err)
		w.giveBack(s)
	case verdict == place.Known:
		w.stats.Known++
		w.acknowledge(block, 0, answer.Expires, evictions)
	default:
		w.write(block, s, &answer, evictions)
	}
}

// write copies the parts into their slots, and publishes them.
func (w *world) write(block int, s *place.Save, answer *place.Answer, evictions int) {
	me, serial := w.current, s.Request().Serial
	for _, slot := range answer.Slots {
		w.owner[slot] = me
	}
	defer func() {
		for _, slot := range answer.Slots {
			if w.owner[slot] == me {
				w.owner[slot] = nil
			}
		}
	}()
	for i, slot := range answer.Slots {
		if b := s.Bytes(i); len(b) != slotBytes || w.slotOfBytes(b) != slot {
			w.fail("a part of %d bytes in another slot than %d", len(b), slot)
		}
		ack := func() { w.acknowledge(block, serial, answer.Expires, evictions) }
		if !w.writePart(block, i, s, slot, ack) {
			w.giveBack(s)
			return
		}
	}
}

// writePart copies one part and publishes it; false if the save ends with it.
func (w *world) writePart(block, part int, s *place.Save, slot place.Slot, ack func()) bool {
	last := part == len(s.Request().Parts)-1
	if w.o.Mutant == ReadyBeforeBytes {
		_, _ = s.Publish(part)
		ack()
	}
	host, _ := w.views(false)
	tag := w.sign(tagOf(block, part, s.Request().Epoch, s.Request().Serial))
	host.writeTag(slot, 0, tag)
	host.writeTag(slot, 1, tag)
	if w.rng.IntN(12) == 0 {
		return false
	}
	if last && s.Request().Replace {
		w.takeBack(block) // until the index has the new one
	}
	if last && w.o.Mutant == AckBeforeReady {
		ack()
	}
	done, err := s.Publish(part)
	if !w.check("publish", err, w.source()) {
		return false
	}
	if done {
		w.stats.Saves++
		if s.Request().Replace {
			w.stats.Replaced++
		}
	}
	if done || w.o.Mutant == RankAlone && part == 0 {
		ack()
	}
	return true
}

// acknowledge notes that a block was saved, unless it was given up since.
func (w *world) acknowledge(block int, serial uint64, expires int64, evictions int) {
	if w.evicted[block] != evictions || w.acks[block].stamp != 0 && serial == 0 {
		return
	}
	w.stamp++
	w.acks[block] = acked{stamp: w.stamp, serial: serial, expires: expires}
}

func (w *world) takeBack(block int) { w.acks[block] = acked{} }

// giveBack ends a save that did not succeed.
func (w *world) giveBack(s *place.Save) {
	if r, told := s.Drop(); told && w.o.Mutant != ReturnForgotten {
		w.stats.Returned++
		w.requests = append(w.requests, message{back: &r})
	}
}

// sign makes a tag that a digest would cover.
func (w *world) sign(tag uint64) uint64 {
	w.signed[tag] = true
	return tag
}

// useAnyway writes slots that the host should have refused.
func (w *world) useAnyway(block int, s *place.Save, answer *place.Answer, err error) {
	var r *place.RefusalError
	if w.o.Mutant != LentTwiceAccepted || !errors.As(err, &r) || r.Reason != place.LentTwice {
		return
	}
	host, _ := w.views(false)
	for i, slot := range answer.Slots {
		if int(slot) < w.g.Slots {
			host.writeTag(slot, 0, tagOf(block, i, s.Request().Epoch, s.Request().Serial))
		}
	}
}

// overwrite writes a new copy of a block over the one that is there.
func (w *world) overwrite(block int) {
	refs, err := w.host.Find(keysOf(block), w.now)
	if err != nil {
		return
	}
	host, _ := w.views(false)
	for i, r := range refs {
		w.owner[r.Slot] = w.current
		for half := range 2 {
			host.writeTag(r.Slot, half, tagOf(block, i, w.epoch, 1<<30))
		}
		w.owner[r.Slot] = nil
	}
}
