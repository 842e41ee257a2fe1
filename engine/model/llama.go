package model

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/gguf"
	"github.com/kvport/kvport/engine/model/kernel"
)

// llama is a Llama-family transformer: RMS norm, rotary embedding, grouped-query attention, SwiGLU.
type llama struct {
	config
	spec    Spec
	compute *kernel.Compute
	memory  *kernel.Memory // the matrices below

	embedding *gguf.Tensor // a private copy; one row is read for each token
	layers    []layer
	norm      []float32
	head      *kernel.Matrix // hidden to logits
	cos, sin  []float32      // rotary angles of all positions, headDim each

	step step
}

// layer is one transformer layer.
type layer struct {
	attentionNorm, feedNorm []float32
	qkv                     *kernel.Matrix // queries, keys and values of all heads, side by side
	attentionOut            *kernel.Matrix
	gateUp                  *kernel.Matrix
	down                    *kernel.Matrix
}

// Spec implements [Model].
func (m *llama) Spec() Spec { return m.spec }

// pageBytes is what every block is aligned to: the alignment of direct I/O.
const pageBytes = 4096

// Layout implements [Model]: a segment for each layer, in it a block holds the keys of its slots and
// then their values, float32, the rank's KV heads side by side.
func (m *llama) Layout(blockTokens, blocks int) connector.Layout {
	bytes := int64(2*blockTokens*m.rankHeads()*m.headDim) * 4
	stride := (bytes + pageBytes - 1) / pageBytes * pageBytes
	l := connector.Layout{
		Name:   m.spec.ByteShape,
		Blocks: blocks,
		Groups: []connector.Group{{BlockTokens: blockTokens, Policy: connector.PolicyAll}},
	}
	for i := range m.layers {
		l.Segments = append(l.Segments, connector.Segment{
			Layer: i, Offset: int64(i) * int64(blocks) * stride, BlockStride: stride, Bytes: bytes, Planes: 2, Heads: m.rankHeads(),
		})
	}
	return l
}

// Close implements [Model].
func (m *llama) Close() error {
	if m.memory == nil {
		return nil
	}
	m.compute.Close()
	err := m.memory.Close()
	m.memory = nil
	return err
}

// Forward implements [Model] for one rank.
func (m *llama) Forward(batch *Batch, kv *connector.KV) error {
	return m.ForwardRanks(batch, []*connector.KV{kv})
}

// ForwardRanks implements [Sharded]: the KV heads are spread over the ranks, everything else is computed
// in one place, so that the number of ranks does not change a bit.
func (m *llama) ForwardRanks(batch *Batch, ranks []*connector.KV) error {
	if m.memory == nil {
		return errors.New("forward: the model is closed")
	}
	s := &m.step
	if err := s.begin(m, batch, ranks); err != nil {
		return fmt.Errorf("forward: %w", err)
	}
	if len(s.rows) == 0 {
		return nil
	}
	m.embed(s)
	for l := range m.layers {
		if err := m.layer(l, s, batch); err != nil {
			return fmt.Errorf("forward: layer %d: %w", l, err)
		}
	}
	m.logits(s)
	return nil
}

// Rows that one thread takes at a time in row-wise work: enough to be worth the hand-over.
const rowGrain = 16

func (m *llama) embed(s *step) {
	m.compute.Each(len(s.rows), rowGrain, func(_, t int) {
		m.embedding.Row(row(s.x, t, m.hidden), int(s.rows[t].token))
	})
}

// layer runs one transformer layer over all rows.
func (m *llama) layer(l int, s *step, batch *Batch) error {
	w, c, rows := &m.layers[l], m.compute, len(s.rows)
	c.Each(rows, rowGrain, func(thread, t int) {
		c.RMSNorm(thread, row(s.y, t, m.hidden), row(s.x, t, m.hidden), w.attentionNorm, m.epsilon)
	})
	c.MatMul(s.qkv, s.y, rows, w.qkv)
	if batch.BeforeLayer != nil {
		if err := batch.BeforeLayer(l); err != nil {
			return err
		}
	}
	s.views(l)
	m.store(s)
	m.attend(s)
	if batch.AfterLayer != nil {
		if err := batch.AfterLayer(l); err != nil {
			return err
		}
	}
	c.MatMul(s.out, s.y, rows, w.attentionOut)
	c.Each(rows, rowGrain, func(thread, t int) {
		x := row(s.x, t, m.hidden)
		c.Add(x, row(s.out, t, m.hidden))
		c.RMSNorm(thread, row(s.y, t, m.hidden), x, w.feedNorm, m.epsilon)
	})
	c.MatMul(s.gateUp, s.y, rows, w.gateUp)
	c.Each(rows, rowGrain, func(_, t int) {
		both := row(s.gateUp, t, 2*m.feed)
		c.SiLUMul(row(s.active, t, m.feed), both[:m.feed], both[m.feed:])
	})
	c.MatMul(s.out, s.active, rows, w.down)
	c.Each(rows, rowGrain, func(_, t int) { c.Add(row(s.x, t, m.hidden), row(s.out, t, m.hidden)) })
	return nil
}

