package sim

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/model"
)

func newModel(t testing.TB, o Options) *Model {
	m, err := New(o)
	require.NoError(t, err)
	return m
}

func newCache(t testing.TB, m *Model, blockTokens, blocks int) *connector.KV {
	return newCaches(t, m, blockTokens, blocks)[0]
}

// newCaches makes a cache for every rank. What is no block's is filled with guard bytes.
func newCaches(t testing.TB, m *Model, blockTokens, blocks int) []*connector.KV {
	l := m.Layout(blockTokens, blocks)
	var size int64
	for _, s := range l.Segments {
		size = max(size, s.Offset+int64(blocks)*s.BlockStride)
	}
	caches := make([]*connector.KV, m.Spec().Ranks)
	for rank := range caches {
		var err error
		caches[rank], err = connector.NewKV(l, [][]byte{bytes.Repeat([]byte{guard}, int(size))})
		require.NoError(t, err)
	}
	return caches
}

// guard is what memory holds that nobody has written.
const guard = 0xA5

func prompt(rng *rand.Rand, n int) []int32 {
	tokens := make([]int32, n)
	for i := range tokens {
		tokens[i] = rng.Int32N(vocab)
	}
	return tokens
}

// cache is a cache with a sequence's block table.
type cache struct {
	*connector.KV
	table []connector.BlockID
}

// run computes tokens in chunks and returns the logits of every position.
func run(t testing.TB, m *Model, kv cache, tokens []int32, chunk func() int) [][]float32 {
	var all [][]float32
	for at := 0; at < len(tokens); {
		n := min(chunk(), len(tokens)-at)
		c := model.Chunk{Tokens: tokens[at : at+n], Start: at, Blocks: [][]connector.BlockID{kv.table}}
		for range n {
			c.Logits = append(c.Logits, make([]float32, vocab))
		}
		require.NoError(t, m.Forward(&model.Batch{Chunks: []model.Chunk{c}}, kv.KV))
		all = append(all, c.Logits...)
		at += n
	}
	return all
}

// table lists n blocks in random order.
func table(rng *rand.Rand, n int) []connector.BlockID {
	ids := make([]connector.BlockID, n)
	for i, p := range rng.Perm(n) {
		ids[i] = connector.BlockID(p)
	}
	return ids
}

func TestLogitsDependOnTokensAlone(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	m := newModel(t, Options{})
	tokens := prompt(rng, 150)
	want := run(t, m, cache{newCache(t, m, 16, 10), table(rng, 10)}, tokens, func() int { return len(tokens) })
	for _, blockTokens := range []int{1, 7, 16, 64, 150} {
		for _, chunk := range []int{1, 7, 64, 0} {
			t.Run(fmt.Sprintf("block %d chunk %d", blockTokens, chunk), func(t *testing.T) {
				n := (len(tokens) + blockTokens - 1) / blockTokens
				size := func() int {
					if chunk == 0 {
						return 1 + rng.IntN(20)
					}
					return chunk
				}
				require.Equal(t, want, run(t, m, cache{newCache(t, m, blockTokens, n), table(rng, n)}, tokens, size))
			})
		}
	}
}

func TestBatchEqualsOneByOne(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	m := newModel(t, Options{})
	kv := newCache(t, m, 16, 40)
	ids := table(rng, 40)
	var batch model.Batch
	var want [][]float32
	for i := range 8 {
		tokens := prompt(rng, 1+rng.IntN(80))
		own := ids[i*5 : i*5+5]
		alone := run(t, m, cache{newCache(t, m, 16, 40), own}, tokens, func() int { return 80 })
		want = append(want, alone[len(alone)-1])
		batch.Chunks = append(batch.Chunks, model.Chunk{
			Tokens: tokens, Blocks: [][]connector.BlockID{own}, Logits: [][]float32{make([]float32, vocab)},
		})
	}
	require.NoError(t, m.Forward(&batch, kv))
	for i, c := range batch.Chunks {
		require.Equal(t, want[i], c.Logits[0])
	}
}

