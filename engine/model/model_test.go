package model

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/gguf"
	"github.com/kvport/kvport/engine/model/kernel"
)

func TestSpec(t *testing.T) {
	m := loadTiny(t, Options{Threads: 1})
	s := m.Spec()
	require.Equal(t, "tiny-random", s.Name)
	require.Equal(t, []int{259, 4096, 4}, []int{s.Vocab, s.MaxTokens, s.Layers})
	require.Equal(t, s, loadTiny(t, Options{Threads: 2, ISA: kernel.Portable}).Spec(), "how it computes is no part of the model")
	require.NotEqual(t, s.Weights, loadTiny(t, Options{DType: F16}).Spec().Weights)
	other, err := Tiny(testSeed+1, Options{})
	require.NoError(t, err)
	require.NotEqual(t, s.Weights, other.Spec().Weights)
	require.NoError(t, other.Close())
}

func TestLayout(t *testing.T) {
	m := loadTiny(t, Options{Threads: 1})
	for _, size := range []int{1, 16, 64} {
		l := m.Layout(size, 10)
		require.Len(t, l.Segments, 4)
		end := int64(0)
		for i, s := range l.Segments {
			require.Equal(t, i, s.Layer)
			require.Equal(t, int64(2*size*64*4), s.Bytes)
			require.Zero(t, s.Offset%4096)
			require.Zero(t, s.BlockStride%4096)
			require.Equal(t, end, s.Offset)
			end += 10 * s.BlockStride
		}
		require.NoError(t, l.Validate([]int64{end}))
		require.Error(t, l.Validate([]int64{end - pageBytes}))
	}
}

// TestHooks: a layer's blocks are read only after BeforeLayer, written only after it, and final at AfterLayer.
func TestHooks(t *testing.T) {
	m := loadTiny(t, Options{Threads: 2})
	tokens := randomTokens(4, 40, 259)
	want := newKV(t, m, 16, 4)
	whole := newSequences(want, 1, tokens)[0]
	require.NoError(t, m.Forward(&Batch{Chunks: []Chunk{whole.chunk(40, 259)}}, want))

	kv := newKV(t, m, 16, 4)
	s := newSequences(kv, 1, tokens)[0]
	s.done = 20 // in the middle of a block, which the hook loads as a whole
	var calls []int
	b := &Batch{
		Chunks: []Chunk{s.chunk(40, 259)},
		BeforeLayer: func(l int) error {
			calls = append(calls, l)
			for _, id := range s.blocks[:2] {
				for _, v := range floats(kv.View(l, id)) {
					require.True(t, math.IsNaN(float64(v)), "layer %d written before its hook", l)
				}
			}
			copy(kv.View(l, s.blocks[0]), want.View(l, whole.blocks[0]))
			slot := 4 * 64 * 4 // tokens 16..19 of the second block, keys and values
			copy(kv.View(l, s.blocks[1])[:slot], want.View(l, whole.blocks[1])[:slot])
			copy(kv.View(l, s.blocks[1])[16*64*4:][:slot], want.View(l, whole.blocks[1])[16*64*4:][:slot])
			return nil
		},
		AfterLayer: func(l int) error {
			calls = append(calls, -l)
			for i := range s.blocks[:2] {
				require.Equal(t, want.View(l, whole.blocks[i]), kv.View(l, s.blocks[i]), "layer %d block %d", l, i)
			}
			return nil
		},
	}
	require.NoError(t, m.Forward(b, kv))
	require.Equal(t, []int{0, 0, 1, -1, 2, -2, 3, -3}, calls)
	requireSame(t, whole.logits[20:], s.logits, "with loaded prefix")

	stop := errors.New("stop")
	for _, b := range []*Batch{{BeforeLayer: func(int) error { return stop }}, {AfterLayer: func(int) error { return stop }}} {
		s.done = 20
		b.Chunks = []Chunk{s.chunk(40, 259)}
		require.ErrorIs(t, m.Forward(b, kv), stop)
	}
}

