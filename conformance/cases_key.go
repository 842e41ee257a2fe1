package conformance

import (
	"github.com/kvport/kvport/connector"
)

func keyCases() []Case {
	groups := storeCase("other-group", "KEY-08", "Two groups with equal keys are kept apart.", otherGroup)
	groups.Profiles, groups.Groups, groups.Run = []Profile{Groups, Power}, true, rigged(0, true, otherGroup)
	return []Case{
		storeCase("partial-block", "KEY-04", "A block without a key is not stored, and a load of one fails.", partialBlock),
		storeCase("other-shape", "KEY-05", "An engine with another Shape sees nothing.", otherShape),
		storeCase("other-key", "KEY-06", "No key that differs in one bit is found, nor another model's.", otherKey),
		storeCase("other-rank", "KEY-07", "Each of two ranks gets back its own shard.", otherRank),
		groups,
	}
}

// seesNothing fails the case if the engine is offered or loads any of the blocks.
func (e *engine) seesNothing(who string, keys ...connector.BlockKey) {
	e.Helper()
	e.equal(0, e.match(keys...), "blocks offered to %s", who)
	to := blocks(8, keys...)
	if e.load(to...) == nil {
		e.Errorf("a load by %s succeeds", who)
	}
}

func partialBlock(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(2)
	bs := append(blocks(0, keys...), connector.Block{ID: 2})
	e.fill(bs...)
	t := transfer(bs)
	t.Tokens -= blockTokens - 1
	if err := e.saveOnly(r.Context(), t); err != nil {
		e.failed(err, 2) // to say that it was not stored is fine
	}
	r.equal(2, e.match(keys...), "blocks offered")
	to := append(blocks(4, keys...), connector.Block{ID: 6})
	e.wipe(0, to...)
	e.failed(e.load(to...), 6)
	e.holds(to[:2]...)
	r.equal(0, e.match(connector.BlockKey{}), "blocks offered under the zero key")
}

func otherShape(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(3)
	e.save(blocks(0, keys...)...)
	other := r.engine(setup{shape: "other"})
	other.seesNothing("an engine of another shape", keys...)
}

func otherKey(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(1)
	e.save(blocks(0, keys...)...)
	for i := range len(keys[0]) {
		near := keys[0]
		near[i] ^= 1 << e.rand.IntN(8)
		e.seesNothing("a request whose key differs in one bit", near)
	}
	tokens := []int32{1, 2, 3, 4, 5, 6, 7, 8}
	space := connector.KeySpace{Model: e.env.Model}
	ours := space.Keys(tokens, blockTokens)
	e.save(blocks(0, ours...)...)
	other := r.engine(setup{model: "other"})
	space.Model = other.env.Model
	other.seesNothing("an engine with another model", space.Keys(tokens, blockTokens)...)
	r.equal(2, e.match(ours...), "blocks offered to the engine that saved them")
}

func otherRank(r *rig) {
	e := r.engine(setup{world: 2})
	keys := e.keys(3)
	e.save(blocks(0, keys...)...)
	to := blocks(5, keys...)
	e.wipe(0, to...)
	r.equal(3, e.match(keys...), "blocks offered")
	r.must(e.load(to...), "load")
	e.holds(to...)
}

func otherGroup(r *rig) {
	layout := twoGroups()
	e := r.engine(setup{layout: &layout})
	var from, to []connector.Block
	keys := e.keys(3)
	for g := range uint16(2) {
		for i, k := range keys {
			from = append(from, connector.Block{Key: k, ID: connector.BlockID(i), Group: g})
			to = append(to, connector.Block{Key: k, ID: connector.BlockID(10 + i), Group: g})
		}
	}
	e.save(from...)
	e.wipe(0, to...)
	r.equal(3, e.match(keys...), "blocks offered")
	r.must(e.load(to...), "load")
	e.holds(to...)
}
