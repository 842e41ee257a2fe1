package tier

import (
	"fmt"
	"math"
	"sync"

	"github.com/kvport/kvport/connector"
)

// MaxEntries is the largest number of entries of an Index.
const MaxEntries = math.MaxInt32

// Index says which key lies in which of n numbered entries, and which entry is given up for a new key.
// It holds no block: entry i stands for slot i of whatever does. All methods may be called
// concurrently; Has never waits for a change elsewhere in the index.
//
// An entry is free, reserved (for a block that is being written, found by nobody), visible, or
// detached: its key was removed while somebody had it pinned, and it becomes free with the last pin.
// A reserved entry has its place in the eviction policy already, in the order of reservation, so that
// blocks which are written together are judged as if they came one by one.
type Index struct {
	keys  []connector.StoreKey // of visible entries
	table *table

	mu      sync.Mutex
	entries entries
	policy  policy
	free    list
	visible int
	pins    map[uint32]int      // entries that may not go, and how often they are pinned
	kept    map[uint32]struct{} // entries that Keep pinned
	came    func(id uint32)     // called with an entry that has become visible; may be nil
	gone    func(id uint32)     // called with a visible entry before its key goes; may be nil
}

// Marks of an entry. The low three bits belong to the policy.
const (
	detached = 1 << 7 // its key is gone
	reserved = 1 << 6 // its block is being written
)

// NewIndex makes an index of n entries that evicts by the named policy; "" is LRU. Errors wrap
// connector.ErrIncompatible.
func NewIndex(n int, policy string) (*Index, error) {
	if n < 1 || n > MaxEntries {
		return nil, fmt.Errorf("an index of %d entries, want 1..%d: %w", n, MaxEntries, connector.ErrIncompatible)
	}
	x := &Index{keys: make([]connector.StoreKey, n), pins: map[uint32]int{}, kept: map[uint32]struct{}{}}
	x.table = newTable(x.keys)
	x.entries = entries{links: newLinks(n), flags: make([]uint8, n)}
	x.entries.hash = func(id uint32) uint64 { return x.table.hashOf(&x.keys[id]) }
	var err error
	if x.policy, err = newPolicy(policy, &x.entries, n); err != nil {
		return nil, err
	}
	x.free = newList()
	for id := n - 1; id >= 0; id-- {
		x.entries.push(&x.free, uint32(id))
	}
	return x, nil
}

// Has reports whether a key is visible. It changes nothing.
func (x *Index) Has(k connector.StoreKey) bool {
	return x.table.find(&k, x.table.hashOf(&k)) != none
}

// entry is the entry of a visible key, or none.
func (x *Index) entry(k connector.StoreKey) uint32 { return x.table.find(&k, x.table.hashOf(&k)) }

// Len is the number of visible keys.
func (x *Index) Len() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.visible
}

// Acquire pins the entry of a key until Release. With use it counts as a hit.
func (x *Index) Acquire(k connector.StoreKey, use bool) (id uint32, ok bool) {
	h := x.table.hashOf(&k)
	x.mu.Lock()
	defer x.mu.Unlock()
	id = x.table.find(&k, h)
	if id == none {
		return 0, false
	}
	x.pins[id]++
	if use {
		x.policy.touch(id)
	}
	return id, true
}

// Touch counts a hit of a key.
func (x *Index) Touch(k connector.StoreKey) {
	h := x.table.hashOf(&k)
	x.mu.Lock()
	defer x.mu.Unlock()
	if id := x.table.find(&k, h); id != none {
		x.policy.touch(id)
	}
}

// Release takes back one pin.
func (x *Index) Release(id uint32) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.pins[id]--; x.pins[id] > 0 {
		return
	}
	delete(x.pins, id)
	if x.entries.flags[id]&detached != 0 {
		x.recycle(id)
	}
}

func (x *Index) recycle(id uint32) {
	x.entries.flags[id] = 0
	x.entries.push(&x.free, id)
}

// Victim is what Reserve evicted.
type Victim struct {
	Key     connector.StoreKey
	Evicted bool
}

// Reserve gives an entry for a block of key k, which is not visible: a free one, or another key's,
// which is then gone. It fails with ErrPinned when every entry is pinned or reserved.
func (x *Index) Reserve(k connector.StoreKey) (id uint32, v Victim, err error) {
	h := x.table.hashOf(&k)
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.free.n > 0 {
		id = x.free.head
		x.enter(id, h)
		return id, v, nil
	}
	id = x.policy.evict(h, x.pinned)
	if id == none {
		return 0, v, ErrPinned
	}
	x.leave(id)
	v = Victim{Key: x.keys[id], Evicted: true}
	x.table.remove(&v.Key, x.table.hashOf(&v.Key))
	x.visible--
	x.reserve(id, h)
	return id, v, nil
}

