package model

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/gguf"
	"github.com/kvport/kvport/engine/model/kernel"
)

// DType is how weights are kept in memory.
type DType = kernel.DType

// The weight types. F16 is faster at decoding; the two give different tokens and never share KV.
const (
	F32 = kernel.F32
	F16 = kernel.F16
)

// ISA is the instruction set that the kernels use. All give the same bits.
type ISA = kernel.ISA

// Options of a model that computes. Only DType changes results.
type Options struct {
	Threads int          // 0: one for each CPU
	Ranks   int          // caches over which the KV heads are spread, a divisor of their number; 0: 1
	DType   DType        // F32 or F16
	ISA     ISA          // kernel.Auto: the fastest that this machine can run
	Log     *slog.Logger // nil: none
	// Images keeps the packed weights, for a quick start the next time; the zero value keeps none.
	Images kernel.Images
}

// arithmetic names what decides the bits of a KV cache in addition to the weights. Change it with the kernels.
const arithmetic = "kvport/llama/1"

// Load reads a Llama-family model from a GGUF file. The file is not needed once it returns. Errors name
// what is not supported and wrap connector.ErrIncompatible, or gguf.ErrFormat or gguf.ErrMissing.
func Load(path string, o Options) (Model, error) {
	f, err := gguf.Open(path)
	if err != nil {
		return nil, err
	}
	m, err := fromGGUF(f, o)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("load model %s: %w", path, err)
	}
	return m, nil
}

// config is the shape of a Llama-family model.
type config struct {
	hidden, feed, vocab      int
	heads, kvHeads, headDim  int
	layerCount, maxPositions int
	ranks                    int
	ropeBase                 float64
	epsilon                  float32
}

func (c *config) kvDim() int { return c.kvHeads * c.headDim }

// rankHeads is how many KV heads each rank's cache holds.
func (c *config) rankHeads() int { return c.kvHeads / c.ranks }

func fromGGUF(f *gguf.File, o Options) (Model, error) {
	if o.DType != F32 && o.DType != F16 {
		return nil, fmt.Errorf("dtype %d is neither f32 nor f16: %w", o.DType, connector.ErrIncompatible)
	}
	c, err := readConfig(f)
	if err != nil {
		return nil, err
	}
	if c.ranks = max(1, o.Ranks); c.kvHeads%c.ranks != 0 {
		return nil, fmt.Errorf("%d KV heads cannot be spread evenly over %d ranks, of which the number must divide them: %w", c.kvHeads, c.ranks, connector.ErrIncompatible)
	}
	b := &builder{file: f, config: c, dtype: o.DType}
	if b.compute, err = kernel.New(kernel.Options{Threads: o.Threads, ISA: o.ISA}); err != nil {
		return nil, err
	}
	content := sha256.Sum256(f.Data())
	image := imageName(content, o.DType)
	bytes := c.matrixBytes(o.DType)
	start := "from its image"
	if b.memory, err = o.Images.Open(image, bytes); err != nil {
		start = "packed"
		if b.memory, err = kernel.NewMemory(bytes); err != nil {
			b.compute.Close()
			return nil, err
		}
	}
	m := b.model()
	if b.err != nil {
		return nil, errors.Join(b.err, m.Close())
	}
	m.spec = m.describe(f, content, o.DType)
	if start == "packed" {
		if err := o.Images.Save(image, b.memory, bytes); err != nil && o.Log != nil {
			o.Log.Warn("packed weights are not kept, the next start will be slower", "folder", o.Images.Dir, "error", err)
		}
	}
	if o.Log != nil {
		o.Log.Info("model loaded", "name", m.spec.Name, "layers", c.layerCount, "dtype", o.DType.String(),
			"kernels", b.compute.ISA().String(), "threads", b.compute.Threads(), "weights", m.spec.Weights.String(), "weights_were", start)
	}
	return m, nil
}

// describe makes the Spec. The rotary angles are part of the fingerprint as numbers: Go's cosine may differ
// in the last bit between architectures, and then their caches must not be mixed.
func (m *llama) describe(f *gguf.File, content [sha256.Size]byte, d DType) Spec {
	name, err := f.String("general.name")
	if err != nil {
		name = "llama"
	}
	angles := sha256.New()
	angles.Write(bytesOf(m.cos))
	angles.Write(bytesOf(m.sin))
	return Spec{
		Name: name, Vocab: m.vocab, MaxTokens: m.maxPositions, Layers: m.layerCount, Ranks: m.ranks,
		Weights:   connector.NewFingerprint(arithmetic, string(content[:]), d.String(), string(angles.Sum(nil))),
		ByteShape: fmt.Sprintf("f32[k|v][slot][%d][%d]", m.kvHeads, m.headDim),
	}
}

