package model

import (
	"encoding/binary"
	"fmt"
	"math"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/gguf"
)

// reference is a second implementation of the Llama forward pass, in float64, without cache or kernels,
// with its own dequantisation: the simplest code that could be right.
type reference struct {
	t                              *testing.T
	file                           *gguf.File
	hidden, feed, heads, kv, layer int
	base, eps                      float64
}

func newReference(t *testing.T, path string) *reference {
	f, err := gguf.Open(path)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	integer := func(key string) int {
		n, err := f.Uint(key)
		require.NoError(t, err)
		return int(n)
	}
	r := &reference{
		t: t, file: f, hidden: integer("llama.embedding_length"), feed: integer("llama.feed_forward_length"),
		heads: integer("llama.attention.head_count"), kv: integer("llama.attention.head_count_kv"), layer: integer("llama.block_count"),
	}
	r.base, err = f.Float("llama.rope.freq_base")
	require.NoError(t, err)
	r.eps, err = f.Float("llama.attention.layer_norm_rms_epsilon")
	require.NoError(t, err)
	return r
}

func halfAt(b []byte) float64 {
	h := binary.LittleEndian.Uint16(b)
	mantissa, exponent := float64(h&1023), int(h>>10&31)
	v := math.Ldexp(1024+mantissa, exponent-25)
	if exponent == 0 {
		v = math.Ldexp(mantissa, -24)
	}
	if h>>15 == 1 {
		return -v
	}
	return v
}

// weights is one row of a tensor.
func (r *reference) weights(name string, row int) []float64 {
	tensor, err := r.file.Tensor(name)
	require.NoError(r.t, err)
	n := tensor.Dims[0]
	out := make([]float64, n)
	raw := tensor.Raw()
	switch tensor.Type {
	case gguf.F32:
		for i := range out {
			out[i] = float64(math.Float32frombits(binary.LittleEndian.Uint32(raw[4*(row*n+i):])))
		}
	case gguf.Q8_0:
		for i := range out {
			block := raw[(row*n+i)/32*34:]
			out[i] = halfAt(block) * float64(int8(block[2+i%32]))
		}
	case gguf.Q4_1:
		for i := range out {
			block := raw[(row*n+i)/32*20:]
			nibble := block[4+i%16] >> (i % 32 / 16 * 4) & 15
			out[i] = halfAt(block)*float64(nibble) + halfAt(block[2:])
		}
	default:
		require.Failf(r.t, "type", "%s has type %s", name, tensor.Type)
	}
	return out
}

// multiply gives x*W for every row of x.
func (r *reference) multiply(name string, x [][]float64, n int) [][]float64 {
	y := make([][]float64, len(x))
	for t := range y {
		y[t] = make([]float64, n)
	}
	var wait sync.WaitGroup
	threads := runtime.GOMAXPROCS(0)
	for first := range threads {
		wait.Go(func() {
			for j := first; j < n; j += threads {
				w := r.weights(name, j)
				for t := range x {
					y[t][j] = dot(w, x[t])
				}
			}
		})
	}
	wait.Wait()
	return y
}

func dot(a, b []float64) float64 {
	var s [4]float64
	for i := 0; i < len(a); i += 4 {
		s[0] += a[i] * b[i]
		s[1] += a[i+1] * b[i+1]
		s[2] += a[i+2] * b[i+2]
		s[3] += a[i+3] * b[i+3]
	}
	return s[0] + s[1] + s[2] + s[3]
}

func (r *reference) normed(name string, x [][]float64) [][]float64 {
	w := r.weights(name, 0)
	y := make([][]float64, len(x))
	for t := range x {
		y[t] = make([]float64, len(w))
		scale := 1 / math.Sqrt(dot(x[t], x[t])/float64(len(w))+r.eps)
		for i := range w {
			y[t][i] = x[t][i] * scale * w[i]
		}
	}
	return y
}

func (r *reference) rotate(x []float64, position, dim int) {
	for i := 0; i < len(x); i += 2 {
		angle := float64(position) * math.Pow(r.base, -float64(i%dim)/float64(dim))
		a, b := x[i], x[i+1]
		x[i], x[i+1] = a*math.Cos(angle)-b*math.Sin(angle), a*math.Sin(angle)+b*math.Cos(angle)
	}
}