// store rotates queries and keys and writes keys and values to the cache.
func (m *llama) store(s *step) {
	q, kv := m.heads*m.headDim, m.kvDim()
	m.compute.Each(len(s.rows), rowGrain, func(_, t int) {
		r, all := s.rows[t], row(s.qkv, t, q+2*kv)
		m.compute.Rotate(all[:q+kv], row(m.cos, r.position, m.headDim), row(m.sin, r.position, m.headDim))
		for rank, n := 0, m.rankHeads()*m.headDim; rank < m.ranks; rank++ {
			s.cache(r.chunk, rank).Put(r.position, row(all[q:q+kv], rank, n), row(all[q+kv:], rank, n))
		}
	})
}

// attend writes the attention output of every row to y.
func (m *llama) attend(s *step) {
	group := m.heads / m.kvHeads * m.headDim // the queries that share a KV head
	m.compute.Each(len(s.rows)*m.kvHeads, 1, func(thread, i int) {
		t, head := i/m.kvHeads, i%m.kvHeads
		r := s.rows[t]
		q := row(s.qkv, t, m.heads*m.headDim+2*m.kvDim())
		out := row(s.y, t, m.heads*m.headDim)
		m.compute.Attend(thread, row(out, head, group), row(q, head, group), s.cache(r.chunk, head/m.rankHeads()),
			kernel.Query{Head: head % m.rankHeads(), Position: r.position})
	})
}

// logitRows is how many positions' logits are computed at a time: a row has the whole vocabulary.
const logitRows = 32

func (m *llama) logits(s *step) {
	for wanted := s.wanted; len(wanted) > 0; wanted = wanted[min(logitRows, len(wanted)):] {
		part := wanted[:min(logitRows, len(wanted))]
		for i, w := range part {
			m.compute.RMSNorm(0, row(s.y, i, m.hidden), row(s.x, w.row, m.hidden), m.norm, m.epsilon)
		}
		stride := m.head.Stride()
		s.all = grow(s.all, len(part)*stride)
		m.compute.MatMul(s.all, s.y, len(part), m.head)
		for i, w := range part {
			copy(w.logits, row(s.all, i, stride))
		}
	}
}

// row is row t of an array of rows of n.
func row(x []float32, t, n int) []float32 { return x[t*n : (t+1)*n : (t+1)*n] }

// step is the state of one Forward. Its buffers are kept from step to step.
type step struct {
	kv     []*connector.KV // of each rank
	chunks []Chunk
	rows   []rowRef
	wanted []wantedRow
	caches []kernel.Cache // of each rank of each chunk, in the current layer
	layers []int          // segment of each layer

	x, y, out, qkv, gateUp, active []float32 // a row for each token
	all                            []float32 // logits
}

// rowRef is a token of the batch.
type rowRef struct {
	token    int32
	position int
	chunk    int
}

// wantedRow is a row whose logits are wanted.
type wantedRow struct {
	row    int
	logits []float32
}

// begin checks a batch and lays it out in rows. Nothing is written to the cache.
func (s *step) begin(m *llama, batch *Batch, ranks []*connector.KV) error {
	if err := s.useCaches(m, ranks); err != nil {
		return err
	}
	s.chunks, s.rows, s.wanted = batch.Chunks, s.rows[:0], s.wanted[:0]
	n := len(s.chunks) * len(s.kv)
	s.caches = slices.Grow(s.caches[:0], n)[:n]
	for i := range s.caches {
		s.caches[i].BlockTokens = s.kv[0].Layout().Groups[0].BlockTokens
		s.caches[i].KVHeads, s.caches[i].HeadDim = m.rankHeads(), m.headDim
	}
	for i := range s.chunks {
		c := &s.chunks[i]
		if err := s.check(m, c); err != nil {
			return fmt.Errorf("chunk %d: %w", i, err)
		}
		for j, token := range c.Tokens {
			s.rows = append(s.rows, rowRef{token: token, position: c.Start + j, chunk: i})
		}
		for j, logits := range c.Logits {
			s.wanted = append(s.wanted, wantedRow{row: len(s.rows) - len(c.Logits) + j, logits: logits})
		}
	}
	n = len(s.rows)
	s.x, s.out = grow(s.x, n*m.hidden), grow(s.out, n*m.hidden)
	s.y = grow(s.y, max(n, logitRows)*max(m.hidden, m.heads*m.headDim))
	s.qkv = grow(s.qkv, n*(m.heads*m.headDim+2*m.kvDim()))
	s.gateUp, s.active = grow(s.gateUp, n*2*m.feed), grow(s.active, n*m.feed)
	return nil
}

