package conformance

import (
	"context"
	"slices"
	"sync"

	"github.com/kvport/kvport/connector"
)

func storeCases() []Case {
	return []Case{
		storeCase("reopen", "STORE-01", "What was saved is there after sides were closed and opened again.", reopen),
		storeCase("all-ranks", "STORE-03", "A block is offered only when both ranks have saved it.", allRanks),
		storeCase("two-engines", "STORE-04", "Two engines save the same blocks while both load them.", twoEngines),
		storeCase("put-twice", "STORE-05", "A second save of a stored block succeeds and changes nothing.", putTwice),
		storeCase("replace", "STORE-06", "A Save with Replace overwrites what is stored, also where the same engine has loaded it before.", replace),
		storeCase("another-version", "STORE-07", "Blocks are there with another length, or with digests by another key: a save stores them again.", anotherVersion),
	}
}

func reopen(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(3)
	e.save(blocks(0, keys...)...)
	to := blocks(6, keys...)

	r.must(e.closeWorker(0), "close the worker side")
	e.openWorker(0)
	e.wipe(0, to...)
	r.equal(3, e.match(keys...), "blocks offered after the worker side opened again")
	r.must(e.load(to...), "load after the worker side opened again")
	e.holds(to...)
	if r.info.Scope == connector.ScopeEngine {
		return
	}
	e.closeAll()
	r.must(e.inst.Close(), "end the connector")
	next := r.engine(setup{})
	next.wipe(0, to...)
	r.equal(3, next.match(keys...), "blocks offered to the next life of the engine")
	r.must(next.load(to...), "load in the next life of the engine")
	next.holds(to...)
}

func allRanks(r *rig) {
	e := r.engine(setup{world: 2})
	keys := e.keys(2)
	bs := blocks(0, keys...)
	e.fill(bs...)
	t := transfer(bs)
	for rank := range e.workers {
		r.equal(0, e.match(keys...), "blocks offered when %d of 2 ranks have saved", rank)
		r.must(e.moveRank(r.Context(), rank, &t, true), "save on rank %d", rank)
	}
	r.equal(2, e.match(keys...), "blocks offered when both ranks have saved")
}

func twoEngines(r *rig) {
	const rounds, n = 10, 4
	a := r.engine(setup{})
	b := a.peer()
	for round := range rounds {
		keys := a.keys(n)
		var wg sync.WaitGroup
		from, to := blocks(0, keys...), blocks(n, keys...)
		for _, e := range []*engine{a, b} {
			e.fill(from...)
			e.wipe(0, to...)
		}
		if a == b {
			b = nil
		}
		errs := make([]error, 3)
		save := transfer(from)
		load := transfer(to)
		wg.Go(func() { errs[0] = a.moveRank(r.Context(), 0, &save, true) })
		if b != nil {
			wg.Go(func() { errs[1] = b.moveRank(r.Context(), 0, &save, true) })
			wg.Go(func() { errs[2] = b.workers[0].Load(r.Context(), &load, b.kv[0]) })
		} else {
			wg.Go(func() { errs[1] = a.moveRank(r.Context(), 0, &save, true) })
			wg.Go(func() { errs[2] = a.workers[0].Load(r.Context(), &load, a.kv[0]) })
			b = a
		}
		wg.Wait()
		for i, err := range errs[:2] {
			r.must(err, "round %d: save %d", round, i)
		}
		if errs[2] == nil {
			b.holds(to...) // whatever it found was whole
		}
		r.equal(n, a.match(keys...), "blocks offered to one engine")
		r.equal(n, b.match(keys...), "blocks offered to the other")
		r.must(a.load(to...), "load")
		a.holds(to...)
	}
}

func putTwice(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(3)
	e.save(blocks(0, keys...)...)
	peer := e.peer()
	for _, other := range []*engine{e, peer} {
		other.fill(blocks(4, keys...)...)
		r.must(other.saveOnly(r.Context(), transfer(blocks(4, keys...))), "save what is stored already")
		r.equal(3, other.match(keys...), "blocks offered")
		to := blocks(8, keys...)
		other.wipe(0, to...)
		r.must(other.load(to...), "load")
		other.holds(to...)
	}
}

func replace(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(2)
	from, to := blocks(0, keys...), blocks(4, keys...)
	// What is stored is damaged: other bytes than those that belong under the keys.
	e.spoil(from...)
	r.must(e.saveOnly(r.Context(), transfer(from)), "save")
	for range 2 { // as the host that finds the damage: what it has loaded may be kept nearer from then on
		r.must(e.load(to...), "load of what is replaced next")
	}
	e.fill(from...)
	t := transfer(from)
	t.Replace = true
	r.must(e.saveReplace(r.Context(), t), "save with Replace")
	e.wipe(0, to...)
	r.must(e.load(to...), "load")
	e.holds(to...)
	r.equal(2, e.match(keys...), "blocks offered")
}

// saveReplace saves past the Planner: the host decides on its own to replace what is damaged.
func (e *engine) saveReplace(ctx context.Context, t connector.Transfer) error {
	for rank := range e.workers {
		if err := e.moveRank(ctx, rank, &t, true); err != nil {
			return err
		}
	}
	return nil
}

// anotherVersion saves in three lives of an engine: of a release that gives blocks another length, of one that has lost the key of its digests
// since, and of today's. Keys are the same in all of them.
func anotherVersion(r *rig) {
	longer := interleaved(slots)
	longer.Segments[0].Bytes += gap / 3
	first := r.engine(setup{layout: &longer})
	long := first.keys(3)
	first.save(blocks(0, long...)...)
	first.end()

	second := r.closed(setup{})
	second.env.Engine = first.env.Engine
	second.openAll()
	strange := second.keys(3)
	from := blocks(0, strange...)
	second.fill(from...)
	second.rekey(from...)
	r.must(second.saveOnly(r.Context(), transfer(from)), "save")
	second.end()

	third := second.life()
	keys := slices.Concat(long, strange)
	third.save(blocks(0, keys...)...)
	r.equal(len(keys), third.match(keys...), "blocks offered that were stored in another version, and saved again")
	to := blocks(8, keys...)
	third.wipe(0, to...)
	r.must(third.load(to...), "load of blocks that were stored in another version, and saved again")
	third.holds(to...)
}

// rekey makes the digests of blocks those of another key, as their header says.
func (e *engine) rekey(bs ...connector.Block) {
	for _, kv := range e.kv {
		for _, b := range bs {
			for _, s := range kv.Segments(b.Group) {
				if e.isDigest(s) {
					kv.View(s, b.ID)[8] ^= 0xA5 // the name of the key, in the middle of the header
				}
			}
		}
	}
}
