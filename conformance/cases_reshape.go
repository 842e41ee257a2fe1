package conformance

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"

	"github.com/kvport/kvport/connector"
)

// A producer and a consumer whose caches are cut in two ways. The content of a token is a function of the
// prompt, the segment, the plane, the token and the head, so that a byte that came from or went to another
// place is a wrong byte.

func reshapeCase(id, rule, text string, body func(*rig)) Case {
	return Case{
		ID: id, Rule: rule, Text: text, Profiles: []Profile{Reshape}, Needs: connector.CanReshape,
		Run: rigged(connector.CanHold|connector.CanReshape, false, body),
	}
}

func reshapeCases() []Case {
	return []Case{
		reshapeCase("reshape-offer", "RESHAPE-02", "All tokens that are the same are offered, and none after them.", reshapeOffer),
		reshapeCase("reshape-blocks", "RESHAPE-03", "Blocks of 4 tokens are loaded into blocks of 8 and 16, and the other way.", reshapeBlocks),
		reshapeCase("reshape-ranks", "RESHAPE-03", "Heads go from one rank to two and four, from two to three, and the other way.", reshapeRanks),
		reshapeCase("reshape-both", "RESHAPE-03", "Block size and ranks differ at once.", reshapeBoth),
		reshapeCase("reshape-part", "RESHAPE-03", "A consumer that has the first blocks loads the others, up to the middle of a block.", reshapePart),
		reshapeCase("reshape-refused", "RESHAPE-04", "Block sizes and ranks that do not divide each other are refused, and nothing is written.", reshapeRefused),
		reshapeCase("reshape-named", "RESHAPE-05", "Blocks that the hold has half of, or not at all, are named.", reshapeNamed),
		reshapeCase("reshape-once", "RESHAPE-06", "A hold is reported once, after the last rank of its consumer.", reshapeOnce),
		reshapeCase("reshape-consumed", "RESHAPE-06", "A hold that was fetched gives nothing more.", reshapeConsumed),
	}
}

// cut is how an engine of these cases cuts its cache.
type cut struct {
	block, ranks int
	heads        int   // in all; 0: cutHeads
	wider        int64 // bytes that a head has more
}

const (
	cutHeads  = 12
	cutBlocks = 64
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
	e := r.closed(setup{world: c.ranks, layout: &layout, shape: fmt.Sprint(c)})
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
		e.write(kv, p, cutSpan{rank: rank, to: tokens}, p.blocks)
	}
	t := connector.Transfer{Request: p.request, Tokens: tokens, Blocks: p.blocks}
	e.must(e.saveOnly(e.Context(), t), "save")
	e.endRequest(p.prompt, connector.ReasonLength)
	if p.hold.Ticket == nil {
		e.Errorf("a finished request whose consumer was announced has no ticket")
		e.FailNow()
	}
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

// cutSpan is tokens of one rank, and the place of the first block that they go to.
type cutSpan struct{ rank, from, to, first int }

// write writes a prompt's tokens into blocks.
func (e *cutEngine) write(kv *connector.KV, p cutPrompt, at cutSpan, bs []connector.Block) {
	heads := e.cut.heads / e.cut.ranks
	for segment, s := range cutSegments {
		size := int(s.head + e.cut.wider)
		for token := at.from; token < at.to; token++ {
			view := kv.View(segment, bs[token/e.cut.block-at.first].ID)
			for plane := range s.planes {
				row := view[((plane*e.cut.block + token%e.cut.block) * heads * size):][:heads*size]
				for head := range heads {
					writeHead(row[head*size:][:size], p.seed, segment, plane, token, at.rank*heads+head)
				}
			}
		}
	}
}

func writeHead(to []byte, seed uint64, place ...int) {
	h := fnv.New64a()
	_, _ = h.Write(binary.LittleEndian.AppendUint64(nil, seed))
	for _, n := range place {
		_, _ = h.Write(binary.LittleEndian.AppendUint64(nil, uint64(n)))
	}
	for i := range to {
		_, _ = h.Write([]byte{byte(i)})
		to[i] = byte(h.Sum64() >> 32)
	}
}