func TestForwardRefuses(t *testing.T) {
	m := loadTiny(t, Options{Threads: 1})
	kv := newKV(t, m, 16, 4)
	table := func(ids ...connector.BlockID) [][]connector.BlockID { return [][]connector.BlockID{ids} }
	for name, c := range map[string]Chunk{
		"no tokens":        {Blocks: table(0)},
		"negative start":   {Tokens: []int32{1}, Start: -1, Blocks: table(0)},
		"too long":         {Tokens: []int32{1}, Start: 4096, Blocks: table(0)},
		"token too high":   {Tokens: []int32{259}, Blocks: table(0)},
		"negative token":   {Tokens: []int32{-1}, Blocks: table(0)},
		"no blocks":        {Tokens: []int32{1}},
		"short table":      {Tokens: []int32{1}, Start: 16, Blocks: table(0)},
		"two groups":       {Tokens: []int32{1}, Blocks: append(table(0), table(0)...)},
		"block beyond":     {Tokens: []int32{1}, Blocks: table(4)},
		"negative block":   {Tokens: []int32{1}, Blocks: table(-1)},
		"too many logits":  {Tokens: []int32{1}, Blocks: table(0), Logits: make([][]float32, 2)},
		"logits too short": {Tokens: []int32{1}, Blocks: table(0), Logits: [][]float32{make([]float32, 258)}},
		"start overflows":  {Tokens: []int32{1}, Start: math.MaxInt, Blocks: table(0)},
	} {
		require.Error(t, m.Forward(&Batch{Chunks: []Chunk{c}}, kv), name)
	}
	layout := m.Layout(16, 4)
	layout.Segments = layout.Segments[:3]
	short, err := connector.NewKV(layout, [][]byte{make([]byte, 1<<20)})
	require.NoError(t, err)
	good := Chunk{Tokens: []int32{1}, Blocks: table(0)}
	require.ErrorIs(t, m.Forward(&Batch{Chunks: []Chunk{good}}, short), connector.ErrIncompatible)
	require.NoError(t, m.Forward(&Batch{Chunks: []Chunk{good}}, kv))
	require.NoError(t, m.Forward(&Batch{}, kv))
}

func TestClosed(t *testing.T) {
	m, err := Tiny(1, Options{Threads: 2})
	require.NoError(t, err)
	kv := newKV(t, m, 16, 1)
	require.NoError(t, m.Close())
	require.NoError(t, m.Close())
	require.ErrorContains(t, m.Forward(&Batch{}, kv), "closed")
}

// TestRefusedFiles: what is not supported is named.
func TestRefusedFiles(t *testing.T) {
	type change func(w *gguf.Writer)
	file := func(heads uint32, changes ...change) []byte {
		w := &gguf.Writer{}
		w.String("general.architecture", "llama")
		w.Uint32("llama.embedding_length", 128)
		w.Uint32("llama.feed_forward_length", 256)
		w.Uint32("llama.attention.head_count", heads)
		w.Uint32("llama.block_count", 1)
		w.Uint32("llama.context_length", 64)
		w.Float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
		w.Tensor("token_embd.weight", gguf.F32, []int{128, 4}, make([]byte, 4*512))
		for _, c := range changes {
			c(w)
		}
		return w.Bytes()
	}
	arch := &gguf.Writer{}
	arch.String("general.architecture", "mamba")
	for want, data := range map[string][]byte{
		"mamba":                      arch.Bytes(),
		"heads of 32 dimensions":     file(4),
		"llama.rope.scaling.type":    file(2, func(w *gguf.Writer) { w.String("llama.rope.scaling.type", "yarn") }),
		"mixture of experts":         file(2, func(w *gguf.Writer) { w.Uint32("llama.expert_count", 8) }),
		"rope_freqs.weight":          file(2, func(w *gguf.Writer) { w.Tensor("rope_freqs.weight", gguf.F32, []int{32}, make([]byte, 128)) }),
		"32 of 64 dimensions":        file(2, func(w *gguf.Writer) { w.Uint32("llama.rope.dimension_count", 32) }),
		"do not divide":              file(2, func(w *gguf.Writer) { w.Uint32("llama.attention.head_count_kv", 3) }),
		"llama.attention.head_count": file(0),
		"blk.0.attn_norm.weight":     file(2),
		"has shape":                  file(2, func(w *gguf.Writer) { w.Tensor("blk.0.attn_norm.weight", gguf.F32, []int{64}, make([]byte, 256)) }),
		"ffn_norm.weight":            file(2, func(w *gguf.Writer) { w.Tensor("blk.0.attn_norm.weight", gguf.F32, []int{128}, make([]byte, 512)) }),
	} {
		f, err := gguf.Parse(data)
		require.NoError(t, err)
		_, err = fromGGUF(f, Options{Threads: 1})
		require.ErrorContains(t, err, want)
	}
	_, err := Load("testdata/absent.gguf", Options{})
	require.Error(t, err)
	_, err = Load("testdata/llamacpp.json", Options{})
	require.ErrorIs(t, err, gguf.ErrFormat)
	_, err = Tiny(1, Options{DType: 9})
	require.ErrorIs(t, err, connector.ErrIncompatible)
	_, err = Tiny(1, Options{Threads: -1})
	require.ErrorContains(t, err, "threads")
}

// TestPinned: the same bits in every release, on every machine. When a change of the arithmetic is meant,
// change the constant arithmetic with it: it keeps the caches of old and new engines apart.
func TestPinned(t *testing.T) {
	for d, want := range map[DType][2]string{
		F32: {"9588fef1563635ae", "6741a092d1485412"},
		F16: {"7466077be5f5acae", "f6ec3b2a40d3052a"},
	} {
		m := loadTiny(t, Options{Threads: 1, DType: d})
		h := sha256.New()
		for _, l := range logits(t, m, randomTokens(9, 50, 259), 50, 16) {
			h.Write(bytesOf(l))
		}
		require.Equal(t, want, [2]string{m.Spec().Weights.String(), hex.EncodeToString(h.Sum(nil)[:8])}, d.String())
	}
}
