package model

import (
	"errors"
	"fmt"

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
	m.compute.Run(len(s.rows), rowGrain, func(_, from, to int) {
		for t := from; t < to; t++ {
			m.embedding.Row(row(s.x, t, m.hidden), int(s.rows[t].token))
		}
	})
}

// layer runs one transformer layer over all rows.
func (m *llama) layer(l int, s *step, batch *Batch) error {
	w, c, rows := &m.layers[l], m.compute, len(s.rows)
	m.normRows(s.y, s.x, w.attentionNorm, rows)
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
	c.Run(rows, rowGrain, func(thread, from, to int) {
		for t := from; t < to; t++ {
			x := row(s.x, t, m.hidden)
			c.Add(x, row(s.out, t, m.hidden))
			c.RMSNorm(thread, row(s.y, t, m.hidden), x, w.feedNorm, m.epsilon)
		}
	})
	c.MatMul(s.gateUp, s.y, rows, w.gateUp)
	c.Run(rows, rowGrain, func(_, from, to int) {
		for t := from; t < to; t++ {
			both := row(s.gateUp, t, 2*m.feed)
			c.SiLUMul(row(s.active, t, m.feed), both[:m.feed], both[m.feed:])
		}
	})
	c.MatMul(s.out, s.active, rows, w.down)
	c.Run(rows, rowGrain, func(_, from, to int) {
		c.Add(s.x[from*m.hidden:to*m.hidden], s.out[from*m.hidden:to*m.hidden])
	})
	return nil
}

func (m *llama) normRows(dst, x, w []float32, rows int) {
	m.compute.Run(rows, rowGrain, func(thread, from, to int) {
		for t := from; t < to; t++ {
			m.compute.RMSNorm(thread, row(dst, t, m.hidden), row(x, t, m.hidden), w, m.epsilon)
		}
	})
}

// store rotates queries and keys and writes keys and values to the cache.
func (m *llama) store(s *step) {
	q, kv := m.heads*m.headDim, m.kvDim()
	m.compute.Run(len(s.rows), rowGrain, func(_, from, to int) {
		for t := from; t < to; t++ {
			r, all := s.rows[t], row(s.qkv, t, q+2*kv)
			m.compute.Rotate(all[:q+kv], row(m.cos, r.position, m.headDim), row(m.sin, r.position, m.headDim))
			for rank, n := 0, m.rankHeads()*m.headDim; rank < m.ranks; rank++ {
				s.cache(r.chunk, rank).Put(r.position, row(all[q:q+kv], rank, n), row(all[q+kv:], rank, n))
			}
		}
	})
}

// attend writes the attention output of every row to y.
func (m *llama) attend(s *step) {
	group := m.heads / m.kvHeads * m.headDim // the queries that share a KV head
	m.compute.Run(len(s.rows)*m.kvHeads, 1, func(thread, from, to int) {
		for i := from; i < to; i++ {
			t, head := i/m.kvHeads, i%m.kvHeads
			r := s.rows[t]
			q := row(s.qkv, t, m.heads*m.headDim+2*m.kvDim())
			out := row(s.y, t, m.heads*m.headDim)
			m.compute.Attend(thread, row(out, head, group), row(q, head, group), s.cache(r.chunk, head/m.rankHeads()),
				kernel.Query{Head: head % m.rankHeads(), Position: r.position})
		}
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
