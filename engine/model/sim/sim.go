// Package sim is a model without arithmetic, for tests of everything around a model. Its KV bytes
// are a function of prefix, layer and position, and its tokens a function of every KV byte of the
// prefix, read from the cache at every step: a wrong byte anywhere is a wrong token.
//
// The data flow is a transformer's. Layer by layer, position by position, a hidden value becomes KV
// bytes, and the hidden value of the next layer depends on the KV of all positions up to its own.
package sim

import (
	"encoding/binary"
	"fmt"
	"strconv"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/model"
)

// The byte tokenizer's vocabulary, and its token that ends a text.
const (
	vocab = 259
	eos   = 257
)

// Options shape a sim model. The zero value is a small one.
type Options struct {
	Layers        int    // default 4
	BytesPerToken int    // KV bytes of one token in one layer, a multiple of 8; default 64
	MaxTokens     int    // default 8192
	Seed          uint64 // two seeds are two sets of weights
}

// Model is a sim model.
type Model struct {
	o      Options
	hidden []uint64 // of the chunk's tokens, on their way through the layers
}

var _ model.Model = (*Model)(nil)

// New makes a sim model. Errors name the option.
func New(o Options) (*Model, error) {
	for _, f := range []struct {
		name    string
		value   *int
		initial int
	}{{"layers", &o.Layers, 4}, {"bytes per token", &o.BytesPerToken, 64}, {"max tokens", &o.MaxTokens, 8192}} {
		if *f.value == 0 {
			*f.value = f.initial
		}
		if *f.value < 0 {
			return nil, fmt.Errorf("sim: %s is %d, want a positive number", f.name, *f.value)
		}
	}
	if o.BytesPerToken%8 != 0 {
		return nil, fmt.Errorf("sim: bytes per token is %d, want a multiple of 8", o.BytesPerToken)
	}
	return &Model{o: o}, nil
}

// Spec implements model.Model.
func (m *Model) Spec() model.Spec {
	return model.Spec{
		Name: "sim", Vocab: vocab, MaxTokens: m.o.MaxTokens, Layers: m.o.Layers,
		Weights:   connector.NewFingerprint("kvport/sim/1", strconv.FormatUint(m.o.Seed, 10), strconv.Itoa(m.o.Layers)),
		ByteShape: fmt.Sprintf("sim/%d", m.o.BytesPerToken),
	}
}

// Layout implements model.Model: one segment a layer, one after the other.
func (m *Model) Layout(blockTokens, blocks int) connector.Layout {
	l := connector.Layout{
		Name: "sim", Blocks: blocks, Groups: []connector.Group{{BlockTokens: blockTokens, Policy: connector.PolicyAll}},
	}
	size := int64(blockTokens) * int64(m.o.BytesPerToken)
	for layer := range m.o.Layers {
		l.Segments = append(l.Segments, connector.Segment{
			Layer: layer, Offset: int64(layer) * int64(blocks) * size, BlockStride: size, Bytes: size,
		})
	}
	return l
}

// Close implements model.Model.
func (m *Model) Close() error { return nil }

// Forward implements model.Model.
func (m *Model) Forward(b *model.Batch, kv *connector.KV) error {
	for i := range b.Chunks {
		if err := m.check(&b.Chunks[i], kv); err != nil {
			return fmt.Errorf("chunk %d: %w", i, err)
		}
	}
	m.hidden = m.hidden[:0]
	for _, c := range b.Chunks {
		for _, t := range c.Tokens {
			m.hidden = append(m.hidden, mix(m.o.Seed, uint64(t)))
		}
	}
	for segment, s := range kv.Layout().Segments {
		if s.Layer < 0 {
			continue // the host's digests
		}
		if err := m.layer(b, kv, segment); err != nil {
			return err
		}
	}
	h := m.hidden
	for _, c := range b.Chunks {
		for i, logits := range c.Logits {
			fill(logits, h[len(c.Tokens)-len(c.Logits)+i])
		}
		h = h[len(c.Tokens):]
	}
	return nil
}