// enter reserves a free entry for a key.
func (x *Index) enter(id uint32, h uint64) {
	x.entries.cut(&x.free, id)
	x.reserve(id, h)
}

func (x *Index) reserve(id uint32, h uint64) {
	x.entries.flags[id] = reserved
	x.policy.add(id, h)
}

func (x *Index) pinned(id uint32) bool {
	_, kept := x.kept[id]
	return kept || x.pins[id] > 0 || x.entries.flags[id]&reserved != 0
}

func (x *Index) leave(id uint32) {
	delete(x.kept, id)
	if x.gone != nil {
		x.gone(id)
	}
}

// Keep pins the entry of a key until Unkeep, or until the key is removed: eviction does not take it.
func (x *Index) Keep(k connector.StoreKey) bool {
	h := x.table.hashOf(&k)
	x.mu.Lock()
	defer x.mu.Unlock()
	id := x.table.find(&k, h)
	if id != none {
		x.kept[id] = struct{}{}
		x.policy.touch(id) // so that it leaves the queue of what may never be wanted again
	}
	return id != none
}

// Unkeep takes back what Keep did.
func (x *Index) Unkeep(k connector.StoreKey) {
	h := x.table.hashOf(&k)
	x.mu.Lock()
	defer x.mu.Unlock()
	if id := x.table.find(&k, h); id != none {
		delete(x.kept, id)
	}
}

// Commit makes a reserved entry visible as k, in place of another entry that is. At no moment is k
// not found then.
func (x *Index) Commit(id uint32, k connector.StoreKey) { x.commit(id, k, 0) }

func (x *Index) commit(id uint32, k connector.StoreKey, pins int) {
	h := x.table.hashOf(&k)
	x.mu.Lock()
	defer x.mu.Unlock()
	x.keys[id] = k
	if pins > 0 {
		x.pins[id] += pins
	}
	if old := x.table.find(&k, h); old != none {
		x.leave(old)
		x.table.replace(&k, h, id)
		x.drop(old)
	} else {
		x.table.insert(id, h)
	}
	x.entries.flags[id] &^= reserved
	x.visible++
	if x.came != nil {
		x.came(id)
	}
}

// drop takes out an entry that is no longer in the table.
func (x *Index) drop(id uint32) {
	x.policy.remove(id)
	x.visible--
	if x.pins[id] > 0 {
		x.entries.flags[id] = detached
	} else {
		x.recycle(id)
	}
}

// adopt makes a free entry visible as k: what an earlier process left in the entry's slot.
func (x *Index) adopt(id uint32, k connector.StoreKey) {
	h := x.table.hashOf(&k)
	x.mu.Lock()
	x.enter(id, h)
	x.mu.Unlock()
	x.Commit(id, k)
}

// Cancel frees a reserved entry.
func (x *Index) Cancel(id uint32) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.policy.remove(id)
	x.recycle(id)
}

// Remove takes a key out; its entry becomes free when nobody has it pinned any more.
func (x *Index) Remove(k connector.StoreKey) (id uint32, ok bool) {
	h := x.table.hashOf(&k)
	x.mu.Lock()
	defer x.mu.Unlock()
	id = x.table.find(&k, h)
	if id == none {
		return 0, false
	}
	x.leave(id)
	x.table.remove(&k, h)
	x.drop(id)
	return id, true
}

// forget removes a key if it still stands for the entry id.
func (x *Index) forget(k connector.StoreKey, id uint32) bool {
	h := x.table.hashOf(&k)
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.table.find(&k, h) != id {
		return false
	}
	x.leave(id)
	x.table.remove(&k, h)
	x.drop(id)
	return true
}

// Keys lists the visible keys, in no order.
func (x *Index) Keys() []connector.StoreKey {
	x.mu.Lock()
	defer x.mu.Unlock()
	out := make([]connector.StoreKey, 0, x.visible)
	for i := range x.table.shards {
		s := &x.table.shards[i]
		for at, tag := range s.tags {
			if tag != 0 {
				out = append(out, x.keys[s.ids[at]])
			}
		}
	}
	return out
}
