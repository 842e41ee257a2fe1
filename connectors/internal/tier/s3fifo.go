package tier

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
