package conformance

import (
	"github.com/kvport/kvport/connector"
)

// groupCase is a case of a cache of several groups.
func groupCase(id, rule, text string, body func(*rig)) Case {
	return Case{ID: id, Rule: rule, Text: text, Profiles: []Profile{Groups, Power}, Groups: true, Run: rigged(0, true, body)}
}

func groupCases() []Case {
	return []Case{
		groupCase("group-missing", "GROUP-03", "A block that a group with policy all lacks is not offered.", groupMissing),
		groupCase("group-trailing", "GROUP-04", "A group with policy trailing N needs the last N blocks of the offer only.", groupTrailing),
		groupCase("group-strides", "LAYOUT-01", "Groups of different sizes and strides keep their own bytes.", groupStrides),
		groupCase("group-ranks", "KEY-08", "Two groups on three ranks are six different shards.", groupRanks),
	}
}

// in places the blocks of a group.
func in(group uint16, bs []connector.Block) []connector.Block {
	for i := range bs {
		bs[i].Group = group
	}
	return bs
}

// bothAll is two groups, each with policy all.
func bothAll() connector.Layout {
	l := twoGroups()
	l.Groups[1] = connector.Group{BlockTokens: blockTokens, Policy: connector.PolicyAll}
	return l
}

func groupMissing(r *rig) {
	layout := bothAll()
	e := r.engine(setup{layout: &layout})
	keys := e.keys(5)
	e.save(blocks(0, keys...)...)
	r.equal(0, e.match(keys...), "blocks offered when one group has saved 5, the other none")
	e.save(in(1, blocks(0, keys[:3]...))...)
	r.equal(3, e.match(keys...), "blocks offered when one group has saved 5, the other 3")
	e.save(in(1, blocks(3, keys[4:]...))...)
	r.equal(3, e.match(keys...), "blocks offered when the other group has a hole")
	e.save(in(1, blocks(4, keys[3:4]...))...)
	r.equal(5, e.match(keys...), "blocks offered when both groups have saved 5")
}

func groupTrailing(r *rig) {
	layout := twoGroups() // the second group needs its last 2 blocks
	e := r.engine(setup{layout: &layout})
	keys := e.keys(6)
	e.save(blocks(0, keys...)...)
	r.equal(0, e.match(keys...), "blocks offered when the trailing group has none")
	e.save(in(1, blocks(0, keys[2:4]...))...)
	r.equal(4, e.match(keys...), "blocks offered when the trailing group has blocks 2 and 3")
	e.save(in(1, blocks(4, keys[5:]...))...)
	r.equal(4, e.match(keys...), "blocks offered when the trailing group has 2, 3 and 5")
	e.save(in(1, blocks(5, keys[4:5]...))...)
	r.equal(6, e.match(keys...), "blocks offered when the trailing group has 2 to 5")

	fresh := e.keys(4)
	e.save(blocks(0, fresh[:2]...)...)
	e.save(in(1, blocks(0, fresh...))...)
	r.equal(2, e.match(fresh...), "blocks offered when the group with policy all ends at 2")

	to := append(blocks(10, keys...), in(1, blocks(10, keys[4:]...))...)
	e.wipe(0, to...)
	r.must(e.load(to...), "load of all blocks of one group and the last two of the other")
	e.holds(to...)
}

func groupStrides(r *rig) {
	for _, layout := range []connector.Layout{bothAll(), mixed(slots)} {
		e := r.engine(setup{layout: &layout, shape: layout.Name})
		keys := e.keys(4)
		var from, to []connector.Block
		for g := range uint16(2) {
			from = append(from, in(g, blocks(int(2*g), keys...))...)
			to = append(to, in(g, blocks(20-int(2*g), keys...))...)
		}
		e.save(from...)
		e.wipe(0, to...)
		r.equal(4, e.match(keys...), "blocks offered in layout %s", layout.Name)
		r.must(e.load(to...), "load in layout %s", layout.Name)
		e.holds(to...)
		e.end()
	}
}

// mixed interleaves the first group and gives the second an array of its own.
func mixed(blocks int) connector.Layout {
	l := interleaved(blocks)
	l.Name = "mixed groups"
	l.Groups = append(l.Groups, connector.Group{BlockTokens: blockTokens, Policy: connector.PolicyTrailing, Trailing: 1})
	const size = 200
	l.Segments = append(l.Segments, connector.Segment{
		Layer: len(segmentBytes), Group: 1, Offset: (end(&l) + 7) &^ 7, BlockStride: size + 3*gap, Bytes: size,
	})
	return withDigest(l, 1)
}

func groupRanks(r *rig) {
	layout := twoGroups()
	e := r.engine(setup{world: ranks, layout: &layout})
	keys := e.keys(2)
	from := append(blocks(0, keys...), in(1, blocks(0, keys...))...)
	e.save(from...)
	d := e.peer()
	to := append(blocks(9, keys...), in(1, blocks(5, keys...))...)
	d.wipe(0, to...)
	r.equal(2, d.match(keys...), "blocks offered")
	r.must(d.load(to...), "load")
	d.holds(to...)
}