// TestEveryWrongByteShows flips each byte of the cache that a decode attends to.
func TestEveryWrongByteShows(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	m := newModel(t, Options{Layers: 3, BytesPerToken: 16})
	kv := newCache(t, m, 4, 4)
	ids := table(rng, 4)
	tokens := prompt(rng, 14)
	run(t, m, cache{kv, ids}, tokens, func() int { return 14 })
	next := func() []float32 {
		logits := make([]float32, vocab)
		require.NoError(t, m.Forward(&model.Batch{Chunks: []model.Chunk{{
			Tokens: []int32{65}, Start: 14, Blocks: [][]connector.BlockID{ids}, Logits: [][]float32{logits},
		}}}, kv))
		return logits
	}
	want := next()
	flips := 0
	for segment := range kv.Layout().Segments {
		for position := range 14 {
			token := kv.View(segment, ids[position/4])[position%4*16:][:16]
			for i := range token {
				flip := byte(1 << rng.IntN(8))
				token[i] ^= flip
				require.NotEqual(t, want, next(), "segment %d position %d byte %d", segment, position, i)
				token[i] ^= flip
				flips++
			}
		}
	}
	require.Equal(t, 3*14*16, flips)
	require.Equal(t, want, next())
}

func TestBytesDependOnWholePrefix(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	m := newModel(t, Options{})
	a := prompt(rng, 32)
	b := slices.Clone(a)
	b[3] ^= 1
	kvs := [2]*connector.KV{newCache(t, m, 16, 2), newCache(t, m, 16, 2)}
	for i, tokens := range [][]int32{a, b} {
		run(t, m, cache{kvs[i], []connector.BlockID{0, 1}}, tokens, func() int { return 32 })
	}
	for segment := range kvs[0].Layout().Segments {
		require.NotEqual(t, kvs[0].View(segment, 1), kvs[1].View(segment, 1), "layer %d", segment)
	}
}

func TestRefusesWhatDoesNotFit(t *testing.T) {
	for _, o := range []Options{
		{Layers: -1}, {BytesPerToken: 24}, {MaxTokens: -3}, {Ranks: -1}, {Groups: 5}, {Window: 1}, {Stride: "diagonal"}, {Ranks: 65},
	} {
		_, err := New(o)
		require.Error(t, err)
	}
	m := newModel(t, Options{MaxTokens: 20})
	kv := newCache(t, m, 4, 4)
	for name, c := range map[string]model.Chunk{
		"no tokens":       {Blocks: [][]connector.BlockID{{0}}},
		"short table":     {Tokens: make([]int32, 5), Blocks: [][]connector.BlockID{{0}}},
		"no such block":   {Tokens: []int32{1}, Blocks: [][]connector.BlockID{{4}}},
		"no such token":   {Tokens: []int32{vocab}, Blocks: [][]connector.BlockID{{0}}},
		"too long":        {Tokens: []int32{1}, Start: 20, Blocks: [][]connector.BlockID{{0, 1, 2, 3}}},
		"too many tables": {Tokens: []int32{1}, Blocks: [][]connector.BlockID{{0}, {1}}},
		"too many logits": {Tokens: []int32{1}, Blocks: [][]connector.BlockID{{0}}, Logits: make([][]float32, 2)},
	} {
		require.Error(t, m.Forward(&model.Batch{Chunks: []model.Chunk{c}}, kv), name)
	}
}

func BenchmarkDecode1000(b *testing.B) {
	rng := rand.New(rand.NewPCG(9, 9))
	m := newModel(b, Options{})
	kv := newCache(b, m, 16, 64)
	ids := table(rng, 64)
	run(b, m, cache{kv, ids}, prompt(rng, 1000), func() int { return 1000 })
	batch := &model.Batch{Chunks: []model.Chunk{{
		Tokens: []int32{65}, Start: 1000, Blocks: [][]connector.BlockID{ids}, Logits: [][]float32{make([]float32, vocab)},
	}}}
	for b.Loop() {
		if err := m.Forward(batch, kv); err != nil {
			b.Fatal(err)
		}
	}
}
