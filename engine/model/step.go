package model

import (
	"fmt"
	"slices"
	"unsafe"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/model/kernel"
)

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

// findLayers gives the segment of each layer.
func (m *llama) findLayers(kv *connector.KV) ([]int, error) {
	layout := kv.Layout()
	want := m.Layout(layout.Groups[0].BlockTokens, layout.Blocks)
	segments := make([]int, len(m.layers))
	found := 0
	for i, seg := range layout.Segments {
		if seg.Layer == connector.DigestLayer || seg.Group != 0 {
			continue
		}
		if seg.Layer < 0 || seg.Layer >= len(segments) || seg.Bytes != want.Segments[0].Bytes || (seg.Offset|seg.BlockStride)%4 != 0 {
			return nil, fmt.Errorf("cache segment %d (layer %d, %d bytes) is not of this model's layout: %w",
				i, seg.Layer, seg.Bytes, connector.ErrIncompatible)
		}
		segments[seg.Layer] = i
		found++
	}
	if found != len(segments) {
		return nil, fmt.Errorf("cache has %d layers, the model %d: %w", found, len(segments), connector.ErrIncompatible)
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
			blocks := cache.Blocks[:0]
			for _, b := range c.Blocks[0][:(c.Start+len(c.Tokens)+size-1)/size] {
				blocks = append(blocks, floats(kv.View(s.layers[l], b)))
			}
			cache.Blocks = blocks
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
func grow(x []float32, n int) []float32 {
	if cap(x) < n {
		return make([]float32, n)
	}
	return x[:n]
}
