package conformance

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/kvport/kvport/conformance/internal/model"
	"github.com/kvport/kvport/connector"
)

// contentCases are about bytes that do not look random, and about what else a first engine does not have: names of requests.
func contentCases() []Case {
	return []Case{
		storeCase("plain-bytes", "WORK-01", "Blocks of zeros, of one byte, and of which the beginning, the end or all is equal come back as they are, also when one of them is replaced.", plainBytes),
		storeCase("shapes", "LAYOUT-01", "Caches of other shapes than those of the other cases: blocks of 300 segments, of a few bytes or whole pages each, of 256 KiB and 9 MiB, and of 528 tokens.", shapes),
		storeCase("odd-requests", "INPUT-06", "Requests whose names are long, or have slashes, spaces and dots, save and load like others.", oddRequests),
	}
}

// plain is a way to fill segments with bytes that do not look random. own is different for each block.
type plain struct {
	what string
	fill func(view []byte, own byte)
}

func plains() []plain {
	return []plain{
		{"zeros", func(view []byte, _ byte) { clear(view) }},
		{"one byte", func(view []byte, _ byte) { fillWith(view, 0xFF) }},
		{"an equal beginning", func(view []byte, own byte) {
			fillWith(view, 0x11)
			view[len(view)-1] = own
		}},
		{"an equal end", func(view []byte, own byte) {
			fillWith(view, 0)
			view[0] = own
		}},
	}
}

// plainBytes saves two blocks of each kind and loads them, and once more when the first of the two is another.
func plainBytes(r *rig) {
	kinds := plains()
	e := r.engine(setup{})
	keys := e.keys(2 * len(kinds))
	from, to := blocks(0, keys...), blocks(len(keys), keys...)
	kv := e.kv[0]
	for n, b := range from {
		for _, s := range kv.Segments(0) {
			kinds[n/2].fill(kv.View(s, b.ID), byte(n+1))
		}
		e.seal(kv, b)
	}
	r.must(e.saveOnly(r.Context(), transfer(from)), "save")
	peer := e.peer()
	for _, who := range []*engine{e, peer} {
		who.wipe(0x55, to...)
		r.equal(len(keys), who.match(keys...), "blocks offered")
		r.must(who.load(to...), "load")
		for n, b := range to {
			if d := differ(kv, from[n], who.kv[0], b); d != "" {
				r.Errorf("of two blocks that have %s, number %d does not come back: %s", kinds[n/2].what, n%2+1, d)
			}
		}
	}
	first := from[:0:0]
	for n := 0; n < len(from); n += 2 {
		first = append(first, from[n])
	}
	e.fill(first...)
	t := transfer(first)
	t.Replace = true
	r.must(e.saveReplace(r.Context(), t), "save with Replace")
	e.wipe(0x55, to...)
	r.must(e.load(to...), "load of blocks of which some were replaced")
	for n, b := range to {
		if d := differ(kv, from[n], kv, b); d != "" {
			r.Errorf("of two blocks that had %s, the first was replaced, and number %d does not come back: %s", kinds[n/2].what, n%2+1, d)
		}
	}
}

// differ says where two blocks of equal layouts have other bytes; "" if they have not.
func differ(kv *connector.KV, a connector.Block, other *connector.KV, b connector.Block) string {
	for _, s := range kv.Segments(a.Group) {
		if !bytes.Equal(kv.View(s, a.ID), other.View(s, b.ID)) {
			return fmt.Sprintf("byte %d of segment %d is wrong", firstDifference(kv.View(s, a.ID), other.View(s, b.ID)), s)
		}
	}
	return ""
}

// oddShapes are caches that real engines have, and that are unlike those of the other cases.
func oddShapes(groups bool) []model.Shape {
	one := func(g model.Group) []model.Group { return []model.Group{g} }
	shapes := []model.Shape{
		{Groups: one(model.Group{Segments: 300, Bytes: 300 * 32})},
		{Groups: one(model.Group{Segments: 9, Bytes: 9 * 64, Cut: model.CutTiny})},
		{Groups: one(model.Group{Segments: 4, Bytes: 4 * 4096, Cut: model.CutEqual})},
		{Groups: one(model.Group{Segments: 2, Bytes: 1 << 18, Cut: model.CutEqual})},
		{Groups: one(model.Group{Segments: 2, Bytes: 9 << 20}), Slots: 3}, // as of a large model on one rank
		{Groups: one(model.Group{Segments: 3, Bytes: 600}), Tokens: 16},
		{Groups: one(model.Group{Segments: 3, Bytes: 600}), Tokens: 256},
		{Groups: one(model.Group{Segments: 3, Bytes: 600}), Tokens: 528},
	}
	if groups {
		six := model.Shape{Ranks: 2}
		for n := range 6 {
			six.Groups = append(six.Groups, model.Group{Segments: 1 + n%3, Bytes: int64(256 << (n % 4))})
		}
		shapes = append(shapes, six)
	}
	return shapes
}

