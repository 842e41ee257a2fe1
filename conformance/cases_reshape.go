package conformance

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

// A producer and a consumer whose caches are cut in two ways. The consumer reads whole blocks of the producer's ranks,
// into memory in which they have the sizes that they have there; that of a host, which checks and cuts them.

func reshapeCase(id, rule, text string, body func(*rig)) Case {
	return Case{
		ID: id, Rule: rule, Text: text, Profiles: []Profile{Reshape}, Needs: connector.CanReshape,
		Run: rigged(connector.CanHold|connector.CanReshape, false, body),
	}
}

func reshapeCases() []Case {
	random := reshapeCase("random-reshape", "RESHAPE-03", "Random histories of engines of any shapes: prompts of several producers, read in calls in any order, in parts, at once, given up, and by the engine that takes a consumer's place.", randomReshape)
	return []Case{
		reshapeCase("reshape-offer", "RESHAPE-02", "All tokens that are the same are offered, and none after them.", reshapeOffer),
		reshapeCase("reshape-blocks", "RESHAPE-03", "Whole blocks of other sizes are read, digests included, up to 70 of them.", reshapeBlocks),
		reshapeCase("reshape-ranks", "RESHAPE-03", "Each of one to eight ranks of a producer is read, by engines with more and with fewer.", reshapeRanks),
		reshapeCase("reshape-both", "RESHAPE-03", "Block size and ranks differ at once.", reshapeBoth),
		reshapeCase("reshape-part", "RESHAPE-03", "Blocks from the middle of a prompt are read, in calls of a few blocks.", reshapePart),
		reshapeCase("reshape-refused", "RESHAPE-04", "Blocks of other sizes than the producer's are refused, and nothing is written.", reshapeRefused),
		reshapeCase("reshape-named", "RESHAPE-05", "Blocks that the hold does not have, or that are others, are named.", reshapeNamed),
		reshapeCase("reshape-once", "RESHAPE-06", "A hold is reported once, after the last call of its consumer.", reshapeOnce),
		reshapeCase("reshape-consumed", "RESHAPE-06", "A hold that was fetched gives nothing more.", reshapeConsumed),
		budgeted(random),
	}
}

// cut is how an engine of these cases cuts its cache.
type cut struct {
	block, ranks int
	heads        int   // in all; 0: cutHeads
	wider        int64 // bytes that a head has more
}

const (
	cutHeads  = 24
	cutBlocks = 96
	// sourceBlocks is how many source blocks the memory for them has room for.
	sourceBlocks = 80
	// sourceBytes is memory for source blocks, which the blocks of any producer here fit into.
	sourceBytes = 2 << 20
)

// cutSegments are planes and bytes of a head; no size divides another.
var cutSegments = []struct {
	planes int
	head   int64
}{{2, 10}, {1, 14}, {3, 4}}

func (c cut) layout() connector.Layout {
	l := connector.Layout{Name: "cut", Blocks: cutBlocks, Groups: []connector.Group{{BlockTokens: c.block, Policy: connector.PolicyAll}}}
	at := int64(gap)
	for i, s := range cutSegments {
		n := int64(s.planes*c.block*c.heads/c.ranks) * (s.head + c.wider)
		l.Segments = append(l.Segments, connector.Segment{
			Layer: i, Offset: at, BlockStride: n + gap, Bytes: n, Planes: s.planes, Heads: c.heads / c.ranks,
		})
		at += cutBlocks*(n+gap) + gap
	}
	return withDigest(l, 0)
}

// cutEngine is an engine of these cases.
type cutEngine struct {
	*pd
	cut cut
}

func (r *rig) cutEngine(c cut, role connector.Role) *cutEngine {
	r.Helper()
	if c.heads == 0 {
		c.heads = cutHeads
	}
	layout := c.layout()
	e := r.closed(setup{world: c.ranks, layout: &layout, shape: fmt.Sprint(c), sources: true})
	e.env.Role, e.env.Base = role, connector.NewFingerprint("conformance base", r.settings.salt)
	return &cutEngine{e.attend(), c}
}

