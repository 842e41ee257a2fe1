package simulate

import (
	"encoding/binary"

	"github.com/kvport/kvport/connector"
)

// tag is what a slot holds in place of KV.
type tag struct {
	kv   uint64 // of which prefix, group and rank this is the KV; 0: nothing
	life uint16 // of the engine that computed it
	gen  uint16 // that engine's generation then: resets begun

	tainted bool // a load brought it that nobody could verify, or it was computed from that
}

// cell is one block of one rank, with the digest that a host has made or a connector has brought.
type cell struct {
	tags []tag
	sum  uint64

	foreign bool // its digest was made with a key outside the ring, as its header says
	short   int  // how many of the last layers are not in place: of a load layer by layer that has not ended, or not well
}

// sign gives a block a digest of this host.
func (c *cell) sign(sum uint64) { c.sum, c.foreign = sum, false }

const (
	basis = 14695981039346656037
	prime = 1099511628211
)

func chain(h uint64, t int32) uint64 { return (h ^ uint64(t+1)) * prime }

// prefixes gives the hash of every prefix of tokens; they extend those given.
func prefixes(list []uint64, tokens []int32) []uint64 {
	for _, t := range tokens[len(list):] {
		h := uint64(basis)
		if len(list) > 0 {
			h = list[len(list)-1]
		}
		list = append(list, chain(h, t))
	}
	return list
}

// sampled is what the model says after a prefix: few values, so that prefixes repeat.
func sampled(prefix uint64) int32 { return int32(prefix >> 40 % 50) }

// oracle is what a single engine without any fault answers to a prompt.
func oracle(prompt []int32, n int) []int32 {
	h := uint64(basis)
	for _, t := range prompt {
		h = chain(h, t)
	}
	var out []int32
	for range n {
		out = append(out, sampled(h))
		h = chain(h, out[len(out)-1])
	}
	return out
}

// kvOf is the right content of a slot.
func kvOf(prefix uint64, group, rank int) uint64 {
	return (prefix ^ uint64(group<<8|rank+1)<<32) * prime
}

func newMemory(ranks, blocks, blockTokens int) [][]cell {
	mem := make([][]cell, ranks)
	for r := range mem {
		mem[r] = make([]cell, blocks)
		tags := make([]tag, blocks*blockTokens)
		for b := range mem[r] {
			mem[r][b].tags = tags[b*blockTokens : (b+1)*blockTokens]
		}
	}
	return mem
}

// digest is bound to the block's key, group and rank, as those of package digest are.
func (c *cell) digest(b connector.Block, rank int) uint64 {
	h := uint64(basis)
	for _, t := range c.tags {
		h = (h ^ t.kv) * prime
		h ^= h >> 29
	}
	h = (h ^ binary.LittleEndian.Uint64(b.Key[:8])) * prime
	return (h ^ uint64(int(b.Group)<<8|rank+1)) * prime
}

// storeKey names what the store keeps of one block: one rank's part of one group.
type storeKey struct {
	key   connector.BlockKey
	group uint16
	rank  uint8
}

// store is a key-value store that several engines share.
type store struct {
	cells map[storeKey]*cell
	order []storeKey // of arrival, so that an rng can pick one
}

func newStore() *store { return &store{cells: map[storeKey]*cell{}} }

func (s *store) put(k storeKey, c *cell, replace bool) {
	old := s.cells[k]
	if old != nil && !replace {
		return
	}
	if old == nil {
		s.order = append(s.order, k)
	}
	s.cells[k] = &cell{tags: append([]tag(nil), c.tags...), sum: c.sum}
}

func (s *store) lose(i int) {
	delete(s.cells, s.order[i])
	s.order = append(s.order[:i], s.order[i+1:]...)
}

func (s *store) clear() {
	clear(s.cells)
	s.order = nil
}

// has reports whether all ranks' parts of a block of one group are there.
func (s *store) has(key connector.BlockKey, group, ranks int) bool {
	for r := range ranks {
		if s.cells[storeKey{key, uint16(group), uint8(r)}] == nil {
			return false
		}
	}
	return true
}

// prefix is how many leading blocks can be had beyond those that the engine has: all in the first
// group, and in every other one those that it needs to go on from there.
func (s *store) prefix(keys []connector.BlockKey, have int, o *Options) int {
	n := have
	for n < len(keys) && s.has(keys[n], 0, o.Ranks) {
		n++
	}
	for ; n > have; n-- {
		if s.windows(keys, have, n, o) {
			break
		}
	}
	return n
}

func (s *store) windows(keys []connector.BlockKey, have, n int, o *Options) bool {
	for g := 1; g < o.Groups; g++ {
		for i := max(have, o.first(g, n*o.BlockTokens, o.BlockTokens)); i < n; i++ {
			if !s.has(keys[i], g, o.Ranks) {
				return false
			}
		}
	}
	return true
}

// other is a stored block to mistake for the given one: of the same key in another place, most of the time.
func (s *store) other(i int, d *rng) int {
	if j := d.n(len(s.order)); d.n(4) == 0 {
		return j
	}
	for j := range s.order {
		if j != i && s.order[j].key == s.order[i].key {
			return j
		}
	}
	return d.n(len(s.order))
}

// overwrite is somebody who writes blocks and has another key. Some are right, and some are forged.
func (s *store) overwrite(d *rng) {
	for range 1 + len(s.order)/2 {
		c := s.cells[s.order[d.n(len(s.order))]]
		if c.foreign = true; d.n(2) == 0 {
			c.tags[d.n(len(c.tags))].kv ^= 1 << d.n(64)
		}
	}
}

// misfortune is something that happens to stored blocks.
func (s *store) misfortune(d *rng) string {
	if len(s.order) == 0 {
		return "nothing stored"
	}
	i := d.n(len(s.order))
	c := s.cells[s.order[i]]
	switch d.n(9) {
	case 0:
		s.lose(i)
		return "loses a block"
	case 1:
		j := s.other(i, d)
		s.cells[s.order[i]], s.cells[s.order[j]] = s.cells[s.order[j]], s.cells[s.order[i]]
		return "swaps two blocks"
	case 2:
		clear(c.tags[len(c.tags)/2:])
		return "keeps half of a block"
	case 3:
		for n := d.n(len(s.order)); n > 0; n-- {
			s.lose(0)
		}
		return "evicts the oldest"
	case 4:
		clear(c.tags)
		return "zeroes a block"
	case 5, 6:
		s.overwrite(d)
		return "has blocks by another key"
	}
	c.tags[d.n(len(c.tags))].kv ^= 1 << d.n(64)
	return "flips a bit"
}
