// Package sim is a model without arithmetic, for tests of everything around a model. Its KV bytes
// are a function of prefix, layer, position and head, and its tokens a function of every KV byte
// that attention reaches, on all ranks, read from the cache at every step: a wrong byte anywhere is
// a wrong token.
//
// The data flow is a transformer's. Layer by layer, position by position, a hidden value becomes KV
// bytes on every rank; what the ranks see of the positions up to this one is put together (the
// all-reduce) and makes the hidden value of the next layer. Layers take turns in the groups: those
// of the first attend to everything, those of the others to a window.
package sim

import (
	"encoding/binary"
	"fmt"
	"slices"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/model"
)

// The byte tokenizer's vocabulary, and its token that ends a text.
const (
	vocab = 259
	eos   = 257
)

// Model is a sim model.
type Model struct {
	o      Options
	hidden []uint64   // of the batch's tokens, on their way through the layers
	seen   [][]uint64 // what each head's attention gives for them
}

var _ model.Sharded = (*Model)(nil)

// New makes a sim model. Errors name the option.
func New(o Options) (*Model, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("sim: %w", err)
	}
	return &Model{o: o, seen: make([][]uint64, o.Heads)}, nil
}

// Spec implements model.Model.
func (m *Model) Spec() model.Spec {
	return model.Spec{
		Name: "sim", Vocab: vocab, MaxTokens: m.o.MaxTokens, Layers: m.o.Layers, Ranks: m.o.Ranks,
		Weights:   connector.NewFingerprint("kvport/sim/2", fmt.Sprint(m.o.Seed, m.o.Layers, m.o.Groups, m.o.Window)),
		ByteShape: fmt.Sprintf("sim/%d/%d", m.o.BytesPerToken*m.o.Ranks, m.o.Heads),
	}
}

// Close implements model.Model.
func (m *Model) Close() error { return nil }

// Forward implements model.Model for one rank.
func (m *Model) Forward(b *model.Batch, kv *connector.KV) error {
	return m.ForwardRanks(b, []*connector.KV{kv})
}

