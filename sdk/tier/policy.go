package tier

import (
	"fmt"
	"hash/maphash"
	"slices"
	"sync"

	"github.com/kvport/kvport/connector"
)

// The eviction policies.
const (
	LRU    = "lru"
	ARC    = "arc"
	S3FIFO = "s3fifo"
	FIFO   = "fifo"
)

// policy decides which entry goes. It knows entries by number; h is the hash of an entry's key, by
// which those that went are remembered.
type policy interface {
	// add takes a new entry, after evict if that made its place.
	add(id uint32, h uint64)
	// touch notes a hit.
	touch(id uint32)
	// evict chooses an entry that is not pinned, to make place for the key with hash h, and takes it
	// out; none if all are pinned. An entry whose block is still being written counts as pinned.
	evict(h uint64, pinned func(uint32) bool) uint32
	// remove takes out an entry that goes for another reason.
	remove(id uint32)
}

// entries is what a policy works on: it is shared with the index, which keeps free entries in a list.
type entries struct {
	links
	flags []uint8             // low three bits are the policy's
	hash  func(uint32) uint64 // of an entry's key
}

// newPolicy makes the named policy for n entries.
func newPolicy(name string, e *entries, n int) (policy, error) {
	switch name {
	case "", LRU:
		return &lru{entries: e, all: newList()}, nil
	case FIFO:
		return &fifo{lru{entries: e, all: newList()}}, nil
	case ARC:
		return newARC(e, n), nil
	case S3FIFO:
		return newS3FIFO(e, n), nil
	}
	return nil, fmt.Errorf("eviction policy %q is none of %s, %s, %s, %s: %w", name, LRU, ARC, S3FIFO, FIFO, connector.ErrIncompatible)
}

// lru evicts what was not used for longest.
type lru struct {
	*entries
	all list
}

func (p *lru) add(id uint32, _ uint64) { p.push(&p.all, id) }

func (p *lru) touch(id uint32) {
	p.cut(&p.all, id)
	p.push(&p.all, id)
}

func (p *lru) remove(id uint32) { p.cut(&p.all, id) }

func (p *lru) evict(_ uint64, pinned func(uint32) bool) uint32 {
	id := p.oldest(&p.all, pinned)
	if id != none {
		p.cut(&p.all, id)
	}
	return id
}

// fifo evicts what came first, used or not.
type fifo struct{ lru }

func (p *fifo) touch(uint32) {}

// arc is the Adaptive Replacement Cache of Megiddo and Modha (FAST 2003): entries seen once and
// entries seen again have a queue each, and a hit among those that were evicted from one of them
// gives that one more of the room.
type arc struct {
	*entries
	once, again list
	gone        *ghosts // queue 0: evicted from once, 1: from again
	size        int
	target      int // of once

	adapted uint64 // the hash for which evict has adapted, until add
	pending bool
}

// inAgain marks an entry of the queue again.
const inAgain = 1

// newARC remembers one key more than the paper says: evict remembers one before add forgets another.
func newARC(e *entries, n int) *arc {
	return &arc{entries: e, once: newList(), again: newList(), gone: newGhosts(n + 1), size: n}
}

func (p *arc) add(id uint32, h uint64) {
	if !p.pending || p.adapted != h {
		p.adapt(h)
	}
	p.pending = false
	if ghost, _ := p.gone.find(h); ghost != none {
		p.gone.drop(ghost)
		p.flags[id] |= inAgain
		p.push(&p.again, id)
		return
	}
	p.flags[id] &^= inAgain
	p.push(&p.once, id)
	if p.once.n+p.gone.queue[0].n > p.size {
		p.gone.dropOldest(0)
	}
}

func (p *arc) touch(id uint32) {
	p.remove(id)
	p.flags[id] |= inAgain
	p.push(&p.again, id)
}

func (p *arc) remove(id uint32) {
	if p.flags[id]&inAgain != 0 {
		p.cut(&p.again, id)
	} else {
		p.cut(&p.once, id)
	}
}

// adapt moves the target if the key was evicted a while ago.
func (p *arc) adapt(h uint64) (queue int, known bool) {
	p.adapted, p.pending = h, true
	id, queue := p.gone.find(h)
	if id == none {
		return 0, false
	}
	b1, b2 := p.gone.queue[0].n, p.gone.queue[1].n
	if queue == 0 {
		p.target = min(p.size, p.target+max(1, b2/b1))
	} else {
		p.target = max(0, p.target-max(1, b1/b2))
	}
	return queue, true
}

func (p *arc) evict(h uint64, pinned func(uint32) bool) uint32 {
	queue, known := p.adapt(h)
	b1, b2 := p.gone.queue[0].n, p.gone.queue[1].n
	switch {
	case known:
	case p.once.n+b1 >= p.size && p.once.n < p.size:
		p.gone.dropOldest(0)
	case p.once.n+b1 >= p.size: // once fills everything: its oldest leaves no memory behind
		if id := p.oldest(&p.once, pinned); id != none {
			p.cut(&p.once, id)
			return id
		}
	case p.once.n+p.again.n+b1+b2 >= 2*p.size:
		p.gone.dropOldest(1)
	}
	fromOnce := p.once.n > 0 && (p.once.n > p.target || known && queue == 1 && p.once.n == p.target)
	if id := p.take(fromOnce, pinned); id != none {
		return id
	}
	return p.take(!fromOnce, pinned)
}

