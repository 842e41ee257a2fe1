package place

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/kvport/kvport/connector"
)

// Save is one block on its way from the host into slots.
type Save struct {
	h       *Host
	request Request
	life    uint64
	forgets uint64 // of the host, when a save into a slot that was lent ahead began
	verdict Verdict
	expires int64

	// Of a save whose slots are lent; written under the host's lock.
	refs      []Ref
	former    []uint64 // generation in which a save that is about to end had the slot; noFormer
	published []bool   // or about to be
	leaving   []bool   // nothing is written any more, except the word
	left      int
	over      bool
}

// Reserve begins to save a block; the caller sends the Request and gives the answer to Accept. A
// save ends with Publish of its last part, with an Accept that says Known or ErrDeclined, or with Drop, which follows every
// other error and does nothing after the end. Errors wrap ErrImpossible, ErrSaving (one of the
// keys is on its way already) or ErrVoid (no life of the plugin is open, or there are no words).
func (h *Host) Reserve(parts []Part, tenant uint64, replace bool) (*Save, error) {
	if err := h.g.check(parts); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.alive || h.words == nil {
		return nil, ErrVoid
	}
	for i := range parts {
		if h.saving[parts[i].Key] != nil {
			return nil, ErrSaving
		}
	}
	h.serial++
	s := &Save{h: h, life: h.life, forgets: h.forgets, request: Request{
		Serial: h.serial, Epoch: h.epoch, Tenant: tenant, Replace: replace, Parts: slices.Clone(parts),
	}}
	for i := range parts {
		h.saving[parts[i].Key] = s
	}
	return s, nil
}

// Request is what the plugin is asked.
func (s *Save) Request() *Request { return &s.request }

// Accept takes the plugin's answer. Granted: the caller writes the parts and publishes each. Known: the block is resident,
// and the save has succeeded. Every error means that nothing was saved: ErrDeclined, ErrReset, ErrVoid, ErrGone (it was
// known when the plugin answered), or a *RefusalError; Drop follows.
func (s *Save) Accept(a *Answer, now int64) (Verdict, error) {
	switch a.Verdict {
	case Granted:
		s.expires = a.Expires
		if err := s.claim(a.Slots); err != nil {
			return 0, err
		}
		if err := s.begin(); err != nil {
			return 0, err
		}
		return Granted, nil
	case Known:
		if err := s.h.learn(a.Slots, s.request.Parts, now); err != nil {
			return 0, err
		}
		s.end()
		return Known, nil
	case Declined:
		s.end()
		return 0, ErrDeclined
	}
	return 0, &RefusalError{Reason: NoVerdict}
}

// noFormer is not a generation.
const noFormer = ^uint64(0)

// claim notes that the slots are this save's; all or none of them.
func (s *Save) claim(slots []Slot) error {
	h := s.h
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case s.over || s.refs != nil: // a save takes one answer that lends, also if it is refused
		return ErrVoid
	case s.life != h.life:
		return ErrVoid
	case s.stale():
		return ErrReset
	case len(slots) != len(s.request.Parts):
		return &RefusalError{Reason: Count}
	}
	former := make([]uint64, len(slots))
	for i, slot := range slots {
		if !h.g.has(slot) {
			return &RefusalError{Slot: slot, Reason: OutOfRange}
		}
		var mayBe bool
		if former[i], mayBe = h.writing[slot].leaves(slot); !mayBe || slices.Contains(slots[:i], slot) {
			return &RefusalError{Slot: slot, Reason: LentTwice}
		}
	}
	s.refs, s.former = make([]Ref, len(slots)), former
	for i, slot := range slots {
		h.writing[slot] = s
		s.refs[i] = Ref{Slot: slot, Part: s.request.Parts[i], serial: s.request.Serial}
	}
	return nil
}

// leaves says whether a slot may be lent to another save now: this one does not have it, or is making it READY, and a
// quick plugin has given it another use before the host has taken note. Then the generation must be another one.
func (s *Save) leaves(slot Slot) (generation uint64, ok bool) {
	if s == nil {
		return noFormer, true
	}
	for i := range s.refs {
		if s.refs[i].Slot == slot && s.verdict == Granted {
			return s.refs[i].generation, s.leaving[i]
		}
	}
	return 0, false
}

