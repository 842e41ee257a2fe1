package tier

import (
	"hash/maphash"
	"math/bits"
	"runtime"
	"sync/atomic"

	"github.com/kvport/kvport/connector"
)

// table finds the entry of a key. It is cut into shards so that lookups seldom meet a change: one
// excludes the other only within a shard. The table has five bytes a place, a number and a tag, and
// probes linearly; the tags that a search passes lie side by side.
//
// Changes are made one at a time; the Index sees to that. So a change finds out what it must write while
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
