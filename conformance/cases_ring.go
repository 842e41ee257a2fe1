package conformance

import (
	"github.com/kvport/kvport/connector"
)

// ringCases look at what small messages that go over a ring, beside large ones that go over the stream, could
// disturb. They hold for a plugin without rings as well.
func ringCases() []Case {
	return []Case{
		lifeCase("many-calls", "RING-01", "One side makes 200 loads at once, more than a ring holds, and each is answered.", manyCalls),
		lifeCase("mixed-sizes", "RING-02", "Transfers of one block and of 300 run at once, each with its own blocks.", mixedSizes),
		lifeCase("side-after-side", "RING-03", "100 sides, more than there are rings, open and close one after the other, and each works.", sideAfterSide),
	}
}

func manyCalls(r *rig) {
	const loads = 200
	layout := planes(loads + 1)
	e := r.engine(setup{layout: &layout})
	keys := e.keys(1)
	from := blocks(loads, keys...)
	e.save(from...)
	errs := make([]error, loads)
	var to []connector.Block
	for i := range loads {
		to = append(to, blocks(i, keys...)...)
	}
	e.wipe(0, to...)
	together(loads, func(i int) {
		t := transfer(to[i : i+1])
		errs[i] = e.moveRank(r.Context(), 0, &t, false)
	})
	for i, err := range errs {
		r.must(err, "load %d of %d at once", i, loads)
	}
	e.holds(to...)
}

func mixedSizes(r *rig) {
	const large, pairs = 300, 4
	layout := planes(pairs * (large + 1))
	e := r.engine(setup{layout: &layout})
	keys := e.keys(large + pairs)
	var sets [][]connector.Block
	for i := range pairs {
		sets = append(sets, blocks(i*large, keys[:large]...), blocks(pairs*large+i, keys[large+i]))
	}
	for _, save := range []bool{true, false} {
		for _, set := range sets {
			if save {
				e.fill(set...)
			} else {
				e.wipe(0, set...)
			}
		}
		errs := make([]error, len(sets))
		together(len(sets), func(i int) {
			t := transfer(sets[i])
			errs[i] = e.moveRank(r.Context(), 0, &t, save)
		})
		for i, err := range errs {
			r.must(err, "transfer of %d blocks beside others (save: %v)", len(sets[i]), save)
		}
	}
	for _, set := range sets {
		e.holds(set...)
	}
}

func sideAfterSide(r *rig) {
	const sides = 100
	e := r.closed(setup{})
	for n := range sides {
		e.openWorker(0)
		keys := e.keys(1)
		t := transfer(blocks(n%4, keys...))
		e.fill(t.Blocks...)
		r.must(e.moveRank(r.Context(), 0, &t, true), "save %d", n)
		e.wipe(0, t.Blocks...)
		r.must(e.moveRank(r.Context(), 0, &t, false), "load %d", n)
		e.holds(t.Blocks...)
		r.must(e.closeWorker(0), "close of side %d", n)
	}
}