// begin looks whether the slots are as the answer says. From here on the host may write them.
func (s *Save) begin() error {
	h := s.h
	for i := range s.refs {
		slot := s.refs[i].Slot
		w := Word(h.arena.Load(h.g.wordAt(slot)))
		switch {
		case w.State() != Lent:
			return &RefusalError{Slot: slot, Reason: NotLent}
		case w.Generation() == s.former[i]:
			return &RefusalError{Slot: slot, Reason: LentTwice}
		case h.words != nil && h.words.Load(h.g.pinAt(slot)) != 0:
			return &RefusalError{Slot: slot, Reason: Pinned}
		}
		s.refs[i].generation = w.Generation()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range s.refs {
		h.index.vacate(s.refs[i].Slot)
		h.turns[s.refs[i].Slot]++
	}
	s.verdict, s.published, s.leaving, s.left = Granted, make([]bool, len(s.refs)), make([]bool, len(s.refs)), len(s.refs)
	return nil
}

// Bytes is where a part of a granted save belongs. Nobody may write there after Publish of the part, or Drop.
func (s *Save) Bytes(part int) []byte {
	return s.h.g.bytes(s.h.arena, s.refs[part].Slot, s.refs[part].Part.Length)
}

// Publish makes a part READY whose bytes and digests are written; a copy past the caches ends with an SFENCE. With the
// last part the block is resident (done), and then the save may be acknowledged, not before (rule PLACE-05). Ranks may
// publish their parts at the same time. Errors wrap ErrReset, ErrVoid, ErrRefused (by the slot, or by a block with a higher serial that was
// in its way), or ErrGone: a block with a higher serial has one of its keys, and other parts, or a time at which it expires. Drop follows. The
// slot may be READY then, and the plugin keeps or gives up what it finds there.
func (s *Save) Publish(part int) (done bool, err error) {
	h := s.h
	if err := s.may(part); err != nil {
		return false, err
	}
	r := &s.refs[part]
	head := Header{
		Serial: s.request.Serial, Key: r.Part.Key, Length: r.Part.Length, Group: r.Part.Group, Part: uint16(part),
		Parts: uint16(len(s.refs)), Lead: s.refs[0].Slot, Tenant: s.request.Tenant, Expires: s.expires, Epoch: s.request.Epoch,
	}
	words := head.Encode(r.Slot, r.generation)
	h.g.storeHeader(h.arena, r.Slot, &words)
	if h.words != nil {
		h.words.Store(h.g.useAt(r.Slot), 0)
	}
	h.mu.Lock()
	s.leaving[part] = true
	h.mu.Unlock()
	lent := NewWord(r.generation, Lent)
	if !h.arena.CompareAndSwap(h.g.wordAt(r.Slot), uint64(lent), uint64(lent.as(Ready))) {
		return false, &RefusalError{Slot: r.Slot, Reason: WordChanged}
	}
	if last, err := s.arrived(); !last || err != nil {
		return false, err
	}
	return s.finish()
}

// stale says whether everything was dropped since the save began. The caller holds the host's lock.
func (s *Save) stale() bool { return s.request.Epoch != s.h.epoch || s.forgets != s.h.forgets }

// may claims the right to publish a part, once.
func (s *Save) may(part int) error {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	switch {
	case s.over || s.verdict != Granted || part < 0 || part >= len(s.refs) || s.published[part]:
		return fmt.Errorf("part %d: %w", part, ErrVoid)
	case s.stale():
		return ErrReset
	}
	s.published[part] = true
	return nil
}

// arrived counts a part that is READY, and says whether it is the last one.
func (s *Save) arrived() (last bool, err error) {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	if err := s.ended(); err != nil {
		return false, err
	}
	s.left--
	return s.left == 0, nil
}

// ended is why a save does not succeed any more, or nil. The caller holds the host's lock.
func (s *Save) ended() error {
	switch {
	case s.over:
		return ErrVoid
	case s.stale():
		return ErrReset
	}
	return nil
}

// finish puts a block into the index all of whose parts are READY.
func (s *Save) finish() (done bool, err error) {
	h := s.h
	higher, err := h.insert(s.refs, func() error {
		if err := s.ended(); err != nil {
			return err
		}
		for i := range s.refs {
			if h.writing[s.refs[i].Slot] != s { // it was lent again
				return ErrGone
			}
		}
		return nil
	}, s.endLocked)
	switch {
	case s.covered(higher):
		return true, nil
	case higher == nil && errors.Is(err, ErrGone): // it was resident, and the plugin has given it up already
		return s.succeed()
	}
	return err == nil, err
}

// succeed ends a save whose block was resident, unless it is over.
func (s *Save) succeed() (done bool, err error) {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	if err := s.ended(); err != nil {
		return false, err
	}
	s.endLocked()
	return true, nil
}

// covered says whether blocks with higher serials have all parts of the save, and ends it then: what was saved is resident, in their slots. One
// that will expire does not count: what time it is, nobody says here.
func (s *Save) covered(higher []Ref) bool {
	if len(higher) != len(s.refs) {
		return false
	}
	keys := make([]connector.StoreKey, len(higher))
	for i := range higher {
		if higher[i].Part != s.refs[i].Part || s.h.verify(&higher[i], math.MaxInt64) != nil {
			return false
		}
		keys[i] = higher[i].Part.Key
	}
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	if s.ended() != nil || !slices.Equal(s.h.index.find(keys), higher) {
		return false
	}
	s.endLocked()
	return true
}

// Lent says whether the slot of a save that Claim has begun is lent as it was: its word was not touched.
func (s *Save) Lent() bool {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	return !s.leaving[0]
}

// Drop ends a save that did not succeed, when nobody writes its slots any more. The Return is for the plugin, also if it
// was never heard to answer; ok is false if nothing that the plugin lent is left.
func (s *Save) Drop() (r Return, ok bool) {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	if s.over {
		return Return{}, false
	}
	s.endLocked()
	return Return{Serial: s.request.Serial}, s.life == s.h.life && s.h.alive
}

func (s *Save) end() {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	s.endLocked()
}

func (s *Save) endLocked() {
	if s.over {
		return
	}
	s.over = true
	for i := range s.refs {
		if s.h.writing[s.refs[i].Slot] == s {
			delete(s.h.writing, s.refs[i].Slot)
			s.h.turns[s.refs[i].Slot]++
		}
	}
	for i := range s.request.Parts {
		delete(s.h.saving, s.request.Parts[i].Key)
	}
}
