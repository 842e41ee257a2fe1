package conformance

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"strings"

	"github.com/kvport/kvport/connector"
)

// faultCase is a case of a fault of the connector's process, its backend or its callers.
func faultCase(id, rule, text string, body func(*rig)) Case {
	return Case{ID: id, Rule: rule, Text: text, Profiles: []Profile{Fault}, Run: rigged(0, false, body)}
}

func hostileCases() []Case {
	return []Case{
		faultCase("hostile-blocks", "INPUT-01", "Blocks and groups that the cache does not have are refused.", hostileBlocks),
		faultCase("hostile-queries", "INPUT-02", "Queries that make no sense are answered within their bounds.", hostileQueries),
		faultCase("hostile-ticket", "INPUT-03", "A forged ticket makes no block appear that is not there.", hostileTicket),
		faultCase("no-blocks", "INPUT-04", "A transfer without blocks succeeds and does nothing.", noBlocks),
		faultCase("repeated-key", "INPUT-05", "One key in several blocks of a transfer fills all of them.", repeatedKey),
		faultCase("shared-save", "WORK-09", "One block is in eight saves at the same time.", sharedSave),
		faultCase("huge-batch", "SCHED-06", "One transfer has 6,000 blocks, and one Match has 1,000 queries.", hugeBatch),
		faultCase("quiet", "LOG-01", "500 loads that fail alike log fewer than 100 lines.", quiet),
	}
}

func hostileBlocks(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(2)
	e.save(blocks(0, keys...)...)
	bad := []connector.Block{
		{ID: slots},
		{ID: slots + 1},
		{ID: math.MaxInt32},
		{ID: -1},
		{ID: math.MinInt32},
		{ID: 1, Group: 1},
		{ID: 1, Group: 31},
		{ID: 1, Group: math.MaxUint16},
	}
	before := e.memory()
	for _, b := range bad {
		b.Key = keys[1]
		for _, save := range []bool{false, true} {
			t := transfer([]connector.Block{b})
			t.Replace = save
			if e.tryMove(t, save) == nil {
				r.Errorf("a transfer (save: %v) of block %d of group %d succeeds; the cache has %d blocks and 1 group", save, b.ID, b.Group, slots)
			}
		}
	}
	if at := firstDifference(before[0], e.inst.Memory[0]); at >= 0 {
		r.Errorf("byte %d of the region was changed", at)
	}
	r.equal(2, e.match(keys...), "blocks offered afterwards")
	e.whole(keys, 4)
}

func hostileQueries(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(3)
	e.save(blocks(0, keys...)...)
	long := connector.RequestID(strings.Repeat("r", 1<<10))
	bad := map[string]connector.Query{
		"no keys":               {Request: "q", Tokens: 100},
		"no tokens":             {Request: "q", Keys: keys},
		"nothing":               {},
		"computed beyond":       {Request: "q", Tokens: 12, Keys: keys, Computed: 400},
		"computed huge":         {Request: "q", Tokens: 12, Keys: keys, Computed: math.MaxInt32 &^ 3},
		"computed in a block":   {Request: "q", Tokens: 15, Keys: keys, Computed: 3},
		"tokens huge":           {Request: "q", Tokens: math.MaxInt32, Keys: keys},
		"a long request id":     {Request: long, Tokens: 15, Keys: keys},
		"a strange request id":  {Request: "../..\x00\n%s", Tokens: 15, Keys: keys},
		"one key again and":     {Request: "q", Tokens: 400, Keys: []connector.BlockKey{keys[0], keys[0], keys[0], keys[0]}},
		"the zero key":          {Request: "q", Tokens: 15, Keys: make([]connector.BlockKey, 3)},
		"keys in another order": {Request: "q", Tokens: 15, Keys: []connector.BlockKey{keys[2], keys[1], keys[0]}},
	}
	for name, q := range bad {
		var ms []connector.Match
		err := e.returns("Match", soon, func(ctx context.Context) (err error) {
			ms, err = e.scheduler.Match(ctx, []connector.Query{q})
			return err
		})
		switch {
		case err != nil: // a clean refusal
		case len(ms) != 1:
			r.Errorf("%s: %d answers to one query", name, len(ms))
		case ms[0].Tokens < 0 || ms[0].Tokens > max(0, len(q.Keys)*blockTokens-q.Computed):
			r.Errorf("%s: %d tokens are offered beyond %d computed of %d blocks", name, ms[0].Tokens, q.Computed, len(q.Keys))
		}
		r.equal(3, e.match(keys...), "blocks offered to a right query after one with %s", name)
	}
}