// imageName names the packed weights of a file: its content and the order of its matrices decide them.
func imageName(content [sha256.Size]byte, d DType) string {
	name := connector.NewFingerprint("kvport/llama/image/1", string(content[:]), d.String())
	return hex.EncodeToString(name[:])
}

// readConfig reads and checks the metadata.
func readConfig(f *gguf.File) (config, error) {
	arch, err := f.String("general.architecture")
	if err != nil {
		return config{}, err
	}
	if arch != "llama" {
		return config{}, fmt.Errorf("general.architecture is %q, only llama is supported: %w", arch, connector.ErrIncompatible)
	}
	r := &metadata{file: f}
	c := config{
		hidden:       r.integer("llama.embedding_length"),
		feed:         r.integer("llama.feed_forward_length"),
		heads:        r.integer("llama.attention.head_count"),
		layerCount:   r.integer("llama.block_count"),
		maxPositions: r.integer("llama.context_length"),
		epsilon:      float32(r.number("llama.attention.layer_norm_rms_epsilon", 0)),
		ropeBase:     r.number("llama.rope.freq_base", 10000),
	}
	c.kvHeads = r.integerOr("llama.attention.head_count_kv", c.heads)
	if r.err != nil {
		return config{}, r.err
	}
	c.headDim = r.integerOr("llama.attention.key_length", c.hidden/c.heads)
	embedding, err := f.Tensor("token_embd.weight")
	if err != nil {
		return config{}, err
	}
	c.vocab = embedding.Rows()
	return c, errors.Join(r.err, c.check(), r.refuse(c.headDim))
}

// metadata reads numbers and keeps the first error.
type metadata struct {
	file *gguf.File
	err  error
}

// limit keeps products of shapes far from overflow.
const limit = 1 << 20

func (r *metadata) integer(key string) int {
	n, err := r.file.Uint(key)
	if err == nil && (n == 0 || n > limit) {
		err = fmt.Errorf("metadata key %q is %d, want 1 to %d: %w", key, n, limit, gguf.ErrFormat)
	}
	r.err = cmp.Or(r.err, err)
	return int(min(n, limit))
}

func (r *metadata) integerOr(key string, missing int) int {
	if _, err := r.file.Uint(key); errors.Is(err, gguf.ErrMissing) {
		return missing
	}
	return r.integer(key)
}

func (r *metadata) number(key string, missing float64) float64 {
	v, err := r.file.Float(key)
	if errors.Is(err, gguf.ErrMissing) && missing != 0 {
		return missing
	}
	if err == nil && !(v > 0 && !math.IsInf(v, 0)) {
		err = fmt.Errorf("metadata key %q is %v, want a positive number: %w", key, v, gguf.ErrFormat)
	}
	r.err = cmp.Or(r.err, err)
	return v
}

// refuse names what the file asks for and this package does not do.
func (r *metadata) refuse(headDim int) error {
	if n := r.integerOr("llama.rope.dimension_count", headDim); n != headDim {
		return incompatible("rotary embedding of %d of %d dimensions is not supported", n, headDim)
	}
	if n := r.integerOr("llama.attention.value_length", headDim); n != headDim {
		return incompatible("llama.attention.value_length %d beside keys of %d is not supported", n, headDim)
	}
	if kind, err := r.file.String("llama.rope.scaling.type"); err == nil && kind != "none" {
		return incompatible("llama.rope.scaling.type %q is not supported", kind)
	}
	if _, err := r.file.Uint("llama.expert_count"); err == nil {
		return incompatible("a mixture of experts (llama.expert_count) is not supported")
	}
	for _, name := range []string{"rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.attn_q_norm.weight"} {
		if r.file.Has(name) {
			return incompatible("tensor %q is not supported", name)
		}
	}
	return r.err
}

// incompatible is an error that wraps connector.ErrIncompatible.
func incompatible(format string, args ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), connector.ErrIncompatible)
}