// take evicts the oldest entry of a queue and remembers its key.
func (p *arc) take(fromOnce bool, pinned func(uint32) bool) uint32 {
	l, queue := &p.again, 1
	if fromOnce {
		l, queue = &p.once, 0
	}
	id := p.oldest(l, pinned)
	if id != none {
		p.cut(l, id)
		p.gone.add(p.hash(id), queue)
	}
	return id
}

// s3fifo is S3-FIFO of Yang and others (SOSP 2023): a small queue where most entries pass by once, a
// main queue for those that were used there, and a memory of what left the small one.
type s3fifo struct {
	*entries
	small, main list
	gone        *ghosts
	smallSize   int
}

// The flags of an entry: its queue, and how often it was used, at most three times.
const (
	inMain = 1
	used   = 2 // one use
	uses   = 3 * used
)

// promoted is the number of uses in the small queue with which an entry moves to the main one.
const promoted = 2 * used

func newS3FIFO(e *entries, n int) *s3fifo {
	small := max(1, n/10)
	return &s3fifo{entries: e, small: newList(), main: newList(), gone: newGhosts(n - small), smallSize: small}
}

func (p *s3fifo) add(id uint32, h uint64) {
	p.flags[id] &^= inMain | uses
	if ghost, _ := p.gone.find(h); ghost != none {
		p.gone.drop(ghost)
		p.flags[id] |= inMain
		p.push(&p.main, id)
		return
	}
	p.push(&p.small, id)
}

func (p *s3fifo) touch(id uint32) {
	if p.flags[id]&uses < uses {
		p.flags[id] += used
	}
}

func (p *s3fifo) remove(id uint32) {
	if p.flags[id]&inMain != 0 {
		p.cut(&p.main, id)
	} else {
		p.cut(&p.small, id)
	}
}

func (p *s3fifo) evict(_ uint64, pinned func(uint32) bool) uint32 {
	small := p.next(pinned)
	// An entry is moved once out of the small queue and at most three times round the main one. A
	// pinned entry of the main one goes round without losing a use, so the number of rounds is bounded here.
	for range 5 * (p.small.n + p.main.n + 1) {
		id := none
		switch {
		case small != none && (p.small.n >= p.smallSize || p.main.n == 0):
			id = p.evictSmall(small)
			if id == none {
				small = p.next(pinned)
			}
		case p.main.n > 0:
			id = p.evictMain(pinned)
		}
		if id != none {
			return id
		}
	}
	for _, l := range []*list{&p.main, &p.small} {
		if id := p.oldest(l, pinned); id != none {
			p.cut(l, id)
			return id
		}
	}
	return none
}

// next is the oldest entry of the small queue that may leave it, or none. Pinned ones that were not used stay
// where they are: being written is no sign that a block will be wanted.
func (p *s3fifo) next(pinned func(uint32) bool) uint32 {
	id := p.small.tail
	for id != none && p.flags[id]&uses < promoted && pinned(id) {
		id = p.prev[id]
	}
	return id
}

// evictSmall takes an entry out of the small queue: it goes, or moves to the main one.
func (p *s3fifo) evictSmall(id uint32) uint32 {
	p.cut(&p.small, id)
	if p.flags[id]&uses >= promoted {
		p.flags[id] = p.flags[id]&^uses | inMain
		p.push(&p.main, id)
		return none
	}
	p.gone.add(p.hash(id), 0)
	return id
}

// evictMain looks at the oldest entry of the main queue: it goes, or goes round with one use less.
func (p *s3fifo) evictMain(pinned func(uint32) bool) uint32 {
	id := p.main.tail
	p.cut(&p.main, id)
	switch {
	case pinned(id):
	case p.flags[id]&uses > 0:
		p.flags[id] -= used
	default:
		return id
	}
	p.push(&p.main, id)
	return none
}

// ghosts remember keys that were evicted, in two queues, by 31 bits of their hash. It is for policies
// only: a false memory makes an eviction a little worse and nothing else.
//
// The table probes linearly and is five sixths full at most. Together it is 17 bytes an entry.
type ghosts struct {
	links
	marks []uint32 // hash in the upper bits, queue in the lowest
	table []uint32
	queue [2]list
	free  list
}

func newGhosts(n int) *ghosts {
	g := &ghosts{links: newLinks(n), marks: make([]uint32, n), table: make([]uint32, n+n/5+2), free: newList()}
	g.clear()
	return g
}

// clear forgets every key.
func (g *ghosts) clear() {
	g.queue, g.free = [2]list{newList(), newList()}, newList()
	for i := range g.table {
		g.table[i] = none
	}
	for id := range slices.Backward(g.marks) {
		g.push(&g.free, uint32(id))
	}
}

func mark(h uint64, queue uint32) uint32 { return uint32(h>>32)&^1 | queue }

