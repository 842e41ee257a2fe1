package place

import "github.com/kvport/kvport/connector"

// index says in which slots the resident blocks are. It is private memory of the host and never larger than the number of
// slots, whatever a plugin says.
type index struct {
	keys  map[connector.StoreKey]*entry
	slots []*entry
}

// entry is one block.
type entry struct {
	serial uint64
	refs   []Ref // its parts
}

// Ref is a part that was resident when somebody looked.
type Ref struct {
	Slot       Slot
	Part       Part
	serial     uint64
	generation uint64
}

func newIndex(slots int) index {
	return index{keys: map[connector.StoreKey]*entry{}, slots: make([]*entry, slots)}
}

func (x *index) len() int {
	seen := map[*entry]bool{}
	for _, e := range x.keys {
		seen[e] = true
	}
	return len(seen)
}

// insert adds a block. Whatever its slots held before is gone; of each key the entry with the higher serial stays.
func (x *index) insert(e *entry) {
	for _, r := range e.refs {
		if old := x.slots[r.Slot]; old != nil && old != e {
			x.remove(old)
		}
		x.slots[r.Slot] = e
	}
	for _, r := range e.refs {
		if old := x.keys[r.Part.Key]; old == nil || old.serial <= e.serial {
			x.keys[r.Part.Key] = e
		}
	}
}

// remove drops a block: all its parts.
func (x *index) remove(e *entry) {
	for _, r := range e.refs {
		if x.keys[r.Part.Key] == e {
			delete(x.keys, r.Part.Key)
		}
		if x.slots[r.Slot] == e {
			x.slots[r.Slot] = nil
		}
	}
}

// vacate drops what a slot held.
func (x *index) vacate(s Slot) {
	if e := x.slots[s]; e != nil {
		x.remove(e)
	}
}

// find is where the keys are: those before the first one that is missing.
func (x *index) find(keys []connector.StoreKey) (refs []Ref, entries []*entry) {
	refs, entries = make([]Ref, 0, len(keys)), make([]*entry, 0, len(keys))
	for _, k := range keys {
		e := x.keys[k]
		if e == nil {
			break
		}
		refs, entries = append(refs, Ref{}), append(entries, e)
		for _, r := range e.refs {
			if r.Part.Key == k {
				refs[len(refs)-1] = r
			}
		}
	}
	return refs, entries
}
