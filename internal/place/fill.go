package place

import "slices"

// Fill is a promotion in progress: a block that the plugin writes into slots itself, from a tier below.
type Fill struct {
	p    *Plugin
	set  *Set
	over bool
}

// Fill takes slots for a block. A serial that the host drew in this life orders the block among saves of its keys; 0 is
// older than all of them. Errors wrap ErrFull, ErrImpossible or ErrKnown.
func (p *Plugin) Fill(s Set) (*Fill, error) {
	if err := p.g.check(s.Parts); err != nil {
		return nil, err
	}
	if p.Find(s.Parts) != nil {
		return nil, ErrKnown
	}
	slots, err := p.take(len(s.Parts), Filling)
	if err != nil {
		return nil, err
	}
	s.Parts, s.Slots, s.epoch = slices.Clone(s.Parts), slots, p.epoch
	p.filling[&s] = struct{}{}
	return &Fill{p: p, set: &s}, nil
}

// Bytes is where a part belongs. Nothing may write there after Publish or Cancel.
func (f *Fill) Bytes(part int) []byte {
	return f.p.g.bytes(f.p.arena, f.set.Slots[part], f.set.Parts[part].Length)
}

// Publish makes the block resident; the notice is for the host. The bytes must be written. What has become known or older
// than a reset meanwhile is not published: ErrKnown, ErrReset.
func (f *Fill) Publish() (Notice, error) {
	if f.over {
		return Notice{}, ErrVoid
	}
	p, s := f.p, f.set
	if s.epoch != p.epoch {
		f.Cancel()
		return Notice{}, ErrReset
	}
	p.Settle()
	for i := range s.Parts {
		if p.resident[s.Parts[i].Key] != nil {
			f.Cancel()
			return Notice{}, ErrKnown
		}
	}
	f.over = true
	delete(p.filling, s)
	for i, slot := range s.Slots {
		w := Word(p.arena.Load(p.g.wordAt(slot)))
		h := s.header(i)
		words := h.Encode(slot, w.Generation())
		p.g.storeHeader(p.arena, slot, &words)
		p.arena.Store(p.g.wordAt(slot), uint64(w.as(Ready)))
	}
	p.keep(s)
	return s.notice(), nil
}

// Cancel frees the slots. It does nothing after Publish.
func (f *Fill) Cancel() {
	if f.over {
		return
	}
	f.over = true
	delete(f.p.filling, f.set)
	for _, slot := range f.set.Slots {
		f.p.release(slot)
	}
}

// header is that of one part of a set.
func (s *Set) header(part int) Header {
	return Header{
		Serial: s.Serial, Key: s.Parts[part].Key, Length: s.Parts[part].Length, Group: s.Parts[part].Group,
		Part: uint16(part), Parts: uint16(len(s.Parts)), Lead: s.Slots[0], Tenant: s.Tenant, Expires: s.Expires, Epoch: s.epoch,
	}
}