// cutPrompt is a prompt in a producer's cache.
type cutPrompt struct {
	*prompt
	seed uint64
}

// hand computes a prompt of that many tokens and ends it with a consumer announced.
func (e *cutEngine) hand(tokens int) cutPrompt {
	e.Helper()
	n := (tokens + e.cut.block - 1) / e.cut.block
	keys := e.keys(n)[:tokens/e.cut.block]
	p := cutPrompt{&prompt{request: connector.RequestID(fmt.Sprintf("request-%x", e.rand.Uint32())), keys: keys, tokens: tokens}, e.rand.Uint64()}
	p.blocks = e.blocks(keys, n)
	for rank, kv := range e.kv {
		e.write(kv, p, rank)
	}
	t := connector.Transfer{Request: p.request, Tokens: tokens, Blocks: p.blocks}
	e.must(e.saveOnly(e.Context(), t), "save")
	e.handOver(p.prompt)
	return p
}

// blocks are n blocks anywhere, the first of which have keys.
func (e *cutEngine) blocks(keys []connector.BlockKey, n int) []connector.Block {
	out := make([]connector.Block, n)
	for i, id := range e.slots(n) {
		out[i].ID = id
		if i < len(keys) {
			out[i].Key = keys[i]
		}
	}
	e.rand.Shuffle(n, func(i, j int) { out[i].ID, out[j].ID = out[j].ID, out[i].ID })
	return out
}

// write fills a prompt's blocks on a rank: every byte is another in each of them.
func (e *cutEngine) write(kv *connector.KV, p cutPrompt, rank int) {
	for place, b := range p.blocks {
		for _, s := range kv.Segments(0) {
			h := fnv.New64a()
			for _, n := range []uint64{p.seed, uint64(rank), uint64(place), uint64(s)} {
				_, _ = h.Write(binary.LittleEndian.AppendUint64(nil, n))
			}
			rng := rand.New(rand.NewPCG(h.Sum64(), 0))
			for i, view := 0, kv.View(s, b.ID); i < len(view); i++ {
				view[i] = byte(rng.Uint32())
			}
		}
	}
}

// cutLoad is what a consumer reads.
type cutLoad struct {
	from, to int  // blocks of the producer
	rank     int  // of the producer
	last     bool // of the load

	limit    time.Duration // of the call; 0: a host's deadline
	insists  bool          // as hosts do: the engine asks again while the connector is busy, until the limit
	unlooked bool          // the caller looks itself whether the caches have changed
	rand     *rand.Rand    // that places the blocks; nil: the case's
}

// sourceLayout is how the memory for source blocks holds some of a producer's: with the same sizes, but in other places.
func (e *cutEngine) sourceLayout() connector.Layout {
	l := elsewhere(e.cut.layout(), sourceBlocks)
	for i := range l.Segments {
		l.Segments[i].Region = 1
	}
	return l
}

