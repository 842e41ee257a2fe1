// Package kernel computes the parts of a transformer on a CPU, with the same bits everywhere.
//
// What makes results independent of batch, chunk, block size, threads and instruction set:
//   - every output of a matrix product is one float32 FMA chain over k = 0..K-1; vector lanes are outputs;
//   - a reduction runs in 16 lanes by index (a dot product: by dimension; a softmax: by position) whose
//     sums are added in a fixed tree;
//   - a query sees the keys of positions 0..p in position order, alone or in a chunk, and its values are
//     one FMA chain for each dimension;
//   - exp is our own polynomial.
//
// The portable path emulates FMA exactly. It is the reference; the assembly must agree with it bit by bit.
package kernel

import (
	"cmp"
	"fmt"
	"math"
	"runtime"
	"slices"
)

//go:generate go run gen.go gen_avx2.go

// Lanes is what the length of every vector must be a multiple of.
const Lanes = 16

// HeadDims lists the supported attention head sizes.
func HeadDims() []int { return []int{64, 128} }

// Options choose how a Compute works. They never change results.
type Options struct {
	Threads int // 0: one for each CPU
	ISA     ISA // what this machine cannot run is an error of New
}

// Compute runs kernels on a few threads. Its methods are called by one goroutine at a time.
type Compute struct {
	isa     *isa
	pool    *pool
	scratch []scratch // one for each thread
}

// scratch is a thread's memory. It lives here because what is passed to assembly through a function
// value escapes to the heap.
type scratch struct {
	scores []float32 // of each head
	totals []float32
	lanes  [Lanes]float32
}

// isa is one implementation of the kernels. All have the same bits. Slice lengths are multiples of
// Lanes unless told otherwise.
type isa struct {
	id ISA
	// matMul computes panels [from,to) of rows [row,end) of y = x*W.
	matMul func(y []float32, ldy int, x []float32, w *Matrix, t tile)
	// dots writes scale * (q·key) for len(scores) keys, any number, that lie stride numbers apart.
	dots func(scores, q, keys []float32, stride int, scale float32)
	// weigh adds p[i]*value[i] to the heads of dim numbers in acc, values stride numbers apart.
	weigh func(acc []float32, dim int, p weights, values []float32, stride int)
	// top writes the maximum of all s[i], i%16 = l, to lane l.
	top func(s []float32, lanes *[Lanes]float32)
	// expSum replaces s by exp(s-top) and adds element i to sum[i%16].
	expSum func(s []float32, top float32, sum *[Lanes]float32)
	// siluMul writes gate/(1+exp(-gate)) * up.
	siluMul func(dst, gate, up []float32)
	add     func(dst, x []float32)
	// sumSquares chains x[i]*x[i] into lanes[i%16].
	sumSquares func(x []float32, lanes *[Lanes]float32)
	// scaleMul writes x*scale*w.
	scaleMul func(dst, x, w []float32, scale float32)
	// rotate writes x[i]*cos[i] + x[i^1]*sin[i].
	rotate func(x, cos, sin []float32)
	// peak repeats FMA instructions n times and says how many operations that were.
	peak func(n int) float64
}

// weights are n softmax numerators for each head, heads row numbers apart.
type weights struct {
	scores []float32
	row, n int
}

// New starts the threads of a Compute.
func New(o Options) (*Compute, error) {
	if o.Threads < 0 || o.Threads > 1024 {
		return nil, fmt.Errorf("threads is %d, want 0 to 1024", o.Threads)
	}
	o.Threads = cmp.Or(o.Threads, runtime.GOMAXPROCS(0))
	kernels, err := choose(o.ISA)
	if err != nil {
		return nil, err
	}
	c := &Compute{isa: kernels, scratch: make([]scratch, o.Threads)}
	c.pool = newPool(o.Threads)
	return c, nil
}

// ISA is the instruction set in use, never Auto.
func (c *Compute) ISA() ISA { return c.isa.id }

// Threads is the number of threads in use.
func (c *Compute) Threads() int { return len(c.scratch) }

// Close stops the threads and returns when they are gone.
func (c *Compute) Close() { c.pool.close() }