func (c *config) check() error {
	switch {
	case !slices.Contains(kernel.HeadDims(), c.headDim):
		return incompatible("attention heads of %d dimensions, supported are %v", c.headDim, kernel.HeadDims())
	case c.heads%c.kvHeads != 0:
		return incompatible("%d attention heads do not divide by %d KV heads", c.heads, c.kvHeads)
	case c.hidden%32 != 0 || c.feed%32 != 0:
		return incompatible("embedding_length %d and feed_forward_length %d, want multiples of 32", c.hidden, c.feed)
	case c.layerCount > 1<<12:
		return incompatible("%d layers, supported are %d", c.layerCount, 1<<12)
	}
	return nil
}

func (c *config) matrixBytes(d DType) int {
	size := func(n, k int) int { return kernel.MatrixBytes(n, k, d) }
	q := c.heads * c.headDim
	perLayer := size(q+2*c.kvDim(), c.hidden) + size(c.hidden, q) + size(2*c.feed, c.hidden) + size(c.hidden, c.feed)
	return c.layerCount*perLayer + size(c.vocab, c.hidden)
}

// builder makes a model from tensors and keeps the first error.
type builder struct {
	config
	file    *gguf.File
	dtype   DType
	compute *kernel.Compute
	memory  *kernel.Memory
	err     error
}

func (b *builder) model() *llama {
	m := &llama{config: b.config, compute: b.compute, memory: b.memory}
	output := "output.weight"
	if !b.file.Has(output) {
		output = "token_embd.weight" // tied
	}
	q, kv := b.heads*b.headDim, b.kvDim()
	for i := 0; i < b.layerCount && b.err == nil; i++ {
		name := func(part string) string { return fmt.Sprintf("blk.%d.%s.weight", i, part) }
		m.layers = append(m.layers, layer{
			attentionNorm: b.vector(name("attn_norm")),
			feedNorm:      b.vector(name("ffn_norm")),
			qkv: b.matrix(b.hidden, b.tensor(name("attn_q"), q, b.hidden),
				b.tensor(name("attn_k"), kv, b.hidden), b.tensor(name("attn_v"), kv, b.hidden)),
			attentionOut: b.matrix(q, b.tensor(name("attn_output"), b.hidden, q)),
			gateUp: b.matrix(b.hidden, b.tensor(name("ffn_gate"), b.feed, b.hidden),
				b.tensor(name("ffn_up"), b.feed, b.hidden)),
			down: b.matrix(b.feed, b.tensor(name("ffn_down"), b.hidden, b.feed)),
		})
	}
	m.norm = b.vector("output_norm.weight")
	m.head = b.matrix(b.hidden, b.tensor(output, b.vocab, b.hidden))
	if t := b.tensor("token_embd.weight", b.vocab, b.hidden); t != nil {
		m.embedding = t.Clone()
	}
	if b.err == nil {
		m.cos, m.sin = b.angles()
	}
	return m
}

func (b *builder) tensor(name string, rows, cols int) *gguf.Tensor {
	t, err := b.file.Tensor(name)
	if err == nil && (t.Rows() != rows || t.Cols() != cols) {
		err = fmt.Errorf("tensor %q has shape %v, want [%d %d]: %w", name, t.Dims, cols, rows, gguf.ErrFormat)
	}
	if b.err = cmp.Or(b.err, err); b.err != nil {
		return nil
	}
	return t
}

func (b *builder) vector(name string) []float32 {
	v := make([]float32, b.hidden)
	if t := b.tensor(name, 1, b.hidden); t != nil {
		t.Row(v, 0)
	}
	return v
}

// matrix packs the rows of tensors one after the other; all have rows of cols.
func (b *builder) matrix(cols int, parts ...*gguf.Tensor) *kernel.Matrix {
	if b.err != nil {
		return nil
	}
	rows := 0
	for _, t := range parts {
		rows += t.Rows()
	}
	return b.compute.Pack(b.memory, rows, cols, b.dtype, func(dst []float32, row int) {
		for _, t := range parts {
			if row < t.Rows() {
				t.Row(dst, row)
				return
			}
			row -= t.Rows()
		}
	})
}

func (b *builder) angles() (cos, sin []float32) {
	n := b.headDim
	cos, sin = make([]float32, b.maxPositions*n), make([]float32, b.maxPositions*n)
	b.compute.Each(b.maxPositions, 64, func(_, p int) {
		kernel.Angles(row(cos, p, n), row(sin, p, n), p, b.ropeBase)
	})
	return cos, sin
}
