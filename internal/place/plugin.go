package place

import (
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/kvport/kvport/connector"
)

// Set is a block in slots of this plugin.
type Set struct {
	Serial  uint64
	Tenant  uint64
	Expires int64
	Parts   []Part
	Slots   []Slot // of the parts
	epoch   uint64
}

// notice is what tells the host about a set.
func (s *Set) notice() Notice { return Notice{Slots: slices.Clone(s.Slots)} }

// Plugin is the plugin's end: it owns the words of all slots that are not LENT. One goroutine at a time may use it, and no
// method ever waits.
type Plugin struct {
	arena, words Memory
	g            Geometry
	epoch        uint64

	free     []Slot
	retired  []Slot // of blocks that were given up: free when nobody reads them
	resident map[connector.StoreKey]*Set
	lent     map[uint64]*Set // by serial
	filling  map[*Set]struct{}
}

// Open is the plugin's end of both memories, which may hold anything: it keeps the blocks that are whole, are of the
// host's epoch, and have not expired by now (in Unix ms), and gives up everything else (rule PLACE-07). The
// host's writers must have ended. Errors wrap ErrGeometry.
func Open(arena, words Memory, g Geometry, o Opening, now int64) (*Plugin, error) {
	if err := g.fits(arena, words); err != nil {
		return nil, err
	}
	if err := g.marked(arena, words); err != nil {
		return nil, err
	}
	p := &Plugin{
		arena: arena, words: words, g: g, epoch: o.Epoch,
		resident: map[connector.StoreKey]*Set{}, lent: map[uint64]*Set{}, filling: map[*Set]struct{}{},
	}
	p.recover(o.Serial, now)
	return p, nil
}

// advance gives a slot another use in a new generation.
func (p *Plugin) advance(s Slot, to State) {
	at := p.g.wordAt(s)
	p.arena.Store(at, uint64(Word(p.arena.Load(at)).next(to)))
}

// release makes a slot free that nobody but this plugin uses.
func (p *Plugin) release(s Slot) {
	at := p.g.wordAt(s)
	p.arena.Store(at, uint64(Word(p.arena.Load(at)).as(Free)))
	p.free = append(p.free, s)
}

// take takes n free slots for another use; ErrFull if there are not enough, and then none is taken.
func (p *Plugin) take(n int, to State) ([]Slot, error) {
	if n > len(p.free) {
		p.Sweep()
	}
	if n > len(p.free) {
		return nil, fmt.Errorf("%d slots, free are %d: %w", n, len(p.free), ErrFull)
	}
	slots := slices.Clone(p.free[len(p.free)-n:])
	p.free = p.free[:len(p.free)-n]
	for _, s := range slots {
		p.advance(s, to)
	}
	return slots, nil
}

// check returns an error that wraps ErrImpossible if no block can have such parts.
func (g Geometry) check(parts []Part) error {
	if len(parts) < 1 || len(parts) > min(g.Slots, math.MaxUint16) {
		return fmt.Errorf("%d parts in %d slots: %w", len(parts), g.Slots, ErrImpossible)
	}
	seen := make(map[connector.StoreKey]bool, len(parts))
	for i := range parts {
		if int64(parts[i].Length) > g.SlotBytes || seen[parts[i].Key] {
			return fmt.Errorf("part %d of %d bytes: %w", i, parts[i].Length, ErrImpossible)
		}
		seen[parts[i].Key] = true
	}
	return nil
}

// Lend answers a request of the host. It declines where it has no free slots: the caller, who decides what is kept,
// retires a block first. Blocks that are saved now expire at expires, in Unix ms, 0 for never.
func (p *Plugin) Lend(r *Request, expires int64) Answer {
	p.Settle()
	if r.Epoch != p.epoch || p.g.check(r.Parts) != nil || p.lent[r.Serial] != nil {
		return Answer{Verdict: Declined}
	}
	if s := p.Find(r.Parts); s != nil && !r.Replace {
		return Answer{Verdict: Known, Slots: slices.Clone(s.Slots), Expires: s.Expires}
	}
	slots, err := p.take(len(r.Parts), Lent)
	if err != nil {
		return Answer{Verdict: Declined}
	}
	p.lent[r.Serial] = &Set{
		Serial: r.Serial, Tenant: r.Tenant, Expires: expires, Parts: slices.Clone(r.Parts), Slots: slots, epoch: r.Epoch,
	}
	return Answer{Verdict: Granted, Slots: slices.Clone(slots), Expires: expires}
}

