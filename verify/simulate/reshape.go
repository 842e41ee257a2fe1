package simulate

import (
	"slices"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/ticket"
	"github.com/kvport/kvport/internal/tracker"
)

// The engines of a world may have blocks of two sizes, of which one is a multiple of the other. What a producer
// holds in blocks of its size is then read whole, into memory that the plugin can write, checked by the producer's
// digests, and cut token by token into those of the consumer. The modelled connector may read anything there.

// windows is how many loads of a host can do that at a time.
const windows = 2

// size is how many tokens a block of an engine has.
func (o *Options) size(engine int) int {
	if o.OtherTokens > 0 && engine%2 == 1 {
		return o.OtherTokens
	}
	return o.BlockTokens
}

// smallest is the smallest block size of a world.
func (o *Options) smallest() int {
	if o.OtherTokens > 0 {
		return min(o.BlockTokens, o.OtherTokens)
	}
	return o.BlockTokens
}

// base is what the shapes of all engines have in common.
func base() connector.Fingerprint { return connector.Fingerprint{1} }

func (e *engine) shape() connector.Fingerprint { return connector.Fingerprint{1, byte(e.size)} }

// openReshape has the guard accept tickets of engines with blocks of another size.
func (h *host) openReshape() {
	if h.w.opt.OtherTokens > 0 {
		h.guard.Reshape(base())
	}
}

// cutOf is the part of a ticket that is for engines of other shapes.
func cutOf(t *tracker.Ticket) ticket.Cut {
	if t.Cut.BlockTokens == 0 {
		return ticket.Cut{}
	}
	return ticket.Cut{Base: base(), BlockTokens: t.Cut.BlockTokens, Ranks: 1, Last: t.Cut.Last, Tail: t.Cut.Tail}
}

// opened is what a ticket says to the tracker.
func (h *host) opened(e *ticket.Envelope) *tracker.Ticket {
	t := &tracker.Ticket{
		Tokens: e.Tokens, Lease: e.Lease, Plugin: e.Plugin,
		Cut: tracker.Cut{BlockTokens: e.Cut.BlockTokens, Last: e.Cut.Last, Tail: e.Cut.Tail},
	}
	if e.Shape != h.e.shape() {
		t.Source = &tracker.Source{Shape: e.Shape, World: h.w.opt.Ranks, BlockTokens: e.Cut.BlockTokens}
	}
	return t
}

// mistaken is the ticket of another client that waits: what it says about the prompt is all that tells engines with
// other blocks.
func (r *routing) mistaken(t []byte, d *rng) []byte {
	o := &r.w.opt
	if o.OtherTokens == 0 || o.Rough == 0 || r.w.quiet || d.n(2) > 0 {
		return t
	}
	for _, c := range r.wants {
		if c.ticket != nil {
			return c.ticket
		}
	}
	return t
}

// sourceBlock is a block of a producer's rank on its way.
type sourceBlock struct {
	tracker.Read
	rank int
	at   *cell // in the memory for source blocks
	late *cell // what comes there when the plugin has said that it is done
	gone bool
}

// beginReshape finds out what a load needs of its producer, and where that goes.
func (h *host) beginReshape(m *move) {
	if m.Source == nil {
		return
	}
	if old := h.windows[m.Window]; old != nil && !old.reported && slices.Contains(h.proc.moves, old) {
		h.w.fail('c', "%s: window %d is given to a load of %s while one of %s has it", h.e.name, m.Window, m.Transfer.Request, old.Transfer.Request)
	}
	h.windows[m.Window] = m
	m.load = m.Reshape(h.groups)
	for _, r := range m.load.Reads() {
		for rank := range h.w.opt.Ranks {
			m.reads = append(m.reads, sourceBlock{Read: r, rank: rank, at: h.e.sourceCell(m.Window, len(m.reads), m.Source.BlockTokens)})
		}
	}
}

// sourceCell is room for a block in memory for source blocks. What an earlier load left there stays.
func (e *engine) sourceCell(window, n, size int) *cell {
	w := &e.sources[window]
	for len(*w) <= n {
		*w = append(*w, &cell{tags: make([]tag, size)})
	}
	return (*w)[n]
}

// read is the connector's Reshape, of one block. It reads whatever its fault makes of it.
func (p *proc) read(m *move, b *sourceBlock, d *rng, f Fault) {
	place, rank := b.Place, b.rank
	if f == faultWrong && d.n(2) == 0 {
		place, rank = max(0, place-d.n(2)), (rank+d.n(2))%p.h.w.opt.Ranks
	}
	from := p.producerOf(m)
	var block *cell
	if from != nil {
		block = from.block(b.Group, place, rank)
	}
	if block == nil || f == faultPartial {
		b.gone = true
		return
	}
	switch f {
	case faultHalf:
		copy(b.at.tags, block.tags[:len(block.tags)/2])
		b.at.sum = block.sum
	case faultNothing: // it says that it is done before it has read
		b.late = &cell{tags: slices.Clone(block.tags), sum: block.sum}
	default:
		b.at.set(block)
	}
	if f == faultWrong && d.n(2) == 0 {
		b.at.tags[d.n(len(b.at.tags))].kv ^= 1 << d.n(64)
	}
	if b == &m.reads[len(m.reads)-1] {
		from.proc.taken = append(from.proc.taken, from.kept.id)
	}
}