// cutLoad is what a consumer loads.
type cutLoad struct {
	from, to int   // tokens
	ranks    []int // nil: all
	rank     int   // the one that loads now
}

// load loads tokens of a prompt into blocks anywhere. Nothing else in the cache may change: only the tokens that
// were asked for, of this rank's heads. Blocks that are named as failed may contain anything. It returns how many
// blocks are named on all ranks, and the last error.
func (e *cutEngine) load(p cutPrompt, l cutLoad) (named int, err error) {
	e.Helper()
	first := l.from / e.cut.block
	bs := e.blocks(nil, (l.to+e.cut.block-1)/e.cut.block-first)
	defer e.give(bs...)
	for i := range bs {
		if (first+i+1)*e.cut.block <= l.to {
			bs[i].Key = e.keys(1)[0] // of this engine: nothing like it is there
		}
	}
	if l.ranks == nil {
		for rank := range e.workers {
			l.ranks = append(l.ranks, rank)
		}
	}
	t := connector.Transfer{Request: p.request, From: l.from, Tokens: l.to - l.from, Blocks: bs, Ticket: p.hold.Ticket}
	for _, rank := range l.ranks {
		want := bytes.Clone(e.inst.Memory[rank])
		one := e.reshape(rank, &t)
		failed := map[connector.BlockID]bool{}
		if one != nil {
			err = one
			e.names(one, bs, failed)
		}
		named += len(failed)
		l.rank = rank
		e.compare(want, p, l, bs, failed)
	}
	return named, err
}

// reshape is one Reshape.
func (e *cutEngine) reshape(rank int, t *connector.Transfer) error {
	e.Helper()
	worker, ok := connector.As[connector.Reshaper](e.workers[rank])
	if !ok {
		e.Errorf("Info claims reshape, the worker side does not have it")
		e.FailNow()
	}
	return e.returns("Reshape", pdDeadline, func(ctx context.Context) error { return worker.Reshape(ctx, t, e.kv[rank]) })
}

// compare checks that a rank's memory is as before, except for the tokens of a load.
func (e *cutEngine) compare(want []byte, p cutPrompt, l cutLoad, bs []connector.Block, failed map[connector.BlockID]bool) {
	e.Helper()
	kv, err := connector.NewKV(e.env.Layout, [][]byte{want})
	e.must(err, "copy of the cache")
	first := l.from / e.cut.block
	for i, b := range bs {
		if !failed[b.ID] {
			e.write(kv, p, cutSpan{l.rank, max(l.from, (first+i)*e.cut.block), min(l.to, (first+i+1)*e.cut.block), first}, bs)
			continue
		}
		for _, s := range kv.Segments(0) { // it may be half there
			copy(kv.View(s, b.ID), e.kv[l.rank].View(s, b.ID))
		}
	}
	if at := firstDifference(want, e.inst.Memory[l.rank]); at >= 0 {
		e.Errorf("rank %d of %d, blocks of %d: byte %d of the cache is wrong after tokens %d to %d were loaded into blocks %v",
			l.rank, e.cut.ranks, e.cut.block, at, l.from, l.to, idsOf(bs))
	}
}

// all checks that a prompt is offered and arrives whole.
func (e *cutEngine) all(p cutPrompt) {
	e.Helper()
	if n := e.offered(p, p.tokens, 0); n != p.tokens {
		e.Errorf("%d tokens of %d are offered", n, p.tokens)
	}
	named, err := e.load(p, cutLoad{to: p.tokens})
	e.must(err, "load of %d tokens", p.tokens)
	e.equal(0, named, "blocks that did not arrive")
}