// ForwardRanks implements model.Sharded.
func (m *Model) ForwardRanks(b *model.Batch, ranks []*connector.KV) error {
	if len(ranks) != m.o.Ranks {
		return fmt.Errorf("%d caches for %d ranks", len(ranks), m.o.Ranks)
	}
	for i := range b.Chunks {
		if err := m.check(&b.Chunks[i], ranks[0]); err != nil {
			return fmt.Errorf("chunk %d: %w", i, err)
		}
	}
	m.hidden = m.hidden[:0]
	for _, c := range b.Chunks {
		for _, t := range c.Tokens {
			m.hidden = append(m.hidden, mix(m.o.Seed, uint64(t)))
		}
	}
	for layer := range m.o.Layers {
		if err := m.layer(b, ranks, layer); err != nil {
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

// layer takes all chunks through one layer: every rank by itself, then all together.
func (m *Model) layer(b *model.Batch, ranks []*connector.KV, layer int) error {
	if b.BeforeLayer != nil {
		if err := b.BeforeLayer(layer); err != nil {
			return err
		}
	}
	var others sync.WaitGroup
	for rank := 1; rank < len(ranks); rank++ {
		others.Go(func() { m.rank(b, ranks[rank], layer, rank) })
	}
	m.rank(b, ranks[0], layer, 0)
	others.Wait()
	for i, h := range m.hidden {
		for _, seen := range m.seen {
			h = mix(h, seen[i])
		}
		m.hidden[i] = h
	}
	if b.AfterLayer != nil {
		return b.AfterLayer(layer)
	}
	return nil
}

// rank is one rank's part of a layer. Ranks share nothing but the hidden values, which they only
// read.
func (m *Model) rank(b *model.Batch, kv *connector.KV, layer, rank int) {
	segments := kv.Layout().Segments
	p := paged{kv: kv, window: m.o.window(layer)}
	for i := range segments {
		if segments[i].Layer == layer {
			p.segments = append(p.segments, i)
		}
	}
	group := segments[p.segments[0]].Group
	p.perBlock = kv.Layout().Groups[group].BlockTokens
	p.heads = m.o.Heads / m.o.Ranks
	for p.head = range p.heads {
		head := rank*p.heads + p.head
		m.seen[head] = slices.Grow(m.seen[head][:0], len(m.hidden))[:len(m.hidden)]
		h, seen := m.hidden, m.seen[head]
		for _, c := range b.Chunks {
			n := len(c.Tokens)
			p.table, p.number = c.Blocks[group], 0
			p.attend(mix(uint64(layer), uint64(head)), c.Start, h[:n], seen[:n])
			h, seen = h[n:], seen[n:]
		}
	}
}

// paged finds the KV of positions in one layer of one rank's cache.
type paged struct {
	kv       *connector.KV
	segments []int // the layer's, in layout order
	window   int   // positions that attention reaches, its own included; 0: all
	perBlock int   // tokens
	head     int   // of the rank's
	heads    int   // of the rank
	table    []connector.BlockID
	parts    [][]byte // of the block that was looked up last
	number   int      // its index in the table plus 1
}

// attend reads the KV of all earlier positions in reach, writes that of the new ones and gives what
// each sees.
func (p *paged) attend(place uint64, start int, hidden, seen []uint64) {
	sum, chain := uint64(0), place
	for at := p.reach(start); at < start; at++ {
		sum += p.read(place, at)
	}
	if start > 0 {
		chain = p.first(start - 1)
	}
	for i, h := range hidden {
		at := start + i
		// The chain through the first word makes the bytes of the first layer, too, depend on the
		// whole prefix and not on the token alone.
		chain = mix(chain, h)
		p.write(at, chain)
		sum += p.read(place, at)
		seen[i] = sum
		for out := p.reach(at); out < p.reach(at+1); out++ {
			sum -= p.read(place, out)
		}
	}
}

// reach is the first position that attention at a position reaches.
func (p *paged) reach(at int) int {
	if p.window == 0 {
		return 0
	}
	return max(0, at-p.window+1)
}

// at gives the views of the block with a position, and the position's place in it.
func (p *paged) at(position int) (parts [][]byte, slot int) {
	if n := position / p.perBlock; n+1 != p.number {
		p.parts, p.number = p.parts[:0], n+1
		for _, s := range p.segments {
			p.parts = append(p.parts, p.kv.View(s, p.table[n]))
		}
	}
	return p.parts, position % p.perBlock
}

// read is a digest of a token's KV. For a given place it is a bijection in each word, so that no
// change of a single word goes unseen.
func (p *paged) read(place uint64, at int) uint64 {
	parts, slot := p.at(at)
	x := mix(place, uint64(at))
	for _, part := range parts {
		token := p.token(part, slot)
		for i := 0; i < len(token); i += 8 {
			x = (x ^ binary.LittleEndian.Uint64(token[i:])) * 0x9e3779b97f4a7c15
			x ^= x >> 32
		}
	}
	return x
}

// first is the first word of a token's KV.
func (p *paged) first(at int) uint64 {
	parts, slot := p.at(at)
	return binary.LittleEndian.Uint64(p.token(parts[0], slot))
}

// token is the head's share of a slot in a part of a block.
func (p *paged) token(part []byte, slot int) []byte {
	width := len(part) / p.perBlock / p.heads
	return part[(slot*p.heads+p.head)*width:][:width]
}

// write fills a token's KV from its first word.
func (p *paged) write(at int, word uint64) {
	parts, slot := p.at(at)
	for _, part := range parts {
		token := p.token(part, slot)
		for i := 0; i < len(token); i += 8 {
			binary.LittleEndian.PutUint64(token[i:], word)
			word = mix(word, 1)
		}
	}
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
		if err := m.checkTable(l, g, table, c.Start, end); err != nil {
			return fmt.Errorf("group %d %w", g, err)
		}
	}
	for _, t := range c.Tokens {
		if t < 0 || t >= vocab {
			return fmt.Errorf("token %d, want 0..%d", t, vocab-1)
		}
	}
	return nil
}

// checkTable refuses a block table that does not cover tokens up to end, or in which blocks are gone
// that attention from start on reaches.
func (m *Model) checkTable(l *connector.Layout, group int, table []connector.BlockID, start, end int) error {
	size := l.Groups[group].BlockTokens
	if len(table)*size < end {
		return fmt.Errorf("has %d blocks for %d tokens", len(table), end)
	}
	first := (&paged{window: m.o.window(group)}).reach(start) / size
	for i, id := range table {
		if unused := id == -1 && i < first; !unused && (id < 0 || int(id) >= l.Blocks) {
			return fmt.Errorf("names block %d of %d at place %d", id, l.Blocks, i)
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

func mix(a, b uint64) uint64 {
	x := a*0xbf58476d1ce4e5b9 + b + 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
