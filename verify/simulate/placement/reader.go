package placement

import (
	"errors"

	"github.com/kvport/kvport/internal/place"
)

// reads looks up blocks and copies them, as long as the world goes on. In some worlds it rests in between: then the index holds for long what
// has been given up.
func (w *world) reads() {
	for !w.ending {
		for range w.rng.IntN(w.rest) {
			w.current.before(access{wait: yes})
		}
		w.readBlock(w.rng.IntN(blocks))
	}
}

// claim is what a reader may rely on, from before it looks.
type claim struct {
	block int
	epoch uint64
	ack   acked
}

func (w *world) claims(block int) claim {
	return claim{block: block, epoch: w.epoch, ack: w.acks[block]}
}

// missing fails the world if what was acknowledged is not there, and nobody has taken it back.
func (w *world) missing(c claim, what string) {
	if c.ack.stamp != 0 && w.acks[c.block].stamp == c.ack.stamp && !w.liars && (c.ack.expires == 0 || w.now < c.ack.expires) {
		w.fail("%s: block %d was acknowledged, and is not there", what, c.block)
	}
}

func (w *world) readBlock(block int) {
	c := w.claims(block)
	w.current.before(access{wait: yes})
	refs, err := w.host.Find(keysOf(block), w.now)
	if err != nil {
		w.stats.Misses++
		if errors.Is(err, place.ErrRefused) && !w.o.Damage && !w.o.Liar {
			w.fail("lookup: %v", err)
		}
		w.missing(c, "lookup")
		return
	}
	for i := range refs {
		if !w.readPart(c, i, refs[i]) {
			return
		}
	}
}

// yes is what does not have to be waited for.
func yes() bool { return true }

func (w *world) readPart(c claim, part int, r place.Ref) bool {
	if w.o.Mutant == HitUnchecked {
		w.accept(c, part, w.readTag(r.Slot, 0), w.readTag(r.Slot, 1))
		return true
	}
	pin, err := w.host.Pin(r)
	if err != nil {
		w.missing(c, "pin")
		return false
	}
	if n := len(pin.Bytes()); n > slotBytes {
		w.fail("a part of %d bytes", n)
	}
	w.copying[r.Slot]++
	first, second := w.readTag(r.Slot, 0), w.readTag(r.Slot, 1)
	w.copying[r.Slot]--
	if err := pin.Release(w.now); err != nil && w.o.Mutant != NoSecondLook {
		w.stats.Discarded++
		w.missing(c, "second look")
		return false
	}
	w.accept(c, part, first, second)
	return true
}

// between says that no life of the plugin is open.
func (w *world) between() bool { return w.lane == nil || w.lane.p == nil }

// outlived says that the time of a save is over, so that an older one may be what is left, as from a tier below.
func (w *world) outlived(ack acked) bool { return ack.expires != 0 && ack.expires <= w.now }

// accept checks what a reader believes that it has read.
func (w *world) accept(c claim, part int, first, second uint64) {
	if w.o.Liar && (first != second || !w.signed[first] || first>>48 != tagOf(c.block, part, 0, 0)>>48) {
		w.stats.Digest++ // the digest does not fit
		return
	}
	w.stats.Reads++
	if w.between() {
		w.stats.Alone++
	}
	epoch, serial := first>>32&0xffff, first&0xffff_ffff
	switch {
	case first != second:
		w.fail("wrong bytes: a mixture of %x and %x", first, second)
	case first>>48 != tagOf(c.block, part, 0, 0)>>48:
		w.fail("wrong bytes: %x for part %d of block %d", first, part, c.block)
	case epoch < c.epoch && !w.o.Liar:
		w.fail("wrong bytes: of epoch %d after the reset to %d", epoch, c.epoch)
	case serial < c.ack.serial && w.acks[c.block].stamp == c.ack.stamp && !w.o.Liar && !w.outlived(c.ack):
		w.fail("wrong bytes: of save %d after save %d replaced it", serial, c.ack.serial)
	}
}
