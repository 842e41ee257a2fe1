package place

import (
	"errors"

	"github.com/kvport/kvport/connector"
)

// tries is how often Find looks again where a block was replaced while it looked.
const tries = 3

// Find says where parts are, all of them or none, without pinning anything and without a message. Each is checked against
// its header; now is in Unix ms. ErrMiss: they are not resident, as far as this host knows. A *RefusalError: a header lies;
// the block is not offered again.
func (h *Host) Find(keys []connector.StoreKey, now int64) ([]Ref, error) {
	for range tries {
		refs := h.lookUp(keys)
		if len(refs) < len(keys) {
			return nil, ErrMiss
		}
		at, err := h.firstGone(refs, now)
		if err == nil {
			return refs, nil
		}
		h.forget(&refs[at])
		if !errors.Is(err, ErrGone) {
			return nil, err
		}
	}
	return nil, ErrMiss
}

// Run is how many of the keys, from the first one on, are those of resident parts. It is otherwise as Find.
func (h *Host) Run(keys []connector.StoreKey, now int64) (n int) {
	for range tries {
		refs := h.lookUp(keys[n:])
		at, err := h.firstGone(refs, now)
		if err == nil {
			return n + len(refs)
		}
		h.forget(&refs[at])
		n += at
	}
	return n
}

// Drop forgets the block of a part: what its slot holds is not what its header says. Until the slot has another use a notice
// of it counts for nothing. If the key lies elsewhere by now, or the slot has another use, that stays.
func (h *Host) Drop(r Ref) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.index.has(&r) {
		return
	}
	for _, part := range h.index.block(r.Slot) {
		h.wrong[part.Slot] = part.generation
	}
	h.index.vacate(r.Slot)
}

// Wrong says whether some slot is known not to hold what its header says (see Drop), and has had no other use since.
func (h *Host) Wrong() bool {
	for {
		s, generation, ok := h.anyWrong()
		switch {
		case !ok:
			return false
		case Word(h.arena.Load(h.g.wordAt(s))) == NewWord(generation, Ready):
			return true
		}
		h.mu.Lock()
		if h.wrong[s] == generation {
			delete(h.wrong, s)
		}
		h.mu.Unlock()
	}
}

func (h *Host) anyWrong() (s Slot, generation uint64, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for s, generation = range h.wrong {
		return s, generation, true
	}
	return 0, 0, false
}

func (h *Host) lookUp(keys []connector.StoreKey) []Ref {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.index.find(keys)
}

func (h *Host) firstGone(refs []Ref, now int64) (at int, err error) {
	for i := range refs {
		if err := h.verify(&refs[i], now); err != nil {
			return i, err
		}
	}
	return 0, nil
}

func (h *Host) forget(r *Ref) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.index.has(r) {
		h.index.vacate(r.Slot)
	}
}

// verify says whether a slot holds the part of a reference: READY, in its generation, with its header.
func (h *Host) verify(r *Ref, now int64) error {
	head, w, err := h.read(r.Slot)
	switch {
	case err != nil:
		return err
	case w.Generation() != r.generation || head.expired(now):
		return ErrGone
	case head.Key != r.Part.Key || head.Length != r.Part.Length || head.Serial != r.serial:
		return &RefusalError{Slot: r.Slot, Reason: HeaderLies}
	}
	return nil
}

// Pin keeps the bytes of a part in their slot until Release, which must follow: an honest plugin gives the slot no other
// use before. A reader without words (NewReader) keeps nothing so: it looks before and after. A pin should last as long as one
// copy. ErrGone: the part was given up since Find; it is loaded by message, or recomputed. A *RefusalError: its header lies.
func (h *Host) Pin(r Ref) (*Pin, error) {
	if !h.g.has(r.Slot) {
		return nil, &RefusalError{Slot: r.Slot, Reason: OutOfRange}
	}
	h.pin(r.Slot, 1) // before the look: rule PLACE-04
	if err := h.verify(&r, 0); err != nil {
		h.pin(r.Slot, ^uint64(0))
		return nil, err
	}
	return &Pin{h: h, ref: r}, nil
}

func (h *Host) pin(s Slot, delta uint64) {
	if h.words != nil {
		h.words.Add(h.g.pinAt(s), delta)
	}
}

// Pin is a part that is being read.
type Pin struct {
	h   *Host
	ref Ref
}

// Bytes are the part's, in place, for reading until Release. A plugin that lies may change them at any time: copy first,
// then verify the digest of the copy.
func (p *Pin) Bytes() []byte { return p.h.g.bytes(p.h.arena, p.ref.Slot, p.ref.Part.Length) }

// Release ends the pin and looks a second time: ErrGone if the slot had another use meanwhile, and then whatever was copied
// counts for nothing. now, in Unix ms, is noted as the time of the hit.
func (p *Pin) Release(now int64) error {
	h := p.h
	h.pin(p.ref.Slot, ^uint64(0))
	if Word(h.arena.Load(h.g.wordAt(p.ref.Slot))) != NewWord(p.ref.generation, Ready) {
		return ErrGone
	}
	if h.words == nil {
		return nil
	}
	use := h.words.Load(h.g.useAt(p.ref.Slot))
	hits := min(use&0xffff+1, 0xffff)
	h.words.Store(h.g.useAt(p.ref.Slot), uint64(now)<<16|hits)
	return nil
}