// mustTake is the bytes of a block that no connector may refuse; histories have blocks of as many.
const mustTake = 4 << 20

// shapes saves and loads in each of them, one after the other, in one process if it can. A connector need not take blocks of any number of
// tokens, nor large ones, if it says so when it is opened.
func shapes(r *rig) {
	all := oddShapes(r.info.Groups)
	layouts, size, ranks := make([]connector.Layout, len(all)), int64(0), 1
	for n := range all {
		all[n].Slots, all[n].Gaps = cmp.Or(all[n].Slots, 6), true
		layouts[n] = layoutOf(&all[n])
		if len(r.info.Layouts) > 0 {
			layouts[n].Name = r.info.Layouts[0]
		}
		size, ranks = max(size, end(&layouts[n])), max(ranks, all[n].Ranks)
	}
	var inst *Instance
	var refused []string // numbers of tokens of a block
	for n := range all {
		if inst == nil {
			inst = r.start(ranks, size)
		} else if r.info.ArenaBytes > 0 || r.info.ArenaBlocks > 0 { // which has its size once
			r.must(inst.Close(), "end the connector")
			inst = r.start(ranks, size)
		}
		groups := all[n].Groups
		what := fmt.Sprintf("%d groups of blocks, with %d tokens, and %d segments of together %d bytes in the first", len(groups),
			layouts[n].Groups[0].BlockTokens, groups[0].Segments, groups[0].Bytes)
		e, err := r.on(inst, setup{layout: &layouts[n], world: all[n].Ranks, shape: what})
		r.must(err, "engine")
		large := groups[0].Bytes > mustTake
		if large && e.env.Arena != nil && int64(len(e.env.Arena)) < 2*groups[0].Bytes {
			continue // the memory that it asked for has no place for such a block
		}
		if tokens := all[n].Tokens; tokens > 0 || large {
			err := e.opens()
			if errors.Is(err, connector.ErrIncompatible) {
				if tokens > 0 {
					refused = append(refused, fmt.Sprint(tokens))
				}
				continue
			}
			r.must(err, "open the sides")
		}
		e.openAll()
		e.keepsShape(what)
		e.closeAll()
	}
	if len(refused) == 3 {
		r.unfit(fmt.Sprintf("it takes no blocks of %s tokens: give the connector a config with which it takes one of them", strings.Join(refused, ", ")))
	}
}

// keepsShape saves and loads two blocks of each group, or one where the cache is small.
func (e *engine) keepsShape(what string) {
	e.Helper()
	keys := e.keys(min(2, e.env.Layout.Blocks/3))
	var from, to []connector.Block
	for g := range e.env.Layout.Groups {
		from = append(from, in(uint16(g), blocks(0, keys...))...)     //nolint:gosec // few groups
		to = append(to, in(uint16(g), blocks(len(keys), keys...))...) //nolint:gosec // few groups
	}
	tokens := len(keys) * e.env.Layout.Groups[0].BlockTokens
	save, load, q := transfer(from), transfer(to), query(keys)
	save.Tokens, load.Tokens, q.Tokens = tokens, tokens, tokens+3
	e.fill(from...)
	e.must(e.saveOnly(e.Context(), save), "save of %s", what)
	e.equal(tokens, e.ask(q)[0].Tokens, "tokens offered of %s", what)
	e.wipe(0x55, to...)
	e.must(e.move(e.Context(), load, false), "load of %s", what)
	e.holds(to...)
}

// oddNames are what clients may call a request, which engines pass on.
func oddNames() []connector.RequestID {
	return []connector.RequestID{
		"chatcmpl/../../0", " a b ", ".", "%s%d", "r\u00e9qu\u00eate-\u20ac", "cmpl-1\n", "a:b;c|d*?", connector.RequestID(strings.Repeat("r", 300)),
	}
}

func oddRequests(r *rig) {
	e := r.engine(setup{})
	for _, name := range oddNames() {
		keys := e.keys(2)
		save, load := transfer(blocks(0, keys...)), transfer(blocks(4, keys...))
		save.Request, load.Request = name, name
		e.fill(save.Blocks...)
		r.must(e.saveOnly(r.Context(), save), "save of request %q", name)
		q := query(keys)
		q.Request = name
		r.equal(2, e.ask(q)[0].Tokens/blockTokens, "blocks offered to request %q", name)
		e.wipe(0, load.Blocks...)
		r.must(e.move(r.Context(), load, false), "load of request %q", name)
		e.holds(load.Blocks...)
	}
}