// offered is how many tokens are offered beyond those that are computed, where the first same tokens are equal.
func (e *cutEngine) offered(p cutPrompt, same, computed int) int {
	e.Helper()
	tokens := p.tokens + 3
	q := connector.Query{
		Request: p.request, Tokens: tokens, Keys: e.keys(tokens / e.cut.block), Computed: computed, Ticket: p.hold.Ticket, Reshaped: same,
	}
	return e.ask(q)[0].Tokens
}

// pairs hands prompts from engines of each cut to one of another.
func pairs(r *rig, tokens int, list ...[2]cut) {
	r.Helper()
	for _, pair := range list {
		p, d := r.cutEngine(pair[0], connector.RoleProducer), r.cutEngine(pair[1], connector.RoleConsumer)
		for _, n := range []int{tokens, tokens - 3} {
			pr := p.hand(n)
			d.all(pr)
			p.consumed(pr.prompt, 1)
			p.sweep()
		}
		p.gone()
		d.gone()
	}
}

func reshapeBlocks(r *rig) {
	pairs(r, 32, [2]cut{{block: 4, ranks: 1}, {block: 8, ranks: 1}}, [2]cut{{block: 4, ranks: 1}, {block: 16, ranks: 1}},
		[2]cut{{block: 8, ranks: 1}, {block: 4, ranks: 1}}, [2]cut{{block: 16, ranks: 2}, {block: 4, ranks: 2}})
}

func reshapeRanks(r *rig) {
	pairs(r, 16, [2]cut{{block: 4, ranks: 1}, {block: 4, ranks: 2}}, [2]cut{{block: 4, ranks: 1}, {block: 4, ranks: 4}},
		[2]cut{{block: 4, ranks: 2}, {block: 4, ranks: 3}}, [2]cut{{block: 4, ranks: 2}, {block: 4, ranks: 1}},
		[2]cut{{block: 4, ranks: 4}, {block: 4, ranks: 2}}, [2]cut{{block: 4, ranks: 3}, {block: 4, ranks: 2}})
}

func reshapeBoth(r *rig) {
	pairs(r, 32, [2]cut{{block: 4, ranks: 2}, {block: 8, ranks: 1}}, [2]cut{{block: 16, ranks: 1}, {block: 4, ranks: 2}},
		[2]cut{{block: 4, ranks: 3}, {block: 16, ranks: 2}})
}

func reshapePart(r *rig) {
	p := r.cutEngine(cut{block: 8, ranks: 1}, connector.RoleProducer)
	d := r.cutEngine(cut{block: 4, ranks: 2}, connector.RoleConsumer)
	wide := r.cutEngine(cut{block: 16, ranks: 1}, connector.RoleConsumer)
	for _, l := range []struct {
		d *cutEngine
		cutLoad
	}{{d, cutLoad{from: 4, to: 30}}, {d, cutLoad{from: 12, to: 21}}, {d, cutLoad{from: 28, to: 30}}, {wide, cutLoad{from: 16, to: 30}}, {wide, cutLoad{from: 0, to: 17}}} {
		pr := p.hand(30)
		r.equal(30-l.from, l.d.offered(pr, 30, l.from), "tokens offered beyond %d", l.from)
		named, err := l.d.load(pr, l.cutLoad)
		r.must(err, "load of tokens %d to %d", l.from, l.to)
		r.equal(0, named, "blocks that did not arrive")
		p.consumed(pr.prompt, 1)
		p.sweep()
	}
}

func reshapeOffer(r *rig) {
	p := r.cutEngine(cut{block: 4, ranks: 1}, connector.RoleProducer)
	d := r.cutEngine(cut{block: 8, ranks: 1}, connector.RoleConsumer)
	pr := p.hand(30)
	for _, c := range [][3]int{{30, 0, 30}, {30, 24, 6}, {28, 0, 28}, {8, 0, 8}, {8, 8, 0}, {8, 16, 0}} {
		r.equal(c[2], d.offered(pr, c[0], c[1]), "tokens offered of which %d are the same, to one that has %d", c[0], c[1])
	}
	d.all(pr)
}

