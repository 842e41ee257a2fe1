package model

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvport/kvport/connector"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const testSeed = 42

// modelPath is the real model's file: KVPORT_MODEL, or where make deps puts it.
func modelPath(t testing.TB) string {
	t.Helper()
	if testing.Short() {
		t.Skip("runs the real model: left out with -short, which the race stage uses; make test runs it")
	}
	path := os.Getenv("KVPORT_MODEL")
	if path == "" {
		path = filepath.Join("..", "..", ".deps", "model", "SmolLM2-135M-Instruct.Q4_1.gguf")
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("the real model is missing: %v; run `make deps`, or set KVPORT_MODEL", err)
	}
	return path
}

func loadReal(t testing.TB, o Options) Model {
	t.Helper()
	m, err := Load(modelPath(t), o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	return m
}

func loadTiny(t testing.TB, o Options) Model {
	t.Helper()
	m, err := Tiny(testSeed, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	return m
}

// newKV makes a cache full of NaN, so that reading what was not written shows.
func newKV(t testing.TB, m Model, blockTokens, blocks int) *connector.KV {
	t.Helper()
	layout := m.Layout(blockTokens, blocks)
	last := layout.Segments[len(layout.Segments)-1]
	numbers := make([]float32, (last.Offset+int64(blocks)*last.BlockStride)/4)
	for i := range numbers {
		numbers[i] = float32(math.NaN())
	}
	region := unsafe.Slice((*byte)(unsafe.Pointer(&numbers[0])), 4*len(numbers))
	kv, err := connector.NewKV(layout, [][]byte{region})
	require.NoError(t, err)
	return kv
}

// sequence is a sequence in a cache, with blocks in random order.
type sequence struct {
	tokens []int32
	blocks []connector.BlockID
	done   int
	logits [][]float32 // of every position
}

// newSequences spreads the blocks of a cache over sequences.
func newSequences(kv *connector.KV, seed uint64, texts ...[]int32) []*sequence {
	size, order := kv.Layout().Groups[0].BlockTokens, rand.New(rand.NewPCG(seed, 1)).Perm(kv.Layout().Blocks)
	var out []*sequence
	for _, tokens := range texts {
		s := &sequence{tokens: tokens}
		for range (len(tokens) + size - 1) / size {
			s.blocks = append(s.blocks, connector.BlockID(order[0]))
			order = order[1:]
		}
		out = append(out, s)
	}
	return out
}

// chunk is the sequence's next n tokens with logits wanted for all.
func (s *sequence) chunk(n, vocab int) Chunk {
	n = min(n, len(s.tokens)-s.done)
	c := Chunk{Tokens: s.tokens[s.done : s.done+n], Start: s.done, Blocks: [][]connector.BlockID{s.blocks}}
	for range n {
		c.Logits = append(c.Logits, make([]float32, vocab))
	}
	s.logits = append(s.logits, c.Logits...)
	s.done += n
	return c
}

// forward computes sequences side by side to their ends; sizes[i] tokens of sequence i at a time.
func forward(t testing.TB, m Model, kv *connector.KV, seqs []*sequence, sizes ...int) {
	t.Helper()
	for {
		b := &Batch{}
		for i, s := range seqs {
			if s.done < len(s.tokens) {
				b.Chunks = append(b.Chunks, s.chunk(sizes[i%len(sizes)], m.Spec().Vocab))
			}
		}
		if len(b.Chunks) == 0 {
			return
		}
		require.NoError(t, m.Forward(b, kv))
	}
}

// logits of all positions of tokens, computed in chunks of a size in blocks of a size.
func logits(t testing.TB, m Model, tokens []int32, chunk, block int) [][]float32 {
	t.Helper()
	kv := newKV(t, m, block, len(tokens)/block+3)
	seqs := newSequences(kv, uint64(chunk), tokens)
	forward(t, m, kv, seqs, chunk)
	return seqs[0].logits
}

func randomTokens(seed uint64, n, vocab int) []int32 {
	r := rand.New(rand.NewPCG(seed, 2))
	tokens := make([]int32, n)
	for i := range tokens {
		tokens[i] = int32(r.IntN(vocab))
	}
	return tokens
}

func requireSame(t testing.TB, want, got [][]float32, what string) {
	t.Helper()
	require.Len(t, got, len(want), what)
	for p := range want {
		for i := range want[p] {
			if math.Float32bits(want[p][i]) != math.Float32bits(got[p][i]) {
				require.Failf(t, what, "position %d, logit %d is %v, want %v", p, i, got[p][i], want[p][i])
			}
		}
	}
}

// recording is what testdata/llamacpp.py wrote.
type recording struct {
	Source, Version string
	Runs            []struct {
		Prompt string
		Tokens []int32 `json:"prompt_tokens"`
		Steps  []struct {
			Token   int32
			Logprob float64
			Top     []struct {
				Token   int32
				Logprob float64
			}
		}
	}
}

func readRecording(t testing.TB) recording {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", "llamacpp.json"))
	require.NoError(t, err)
	var r recording
	require.NoError(t, json.Unmarshal(data, &r))
	require.Len(t, r.Runs, 3)
	require.NotEmpty(t, r.Version)
	return r
}

// texts are the recorded prompts with their greedy continuations, all but the last token.
func (r recording) texts() (texts [][]int32) {
	for _, run := range r.Runs {
		tokens := append([]int32(nil), run.Tokens...)
		for _, s := range run.Steps[:len(run.Steps)-1] {
			tokens = append(tokens, s.Token)
		}
		texts = append(texts, tokens)
	}
	return texts
}

func label(parts ...any) string { return fmt.Sprint(parts...) }
