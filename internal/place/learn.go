package place

import (
	"errors"
	"slices"
)

// Notice takes a notice of the plugin: the block comes into the index if its slots hold it. ErrGone: they did when the
// notice was sent, or a block with a higher serial is there. A *RefusalError: no honest plugin sends that.
func (h *Host) Notice(n *Notice, now int64) error { return h.learn(n.Slots, nil, now) }

// Knows says whether the index has what lies in a slot now, so that a notice of it says nothing new.
func (h *Host) Knows(s Slot) bool {
	if !h.g.has(s) {
		return false
	}
	w := Word(h.arena.Load(h.g.wordAt(s)))
	h.mu.Lock()
	defer h.mu.Unlock()
	r := &h.index.slots[s]
	return r.listed && w == NewWord(r.generation, Ready)
}

// moment is what a host knew when it began to look at slots that a plugin named.
type moment struct {
	turns []uint64 // of the slots
	epoch uint64
}

// learn puts a block into the index of which a plugin says that these slots hold it. If parts are given, it must be that
// block.
func (h *Host) learn(slots []Slot, parts []Part, now int64) error {
	if !h.fit(slots) || parts != nil && len(parts) != len(slots) {
		return &RefusalError{Reason: Count}
	}
	began, err := h.look(slots)
	if err != nil {
		return err
	}
	refs := make([]Ref, len(slots))
	for i, s := range slots {
		head, w, err := h.read(s)
		switch {
		case err != nil:
			return err
		case h.ahead(head.Serial):
			return &RefusalError{Slot: s, Reason: SerialAhead}
		case !head.belongs(i, slots) || i > 0 && head.Serial != refs[0].serial:
			return ErrGone // another block, since the plugin spoke
		case !head.counts(began.epoch, now):
			return ErrGone
		}
		refs[i] = Ref{Slot: s, serial: head.Serial, generation: w.Generation(), Part: head.part()}
	}
	if parts != nil && !hold(refs, parts) {
		return ErrGone
	}
	return h.enter(refs, &began)
}

// fit says whether a block can lie in these slots, none of which is named twice: a header may say something else each time that it
// is read.
func (h *Host) fit(slots []Slot) bool {
	return len(slots) > 0 && len(slots) <= h.g.Slots && len(slices.Compact(slices.Sorted(slices.Values(slots)))) == len(slots)
}

// belongs says whether the header is that of part i of a block in these slots.
func (h *Header) belongs(i int, slots []Slot) bool {
	return int(h.Part) == i && int(h.Parts) == len(slots) && h.Lead == slots[0]
}

// counts says whether a block is neither older than the last reset nor over.
func (h *Header) counts(epoch uint64, now int64) bool { return h.Epoch == epoch && !h.expired(now) }

func (h *Header) part() Part { return Part{Key: h.Key, Length: h.Length, Group: h.Group} }

// hold says whether slots hold the parts.
func hold(refs []Ref, parts []Part) bool {
	return slices.EqualFunc(refs, parts, func(r Ref, p Part) bool { return r.Part == p })
}

// ahead says whether a serial has not been drawn. A save that was drawn after the host began to look may be in the slot by
// now.
func (h *Host) ahead(serial uint64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return serial > h.serial
}

// look notes the moment at which the host begins to look at slots.
func (h *Host) look(slots []Slot) (moment, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	began := moment{turns: make([]uint64, len(slots)), epoch: h.epoch}
	for i, s := range slots {
		switch {
		case !h.g.has(s):
			return began, &RefusalError{Slot: s, Reason: OutOfRange}
		case h.writing[s] != nil:
			return began, ErrGone // it was lent since
		}
		began.turns[i] = h.turns[s]
	}
	return began, nil
}

// enter puts a block into the index if there was no reset, and none of its slots got another use, since the host began to
// look at them, none is known to hold other bytes, and no block with a higher serial has one of its keys.
func (h *Host) enter(refs []Ref, began *moment) error {
	_, err := h.insert(refs, func() error {
		if h.epoch != began.epoch {
			return ErrGone
		}
		for i, r := range refs {
			generation, wrong := h.wrong[r.Slot]
			if h.turns[r.Slot] != began.turns[i] || wrong && generation == r.generation {
				return ErrGone
			}
		}
		return nil
	}, func() {
		for _, r := range refs {
			h.turns[r.Slot]++
			delete(h.wrong, r.Slot)
		}
	})
	return err
}

// insert puts a block into the index, if may allows it, and calls then; the caller's functions are called with the host's lock. Blocks with higher
// serials that have its keys stay, unless the plugin has given them up: nobody may have looked at them since. ErrGone: these are in the way, also if
// their time is over (rule PLACE-13), or the block itself has been given up. A *RefusalError: the header of one of them, or of the block, lies; it is not offered again.
func (h *Host) insert(refs []Ref, may func() error, then func()) (higher []Ref, err error) {
	var seen []Ref // with lower serials, that were placed before the block was last looked at
	for try := 0; ; try++ {
		hidden := func(lower []Ref) bool { return try == tries || len(lower) == 0 || slices.Equal(lower, seen) }
		higher, lower, err := h.tryInsert(refs, hidden, may, then)
		switch {
		case err != nil:
			return nil, err
		case len(higher) > 0 && try == tries:
			return higher, ErrGone
		case len(higher) > 0:
			if err := h.giveWay(higher); err != nil {
				return higher, err
			}
			continue
		case hidden(lower):
			return nil, nil
		}
		// What has a lower serial may have been placed since the block was given up. Nobody else would find out that it is hidden.
		if _, err := h.firstGone(refs, 0); err != nil {
			return nil, err
		}
		seen = lower
	}
}

// tryInsert inserts a block, unless there are others with higher serials, or those with lower ones must not be hidden.
func (h *Host) tryInsert(refs []Ref, hidden func(lower []Ref) bool, may func() error, then func()) (higher, lower []Ref, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := may(); err != nil {
		return nil, nil, err
	}
	higher, lower = h.index.room(refs)
	if len(higher) == 0 && hidden(lower) {
		h.index.insert(refs)
		then()
	}
	return higher, lower, nil
}

// giveWay forgets blocks that the plugin has given up. ErrGone: one is there.
func (h *Host) giveWay(refs []Ref) error {
	for i := range refs {
		err := h.verify(&refs[i], 0)
		if err == nil {
			return ErrGone
		}
		h.forget(&refs[i])
		if !errors.Is(err, ErrGone) {
			return err
		}
	}
	return nil
}

// read is the header of a READY slot. ErrGone: it is not READY, or is not any more. A *RefusalError: the header is not what the
// writer of the slot wrote.
func (h *Host) read(s Slot) (head Header, w Word, err error) {
	at := h.g.wordAt(s)
	w = Word(h.arena.Load(at))
	if w.State() != Ready {
		return head, w, ErrGone
	}
	words := h.g.loadHeader(h.arena, s)
	if head.decode(h.g, s, w.Generation(), &words) {
		return head, w, nil
	}
	if Word(h.arena.Load(at)) != w {
		return head, w, ErrGone // it was written meanwhile
	}
	return head, w, &RefusalError{Slot: s, Reason: HeaderLies}
}