// cache is a chunk's part of a rank's cache.
func (s *step) cache(chunk, rank int) *kernel.Cache { return &s.caches[chunk*len(s.kv)+rank] }

// useCaches finds the layers' segments in the ranks' caches, which are all alike; the last ones are
// remembered.
func (s *step) useCaches(m *llama, ranks []*connector.KV) error {
	if slices.Equal(s.kv, ranks) {
		return nil
	}
	if len(ranks) != m.ranks {
		return fmt.Errorf("%d caches for %d ranks: %w", len(ranks), m.ranks, connector.ErrIncompatible)
	}
	for rank, kv := range ranks {
		layers, err := m.findLayers(kv)
		if err == nil && rank > 0 && !slices.Equal(layers, s.layers) {
			err = fmt.Errorf("its layers are in other segments than those of rank 0: %w", connector.ErrIncompatible)
		}
		if err != nil {
			s.kv = nil
			return fmt.Errorf("rank %d: %w", rank, err)
		}
		s.layers = layers
	}
	s.kv = slices.Clone(ranks)
	return nil
}

// findLayers gives the segment of each layer; the layers are in order.
func (m *llama) findLayers(kv *connector.KV) ([]int, error) {
	layout := kv.Layout()
	want := m.Layout(layout.Groups[0].BlockTokens, layout.Blocks)
	var segments []int
	for i, seg := range layout.Segments {
		if seg.Layer == connector.DigestLayer || seg.Group != 0 {
			continue
		}
		if seg.Layer != len(segments) || seg.Bytes != want.Segments[0].Bytes || (seg.Offset|seg.BlockStride)%4 != 0 {
			return nil, fmt.Errorf("cache segment %d (layer %d, %d bytes) is not of this model's layout: %w",
				i, seg.Layer, seg.Bytes, connector.ErrIncompatible)
		}
		segments = append(segments, i)
	}
	if len(segments) != len(m.layers) {
		return nil, fmt.Errorf("cache has %d layers, the model %d: %w", len(segments), len(m.layers), connector.ErrIncompatible)
	}
	return segments, nil
}

func (s *step) check(m *llama, c *Chunk) error {
	if len(c.Tokens) == 0 || c.Start < 0 || c.Start > m.spec.MaxTokens-len(c.Tokens) {
		return fmt.Errorf("%d tokens from position %d, the model handles 1 to %d", len(c.Tokens), c.Start, m.spec.MaxTokens)
	}
	end := c.Start + len(c.Tokens)
	size := s.kv[0].Layout().Groups[0].BlockTokens
	switch {
	case len(c.Blocks) != 1 || len(c.Blocks[0])*size < end:
		return fmt.Errorf("block tables do not cover %d positions in one group", end)
	case len(c.Logits) > len(c.Tokens):
		return fmt.Errorf("logits of %d positions wanted, %d computed", len(c.Logits), len(c.Tokens))
	}
	for _, t := range c.Tokens {
		if t < 0 || int(t) >= m.spec.Vocab {
			return fmt.Errorf("token %d is not in the vocabulary of %d", t, m.spec.Vocab)
		}
	}
	for _, b := range c.Blocks[0][:(end+size-1)/size] {
		if b < 0 || int(b) >= s.kv[0].Layout().Blocks {
			return fmt.Errorf("block %d is not in the cache", b)
		}
	}
	for _, l := range c.Logits {
		if len(l) != m.spec.Vocab {
			return fmt.Errorf("logits slice of %d, the vocabulary has %d", len(l), m.spec.Vocab)
		}
	}
	return nil
}

// views points the chunks' caches at layer l.
func (s *step) views(l int) {
	for i := range s.chunks {
		c := &s.chunks[i]
		for rank, kv := range s.kv {
			cache := s.cache(i, rank)
			size := cache.BlockTokens
			cache.Blocks = cache.Blocks[:0]
			for _, b := range c.Blocks[0][:(c.Start+len(c.Tokens)+size-1)/size] {
				cache.Blocks = append(cache.Blocks, floats(kv.View(s.layers[l], b)))
			}
		}
	}
}

// floats is a view of bytes as numbers; findLayers has checked the alignment.
func floats(b []byte) []float32 {
	return unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/4)
}

// bytesOf is a view of numbers as bytes.
func bytesOf(x []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), 4*len(x))
}

// grow gives a slice of length n, with old content or none.
func grow(x []float32, n int) []float32 { return slices.Grow(x[:0], n)[:n] }
