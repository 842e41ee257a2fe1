package model

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/model/kernel"
)

// requireInvariant computes the same tokens in many ways: all logits of all positions must have the same
// bits. load makes the model with the given options.
func requireInvariant(t *testing.T, load func(Options) Model, d DType, tokens []int32) [][]float32 {
	one := load(Options{Threads: 1, DType: d})
	two := load(Options{Threads: 2, DType: d})
	want := logits(t, one, tokens, len(tokens), 16)
	requireSame(t, want, logits(t, two, tokens, len(tokens), 16), "2 threads")
	for _, chunk := range []int{1, 7, 64} {
		requireSame(t, want, logits(t, two, tokens, chunk, 16), label("chunks of ", chunk))
	}
	for _, block := range []int{32, 64} {
		requireSame(t, want, logits(t, one, tokens, 64, block), label("blocks of ", block))
	}
	// One of eight sequences, each with another length, in uneven chunks.
	const place = 3
	var texts [][]int32
	for i := range 8 {
		texts = append(texts, randomTokens(uint64(i), 20+3*i, one.Spec().Vocab))
	}
	texts[place] = tokens
	kv := newKV(t, two, 16, 64)
	seqs := newSequences(kv, 5, texts...)
	forward(t, two, kv, seqs, 5, 1, 9, 31)
	requireSame(t, want, seqs[place].logits, "batch of 8")
	requireSame(t, logits(t, one, texts[7], len(texts[7]), 16), seqs[7].logits, "another of the batch")
	t.Logf("%d tokens, chunks of 1, 7, 64, whole; blocks of 16, 32, 64; batch 1, 8; threads 1, 2: 0 of %d logits differ",
		len(tokens), len(want)*len(want[0]))
	return want
}

func TestTinyInvariance(t *testing.T) {
	for _, d := range []DType{F32, F16} {
		t.Run(d.String(), func(t *testing.T) {
			tokens := randomTokens(1, 150, 259)
			load := func(o Options) Model { return loadTiny(t, o) }
			want := requireInvariant(t, load, d, tokens)
			for _, isa := range kernel.Supported() {
				m := loadTiny(t, Options{Threads: 2, DType: d, ISA: isa})
				requireSame(t, want, logits(t, m, tokens, len(tokens), 16), isa.String())
				requireSame(t, want, logits(t, m, tokens, 7, 32), label(isa, ", chunks of 7, blocks of 32"))
			}
		})
	}
}

// TestRealInvariance takes the last prompt, a bit longer than the largest chunk and block; in soak all prompts, twice as long.
func TestRealInvariance(t *testing.T) {
	const short = 70
	texts, soak := readRecording(t).texts(), os.Getenv("KVPORT_SOAK") != ""
	t.Logf("prompts 1; soak runs %d, up to %d tokens", len(texts), 2*len(texts[len(texts)-1]))
	for i, text := range texts {
		text = append(text, text...)
		if !soak {
			if i < len(texts)-1 {
				continue
			}
			text = text[:short]
		}
		dtypes := []DType{F16, F32}
		for _, d := range dtypes[:1+i/2] { // the last prompt with both
			t.Run(label("prompt ", i, " ", d), func(t *testing.T) {
				want := requireInvariant(t, func(o Options) Model { return loadReal(t, o) }, d, text)
				for _, isa := range kernel.Supported() {
					some := text
					if isa == kernel.Portable {
						some = text[:4] // it takes a second for each
					}
					m := loadReal(t, Options{Threads: 2, DType: d, ISA: isa})
					requireSame(t, want[:len(some)], logits(t, m, some, len(some), 16), isa.String())
				}
			})
		}
	}
}

// TestRealRanks: with its KV heads on three caches the model gives the same bits.
func TestRealRanks(t *testing.T) {
	text := readRecording(t).texts()[0]
	want := logits(t, loadReal(t, Options{}), text, 64, 16)
	m := loadReal(t, Options{Ranks: 3})
	sharded, ok := m.(Sharded)
	require.True(t, ok)
	for _, block := range []int{16, 32} {
		var ranks []*connector.KV
		for range 3 {
			ranks = append(ranks, newKV(t, m, block, len(text)/block+3))
		}
		s := newSequences(ranks[0], 9, text)[0]
		for s.done < len(s.tokens) {
			require.NoError(t, sharded.ForwardRanks(&Batch{Chunks: []Chunk{s.chunk(7, m.Spec().Vocab)}}, ranks))
		}
		requireSame(t, want, s.logits, label("3 ranks, blocks of ", block))
		require.ErrorIs(t, m.Forward(&Batch{Chunks: []Chunk{{Tokens: text[:1], Blocks: [][]connector.BlockID{{0}}}}}, ranks[0]), connector.ErrIncompatible)
	}
	_, err := Load(modelPath(t), Options{Ranks: 2})
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "3 KV heads cannot be spread evenly over 2 ranks")
}

// TestTinyDependsOnEverything: a model whose logits ignore part of the prefix could not find lost blocks.
func TestTinyDependsOnEverything(t *testing.T) {
	m := loadTiny(t, Options{Threads: 1})
	tokens := randomTokens(2, 64, 259)
	want := logits(t, m, tokens, 64, 16)[63]
	for p := range 63 {
		changed := append([]int32(nil), tokens...)
		changed[p] = (changed[p] + 1) % 259
		require.NotEqual(t, want, logits(t, m, changed, 64, 16)[63], "token %d does not matter", p)
	}
}

// TestPrefixReuse moves the KV of a prefix block by block into another cache and goes on from there.
func TestPrefixReuse(t *testing.T) {
	m := loadTiny(t, Options{Threads: 2})
	tokens := randomTokens(3, 100, 259)
	const prefix = 77
	p, d := newKV(t, m, 16, 16), newKV(t, m, 16, 32)
	from := newSequences(p, 1, tokens)[0]
	b := &Batch{Chunks: []Chunk{from.chunk(prefix, 259)}}
	require.NoError(t, m.Forward(b, p))
	to := newSequences(d, 2, tokens)[0]
	to.done = prefix
	for s := range p.Layout().Segments {
		for i := range (prefix + 15) / 16 {
			copy(d.View(s, to.blocks[i]), p.View(s, from.blocks[i]))
		}
	}
	require.NoError(t, m.Forward(&Batch{Chunks: []Chunk{to.chunk(100, 259)}}, d))
	requireSame(t, logits(t, m, tokens, 100, 16)[prefix:], to.logits, "after a moved prefix")
}
