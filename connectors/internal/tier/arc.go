package tier

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