// layer takes all chunks through one layer.
func (m *Model) layer(b *model.Batch, kv *connector.KV, segment int) error {
	s := &kv.Layout().Segments[segment]
	if b.BeforeLayer != nil {
		if err := b.BeforeLayer(s.Layer); err != nil {
			return err
		}
	}
	h := m.hidden
	for _, c := range b.Chunks {
		p := paged{kv: kv, segment: segment, table: c.Blocks[s.Group], width: m.o.BytesPerToken}
		m.attend(s.Layer, &p, c.Start, h[:len(c.Tokens)])
		h = h[len(c.Tokens):]
	}
	if b.AfterLayer != nil {
		return b.AfterLayer(s.Layer)
	}
	return nil
}

// attend reads the KV of all earlier positions, writes that of the new ones and replaces their
// hidden values.
func (m *Model) attend(layer int, p *paged, start int, hidden []uint64) {
	seen, chain := uint64(layer), uint64(0)
	for at := range start {
		token := p.at(at)
		seen = absorb(seen, token)
		chain = binary.LittleEndian.Uint64(token)
	}
	for i, h := range hidden {
		// The chain through the first word makes the bytes of the first layer, too, depend on the
		// whole prefix and not on the token alone.
		chain = mix(chain, h)
		token := p.at(start + i)
		expand(token, chain)
		seen = absorb(seen, token)
		hidden[i] = mix(h, seen)
	}
}

// paged finds the KV of a position in the cache.
type paged struct {
	kv      *connector.KV
	segment int
	table   []connector.BlockID
	width   int
	block   []byte // of the last look-up
	number  int    // its index in the table plus 1
	perPage int
}

func (p *paged) at(position int) []byte {
	if p.perPage == 0 {
		l := p.kv.Layout()
		p.perPage = l.Groups[l.Segments[p.segment].Group].BlockTokens
	}
	if n := position / p.perPage; n+1 != p.number {
		p.block, p.number = p.kv.View(p.segment, p.table[n]), n+1
	}
	from := position % p.perPage * p.width
	return p.block[from : from+p.width]
}

// check refuses a chunk that does not fit its block tables or the model.
func (m *Model) check(c *model.Chunk, kv *connector.KV) error {
	l := kv.Layout()
	end := c.Start + len(c.Tokens)
	if len(c.Tokens) == 0 || c.Start < 0 || end > m.o.MaxTokens || len(c.Logits) > len(c.Tokens) {
		return fmt.Errorf("tokens %d..%d with %d logits, model handles %d", c.Start, end, len(c.Logits), m.o.MaxTokens)
	}
	if len(c.Blocks) != len(l.Groups) {
		return fmt.Errorf("%d block tables, want %d", len(c.Blocks), len(l.Groups))
	}
	for g, table := range c.Blocks {
		if len(table)*l.Groups[g].BlockTokens < end {
			return fmt.Errorf("group %d has %d blocks for %d tokens", g, len(table), end)
		}
		for _, id := range table {
			if id < 0 || int(id) >= l.Blocks {
				return fmt.Errorf("group %d names block %d of %d", g, id, l.Blocks)
			}
		}
	}
	for _, t := range c.Tokens {
		if t < 0 || t >= vocab {
			return fmt.Errorf("token %d, want 0..%d", t, vocab-1)
		}
	}
	return nil
}

// fill makes logits of the last hidden value: printable characters are likely, and once in a while
// the end of the text is.
func fill(logits []float32, hidden uint64) {
	for v := range logits {
		x := float32(mix(hidden, uint64(v))>>40) / (1 << 24)
		if v >= ' ' && v <= '~' {
			x++
		}
		logits[v] = 4 * x
	}
	if hidden%100 == 0 {
		logits[eos] += 8
	}
}

// absorb folds a token's KV into what was seen before. For a given past it is a bijection in each
// word, so that no change of a single word goes unseen.
func absorb(seen uint64, token []byte) uint64 {
	for i := 0; i < len(token); i += 8 {
		seen = (seen ^ binary.LittleEndian.Uint64(token[i:])) * 0x9e3779b97f4a7c15
		seen ^= seen >> 32
	}
	return seen
}

// expand fills a token's KV from one word, which is the first.
func expand(token []byte, word uint64) {
	for i := 0; i < len(token); i += 8 {
		binary.LittleEndian.PutUint64(token[i:], word)
		word = mix(word, uint64(i))
	}
}

func mix(a, b uint64) uint64 {
	x := a*0xbf58476d1ce4e5b9 + b + 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
