package place

import (
	"cmp"
	"slices"

	"github.com/kvport/kvport/connector"
)

// recover takes the slots over from the life before. What it left is not trusted: a header counts only with its check,
// a block only with all its parts, and of a key only the block with the highest serial. Every other slot is
// retired, whatever its word says, and waits for its readers.
func (p *Plugin) recover(drawn uint64, now int64) {
	found, over := p.left(drawn, now)
	sets := together(found)
	slices.SortFunc(sets, func(a, b *Set) int {
		return cmp.Or(cmp.Compare(b.Serial, a.Serial), cmp.Compare(a.Slots[0], b.Slots[0]))
	})
	kept := map[Slot]bool{}
	for _, s := range sets {
		if p.overlaps(s) || s.older(over) {
			continue
		}
		for i, slot := range s.Slots {
			p.resident[s.Parts[i].Key] = s
			kept[slot] = true
		}
	}
	for s := range Slot(p.g.Slots) {
		if _, ok := found[s]; ok && !kept[s] {
			p.discard(s, Word(p.arena.Load(p.g.wordAt(s))))
		}
	}
	p.Sweep()
}

// left are the headers of blocks that the life before has left. over are the highest serials of those whose time is over, by key: what they
// have replaced does not come back.
func (p *Plugin) left(drawn uint64, now int64) (found map[Slot]Header, over map[connector.StoreKey]uint64) {
	found, over = map[Slot]Header{}, map[connector.StoreKey]uint64{}
	for s := range Slot(p.g.Slots) {
		w := Word(p.arena.Load(p.g.wordAt(s)))
		if w.State() == Free {
			p.free = append(p.free, s)
			continue
		}
		var h Header
		words := p.g.loadHeader(p.arena, s)
		right := w.State() == Ready && h.decode(p.g, s, w.Generation(), &words) && h.Epoch == p.epoch && h.Serial <= drawn
		if right && !h.expired(now) {
			found[s] = h
			continue
		}
		if right {
			over[h.Key] = max(over[h.Key], h.Serial)
		}
		p.discard(s, w)
	}
	return found, over
}

// discard retires a slot, in its generation if it is retired already.
func (p *Plugin) discard(s Slot, w Word) {
	if w.State() != Retired {
		p.advance(s, Retired)
	}
	p.retired = append(p.retired, s)
}

func (p *Plugin) overlaps(s *Set) bool {
	return slices.ContainsFunc(s.Parts, func(part Part) bool { return p.resident[part.Key] != nil })
}

// older says whether one of the parts was saved again later.
func (s *Set) older(later map[connector.StoreKey]uint64) bool {
	return slices.ContainsFunc(s.Parts, func(part Part) bool { return later[part.Key] > s.Serial })
}

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