// load reads blocks of one rank of p into slots anywhere. Nothing else may change, neither there nor in a cache; blocks
// that are named as failed may contain anything. It returns how many are named, and the error.
func (e *cutEngine) load(p *cutEngine, pr cutPrompt, l cutLoad) (named int, err error) {
	e.Helper()
	worker := l.rank % len(e.workers)
	kv, err := connector.NewKV(p.sourceLayout(), [][]byte{e.inst.Memory[worker], e.sources})
	e.must(err, "memory for source blocks")
	want := bytes.Repeat([]byte{guardByte}, len(e.sources))
	copy(e.sources, want)
	if l.rand == nil {
		l.rand = e.rand
	}
	slots := l.rand.Perm(sourceBlocks)
	bs := make([]connector.Block, 0, l.to-l.from)
	for place := l.from; place < l.to; place++ {
		b := connector.Block{ID: connector.BlockID(slots[place])}
		if place < len(pr.keys) {
			b.Key = pr.keys[place]
		}
		bs = append(bs, b)
	}
	end := min(l.to*p.cut.block, max(pr.tokens, (l.to-1)*p.cut.block+1))
	t := connector.Transfer{Request: pr.request, From: l.from * p.cut.block, Tokens: end - l.from*p.cut.block, Blocks: bs, Ticket: pr.hold.Ticket}
	if !l.unlooked {
		defer e.untouched(e.memory())
	}
	err = e.reshape(worker, &t, connector.Source{Rank: l.rank, World: p.cut.ranks, Last: l.last}, kv, &l)
	failed := map[connector.BlockID]bool{}
	if err != nil {
		e.names(err, bs, failed)
	}
	wanted, wrong := connector.NewKV(*kv.Layout(), [][]byte{nil, want})
	e.must(wrong, "what is wanted")
	for i, b := range bs {
		for _, s := range kv.Segments(0) {
			from := kv.View(s, b.ID) // it may be half there
			if !failed[b.ID] && l.from+i < len(pr.blocks) {
				from = p.kv[l.rank].View(s, pr.blocks[l.from+i].ID)
			}
			copy(wanted.View(s, b.ID), from)
		}
	}
	if at := firstDifference(want, e.sources); at >= 0 {
		e.Errorf("blocks %d to %d of rank %d of %d, of %d tokens: byte %d of the memory for them is wrong", l.from, l.to, l.rank, p.cut.ranks, p.cut.block, at)
	}
	return len(failed), err
}

// untouched checks that the engine's caches are as they were before.
func (e *cutEngine) untouched(before [][]byte) {
	e.Helper()
	for rank, was := range before {
		if at := firstDifference(was, e.inst.Memory[rank]); at >= 0 {
			e.Errorf("byte %d of the cache of rank %d was written", at, rank)
		}
	}
}

// reshape is one Reshape.
func (e *cutEngine) reshape(rank int, t *connector.Transfer, from connector.Source, kv *connector.KV, l *cutLoad) error {
	e.Helper()
	worker, ok := connector.As[connector.Reshaper](e.workers[rank])
	if !ok {
		e.Errorf("Info claims reshape, the worker side does not have it")
		e.FailNow()
	}
	return e.returns("Reshape", cmp.Or(l.limit, pdDeadline), func(ctx context.Context) error {
		return whileBusy(ctx, l.insists, func() error { return worker.Reshape(ctx, t, from, kv) })
	})
}

// whole reads all blocks of all ranks of a prompt, in calls of at most some blocks, and says so with the last one if
// last is set.
func (e *cutEngine) whole(p *cutEngine, pr cutPrompt, most int, last bool) {
	e.Helper()
	for from := 0; from < len(pr.blocks); from += most {
		to := min(from+most, len(pr.blocks))
		for rank := range p.cut.ranks {
			e.inLease(pr.prompt)
			named, err := e.load(p, pr, cutLoad{from: from, to: to, rank: rank, last: last && to == len(pr.blocks) && rank == p.cut.ranks-1})
			if err != nil {
				e.missed(pr.prompt, err, "load of blocks %d to %d of rank %d: %v", from, to, rank, err)
				e.FailNow()
			}
			e.equal(0, named, "blocks that did not arrive")
		}
	}
}

// all checks that a prompt is offered and arrives whole.
func (e *cutEngine) all(p *cutEngine, pr cutPrompt) {
	e.Helper()
	if n := e.offered(pr, pr.tokens, 0); n != pr.tokens {
		e.Errorf("%d tokens of %d are offered", n, pr.tokens)
	}
	e.whole(p, pr, sourceBlocks, true)
}

// offered is how many tokens are offered beyond those that are computed, where the first same tokens are equal.
func (e *cutEngine) offered(p cutPrompt, same, computed int) int {
	e.Helper()
	return e.ask(e.query(p, same, computed))[0].Tokens
}

