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

// Query says whose attention is computed: the queries of Position that share the KV head Head.
type Query struct{ Head, Position int }

// Attend computes the softmax-weighted sum of the values at positions 0 to at.Position. q and out hold
// the query heads side by side. It is not parallel: call it from Run.
func (c *Compute) Attend(thread int, out, q []float32, cache *Cache, at Query) {
	s := &c.scratch[thread]
	size, dim, stride, n := cache.BlockTokens, cache.HeadDim, cache.KVHeads*cache.HeadDim, at.Position+1
	heads, row := len(q)/dim, (n+Lanes-1)/Lanes*Lanes
	s.scores = slices.Grow(s.scores[:0], heads*row)[:heads*row]
	s.totals = slices.Grow(s.totals[:0], heads)[:heads]

	clear(out)
	for h := range heads {
		s.totals[h] = c.softmax(s, s.scores[h*row:(h+1)*row], q[h*dim:(h+1)*dim], cache, at)
	}
	for from := 0; from < n; from += size {
		values := cache.Blocks[from/size][size*stride+at.Head*dim:]
		c.isa.weigh(out, dim, weights{s.scores[from:], row, min(size, n-from)}, values, stride)
	}
	for h := range heads {
		inverse := 1 / s.totals[h]
		for i := range out[h*dim : (h+1)*dim] {
			out[h*dim+i] *= inverse
		}
	}
}

// softmax writes one head's numerators for every position, 0 beyond the last, and returns their sum.
func (c *Compute) softmax(s *scratch, scores, q []float32, cache *Cache, at Query) float32 {
	size, dim, stride, n := cache.BlockTokens, cache.HeadDim, cache.KVHeads*cache.HeadDim, at.Position+1
	scale := float32(1 / math.Sqrt(float64(dim)))
	for from := 0; from < n; from += size {
		keys := cache.Blocks[from/size][at.Head*dim:]
		end := min(from+size, n)
		if size%Lanes == 0 {
			end = min(from+size, len(scores)) // slots beyond the position are masked below
		}
		c.isa.dots(scores[from:end], q, keys, stride, scale)
	}
	for i := n; i < len(scores); i++ {
		scores[i] = masked
	}
	c.isa.top(scores, &s.lanes)
	top := slices.Max(s.lanes[:])
	s.lanes = [Lanes]float32{}
	c.isa.expSum(scores, top, &s.lanes)
	return tree(&s.lanes)
}
