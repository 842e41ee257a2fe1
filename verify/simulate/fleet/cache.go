package fleet

import "slices"

// cache is the prefix cache of an instance, by the keys of blocks. The block that was not used for longest is evicted, and of a
// prompt the last one first, so that the beginning of whatever is there is there as well.
type cache struct {
	most   int
	slots  map[uint64]int32
	blocks []slot
	newest int32
	oldest int32
	free   []int32
}

// slot is a block. Its neighbours are others in the order of use; -1: none.
type slot struct {
	key          uint64
	newer, older int32
}

func newCache(most int) *cache {
	return &cache{most: most, slots: map[uint64]int32{}, newest: -1, oldest: -1}
}

// size is how many blocks are there.
func (c *cache) size() int { return len(c.slots) }

// has reports whether a block is there.
func (c *cache) has(key uint64) bool {
	_, is := c.slots[key]
	return is
}

// held is how many blocks at the beginning of a prompt are there, if that is more than least, else least or fewer.
func (c *cache) held(blocks []uint64, least int) int {
	if least >= len(blocks) || !c.has(blocks[least]) {
		return min(least, len(blocks))
	}
	low, high := least+1, len(blocks) // what is before low is there
	for low < high {
		if middle := (low + high) / 2; c.has(blocks[middle]) {
			low = middle + 1
		} else {
			high = middle
		}
	}
	return low
}

// use makes all blocks of a prompt those that were used last. It returns how many at the beginning were there, and what was evicted.
func (c *cache) use(blocks []uint64) (held int, evicted []uint64) {
	held = c.held(blocks, 0)
	for _, block := range slices.Backward(blocks) { // the beginning is the newest
		at, is := c.slots[block]
		if is {
			c.unlink(at)
		} else {
			at = c.take(block)
		}
		c.link(at)
	}
	for len(c.slots) > c.most {
		at := c.oldest
		evicted = append(evicted, c.blocks[at].key)
		c.unlink(at)
		delete(c.slots, c.blocks[at].key)
		c.free = append(c.free, at)
	}
	return held, evicted
}

// take gives a block a slot.
func (c *cache) take(key uint64) (at int32) {
	if n := len(c.free); n > 0 {
		at, c.free = c.free[n-1], c.free[:n-1]
	} else {
		at = int32(len(c.blocks))
		c.blocks = append(c.blocks, slot{})
	}
	c.blocks[at].key = key
	c.slots[key] = at
	return at
}

func (c *cache) link(at int32) {
	c.blocks[at].newer, c.blocks[at].older = -1, c.newest
	if c.newest >= 0 {
		c.blocks[c.newest].newer = at
	} else {
		c.oldest = at
	}
	c.newest = at
}

func (c *cache) unlink(at int32) {
	s := c.blocks[at]
	if s.newer >= 0 {
		c.blocks[s.newer].older = s.older
	} else {
		c.newest = s.older
	}
	if s.older >= 0 {
		c.blocks[s.older].newer = s.newer
	} else {
		c.oldest = s.newer
	}
}