// query is what the engine's host asks about a prompt.
func (e *cutEngine) query(p cutPrompt, same, computed int) connector.Query {
	tokens := p.tokens + 3
	return connector.Query{
		Request: p.request, Tokens: tokens, Keys: e.keys(tokens / e.cut.block), Computed: computed, Ticket: p.hold.Ticket, Reshaped: same,
	}
}

// pairs hands prompts from engines of each cut to one of another.
func pairs(r *rig, tokens int, list ...[2]cut) {
	r.Helper()
	for _, pair := range list {
		p, d := r.cutEngine(pair[0], connector.RoleProducer), r.cutEngine(pair[1], connector.RoleConsumer)
		for _, n := range []int{tokens, tokens - 3} {
			pr := p.hand(n)
			d.all(p, pr)
			p.consumed(pr.prompt, 1)
			p.sweep()
		}
		p.gone()
		d.gone()
	}
}

func reshapeBlocks(r *rig) {
	pairs(r, 32, [2]cut{{block: 4, ranks: 1}, {block: 8, ranks: 1}}, [2]cut{{block: 16, ranks: 2}, {block: 1, ranks: 2}})
	pairs(r, 280, [2]cut{{block: 4, ranks: 1}, {block: 64, ranks: 1}})
}

func reshapeRanks(r *rig) {
	pairs(r, 16, [2]cut{{block: 4, ranks: 4}, {block: 4, ranks: 1}}, [2]cut{{block: 4, ranks: 1}, {block: 4, ranks: 8}},
		[2]cut{{block: 4, ranks: 8}, {block: 4, ranks: 2}}, [2]cut{{block: 4, ranks: 3}, {block: 4, ranks: 2}})
}

func reshapeBoth(r *rig) {
	pairs(r, 32, [2]cut{{block: 4, ranks: 2}, {block: 8, ranks: 1}}, [2]cut{{block: 16, ranks: 1}, {block: 4, ranks: 2}},
		[2]cut{{block: 4, ranks: 3}, {block: 16, ranks: 2}})
}

func reshapePart(r *rig) {
	p := r.cutEngine(cut{block: 4, ranks: 2}, connector.RoleProducer)
	d := r.cutEngine(cut{block: 8, ranks: 1}, connector.RoleConsumer)
	for _, l := range [][2]int{{1, 8}, {3, 4}, {7, 8}, {0, 5}} {
		pr := p.hand(30)
		r.equal(30-8, d.offered(pr, 30, 8), "tokens offered beyond 8")
		for rank := range p.cut.ranks {
			r.inLease(pr.prompt)
			named, err := d.load(p, pr, cutLoad{from: l[0], to: l[1], rank: rank, last: rank == 1})
			r.must(err, "load of blocks %d to %d", l[0], l[1])
			r.equal(0, named, "blocks that did not arrive")
		}
		p.consumed(pr.prompt, 1)
		p.sweep()
	}
	pr := p.hand(30)
	d.whole(p, pr, 3, true)
	p.consumed(pr.prompt, 1)
}

func reshapeOffer(r *rig) {
	p := r.cutEngine(cut{block: 4, ranks: 1}, connector.RoleProducer)
	d := r.cutEngine(cut{block: 8, ranks: 1}, connector.RoleConsumer)
	pr := p.hand(30)
	for _, c := range [][3]int{{30, 0, 30}, {30, 24, 6}, {28, 0, 28}, {8, 0, 8}, {8, 8, 0}, {8, 16, 0}} {
		r.equal(c[2], d.offered(pr, c[0], c[1]), "tokens offered of which %d are the same, to one that has %d", c[0], c[1])
	}
	d.all(p, pr)
}

