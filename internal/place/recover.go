package place

import (
	"cmp"
	"slices"

	"github.com/kvport/kvport/connector"
)

// recover takes the slots over from the life before. What it left is not trusted: a header counts only with its check,
// a block only with all its parts, and of a key only the block with the highest serial, also if that is not kept: what it has replaced does
// not come back. Every other slot is retired, whatever its word says, and waits for its readers.
func (p *Plugin) recover(drawn uint64, now int64) {
	found := p.left(drawn)
	kept, seen := map[Slot]bool{}, map[connector.StoreKey]bool{}
	for _, s := range latest(together(found), now) {
		keep := !s.expired(now) && !slices.ContainsFunc(s.Parts, func(part Part) bool { return seen[part.Key] })
		for i, slot := range s.Slots {
			seen[s.Parts[i].Key] = true
			if keep {
				p.resident[s.Parts[i].Key] = s
				kept[slot] = true
			}
		}
	}
	for s := range Slot(p.g.Slots) {
		if _, ok := found[s]; ok && !kept[s] {
			p.discard(s, Word(p.arena.Load(p.g.wordAt(s))))
		}
	}
	p.Sweep()
}

// left are the headers of blocks that the life before has left, also of those whose time is over.
func (p *Plugin) left(drawn uint64) (found map[Slot]Header) {
	found = map[Slot]Header{}
	for s := range Slot(p.g.Slots) {
		w := Word(p.arena.Load(p.g.wordAt(s)))
		if w.State() == Free {
			p.free = append(p.free, s)
			continue
		}
		var h Header
		words := p.g.loadHeader(p.arena, s)
		if w.State() == Ready && h.decode(p.g, s, w.Generation(), &words) && h.Epoch == p.epoch && h.Serial <= drawn {
			found[s] = h
			continue
		}
		p.discard(s, w)
	}
	return found
}

// discard retires a slot, in its generation if it is retired already.
func (p *Plugin) discard(s Slot, w Word) {
	if w.State() != Retired {
		p.advance(s, Retired)
	}
	p.retired = append(p.retired, s)
}

// latest sorts sets: first the highest serials, and of those that are equal first what has not expired.
func latest(sets []*Set, now int64) []*Set {
	last := func(s *Set) int {
		if s.expired(now) {
			return 1
		}
		return 0
	}
	slices.SortFunc(sets, func(a, b *Set) int {
		return cmp.Or(cmp.Compare(b.Serial, a.Serial), cmp.Compare(last(a), last(b)), cmp.Compare(a.Slots[0], b.Slots[0]))
	})
	return sets
}

func (s *Set) expired(now int64) bool { return s.Expires != 0 && s.Expires <= now }

// together are the sets all of whose parts were found.
func together(found map[Slot]Header) (sets []*Set) {
	parts := map[Slot][]Slot{}
	for s, h := range found {
		parts[h.Lead] = append(parts[h.Lead], s)
	}
	for lead, slots := range parts {
		head, ok := found[lead]
		if !ok || head.Part != 0 || head.Lead != lead || int(head.Parts) != len(slots) {
			continue
		}
		set := &Set{
			Serial: head.Serial, Tenant: head.Tenant, Expires: head.Expires, epoch: head.Epoch,
			Parts: make([]Part, head.Parts), Slots: make([]Slot, head.Parts),
		}
		if set.fill(&head, slots, found) {
			sets = append(sets, set)
		}
	}
	return sets
}

// fill puts the parts in their places; false if one is missing or does not belong to the head.
func (s *Set) fill(head *Header, slots []Slot, found map[Slot]Header) bool {
	keys := map[connector.StoreKey]bool{}
	places := map[uint16]bool{}
	for _, slot := range slots {
		h := found[slot]
		if h.Serial != head.Serial || h.Parts != head.Parts || h.Expires != head.Expires {
			return false
		}
		keys[h.Key], places[h.Part] = true, true
		s.Parts[h.Part] = h.part()
		s.Slots[h.Part] = slot
	}
	return len(keys) == len(slots) && len(places) == len(slots)
}

func bySlot(sets []*Set) {
	slices.SortFunc(sets, func(a, b *Set) int { return cmp.Compare(a.Slots[0], b.Slots[0]) })
}
