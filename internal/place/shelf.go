package place

import (
	"cmp"
	"slices"
	"sync/atomic"

	"github.com/kvport/kvport/connector"
)

// Shelf is the plugin's end for a plugin that writes its slots itself, but those that it lends ahead of saves (see Loan), and says in its own index what lies where. Each
// block is one part, in a slot that the plugin chooses. There are no words of the host, so it gives slots up without a look
// at pins, and the host copies from it only what a digest covers (rule PLACE-20).
//
// Different slots may be used at the same time, each by one goroutine.
type Shelf struct {
	arena  Memory
	g      Geometry
	epoch  uint64
	serial atomic.Uint64 // the last one that this plugin drew, of those that the host gave it
}

// ShelfOpening is what a host tells a plugin that has a Shelf. Its zero value is for a plugin that no host reads.
type ShelfOpening struct {
	Epoch  uint64
	Serial uint64 // the first one that this life may draw; 0: any, and what is found counts whatever its serial is
}

// Found is a block that the life before left in a slot.
type Found struct {
	Slot Slot
	Header
}

// Private is memory that no other process accesses at the same time, so that it may be on any kind of processor. Errors
// wrap ErrGeometry.
func Private(b []byte) (Memory, error) { return wrap(b) }

// Fit is how many slots of that size, at most limit, fit into a memory of size bytes; 0: not one.
func Fit(size, slotBytes int64, limit int) Geometry {
	g := Geometry{SlotBytes: slotBytes}
	if slotBytes < 1 {
		return g
	}
	g.Slots = int(min(int64(limit), maxSlots, max(0, (size-page)/(g.stride()+headerSize))))
	for g.Slots > 0 && g.ArenaBytes() > size { // what aligning the slots costs
		g.Slots--
	}
	return g
}

// Take notes in an arena that the life of a plugin whose first serial this is uses it, until Leave; false if it does already, by
// another Shelf. A life that died has left another serial.
func Take(arena Memory, serial uint64) bool {
	was := arena.Load(userAt)
	return was != serial && arena.CompareAndSwap(userAt, was, serial)
}

// Leave ends what Take began.
func Leave(arena Memory, serial uint64) { arena.CompareAndSwap(userAt, serial, 0) }

// OpenShelf takes an arena into use, whatever is in it. found are the blocks that are whole, in the order of their serials,
// and torn is the number of slots that hold no whole block, and are neither free nor lent. now is in Unix ms. A memory that was laid
// out otherwise is laid out again; of one that nobody has written only the first page is touched. Errors wrap ErrGeometry.
func OpenShelf(arena Memory, g Geometry, o ShelfOpening, now int64) (s *Shelf, found []Found, torn int, err error) {
	if err := g.fitsArena(arena); err != nil {
		return nil, nil, 0, err
	}
	s = &Shelf{arena: arena, g: g, epoch: o.Epoch}
	if g.markedOne(arena, arenaMagic) {
		found, torn = s.recover(&o, now)
	} else {
		s.layOut()
	}
	last := uint64(0)
	if n := len(found); n > 0 {
		last = found[n-1].Serial
	}
	if o.Serial > 0 {
		last = o.Serial - 1
	}
	s.serial.Store(last)
	return s, found, torn, nil
}

// layOut frees every slot of a memory that holds something else, and marks it.
func (s *Shelf) layOut() {
	for at := int64(0); at < page; at += 8 {
		if at != userAt && s.arena.Load(at) != 0 {
			for slot := range Slot(s.g.Slots) {
				s.free(slot, Word(s.arena.Load(s.g.wordAt(slot))).next(Retired))
			}
			break
		}
	}
	s.g.markOne(s.arena, arenaMagic)
}

// recover finds the blocks of the life before and frees every other slot (rule PLACE-07).
func (s *Shelf) recover(o *ShelfOpening, now int64) (found []Found, torn int) {
	last := map[connector.StoreKey]uint64{}
	for slot := range Slot(s.g.Slots) {
		w := Word(s.arena.Load(s.g.wordAt(slot)))
		if w.State() == Free {
			continue
		}
		h, ok := s.Header(slot)
		switch {
		case !ok || h.Epoch != o.Epoch || o.Serial > 0 && h.Serial >= o.Serial:
			if w.State() != Retired && w.State() != Lent {
				torn++
			}
		default:
			last[h.Key] = max(last[h.Key], h.Serial) // what it has replaced does not come back when its own time is over
			if !h.expired(now) {
				found = append(found, Found{slot, h})
				continue
			}
		}
		s.free(slot, w.next(Retired))
	}
	found = slices.DeleteFunc(found, func(f Found) bool { // of a block that was written again, keep the later one
		old := f.Serial < last[f.Key]
		if old {
			s.Retire(f.Slot)
		}
		return old
	})
	slices.SortFunc(found, func(a, b Found) int { return cmp.Compare(a.Serial, b.Serial) })
	return found, torn
}

// Begin takes a slot for a block that is going to be written there: until Publish it holds none.
func (s *Shelf) Begin(slot Slot) {
	at := s.g.wordAt(slot)
	s.arena.Store(at, uint64(Word(s.arena.Load(at)).next(Filling)))
}

// Bytes are the first n bytes of a slot. Nothing may write there except between Begin and Publish.
func (s *Shelf) Bytes(slot Slot, n int) []byte { return s.g.bytes(s.arena, slot, uint32(n)) }

// Publish says that a slot holds all of a block, whose key, length, tenant and end the header names. Before this its bytes are written.
func (s *Shelf) Publish(slot Slot, h *Header) {
	at := s.g.wordAt(slot)
	w := Word(s.arena.Load(at))
	whole := Header{
		Serial: s.serial.Add(1), Key: h.Key, Length: h.Length, Group: h.Group, Parts: 1, Lead: slot,
		Tenant: h.Tenant, Expires: h.Expires, Epoch: s.epoch,
	}
	words := whole.Encode(slot, w.Generation())
	s.g.storeHeader(s.arena, slot, &words)
	s.arena.Store(at, uint64(w.as(Ready)))
}

// Retire gives up what a slot holds, in a new generation. It does nothing to a slot that is free.
func (s *Shelf) Retire(slot Slot) {
	if w := Word(s.arena.Load(s.g.wordAt(slot))); w.State() != Free {
		s.free(slot, w.next(Retired))
	}
}

// free passes through RETIRED, so that every use of the slot has ended in that state.
func (s *Shelf) free(slot Slot, retired Word) {
	s.arena.Store(s.g.wordAt(slot), uint64(retired))
	s.arena.Store(s.g.wordAt(slot), uint64(retired.as(Free)))
}

// Header is what a slot holds; false if it holds no block, or its header is damaged.
func (s *Shelf) Header(slot Slot) (h Header, ok bool) {
	w := Word(s.arena.Load(s.g.wordAt(slot)))
	if w.State() != Ready {
		return h, false
	}
	words := s.g.loadHeader(s.arena, slot)
	ok = h.decode(s.g, slot, w.Generation(), &words) && h.Parts == 1 && h.Lead == slot
	return h, ok
}