func reshapeRefused(r *rig) {
	p := r.cutEngine(cut{block: 4, ranks: 2}, connector.RoleProducer)
	d := r.cutEngine(cut{block: 8, ranks: 1}, connector.RoleConsumer)
	pr := p.hand(24)
	for why, c := range map[string]cut{
		"blocks of 6 tokens":           {block: 6, ranks: 2, heads: cutHeads},
		"the heads of one rank":        {block: 4, ranks: 1, heads: cutHeads},
		"heads that are 2 bytes wider": {block: 4, ranks: 2, heads: cutHeads, wider: 2},
		"half as many heads":           {block: 4, ranks: 2, heads: cutHeads / 2},
	} {
		l := c.layout()
		for i := range l.Segments {
			l.Segments[i].Region = 1
		}
		l.Blocks = 24 // in the memory that there is
		kv, err := connector.NewKV(l, [][]byte{d.inst.Memory[0], d.sources})
		r.must(err, "memory for source blocks")
		before := bytes.Clone(d.sources)
		t := connector.Transfer{Request: pr.request, Tokens: 24, Ticket: pr.hold.Ticket}
		for i := range 24 / c.block {
			t.Blocks = append(t.Blocks, connector.Block{ID: connector.BlockID(i), Key: pr.keys[i]})
		}
		if err := d.reshape(0, &t, connector.Source{World: c.ranks}, kv, &cutLoad{}); !errors.Is(err, connector.ErrIncompatible) {
			r.Errorf("%s: error %v, want ErrIncompatible", why, err)
		}
		if at := firstDifference(before, d.sources); at >= 0 {
			r.Errorf("%s: byte %d of the memory for source blocks was written", why, at)
		}
	}
}

func reshapeNamed(r *rig) {
	p := r.cutEngine(cut{block: 4, ranks: 1}, connector.RoleProducer)
	d := r.cutEngine(cut{block: 16, ranks: 1}, connector.RoleConsumer)
	for _, c := range []struct{ tokens, from, to, other, named int }{
		{24, 4, 8, -1, 2}, {24, 6, 8, -1, 2}, {22, 0, 7, -1, 1}, {24, 0, 6, 3, 1},
	} {
		pr := p.hand(c.tokens)
		if c.other >= 0 {
			pr.keys = slices.Clone(pr.keys)
			pr.keys[c.other] = p.keys(1)[0]
		}
		named, err := d.load(p, pr, cutLoad{from: c.from, to: c.to})
		if err == nil || named < c.named {
			r.Errorf("%d tokens are held and blocks %d to %d wanted: %d blocks are named, want %d (%v)", c.tokens, c.from, c.to, named, c.named, err)
		}
		p.sweep()
	}
}

func reshapeOnce(r *rig) {
	for _, ranks := range [][2]int{{1, 2}, {2, 1}, {4, 2}, {2, 3}} {
		p := r.cutEngine(cut{block: 4, ranks: ranks[0]}, connector.RoleProducer)
		d := r.cutEngine(cut{block: 8, ranks: ranks[1]}, connector.RoleConsumer)
		pr := p.hand(24)
		d.whole(p, pr, 2, false)
		p.silent(pr.prompt, 0)
		p.sweep()
		d.whole(p, pr, 4, true)
		p.consumed(pr.prompt, 1)
		p.gone()
		d.gone()
	}
}

func reshapeConsumed(r *rig) {
	p := r.cutEngine(cut{block: 4, ranks: 2}, connector.RoleProducer)
	d := r.cutEngine(cut{block: 8, ranks: 1}, connector.RoleConsumer)
	pr := p.hand(24)
	d.all(p, pr)
	p.consumed(pr.prompt, 1)
	p.sweep()
	p.prefer(pr.blocks)
	other := p.hand(24) // where it lay
	if named, err := d.load(p, pr, cutLoad{to: 6}); err == nil || named < 6 {
		r.Errorf("a hold that was fetched is served: %d blocks are named, error %v", named, err)
	}
	d.all(p, other)
}