// Run calls f for parts of [0,n), each at most grain long, on all threads and returns when all are
// done. f must not call methods of c that run in parallel themselves.
func (c *Compute) Run(n, grain int, f func(thread, from, to int)) { c.pool.run(n, grain, f) }

// Each calls f for each i of [0,n) as Run does for parts.
func (c *Compute) Each(n, grain int, f func(thread, i int)) {
	c.Run(n, grain, func(thread, from, to int) {
		for i := from; i < to; i++ {
			f(thread, i)
		}
	})
}

// RMSNorm writes x / rms(x) * w. It is not parallel: call it from Run.
func (c *Compute) RMSNorm(thread int, dst, x, w []float32, eps float32) {
	lanes := &c.scratch[thread].lanes
	c.isa.sumSquares(x, lanes)
	mean := tree(lanes) / float32(len(x))
	scale := 1 / float32(math.Sqrt(float64(mean+eps))) // the float64 root rounds to the exact float32 one
	c.isa.scaleMul(dst, x, w, scale)
}

// Add adds x to dst. Not parallel.
func (c *Compute) Add(dst, x []float32) { c.isa.add(dst, x) }

// SiLUMul writes silu(gate) * up; dst may be gate. Not parallel.
func (c *Compute) SiLUMul(dst, gate, up []float32) { c.isa.siluMul(dst, gate, up) }

// Rotate turns each head of x (a multiple of the length of cos) by the angles of one position, as
// written by [Angles]. Not parallel.
func (c *Compute) Rotate(x, cos, sin []float32) {
	for ; len(x) > 0; x = x[len(cos):] {
		c.isa.rotate(x[:len(cos)], cos, sin)
	}
}

// Peak keeps the FMA units of the calling thread as busy as they can be, for n rounds, and gives the number of
// floating-point operations. Its speed is the limit of every kernel, for benchmarks.
func (c *Compute) Peak(n int) float64 {
	if n <= 0 {
		return 0
	}
	return c.isa.peak(n)
}

// Angles writes the rotary embedding of a position for a head of len(cos): pairs (2i,2i+1) turn by
// position * base^(-2i/dim). Cosine and signed sine are written for both of a pair.
func Angles(cos, sin []float32, position int, base float64) {
	for i := 0; i < len(cos); i += 2 {
		angle := float64(position) * math.Pow(base, -float64(i)/float64(len(cos)))
		c, s := float32(math.Cos(angle)), float32(math.Sin(angle))
		cos[i], cos[i+1] = c, c
		sin[i], sin[i+1] = -s, s
	}
}

// tree adds 16 lanes pairwise: halves of 8, 4, 2, 1.
func tree(l *[Lanes]float32) float32 {
	t := *l
	for half := Lanes / 2; half > 0; half /= 2 {
		for i := range half {
			t[i] += t[i+half]
		}
	}
	return t[0]
}

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

// ISA is an instruction set that the kernels are written for. All give the same bits.
type ISA uint8

// The instruction sets, the fastest first.
const (
	Auto     ISA = iota // the fastest that this machine and its operating system can run
	AVX512              // AVX-512F, with AVX2's
	AVX2                // AVX2, FMA and F16C
	Portable            // plain Go with exact FMA emulation: the reference, too slow to serve with
)

// String is the name of the instruction set, for logs.
func (i ISA) String() string {
	switch i {
	case Auto:
		return "auto"
	case AVX512:
		return "avx512"
	case AVX2:
		return "avx2"
	case Portable:
		return "portable"
	}
	return fmt.Sprintf("ISA(%d)", uint8(i))
}

// Supported lists what this machine can run, the fastest first. Portable is always the last.
func Supported() []ISA {
	var ids []ISA
	for _, k := range runnable() {
		ids = append(ids, k.id)
	}
	return ids
}

func runnable() []*isa { return append(native(), portable()) }

// choose gives the kernels for an instruction set.
func choose(id ISA) (*isa, error) {
	all := runnable()
	if id == Auto {
		return all[0], nil
	}
	i := slices.IndexFunc(all, func(k *isa) bool { return k.id == id })
	if i < 0 {
		return nil, fmt.Errorf("this machine cannot run %v kernels, only %v", id, Supported())
	}
	return all[i], nil
}
