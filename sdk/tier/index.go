package tier

import (
	"fmt"
	"hash/maphash"
	"math"
	"math/bits"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/kvport/kvport/connector"
)

// maxEntries is the largest number of entries of an index.
const maxEntries = math.MaxInt32

// keyIndex says which key lies in which of n numbered entries, and which entry is given up for a new key.
// It holds no block: entry i stands for slot i of whatever does. All methods may be called
// concurrently; Has never waits for a change elsewhere in the index.
//
// An entry is free, reserved (for a block that is being written, found by nobody), lent (for a block that nobody knows yet: reserved, and
// unknown to the policy), visible, or detached: its key was removed while somebody had it pinned, and it becomes free with the last pin.
// A reserved entry has its place in the eviction policy already, in the order of reservation, so that
// blocks which are written together are judged as if they came one by one.
type keyIndex struct {
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

// newKeyIndex makes an index of n entries that evicts by the named policy; "" is LRU. Errors wrap
// connector.ErrIncompatible.
func newKeyIndex(n int, policy string) (*keyIndex, error) {
	if n < 1 || n > maxEntries {
		return nil, fmt.Errorf("an index of %d entries, want 1..%d: %w", n, maxEntries, connector.ErrIncompatible)
	}
	x := &keyIndex{keys: make([]connector.StoreKey, n), pins: map[uint32]int{}, kept: map[uint32]struct{}{}}
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
func (x *keyIndex) Has(k connector.StoreKey) bool {
	return x.entry(k) != none
}

// entry is the entry of a visible key, or none.
func (x *keyIndex) entry(k connector.StoreKey) uint32 { return x.table.find(&k, x.table.hashOf(&k)) }

// Len is the number of visible keys.
func (x *keyIndex) Len() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.visible
}

// Acquire pins the entry of a key until Release. With use it counts as a hit.
func (x *keyIndex) Acquire(k connector.StoreKey, use bool) (id uint32, ok bool) {
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
func (x *keyIndex) Touch(k connector.StoreKey) {
	h := x.table.hashOf(&k)
	x.mu.Lock()
	defer x.mu.Unlock()
	if id := x.table.find(&k, h); id != none {
		x.policy.touch(id)
	}
}

// use counts a hit of an entry, pins it until Release, and gives its key; false if it is not visible.
func (x *keyIndex) use(id uint32) (k connector.StoreKey, ok bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if int(id) >= len(x.keys) {
		return k, false
	}
	if k = x.keys[id]; x.table.find(&k, x.table.hashOf(&k)) != id {
		return k, false
	}
	x.policy.touch(id)
	x.pins[id]++
	return k, true
}

// Release takes back one pin.
func (x *keyIndex) Release(id uint32) {
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

func (x *keyIndex) recycle(id uint32) {
	x.entries.flags[id] = 0
	x.entries.push(&x.free, id)
}

// victim is what Reserve evicted.
type victim struct {
	Key     connector.StoreKey
	Evicted bool
}

// Reserve gives an entry for a block of key k, which is not visible: a free one, or another key's,
// which is then gone. It fails with ErrPinned when every entry is pinned or reserved.
func (x *keyIndex) Reserve(k connector.StoreKey) (id uint32, v victim, err error) {
	h := x.table.hashOf(&k)
	x.mu.Lock()
	defer x.mu.Unlock()
	if id, v, err = x.take(h); err == nil {
		x.reserve(id, h)
	}
	return id, v, err
}

// take takes an entry out, free or another key's, for a block whose key has the hash h.
func (x *keyIndex) take(h uint64) (id uint32, v victim, err error) {
	if x.free.n > 0 {
		id = x.free.head
		x.entries.cut(&x.free, id)
		return id, v, nil
	}
	id = x.policy.evict(h, x.pinned)
	if id == none {
		return 0, v, ErrPinned
	}
	x.leave(id)
	v = victim{Key: x.keys[id], Evicted: true}
	x.table.remove(&v.Key, x.table.hashOf(&v.Key))
	x.visible--
	return id, v, nil
}

// Lend gives an entry for a block of which nobody knows the key yet, as Reserve does for one whose key is known. Settle or Back follows.
// Until then the entry is neither free nor known to the policy.
func (x *keyIndex) Lend() (id uint32, v victim, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if id, v, err = x.take(0); err == nil {
		x.entries.flags[id] = reserved
	}
	return id, v, err
}

// Settle makes an entry that was lent visible as k and leaves it pinned, unless k is visible and keep says that this stays.
func (x *keyIndex) Settle(id uint32, k connector.StoreKey, keep func(old uint32) bool) bool {
	h := x.table.hashOf(&k)
	x.mu.Lock()
	defer x.mu.Unlock()
	if old := x.table.find(&k, h); old != none && keep(old) {
		return false
	}
	x.policy.add(id, h)
	x.show(id, k, h, 1)
	return true
}

// Back frees an entry that was lent.
func (x *keyIndex) Back(id uint32) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.recycle(id)
}

// enter reserves a free entry for a key.
func (x *keyIndex) enter(id uint32, h uint64) {
	x.entries.cut(&x.free, id)
	x.reserve(id, h)
}

func (x *keyIndex) reserve(id uint32, h uint64) {
	x.entries.flags[id] = reserved
	x.policy.add(id, h)
}

func (x *keyIndex) pinned(id uint32) bool {
	_, kept := x.kept[id]
	return kept || x.pins[id] > 0 || x.entries.flags[id]&reserved != 0
}

func (x *keyIndex) leave(id uint32) {
	delete(x.kept, id)
	if x.gone != nil {
		x.gone(id)
	}
}

// Keep pins the entry of a key until Unkeep, or until the key is removed: eviction does not take it.
func (x *keyIndex) Keep(k connector.StoreKey) bool {
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
func (x *keyIndex) Unkeep(k connector.StoreKey) {
	h := x.table.hashOf(&k)
	x.mu.Lock()
	defer x.mu.Unlock()
	if id := x.table.find(&k, h); id != none {
		delete(x.kept, id)
	}
}

// Commit makes a reserved entry visible as k, in place of another entry that is. At no moment is k
// not found then.
func (x *keyIndex) Commit(id uint32, k connector.StoreKey) { x.commit(id, k, 0) }

func (x *keyIndex) commit(id uint32, k connector.StoreKey, pins int) {
	h := x.table.hashOf(&k)
	x.mu.Lock()
	defer x.mu.Unlock()
	x.show(id, k, h, pins)
}

// show makes a reserved entry visible as k, whose hash is h. The caller holds the lock.
func (x *keyIndex) show(id uint32, k connector.StoreKey, h uint64, pins int) {
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
func (x *keyIndex) drop(id uint32) {
	x.policy.remove(id)
	x.visible--
	if x.pins[id] > 0 {
		x.entries.flags[id] = detached
	} else {
		x.recycle(id)
	}
}

// adopt makes a free entry visible as k: what an earlier process left in the entry's slot.
func (x *keyIndex) adopt(id uint32, k connector.StoreKey) {
	h := x.table.hashOf(&k)
	x.mu.Lock()
	x.enter(id, h)
	x.mu.Unlock()
	x.Commit(id, k)
}

// Cancel frees a reserved entry.
func (x *keyIndex) Cancel(id uint32) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.policy.remove(id)
	x.recycle(id)
}

// Remove takes a key out; its entry becomes free when nobody has it pinned any more.
func (x *keyIndex) Remove(k connector.StoreKey) (id uint32, ok bool) {
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
func (x *keyIndex) forget(k connector.StoreKey, id uint32) bool {
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
func (x *keyIndex) Keys() []connector.StoreKey {
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

// table finds the entry of a key. It is cut into shards so that lookups seldom meet a change: one
// excludes the other only within a shard. The table has five bytes a place, a number and a tag, and
// probes linearly; the tags that a search passes lie side by side.
//
// Changes are made one at a time; the index sees to that. So a change finds out what it must write while
// lookups continue, and excludes them only while it writes: looking at the keys of a whole cluster, each of
// which is far away in memory, would make lookups wait ten times as long.
type table struct {
	seed   maphash.Seed
	keys   []connector.StoreKey // of all entries; the entry's key does not change while it is in the table
	shards []shard
	bits   int
	moves  []int // of the change that is being made
}

type shard struct {
	spin
	ids  []uint32
	tags []uint8 // 0: free
	n    int
}

// spin is a lock for what takes about a microsecond: waking somebody who waits in a sync.RWMutex takes
// twenty times that, which lookups would feel. It counts readers; -1 is a writer.
type spin struct{ n atomic.Int32 }

const spins = 64 // before others may run

func (l *spin) rlock() {
	for i := 0; ; i++ {
		if n := l.n.Load(); n >= 0 && l.n.CompareAndSwap(n, n+1) {
			return
		}
		if i%spins == spins-1 {
			runtime.Gosched()
		}
	}
}

func (l *spin) runlock() { l.n.Add(-1) }

func (l *spin) lock() {
	for i := 0; !l.n.CompareAndSwap(0, -1); i++ {
		if i%spins == spins-1 {
			runtime.Gosched()
		}
	}
}

func (l *spin) unlock() { l.n.Store(0) }

const (
	shardBits  = 8
	shardLeast = 4096 // entries for which a shard is worth having
)

func newTable(keys []connector.StoreKey) *table {
	t := &table{seed: maphash.MakeSeed(), keys: keys}
	for t.bits < shardBits && len(keys)>>(t.bits+1) >= shardLeast {
		t.bits++
	}
	t.shards = make([]shard, 1<<t.bits)
	n := places(len(keys)>>t.bits + 1)
	ids, tags := make([]uint32, n*len(t.shards)), make([]uint8, n*len(t.shards)) // together: no shard is rounded up
	for i := range t.shards {
		t.shards[i].ids, t.shards[i].tags = ids[i*n:(i+1)*n:(i+1)*n], tags[i*n:(i+1)*n:(i+1)*n]
	}
	return t
}

// places is the room for n entries, filled to eight ninths.
func places(n int) int { return n + n/8 + 2 }

// hashOf is the hash of a key, another one in every process.
func (t *table) hashOf(k *connector.StoreKey) uint64 { return maphash.Bytes(t.seed, k[:]) }

func (t *table) shard(h uint64) *shard { return &t.shards[h>>(64-t.bits)] }

func tagOf(h uint64) uint8 { return uint8(h&0xff) | 1 }

func (t *table) home(s *shard, h uint64) int {
	at, _ := bits.Mul64(h<<t.bits, uint64(len(s.ids)))
	return int(at)
}

// find gives the entry of a key, or none.
func (t *table) find(k *connector.StoreKey, h uint64) uint32 {
	s := t.shard(h)
	s.rlock()
	defer s.runlock()
	if at := t.place(s, k, h); at >= 0 {
		return s.ids[at]
	}
	return none
}

// place is where in its shard a key stands, or -1.
func (t *table) place(s *shard, k *connector.StoreKey, h uint64) int {
	tag := tagOf(h)
	for at := t.home(s, h); s.tags[at] != 0; at = s.after(at) {
		if s.tags[at] == tag && t.keys[s.ids[at]] == *k {
			return at
		}
	}
	return -1
}

func (s *shard) after(at int) int {
	if at++; at == len(s.tags) {
		return 0
	}
	return at
}

// insert adds an entry whose key is in keys and not in the table.
func (t *table) insert(id uint32, h uint64) {
	s := t.shard(h)
	if s.n+1 >= len(s.tags)-len(s.tags)/16 {
		t.grow(s)
	}
	at := t.vacant(s, h)
	s.lock()
	defer s.unlock()
	s.put(at, id, h)
}

// vacant is the place for a new key.
func (t *table) vacant(s *shard, h uint64) int {
	at := t.home(s, h)
	for s.tags[at] != 0 {
		at = s.after(at)
	}
	return at
}

func (s *shard) put(at int, id uint32, h uint64) {
	s.ids[at], s.tags[at] = id, tagOf(h)
	s.n++
}

// grow makes room in a shard that chance filled more than the others.
func (t *table) grow(s *shard) {
	n := places(s.n + 6)
	larger := &shard{ids: make([]uint32, n), tags: make([]uint8, n)}
	for i, id := range s.ids {
		if s.tags[i] != 0 {
			h := t.hashOf(&t.keys[id])
			larger.put(t.vacant(larger, h), id, h)
		}
	}
	s.lock()
	defer s.unlock()
	s.ids, s.tags = larger.ids, larger.tags
}

// remove takes a key out. Entries behind it move up, so that none becomes unreachable.
func (t *table) remove(k *connector.StoreKey, h uint64) {
	s := t.shard(h)
	hole := t.place(s, k, h)
	if hole < 0 {
		return
	}
	t.moves = append(t.moves[:0], hole)
	for at := s.after(hole); s.tags[at] != 0; at = s.after(at) {
		if home := t.home(s, t.hashOf(&t.keys[s.ids[at]])); between(home, hole, at) {
			t.moves = append(t.moves, at)
			hole = at
		}
	}
	s.lock()
	defer s.unlock()
	for i, from := range t.moves[1:] {
		s.ids[t.moves[i]], s.tags[t.moves[i]] = s.ids[from], s.tags[from]
	}
	s.tags[hole] = 0
	s.n--
}

// replace lets a key that is in the table name another entry.
func (t *table) replace(k *connector.StoreKey, h uint64, id uint32) {
	s := t.shard(h)
	at := t.place(s, k, h)
	if at < 0 {
		return
	}
	s.lock()
	defer s.unlock()
	s.ids[at] = id
}
