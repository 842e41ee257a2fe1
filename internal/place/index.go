package place

import (
	"hash/maphash"
	"math/bits"
	"slices"

	"github.com/kvport/kvport/connector"
)

// atOnce is how many keys a lookup reads the heads of before it looks whether the first of them is there.
const atOnce = 64

// index says in which slots the resident blocks are. It is private memory of the host, whose size follows from the number of
// slots, whatever a plugin says. A lookup comes when none of it is in the processor's caches, so a key costs one line of each
// array; and there are no pointers for the garbage collector to follow.
type index struct {
	seed  maphash.Seed // so that nobody can choose keys whose hashes are the same
	heads []uint32     // of the chains of slots whose keys have the same hash; 0: none, else the slot and 1
	slots []resident
	used  bool // something was inserted since it was empty
}

// resident is what the index knows of a slot, in one cache line. Its zero value: nothing lies there.
type resident struct {
	key        connector.StoreKey
	serial     uint64
	generation uint64
	length     uint32
	group      uint16
	listed     bool   // it is in a chain: no other slot is said to hold its key
	next       uint32 // in the chain, as heads
	peer       uint32 // the next part of the block, as heads: each leads to all of them; of a block of one part it is the slot itself
}

// Ref is a part that was resident when somebody looked.
type Ref struct {
	Slot       Slot
	Part       Part
	serial     uint64
	generation uint64
}

func newIndex(slots int) index {
	return index{seed: maphash.MakeSeed(), heads: make([]uint32, 2<<bits.Len(uint(slots-1))), slots: make([]resident, slots)}
}

// len is the number of blocks of which a part can be found.
func (x *index) len() (n int) {
	for s := range x.slots {
		if x.slots[s].listed && !x.earlier(Slot(s)) {
			n++
		}
	}
	return n
}

// earlier says whether a part of the same block can be found in a slot before this one.
func (x *index) earlier(s Slot) bool {
	for p := x.peer(s); p != s; p = x.peer(p) {
		if p < s && x.slots[p].listed {
			return true
		}
	}
	return false
}

func (x *index) peer(s Slot) Slot { return Slot(x.slots[s].peer - 1) }

// room drops what the slots of a block held before, and says which others have some of its keys: those with higher serials and those with lower ones.
func (x *index) room(refs []Ref) (higher, lower []Ref) {
	x.used = true
	for i := range refs {
		x.vacate(refs[i].Slot)
	}
	for i := range refs {
		r := &refs[i]
		old, ok := x.slot(*x.head(&r.Part.Key), &r.Part.Key)
		switch {
		case !ok:
		case x.slots[old].serial > r.serial:
			higher = append(higher, x.ref(old))
		default:
			lower = append(lower, x.ref(old))
		}
	}
	return higher, lower
}

// insert adds a block, all of its parts, for which there is room: its keys are found there from now on.
func (x *index) insert(refs []Ref) {
	for i := range refs {
		r := &refs[i]
		x.slots[r.Slot] = resident{
			key: r.Part.Key, serial: r.serial, generation: r.generation, length: r.Part.Length, group: r.Part.Group,
			peer: uint32(refs[(i+1)%len(refs)].Slot) + 1,
		}
	}
	for i := range refs {
		r := &refs[i]
		if old, ok := x.slot(*x.head(&r.Part.Key), &r.Part.Key); ok {
			x.unlist(old)
		}
		x.list(r.Slot)
	}
}

// clear drops all blocks, in place: there may be gigabytes of them, and a lock is held.
func (x *index) clear() {
	if !x.used {
		return
	}
	clear(x.heads)
	clear(x.slots)
	x.seed, x.used = maphash.MakeSeed(), false
}

// vacate drops the block of which a slot holds a part: all its parts.
func (x *index) vacate(s Slot) {
	for x.slots[s].peer != 0 {
		next := x.peer(s)
		if x.slots[s].listed {
			x.unlist(s)
		}
		x.slots[s] = resident{}
		s = next
	}
}

// list puts a slot at the head of the chain of its key.
func (x *index) list(s Slot) {
	head := x.head(&x.slots[s].key)
	x.slots[s].next, x.slots[s].listed = *head, true
	*head = uint32(s) + 1
}

// unlist takes a slot out of the chain of its key.
func (x *index) unlist(s Slot) {
	link := x.head(&x.slots[s].key)
	for *link != uint32(s)+1 {
		link = &x.slots[*link-1].next
	}
	*link, x.slots[s].listed = x.slots[s].next, false
}

// head is where the chain of a key begins.
func (x *index) head(k *connector.StoreKey) *uint32 {
	return &x.heads[maphash.Bytes(x.seed, k[:])&uint64(len(x.heads)-1)]
}

// slot finds a key in the chain that begins there.
func (x *index) slot(link uint32, k *connector.StoreKey) (s Slot, ok bool) {
	for ; link != 0; link = x.slots[link-1].next {
		if x.slots[link-1].key == *k {
			return Slot(link - 1), true
		}
	}
	return 0, false
}

// ref is what a slot holds.
func (x *index) ref(s Slot) Ref {
	r := &x.slots[s]
	return Ref{Slot: s, Part: Part{Key: r.key, Length: r.length, Group: r.group}, serial: r.serial, generation: r.generation}
}

// has says whether a slot holds what it held when somebody looked.
func (x *index) has(r *Ref) bool { return x.slots[r.Slot].peer != 0 && x.ref(r.Slot) == *r }

// block are the parts of the block of which a slot holds one, from that one on.
func (x *index) block(s Slot) (refs []Ref) {
	refs = append(refs, x.ref(s))
	for p := x.peer(s); p != s; p = x.peer(p) {
		refs = append(refs, x.ref(p))
	}
	return refs
}

// find is where the keys are: those before the first one that is missing.
func (x *index) find(keys []connector.StoreKey) []Ref {
	refs := make([]Ref, 0, len(keys))
	for some := range slices.Chunk(keys, atOnce) {
		var heads [atOnce]uint32
		for i := range some { // all of them first: the processor waits for many lines at a time
			heads[i] = *x.head(&some[i])
		}
		for i := range some {
			s, ok := x.slot(heads[i], &some[i])
			if !ok {
				return refs
			}
			refs = append(refs, x.ref(s))
		}
	}
	return refs
}