func hostileTicket(r *rig) {
	e := r.engine(setup{})
	absent, stored := e.keys(2), e.keys(2)
	e.save(blocks(0, stored...)...)
	garbage := make([]byte, 4096)
	for i := range garbage {
		garbage[i] = byte(e.rand.Uint32())
	}
	tickets := [][]byte{
		{0},
		{1, 0, 0, 0, 0, 0, 0, 0},
		garbage[:8], garbage[:100], garbage, []byte("{}"),
		[]byte(`{"remote_host":"127.0.0.1","remote_port":1,"remote_block_ids":[0,1]}`), bytes.Repeat([]byte{0xFF}, 64),
	}
	for i, ticket := range tickets {
		q := query(absent)
		q.Ticket = ticket
		offered := 0
		_ = e.returns("Match", soon, func(ctx context.Context) error {
			ms, err := e.scheduler.Match(ctx, []connector.Query{q})
			if err == nil && len(ms) == 1 {
				offered = ms[0].Tokens
			}
			return err
		})
		r.equal(0, offered, "tokens offered for forged ticket %d and nothing stored", i)
		t := transfer(blocks(4, absent...))
		t.Ticket = ticket
		if e.tryMove(t, false) == nil {
			r.Errorf("forged ticket %d loads blocks that are not there", i)
		}
		t = transfer(blocks(8, stored...))
		t.Ticket = ticket
		e.wipe(0, t.Blocks...)
		if e.tryMove(t, false) == nil {
			e.holds(t.Blocks...)
		}
	}
	e.whole(stored, 12)
}

func noBlocks(r *rig) {
	e := r.engine(setup{})
	before := e.memory()
	for _, save := range []bool{true, false} {
		r.must(e.tryMove(connector.Transfer{Request: "request"}, save), "transfer without blocks (save: %v)", save)
	}
	if at := firstDifference(before[0], e.inst.Memory[0]); at >= 0 {
		r.Errorf("byte %d of the region was changed", at)
	}
	keys := e.keys(1)
	r.equal(0, e.match(keys...), "blocks offered")
	e.works("after transfers without blocks")
}

func repeatedKey(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(2)
	from := blocks(0, keys[0], keys[1], keys[0], keys[0])
	e.fill(from...)
	r.must(e.tryMove(transfer(from), true), "save of one key three times")
	r.equal(2, e.match(keys...), "blocks offered")
	to := blocks(8, keys[0], keys[1], keys[0], keys[1], keys[0])
	e.wipe(0, to...)
	r.must(e.load(to...), "load of one key three times")
	e.holds(to...)
	to = append(blocks(8, keys[0]), blocks(8, keys[0])...)
	e.wipe(0, to...)
	r.must(e.load(to...), "load of one block twice")
	e.holds(to...)
}

func sharedSave(r *rig) {
	const savers = 8
	e := r.engine(setup{})
	for range 10 {
		keys := e.keys(4)
		from := blocks(0, keys...)
		e.fill(from...)
		errs := make([]error, savers)
		together(savers, func(i int) {
			t := transfer(from)
			t.Replace = i%3 == 2
			errs[i] = e.moveRank(r.Context(), 0, &t, true)
		})
		for i, err := range errs {
			r.must(err, "save %d of %d at once", i, savers)
		}
		r.equal(4, e.match(keys...), "blocks offered")
		e.whole(keys, 8)
	}
}

func hugeBatch(r *rig) {
	const many, queries = 6000, 1000
	layout := planes(many)
	e := r.engine(setup{layout: &layout})
	keys := e.keys(many)
	all := blocks(0, keys...)
	e.save(all...)
	e.wipe(0, all...)
	r.must(e.load(all...), "load of %d blocks", many)
	e.holds(all...)
	qs := make([]connector.Query, queries)
	for i := range qs {
		qs[i] = query(keys[i*4 : i*4+4])
		qs[i].Request = connector.RequestID(fmt.Sprint(i))
	}
	for i, m := range e.ask(qs...) {
		if m.Tokens != 4*blockTokens {
			r.Errorf("%d tokens offered to query %d of %d, want %d", m.Tokens, i, queries, 4*blockTokens)
			return
		}
	}
}

func quiet(r *rig) {
	const failures, lines = 500, 100
	e := r.closed(setup{})
	logged := e.logged()
	e.openAll()
	keys := e.keys(1)
	before := logged()
	for range failures {
		if e.load(blocks(0, keys...)...) == nil {
			r.Errorf("the load of an absent block succeeds")
			return
		}
	}
	if n := logged() - before; n >= lines {
		r.Errorf("%d lines were logged by %d loads that failed alike", n, failures)
	}
}
