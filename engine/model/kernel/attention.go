package kernel

import (
	"math"
	"slices"
)

// Cache is one layer's paged KV of one sequence, as the kernels see it. A block holds the keys of its
// slots, then their values; a slot holds the heads one after the other.
type Cache struct {
	Blocks      [][]float32 // in position order
	BlockTokens int
	KVHeads     int
	HeadDim     int
}

// Put stores the key and value of a position, each of KVHeads*HeadDim numbers.
func (c *Cache) Put(position int, key, value []float32) {
	block, slot := c.Blocks[position/c.BlockTokens], position%c.BlockTokens
	n := c.KVHeads * c.HeadDim
	copy(block[slot*n:(slot+1)*n], key)
	copy(block[(c.BlockTokens+slot)*n:(c.BlockTokens+slot+1)*n], value)
}

// masked is a score whose exp is 0.
const masked = -1e30

// Attend computes, for the queries of one position that share KV head head, the softmax-weighted sum of
// the values at positions 0..position. q and out hold those heads side by side. It is not parallel: call
// it from Run.
func (c *Compute) Attend(thread int, out, q []float32, cache *Cache, head, position int) {
	n, dim := position+1, cache.HeadDim
	s := &c.scratch[thread]
	padded := (n + Lanes - 1) / Lanes * Lanes
	s.scores = slices.Grow(s.scores[:0], padded)[:padded]
	for ; len(q) > 0; q, out = q[dim:], out[dim:] {
		c.attendHead(s, out[:dim], q[:dim], cache, head, n)
	}
}

func (c *Compute) attendHead(s *scratch, out, q []float32, cache *Cache, head, n int) {
	size, dim, stride := cache.BlockTokens, cache.HeadDim, cache.KVHeads*cache.HeadDim
	scale := float32(1 / math.Sqrt(float64(dim)))
	for from := 0; from < n; from += size {
		keys := cache.Blocks[from/size][head*dim:]
		c.isa.dots(s.scores[from:min(from+size, n)], q, keys, stride, scale)
	}
	top := slices.Max(s.scores[:n])
	for i := n; i < len(s.scores); i++ {
		s.scores[i] = masked
	}
	s.lanes = [Lanes]float32{}
	c.isa.expSum(s.scores, top, &s.lanes)
	total := tree(&s.lanes)

	clear(out)
	for from := 0; from < n; from += size {
		values := cache.Blocks[from/size][size*stride+head*dim:]
		c.isa.weigh(out, s.scores[from:min(from+size, n)], values, stride)
	}
	inverse := 1 / total
	for i := range out {
		out[i] *= inverse
	}
}