func reshapeRefused(r *rig) {
	for why, pair := range map[string][2]cut{
		"blocks of 6 tokens there, of 4 here":       {{block: 6, ranks: 1}, {block: 4, ranks: 1}},
		"12 heads there, 8 here":                    {{block: 4, ranks: 1}, {block: 4, ranks: 1, heads: 8}},
		"6 heads on 2 ranks there, 6 on 1 here":     {{block: 4, ranks: 2}, {block: 4, ranks: 1, heads: 6}},
		"heads that are 2 bytes wider here":         {{block: 4, ranks: 1}, {block: 8, ranks: 1, wider: 2}},
		"half as many heads of twice the size here": {{block: 4, ranks: 1, wider: 10}, {block: 4, ranks: 1, heads: 24}},
	} {
		p, d := r.cutEngine(pair[0], connector.RoleProducer), r.cutEngine(pair[1], connector.RoleConsumer)
		pr := p.hand(24)
		before := d.memory()
		t := connector.Transfer{Request: pr.request, Tokens: 24, Blocks: d.blocks(nil, 24/d.cut.block), Ticket: pr.hold.Ticket}
		for rank := range d.workers {
			err := d.reshape(rank, &t)
			if !errors.Is(err, connector.ErrIncompatible) {
				r.Errorf("%s: error %v, want ErrIncompatible", why, err)
			}
			if at := firstDifference(before[rank], d.inst.Memory[rank]); at >= 0 {
				r.Errorf("%s: byte %d of the cache was written", why, at)
			}
		}
		p.gone()
		d.gone()
	}
}

func reshapeNamed(r *rig) {
	p := r.cutEngine(cut{block: 4, ranks: 1}, connector.RoleProducer)
	for _, c := range []struct {
		cut            cut
		tokens, wanted int
		named          int // at least
	}{
		{cut{block: 16, ranks: 1}, 24, 32, 1},
		{cut{block: 16, ranks: 1}, 24, 48, 2},
		{cut{block: 8, ranks: 1}, 22, 24, 1},
		{cut{block: 8, ranks: 2}, 20, 24, 2},
		{cut{block: 16, ranks: 1}, 15, 16, 1},
	} {
		d := r.cutEngine(c.cut, connector.RoleConsumer)
		pr := p.hand(c.tokens)
		named, err := d.load(pr, cutLoad{to: c.wanted})
		if err == nil || named < c.named {
			r.Errorf("%d tokens are held and %d loaded into blocks of %d: %d blocks are named, want %d", c.tokens, c.wanted, c.cut.block, named, c.named)
		}
		d.gone()
		p.sweep()
	}
}

func reshapeOnce(r *rig) {
	for _, ranks := range [][2]int{{1, 2}, {2, 1}, {4, 2}, {2, 3}} {
		p := r.cutEngine(cut{block: 4, ranks: ranks[0]}, connector.RoleProducer)
		d := r.cutEngine(cut{block: 8, ranks: ranks[1]}, connector.RoleConsumer)
		pr := p.hand(24)
		for rank := range d.workers {
			if rank == len(d.workers)-1 {
				p.silent(pr.prompt, 0)
			}
			p.sweep()
			_, err := d.load(pr, cutLoad{to: 24, ranks: []int{rank}})
			r.must(err, "load of rank %d", rank)
		}
		p.consumed(pr.prompt, 1)
		p.gone()
		d.gone()
	}
}

func reshapeConsumed(r *rig) {
	p := r.cutEngine(cut{block: 4, ranks: 1}, connector.RoleProducer)
	d := r.cutEngine(cut{block: 8, ranks: 2}, connector.RoleConsumer)
	pr := p.hand(24)
	d.all(pr)
	p.consumed(pr.prompt, 1)
	p.sweep()
	p.prefer(pr.blocks)
	other := p.hand(24) // where it lay
	if named, err := d.load(pr, cutLoad{to: 24}); err == nil || named < 6 {
		r.Errorf("a hold that was fetched is served: %d blocks are named, error %v", named, err)
	}
	d.all(other)
}