// Settle takes note of what the host has written: a block all of whose parts are READY is resident, and replaces what was
// there of its keys.
func (p *Plugin) Settle() {
	for _, serial := range slices.Sorted(maps.Keys(p.lent)) {
		s := p.lent[serial]
		if !p.ready(s) {
			continue
		}
		delete(p.lent, serial)
		if s.epoch != p.epoch {
			p.giveUp(s)
		} else {
			p.keep(s)
		}
	}
}

func (p *Plugin) ready(s *Set) bool {
	for _, slot := range s.Slots {
		if Word(p.arena.Load(p.g.wordAt(slot))).State() != Ready {
			return false
		}
	}
	return true
}

// keep makes a set resident. Of each key the set with the higher serial stays.
func (p *Plugin) keep(s *Set) {
	for i := range s.Parts {
		if old := p.resident[s.Parts[i].Key]; old != nil && old.Serial > s.Serial {
			p.giveUp(s)
			return
		}
	}
	for i := range s.Parts {
		if old := p.resident[s.Parts[i].Key]; old != nil {
			p.Retire(old)
		}
	}
	for i := range s.Parts {
		p.resident[s.Parts[i].Key] = s
	}
}

// Returned takes back the slots of a save that did not end.
func (p *Plugin) Returned(r Return) {
	s := p.lent[r.Serial]
	if s == nil {
		return
	}
	delete(p.lent, r.Serial)
	for _, slot := range s.Slots {
		if Word(p.arena.Load(p.g.wordAt(slot))).State() == Lent {
			p.release(slot)
		} else {
			p.advance(slot, Retired) // a rank had written its part
			p.retired = append(p.retired, slot)
		}
	}
	p.Sweep()
}

// Retire gives up a block: all its parts at once.
func (p *Plugin) Retire(s *Set) {
	for i := range s.Parts {
		if p.resident[s.Parts[i].Key] == s {
			delete(p.resident, s.Parts[i].Key)
		}
	}
	p.giveUp(s)
}

// giveUp retires the slots of a set: each word first, the readers' pins then (rule PLACE-04).
func (p *Plugin) giveUp(s *Set) {
	for _, slot := range s.Slots {
		p.advance(slot, Retired)
	}
	p.retired = append(p.retired, s.Slots...)
	p.Sweep()
}

// Sweep frees the retired slots that nobody reads, and returns how many are left.
func (p *Plugin) Sweep() int {
	left := p.retired[:0]
	for _, s := range p.retired {
		if p.words.Load(p.g.pinAt(s)) != 0 {
			left = append(left, s)
			continue
		}
		p.release(s)
	}
	p.retired = left
	return len(left)
}

// Reset gives up every block that is older than a reset of the host, which is then in epoch. Saves and promotions that
// began before are given up when they end.
func (p *Plugin) Reset(epoch uint64) {
	p.epoch = epoch
	p.Settle()
	for _, s := range p.Resident() {
		p.Retire(s)
	}
}

// Find is the resident set that has exactly these parts, or nil.
func (p *Plugin) Find(parts []Part) *Set {
	s := p.resident[parts[0].Key]
	if s == nil || len(s.Parts) != len(parts) {
		return nil
	}
	for i := range parts {
		if s.Parts[i] != parts[i] || p.resident[parts[i].Key] != s {
			return nil
		}
	}
	return s
}

// Resident are all resident sets, in the order of their first slots.
func (p *Plugin) Resident() []*Set {
	sets := make([]*Set, 0, len(p.resident))
	for k, s := range p.resident {
		if k == s.Parts[0].Key {
			sets = append(sets, s)
		}
	}
	bySlot(sets)
	return sets
}

// Notices tell a host about everything that is resident, such as after Open.
func (p *Plugin) Notices() []Notice {
	sets := p.Resident()
	list := make([]Notice, len(sets))
	for i, s := range sets {
		list[i] = s.notice()
	}
	return list
}

// Use is the host's word of a slot's hits: the lower 16 bits count them, the others are the time of the last one in Unix
// ms. It starts again with each use of the slot.
func (p *Plugin) Use(s Slot) (hits uint16, last int64) {
	u := p.words.Load(p.g.useAt(s))
	return uint16(u), int64(u >> 16)
}

// Counts is how many slots are in which use.
type Counts struct{ Free, Lent, Filling, Resident, Retired int }

// Counts counts the slots by use. Together they are all slots.
func (p *Plugin) Counts() Counts {
	c := Counts{Free: len(p.free), Retired: len(p.retired)}
	for _, s := range p.lent {
		c.Lent += len(s.Slots)
	}
	for s := range p.filling {
		c.Filling += len(s.Slots)
	}
	for k, s := range p.resident {
		if k == s.Parts[0].Key {
			c.Resident += len(s.Slots)
		}
	}
	return c
}
