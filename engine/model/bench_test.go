package model

import (
	"fmt"
	"testing"

	"github.com/kvport/kvport/connector"
)

// benchModels runs f with the real model, f16 and f32, on one thread and two.
func benchModels(b *testing.B, f func(b *testing.B, m Model)) {
	for _, d := range []DType{F16, F32} {
		for _, threads := range []int{1, 2} {
			b.Run(fmt.Sprintf("%s/threads=%d", d, threads), func(b *testing.B) {
				f(b, loadReal(b, Options{Threads: threads, DType: d}))
			})
		}
	}
}

// BenchmarkPrefill computes a prompt of 512 tokens in one chunk.
func BenchmarkPrefill(b *testing.B) {
	benchModels(b, func(b *testing.B, m Model) {
		const tokens = 512
		kv := newKV(b, m, 16, tokens/16)
		s := newSequences(kv, 1, randomTokens(1, tokens, m.Spec().Vocab))[0]
		c := s.chunk(tokens, 0)
		c.Logits = [][]float32{make([]float32, m.Spec().Vocab)}
		batch := &Batch{Chunks: []Chunk{c}}
		for b.Loop() {
			if err := m.Forward(batch, kv); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(b.N*tokens)/b.Elapsed().Seconds(), "tokens/s")
	})
}

// BenchmarkDecode computes one token of each of 1 or 8 sequences of 128 tokens.
func BenchmarkDecode(b *testing.B) {
	for _, n := range []int{1, 8} {
		b.Run(fmt.Sprintf("batch=%d", n), func(b *testing.B) {
			benchModels(b, func(b *testing.B, m Model) { benchDecode(b, m, n) })
		})
	}
}

func benchDecode(b *testing.B, m Model, n int) {
	const context = 128
	kv := newKV(b, m, 16, n*(context/16+1))
	batch := &Batch{}
	for i := range n {
		blocks := make([]connector.BlockID, context/16+1)
		for j := range blocks {
			blocks[j] = connector.BlockID(i*len(blocks) + j)
		}
		table := [][]connector.BlockID{blocks}
		prompt := &Batch{Chunks: []Chunk{{Tokens: randomTokens(uint64(i), context, m.Spec().Vocab), Blocks: table}}}
		if err := m.Forward(prompt, kv); err != nil {
			b.Fatal(err)
		}
		batch.Chunks = append(batch.Chunks, Chunk{
			Tokens: []int32{int32(i)}, Start: context, Blocks: table,
			Logits: [][]float32{make([]float32, m.Spec().Vocab)},
		})
	}
	for b.Loop() {
		if err := m.Forward(batch, kv); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N*n)/b.Elapsed().Seconds(), "tokens/s")
}

// BenchmarkLoad reads, dequantises and packs the model.
func BenchmarkLoad(b *testing.B) {
	path := modelPath(b)
	for b.Loop() {
		m, err := Load(path, Options{DType: F16})
		if err != nil {
			b.Fatal(err)
		}
		if err := m.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
