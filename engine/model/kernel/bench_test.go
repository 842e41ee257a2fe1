package kernel

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// BenchmarkMatMul has the shapes of a 135M model: a chunk, a batch and a token. 1x49152x576 is the head.
func BenchmarkMatMul(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	for _, d := range []DType{F32, F16} {
		for _, shape := range [][3]int{{512, 1536, 576}, {512, 576, 1536}, {8, 1536, 576}, {1, 1536, 576}, {1, 49152, 576}} {
			for _, at := range []Options{{1, AVX2}, {1, AVX512}, {2, AVX512}} {
				rows, n, k := shape[0], shape[1], shape[2]
				b.Run(fmt.Sprintf("%s/%dx%dx%d/%v/threads=%d", d, rows, n, k, at.ISA, at.Threads), func(b *testing.B) {
					c := newCompute(b, at.Threads, at.ISA)
					w := pack(b, c, random(r, n*k), k, d)
					x, y := random(r, rows*k), make([]float32, rows*w.Stride())
					for b.Loop() {
						c.MatMul(y, x, rows, w)
					}
					b.ReportMetric(2*float64(rows*n*k)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GF/s")
				})
			}
		}
	}
}

// BenchmarkAttend is one position's heads at the end of a long sequence.
func BenchmarkAttend(b *testing.B) {
	r := rand.New(rand.NewPCG(2, 2))
	const position, kvHeads, group, dim = 511, 3, 3, 64
	cache := newCache(16, kvHeads, dim, position+1)
	for p := range position + 1 {
		cache.Put(p, random(r, kvHeads*dim), random(r, kvHeads*dim))
	}
	q, out := random(r, group*dim), make([]float32, group*dim)
	for _, id := range []ISA{AVX2, AVX512} {
		b.Run(id.String(), func(b *testing.B) {
			c := newCompute(b, 1, id)
			for b.Loop() {
				c.Attend(0, out, q, cache, Query{1, position})
			}
		})
	}
}

// BenchmarkPortable is the reference path on a small product.
func BenchmarkPortable(b *testing.B) {
	r := rand.New(rand.NewPCG(3, 3))
	const rows, n, k = 8, 576, 576
	c := newCompute(b, 1, Portable)
	w := pack(b, c, random(r, n*k), k, F32)
	x, y := random(r, rows*k), make([]float32, rows*n)
	for b.Loop() {
		c.MatMul(y, x, rows, w)
	}
	b.ReportMetric(2*rows*n*k*float64(b.N)/b.Elapsed().Seconds()/1e9, "GF/s")
}