// block is a block that a producer's rank holds, by its place in the prompt; nil: it does not.
func (p *producer) block(group uint16, place, rank int) *cell {
	for _, b := range p.kept.blocks {
		if b.Group == group && position(p.kept.blocks, b, p.kept.tokens, p.proc.h.e.size) == place {
			return &p.proc.h.e.mem[rank][b.ID]
		}
	}
	return nil
}

// keyed is the block with some key that a producer's rank holds; nil: there is none.
func (p *producer) keyed(b connector.Block, rank int) *cell {
	for _, k := range p.kept.blocks {
		if k.Group == b.Group && k.Key == b.Key && k.Key != (connector.BlockKey{}) {
			return &p.proc.h.e.mem[rank][k.ID]
		}
	}
	return nil
}

// bring is the load of a lossy connector, of one block. No digest verifies what it brings, so it writes nothing wrong: it
// compares keys, which partial blocks lack, and the producer confirms that it still held what was read.
func (p *proc) bring(m *move, b connector.Block, i int, c *cell, f Fault) {
	t := m.Transfer
	from := p.producerOf(m)
	var block *cell
	if from != nil {
		block = from.keyed(b, m.Rank)
	}
	if block == nil || f == faultPartial {
		m.missing = append(m.missing, b.ID)
		return
	}
	copy(c.tags, block.tags)
	c.sum = uint64(m.ID) // where digests are it may write anything
	for k := range c.tags {
		c.tags[k].tainted = true
	}
	if i == len(t.Blocks)-1 && m.Rank == 0 {
		from.proc.taken = append(from.proc.taken, from.kept.id)
	}
}

// producer is a hold that can be read now.
type producer struct {
	proc *proc
	kept *kept
}

// producerOf finds the hold that a load reads, nil if nothing keeps its blocks any more.
func (p *proc) producerOf(m *move) *producer {
	t, ok := parseTicket(m.Transfer.Ticket)
	if !ok {
		return nil
	}
	from := p.h.w.pluginOf(t)
	if from == nil || from.n != t.life {
		return nil
	}
	for _, k := range from.holds {
		if k.id == t.hold && from.h.keeps(k) {
			return &producer{from, k}
		}
	}
	return nil
}

// keeps says whether the host still has the blocks of a hold pinned.
func (h *host) keeps(k *kept) bool {
	for _, l := range h.holds {
		if l.id == k.id && slices.Equal(l.blocks, k.blocks) {
			return true
		}
	}
	return false
}

// reshaped is the host's part when a load of whole source blocks has returned: it checks them by the producer's digests,
// cuts those that are right, and makes digests of ours that are whole.
func (h *host) reshaped(m *move) {
	for i := range m.reads {
		if b := &m.reads[i]; b.late != nil {
			b.at.set(b.late)
		}
	}
	if m.out.Err != nil {
		return
	}
	h.w.stats.Reshaped++
	faults := map[tracker.Read]error{}
	for i := range m.reads {
		b := &m.reads[i]
		if err := h.faultOf(m, b); err != nil {
			faults[b.Read] = err
		} else if !h.w.is(CutBeforeCheck) {
			h.cut(m, b)
		}
	}
	m.out = m.load.Outcome(func(r tracker.Read) error { return faults[r] })
	h.w.stats.Damaged += len(m.out.Corrupt)
	for _, t := range m.load.Targets() {
		if slices.Contains(m.out.Corrupt, t.ID) || t.Key == (connector.BlockKey{}) {
			continue
		}
		for rank := range h.e.mem {
			c := &h.e.mem[rank][t.ID]
			c.sign(h.sum(c, t.Block, rank))
		}
	}
}

// faultOf says why a source block is not cut.
func (h *host) faultOf(m *move, b *sourceBlock) error {
	want := connector.Block{Key: m.Source.Keys[b.Place], Group: b.Group}
	switch {
	case b.gone && !h.w.is(ReshapePart):
		return connector.ErrGone
	case !b.gone && b.at.sum != h.sum(b.at, want, b.rank) && !h.w.is(NoDigest):
		return connector.ErrCorrupt
	}
	return nil
}

// cutFirst is a host that cuts what has come before it checks that.
func (h *host) cutFirst(m *move) {
	for i := range m.reads {
		if h.w.is(CutBeforeCheck) && !m.reads[i].gone {
			h.cut(m, &m.reads[i])
		}
	}
}

// cut copies a source block's tokens into our blocks.
func (h *host) cut(m *move, b *sourceBlock) {
	size := m.Source.BlockTokens
	first := b.Place * size
	if h.w.is(ReshapeOffByOne) {
		first++
	}
	for _, t := range m.load.Targets() {
		if t.Group != b.Group {
			continue
		}
		begin := t.From - t.From%h.e.size
		for at := max(first, t.From); at < min(first+size, t.To); at++ {
			h.e.mem[b.rank][t.ID].tags[at-begin], h.e.mem[b.rank][t.ID].short = b.at.tags[at-first], 0
		}
	}
}
