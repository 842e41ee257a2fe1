package tier

import "slices"

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
