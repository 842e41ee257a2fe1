package conformance

import (
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

func matchCases() []Case {
	return []Case{
		storeCase("batch-order", "SCHED-01", "Queries of different lengths are answered in their order.", batchOrder),
		storeCase("match-repeat", "SCHED-02", "72 Matches of one request are answered alike.", matchRepeat),
		storeCase("probe", "SCHED-03", "A probe is answered like a query and leaves no trace.", probe),
		storeCase("computed", "SCHED-04", "Tokens counts from Computed, in whole blocks, within the prompt.", computed),
		storeCase("large-batch", "SCHED-06", "2,000 blocks are saved, matched in one query and loaded, and some that are absent are named.", largeBatch),
		storeCase("prefix-hole", "STORE-02", "A match ends at the first absent block.", prefixHole),
	}
}

// prompts saves k blocks for each count and gives the full prompts of 5 blocks.
func (e *engine) prompts(saved ...int) []connector.Query {
	e.Helper()
	qs := make([]connector.Query, len(saved))
	for i, n := range saved {
		keys := e.keys(5)
		if n > 0 {
			e.save(blocks(0, keys[:n]...)...)
		}
		qs[i] = query(keys)
		qs[i].Request = connector.RequestID(rune('a' + i))
	}
	return qs
}

func batchOrder(r *rig) {
	e := r.engine(setup{})
	want := []int{3, 0, 5, 1, 4, 0, 2}
	for i, m := range e.ask(e.prompts(want...)...) {
		r.equal(want[i]*blockTokens, m.Tokens, "tokens offered to query %d of %d", i, len(want))
	}
	if got := e.ask(); len(got) != 0 {
		r.Errorf("%d answers to an empty batch", len(got))
	}
}

func matchRepeat(r *rig) {
	e := r.engine(setup{})
	qs := e.prompts(3, 0)
	first := e.ask(qs...)
	r.equal(3*blockTokens, first[0].Tokens, "tokens offered at first")
	for n := range 71 {
		again := e.ask(qs...)
		if again[0] != first[0] || again[1] != first[1] {
			r.Errorf("Match %d answered %+v, the first %+v", n+2, again, first)
			return
		}
	}
	e.save(blocks(0, qs[1].Keys...)...)
	r.equal(5, e.match(qs[1].Keys...), "blocks offered after 72 misses and a save")
}

func probe(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(4)
	ask := query(keys)
	ask.Request = ""
	for range 3 {
		r.equal(0, e.ask(ask)[0].Tokens, "tokens offered to a probe before anything was saved")
	}
	e.save(blocks(0, keys...)...)
	r.equal(4, e.match(keys...), "blocks offered to a request after probes and a save")
	for range 3 {
		r.equal(4*blockTokens, e.ask(ask)[0].Tokens, "tokens offered to a probe")
	}
	e.wipe(0, blocks(8, keys...)...)
	r.must(e.load(blocks(8, keys...)...), "load after probes")
	e.holds(blocks(8, keys...)...)
}

func computed(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(6)
	e.save(blocks(0, keys[:5]...)...)
	for _, c := range []struct{ computed, tokens int }{{0, 20}, {4, 16}, {12, 8}, {16, 4}, {20, 0}, {24, 0}} {
		for _, extra := range []int{0, 3} {
			q := query(keys)
			q.Tokens, q.Computed = len(keys)*blockTokens+extra, c.computed
			r.equal(c.tokens, e.ask(q)[0].Tokens, "tokens offered beyond %d computed of %d", q.Computed, q.Tokens)
		}
	}
	q := query(keys[:3])
	r.equal(12, e.ask(q)[0].Tokens, "tokens offered to a prompt of 3 blocks of which 5 are stored")
	q = connector.Query{Request: "short", Tokens: blockTokens - 1}
	r.equal(0, e.ask(q)[0].Tokens, "tokens offered to a prompt shorter than a block")
}

func largeBatch(r *rig) {
	const many = 2000
	layout := planes(many)
	e := r.engine(setup{layout: &layout})
	keys := e.keys(many)
	all := blocks(0, keys...)
	e.save(all...)
	r.equal(many, e.match(keys...), "blocks offered")
	qs := make([]connector.Query, 100)
	for i := range qs {
		qs[i] = query(keys[:1+i*7])
	}
	for i, m := range e.ask(qs...) {
		r.equal(len(qs[i].Keys)*blockTokens, m.Tokens, "tokens offered to query %d", i)
	}
	e.wipe(0, all...)
	began := time.Now()
	r.must(e.load(all...), "load of %d blocks", many)
	took := time.Since(began)
	e.holds(all...)
	absent := []int{0, 511, 512, 999, 1000, 1023, 1024, 1029} // where connectors end what they do at once
	all = all[:1030]
	if e.left() < 2*took { // it is slow, and right so far
		return
	}
	none := e.keys(len(absent))
	var ids []connector.BlockID
	for n, at := range absent {
		all[at].Key = none[n]
		ids = append(ids, all[at].ID)
	}
	e.wipe(0, all...)
	e.failed(e.load(all...), ids...)
	e.holds(slices.DeleteFunc(all, func(b connector.Block) bool { return slices.Contains(none, b.Key) })...)
}

func prefixHole(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(6)
	e.save(blocks(0, keys[0], keys[1], keys[3], keys[4])...)
	r.equal(2, e.match(keys...), "blocks offered when the third of six is absent")
	r.equal(0, e.match(keys[2:]...), "blocks offered when the first is absent")
	q := query(keys)
	q.Computed = 2 * blockTokens
	r.equal(0, e.ask(q)[0].Tokens, "tokens offered when the first beyond Computed is absent")
	e.save(blocks(2, keys[2])...)
	r.equal(5, e.match(keys...), "blocks offered when the hole is filled")
	for n := range 8 { // a run of nine with one hole, and all behind it
		keys = e.keys(9)
		e.save(blocks(0, slices.Concat(keys[:n], keys[n+1:])...)...)
		r.equal(n, e.match(keys...), "blocks offered when block %d of nine is absent, and no other", n+1)
	}
}
