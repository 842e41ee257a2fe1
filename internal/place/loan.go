package place

// Loan is an empty slot that a plugin has lent ahead of a save (rule PLACE-29).
type Loan struct {
	Slot   Slot
	Serial uint64 // of the block that will be written there, drawn by the plugin
}

// Claim begins to save a block of one part in a slot that was lent ahead, without a Request. The caller writes the slot's bytes and
// ends the save with Publish, or with Drop: then the slot is as lent as it was. Errors wrap ErrImpossible, ErrSaving or
// ErrVoid, or are a *RefusalError: then the slot is none that may be written.
func (h *Host) Claim(l Loan, part Part, tenant uint64) (*Save, error) {
	if err := h.g.check([]Part{part}); err != nil {
		return nil, err
	}
	s, err := h.begin(l, part, tenant)
	if err != nil {
		return nil, err
	}
	begun := false
	defer func() { // also if the memory is gone
		if !begun {
			s.Drop()
		}
	}()
	if err := s.claim([]Slot{l.Slot}); err != nil {
		return nil, err
	}
	if err := s.begin(); err != nil {
		return nil, err
	}
	begun = true
	return s, nil
}

func (h *Host) begin(l Loan, part Part, tenant uint64) (*Save, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case !h.alive:
		return nil, ErrVoid
	case h.saving[part.Key] != nil:
		return nil, ErrSaving
	case l.Serial > h.serial:
		return nil, &RefusalError{Slot: l.Slot, Reason: SerialAhead}
	case l.Serial <= h.former:
		return nil, &RefusalError{Slot: l.Slot, Reason: SerialPast}
	}
	s := &Save{h: h, life: h.life, forgets: h.forgets, request: Request{Serial: l.Serial, Epoch: h.epoch, Tenant: tenant, Parts: []Part{part}}}
	h.saving[part.Key] = s
	return s, nil
}

// Draw draws serials for n slots that are lent ahead, and gives the first.
func (s *Shelf) Draw(n int) (first uint64) { return s.serial.Add(uint64(n)) - uint64(n) + 1 }

// Lend lends an empty slot, and gives the word that it has until the host has written it or Back takes it back. It is named to the
// host then, not before.
func (s *Shelf) Lend(slot Slot) Word {
	at := s.g.wordAt(slot)
	lent := Word(s.arena.Load(at)).next(Lent)
	s.arena.Store(at, uint64(lent))
	return lent
}

// Written is what the host has written into a slot that was lent with that word and serial. over is false as long as the slot is
// lent. ok is false if there is no block that this plugin may keep: then Retire gives the slot up.
func (s *Shelf) Written(slot Slot, lent Word, serial uint64) (h Header, over, ok bool) {
	w := Word(s.arena.Load(s.g.wordAt(slot)))
	if w == lent {
		return h, false, false
	}
	h, ok = s.Header(slot)
	return h, true, ok && w == lent.as(Ready) && h.Serial == serial && h.Epoch == s.epoch
}

// Back takes back a slot that was lent with that word, when the host has said that it does not write it. It does nothing to a slot
// that has had another use since.
func (s *Shelf) Back(slot Slot, lent Word) {
	if Word(s.arena.Load(s.g.wordAt(slot))) == lent {
		s.free(slot, lent.next(Retired))
	}
}
