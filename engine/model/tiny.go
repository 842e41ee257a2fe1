package model

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/kvport/kvport/engine/gguf"
)

// The shape of the tiny model. Its vocabulary is the byte tokenizer's.
const (
	tinyHidden    = 128
	tinyFeed      = 256
	tinyLayers    = 4
	tinyHeads     = 2
	tinyKVHeads   = 1
	tinyVocab     = 259
	tinyPositions = 4096
)

// Tiny makes a small model with random weights from a seed: no download, and every step of the real
// thing. Equal seeds and dtypes make equal models on every machine.
func Tiny(seed uint64, o Options) (Model, error) {
	f, err := gguf.Parse(tinyFile(seed))
	if err != nil {
		return nil, fmt.Errorf("tiny model: %w", err)
	}
	return fromGGUF(f, o)
}

// tinyFile is the model as a GGUF file, so that it takes the same way in as any other.
func tinyFile(seed uint64) []byte {
	w := &gguf.Writer{}
	w.String("general.architecture", "llama")
	w.String("general.name", "tiny-random")
	w.Uint32("llama.embedding_length", tinyHidden)
	w.Uint32("llama.feed_forward_length", tinyFeed)
	w.Uint32("llama.attention.head_count", tinyHeads)
	w.Uint32("llama.attention.head_count_kv", tinyKVHeads)
	w.Uint32("llama.block_count", tinyLayers)
	w.Uint32("llama.context_length", tinyPositions)
	w.Float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
	w.Float32("llama.rope.freq_base", 10000)

	t := &tinyTensors{Writer: w, source: rand.NewPCG(seed, 0)}
	q, kv := tinyHidden, tinyHidden/tinyHeads*tinyKVHeads
	t.random("token_embd.weight", tinyVocab, tinyHidden, 1)
	t.random("output.weight", tinyVocab, tinyHidden, 3/math.Sqrt(tinyHidden))
	t.ones("output_norm.weight")
	for i := range tinyLayers {
		name := func(part string) string { return fmt.Sprintf("blk.%d.%s.weight", i, part) }
		t.ones(name("attn_norm"))
		t.ones(name("ffn_norm"))
		// Sharp attention with a strong say: tokens far back must matter, or a lost block would not show.
		t.random(name("attn_q"), q, tinyHidden, 3/math.Sqrt(tinyHidden))
		t.random(name("attn_k"), kv, tinyHidden, 3/math.Sqrt(tinyHidden))
		t.random(name("attn_v"), kv, tinyHidden, 3/math.Sqrt(tinyHidden))
		t.random(name("attn_output"), tinyHidden, q, 3/math.Sqrt(tinyHidden))
		t.random(name("ffn_gate"), tinyFeed, tinyHidden, 2/math.Sqrt(tinyHidden))
		t.random(name("ffn_up"), tinyFeed, tinyHidden, 2/math.Sqrt(tinyHidden))
		t.random(name("ffn_down"), tinyHidden, tinyFeed, 2/math.Sqrt(tinyFeed))
	}
	return w.Bytes()
}

type tinyTensors struct {
	*gguf.Writer
	source *rand.PCG // its stream is fixed by the Go 1 promise
}

func (t *tinyTensors) ones(name string) {
	t.add(name, []int{tinyHidden}, func() float32 { return 1 })
}

// random adds uniform numbers in [-scale,scale).
func (t *tinyTensors) random(name string, rows, cols int, scale float64) {
	s := float32(scale)
	t.add(name, []int{cols, rows}, func() float32 {
		return float32(int32(t.source.Uint64()>>32)) / (1 << 31) * s
	})
}

func (t *tinyTensors) add(name string, dims []int, next func() float32) {
	n := 1
	for _, d := range dims {
		n *= d
	}
	data := make([]byte, 0, 4*n)
	for range n {
		data = binary.LittleEndian.AppendUint32(data, math.Float32bits(next()))
	}
	t.Tensor(name, gguf.F32, dims, data)
}