func (g *ghosts) home(m uint32) int { return int(uint64(m&^1) * uint64(len(g.table)) >> 32) }

// find gives the entry and the queue of a key, or none.
func (g *ghosts) find(h uint64) (id uint32, queue int) {
	m := mark(h, 0)
	for at := g.home(m); g.table[at] != none; at = g.after(at) {
		if id := g.table[at]; g.marks[id]&^1 == m {
			return id, int(g.marks[id] & 1)
		}
	}
	return none, 0
}

func (g *ghosts) after(at int) int {
	if at++; at == len(g.table) {
		return 0
	}
	return at
}

// add remembers a key as the youngest of a queue; when all entries are taken the oldest of the longer
// queue is forgotten for it.
func (g *ghosts) add(h uint64, queue int) {
	if len(g.marks) == 0 {
		return
	}
	if id, _ := g.find(h); id != none {
		g.drop(id)
	}
	if g.free.n == 0 {
		longer := 0
		if g.queue[1].n > g.queue[0].n {
			longer = 1
		}
		g.dropOldest(longer)
	}
	id := g.free.head
	g.cut(&g.free, id)
	g.marks[id] = mark(h, uint32(queue))
	at := g.home(g.marks[id])
	for g.table[at] != none {
		at = g.after(at)
	}
	g.table[at] = id
	g.push(&g.queue[queue], id)
}

// dropOldest forgets the oldest key of a queue, if there is one.
func (g *ghosts) dropOldest(queue int) {
	if id := g.queue[queue].tail; id != none {
		g.drop(id)
	}
}

// drop forgets an entry. Those behind it in the table move up, so that none becomes unreachable.
func (g *ghosts) drop(id uint32) {
	hole := g.home(g.marks[id])
	for g.table[hole] != id {
		hole = g.after(hole)
	}
	for at := g.after(hole); g.table[at] != none; at = g.after(at) {
		if home := g.home(g.marks[g.table[at]]); between(home, hole, at) {
			g.table[hole], hole = g.table[at], at
		}
	}
	g.table[hole] = none
	g.cut(&g.queue[g.marks[id]&1], id)
	g.push(&g.free, id)
}

// between reports whether an entry at place at, whose search begins at home, is still found when it
// moves to the hole before it, on a circle.
func between(home, hole, at int) bool {
	if hole <= at {
		return home <= hole || home > at
	}
	return home <= hole && home > at
}

// sketch estimates how often keys were seen: a count-min sketch of four rows of saturating counters,
// halved now and then so that it forgets. It never says less than the truth since it last halved.
type sketch struct {
	mu    sync.Mutex
	seed  maphash.Seed
	count []uint8
	added int
}

const (
	sketchRows = 4
	maxCount   = 255
)

// newSketch makes a sketch for about n keys: 4n bytes and more.
func newSketch(n int) *sketch {
	size := 1024
	for size < n && size < 1<<28 {
		size <<= 1
	}
	return &sketch{seed: maphash.MakeSeed(), count: make([]uint8, sketchRows*size)}
}

// add counts a key once more and gives the estimate, this time included.
func (s *sketch) add(k connector.StoreKey) int {
	h := maphash.Bytes(s.seed, k[:])
	s.mu.Lock()
	defer s.mu.Unlock()
	size := uint64(len(s.count) / sketchRows)
	least := maxCount
	var at [sketchRows]uint64
	for row := range at {
		at[row] = uint64(row)*size + (h>>(8*row)^h*uint64(2*row+1)>>32)&(size-1)
		least = min(least, int(s.count[at[row]]))
	}
	for _, i := range at { // conservative update: only what is too small grows
		if int(s.count[i]) == least && least < maxCount {
			s.count[i]++
		}
	}
	if s.added++; s.added >= 8*int(size) {
		s.added = 0
		for i := range s.count {
			s.count[i] /= 2
		}
	}
	return min(least+1, maxCount)
}

// none is no entry.
const none = ^uint32(0)

// links are the neighbours of entries, of which each is in at most one list.
type links struct{ next, prev []uint32 }

func newLinks(n int) links { return links{make([]uint32, n), make([]uint32, n)} }

// list is a queue of entries: the head is the youngest, the tail the oldest.
type list struct {
	head, tail uint32
	n          int
}

func newList() list { return list{head: none, tail: none} }

// push makes id the youngest entry of l.
func (k *links) push(l *list, id uint32) {
	k.next[id], k.prev[id] = l.head, none
	if l.head != none {
		k.prev[l.head] = id
	} else {
		l.tail = id
	}
	l.head = id
	l.n++
}

// cut takes id out of l.
func (k *links) cut(l *list, id uint32) {
	next, prev := k.next[id], k.prev[id]
	if prev != none {
		k.next[prev] = next
	} else {
		l.head = next
	}
	if next != none {
		k.prev[next] = prev
	} else {
		l.tail = prev
	}
	l.n--
}

// oldest is the oldest entry of l that is not pinned, or none.
func (k *links) oldest(l *list, pinned func(uint32) bool) uint32 {
	id := l.tail
	for id != none && pinned(id) {
		id = k.prev[id]
	}
	return id
}