// attention is one query's output over the rows of its own text up to and with itself.
func attention(q []float64, keys, values [][]float64, dim, group int) []float64 {
	out := make([]float64, len(q))
	for h := 0; h < len(q)/dim; h++ {
		at := h / group * dim
		weights, total := make([]float64, len(keys)), 0.0
		for i, k := range keys {
			weights[i] = math.Exp(dot(q[h*dim:(h+1)*dim], k[at:at+dim]) / math.Sqrt(float64(dim)))
			total += weights[i]
		}
		for i, v := range values {
			for d := range dim {
				out[h*dim+d] += weights[i] / total * v[at+d]
			}
		}
	}
	return out
}

func addRows(x, y [][]float64) {
	for t := range x {
		for i := range x[t] {
			x[t][i] += y[t][i]
		}
	}
}

// logits gives those of the last n positions of each text.
func (r *reference) logits(texts [][]int32, n int) (out [][][]float64) {
	var x [][]float64
	var starts []int // first row of the text, for each row
	for _, text := range texts {
		first := len(x)
		for _, token := range text {
			x = append(x, r.weights("token_embd.weight", int(token)))
			starts = append(starts, first)
		}
	}
	dim := r.hidden / r.heads
	for l := range r.layer {
		name := func(part string) string { return fmt.Sprintf("blk.%d.%s.weight", l, part) }
		y := r.normed(name("attn_norm"), x)
		q, k, v := r.multiply(name("attn_q"), y, r.hidden), r.multiply(name("attn_k"), y, r.kv*dim), r.multiply(name("attn_v"), y, r.kv*dim)
		for t := range x {
			r.rotate(q[t], t-starts[t], dim)
			r.rotate(k[t], t-starts[t], dim)
			y[t] = attention(q[t], k[starts[t]:t+1], v[starts[t]:t+1], dim, r.heads/r.kv)
		}
		addRows(x, r.multiply(name("attn_output"), y, r.hidden))
		y = r.normed(name("ffn_norm"), x)
		gate, up := r.multiply(name("ffn_gate"), y, r.feed), r.multiply(name("ffn_up"), y, r.feed)
		for t := range gate {
			for i, g := range gate[t] {
				gate[t][i] = g / (1 + math.Exp(-g)) * up[t][i]
			}
		}
		addRows(x, r.multiply(name("ffn_down"), gate, r.hidden))
	}
	x = r.normed("output_norm.weight", x)
	var wanted [][]float64
	end := 0
	for _, text := range texts {
		end += len(text)
		wanted = append(wanted, x[end-n:end]...)
	}
	all := r.multiply("token_embd.weight", wanted, 49152)
	for i := range texts {
		out = append(out, all[i*n:(i+1)*n])
	}
	return out
}

// positions is how many positions of each recorded text are compared.
const positions = 32

// TestRealAgainstReferences compares with the float64 forward pass by logits, and with what llama.cpp
// recorded by tokens: llama.cpp rounds activations to 8 bits, so only a clear winner must be the same.
func TestRealAgainstReferences(t *testing.T) {
	path := modelPath(t)
	rec := readRecording(t)
	texts := rec.texts()
	exact := newReference(t, path).logits(texts, positions)
	for _, c := range []struct {
		d     DType
		limit float64
	}{{F32, 1e-3}, {F16, 0.05}} {
		m := loadReal(t, Options{DType: c.d})
		worst, decided := 0.0, 0
		for i, text := range texts {
			got := logits(t, m, text, len(text), 16)
			got = got[len(got)-positions:]
			for p := range got {
				for j, v := range got[p] {
					worst = max(worst, math.Abs(float64(v)-exact[i][p][j]))
				}
				best, margin := winner(exact[i][p])
				if margin > 1 {
					decided++
					require.Equal(t, best, rec.Runs[i].Steps[p].Token, "llama.cpp, text %d position %d, margin %.2f", i, p, margin)
					ours, _ := winner(got[p])
					require.Equal(t, best, ours)
				}
			}
		}
		t.Logf("%s: largest difference from float64 %.2g, llama.cpp agrees on %d clear positions", c.d, worst, decided)
		require.Less(t, worst, c.limit)
		require.Greater(t, decided, positions, "too few clear positions to mean anything")
	}
}

// control is the number of control tokens at the start of the vocabulary: llama.cpp was told to ignore
// the end of a text, which leaves them out.
const control = 17

// winner is the highest logit and its distance to the next.
func winner[T float32 | float64](logits []T) (best int32, margin T) {
	first, second := T(math.Inf(-1)), T(math.Inf(-1))
	for i, v := range logits {
		switch {
		case i < control:
		case v > first:
			best, first, second = int32(i), v, first
		case v > second:
			second = v
		}
	}
	return best, first - second
}
