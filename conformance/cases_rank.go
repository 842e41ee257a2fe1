package conformance

import (
	"errors"
	"fmt"
	"sync"

	"github.com/kvport/kvport/connector"
)

// ranks is how many the cases of several ranks use. Three: with two, "the other" and "all others"
// are the same.
const ranks = 3

func rankCase(id, rule, text string, body func(*rig)) Case {
	return Case{ID: id, Rule: rule, Text: text, Profiles: []Profile{MultiRank}, Run: rigged(0, false, body)}
}

func rankCases() []Case {
	return []Case{
		rankCase("three-shards", "KEY-07", "Each of three ranks gets back its own shard, in another life too.", threeShards),
		rankCase("many-shards", "KEY-07", "Each of seventeen ranks gets back its own shard.", manyShards),
		rankCase("rank-missing", "STORE-03", "A block is not offered while any one of three ranks lacks it.", rankMissing),
		rankCase("rank-fails", "RANK-01", "A rank whose shard is absent fails alone; the others load theirs.", rankFails),
		rankCase("rank-orders", "OPEN-01", "Three ranks open in every order, before and after the scheduler side.", rankOrders),
		rankCase("other-world", "RANK-02", "Engines of one, two and three ranks never share a block.", otherWorld),
		rankCase("ranks-together", "WORK-09", "Three ranks save and load at the same time.", ranksTogether),
	}
}

func threeShards(r *rig) { r.engine(setup{world: ranks}).keepsShards(4) }

// manyShards has one rank more than fit into four bits. A connector that takes fewer says so when it is opened.
func manyShards(r *rig) {
	e := r.closed(setup{world: 17})
	err := e.opens()
	if errors.Is(err, connector.ErrIncompatible) {
		r.unfit(fmt.Sprintf("it takes no engine of %d ranks: %v", e.env.World, err))
	}
	r.mustOpen(e.inst, err, "open the sides")
	e.openAll()
	e.keepsShards(1)
}

// keepsShards saves n blocks on all ranks, and loads them into this engine and another one.
func (e *engine) keepsShards(n int) {
	e.Helper()
	r := e.rig
	keys := e.keys(n)
	e.save(blocks(0, keys...)...)
	for _, who := range []*engine{e, e.peer()} {
		to := blocks(6, keys...)
		who.wipe(0, to...)
		r.equal(len(keys), who.match(keys...), "blocks offered")
		r.must(who.load(to...), "load")
		who.holds(to...)
	}
}

func rankMissing(r *rig) {
	e := r.engine(setup{world: ranks})
	for missing := range ranks {
		keys := e.keys(2)
		t := transfer(blocks(0, keys...))
		e.fill(t.Blocks...)
		for rank := range ranks {
			if rank != missing {
				r.must(e.moveRank(r.Context(), rank, &t, true), "save on rank %d", rank)
			}
		}
		r.equal(0, e.match(keys...), "blocks offered while rank %d has not saved", missing)
		r.must(e.moveRank(r.Context(), missing, &t, true), "save on rank %d", missing)
		r.equal(2, e.match(keys...), "blocks offered when rank %d has saved too", missing)
	}
}

func rankFails(r *rig) {
	e := r.engine(setup{world: ranks})
	for missing := range ranks {
		keys := e.keys(3)
		all := blocks(0, keys...)
		e.fill(all...)
		for rank := range ranks {
			t := transfer(all)
			if rank == missing {
				t = transfer([]connector.Block{all[0], all[2]})
			}
			r.must(e.moveRank(r.Context(), rank, &t, true), "save on rank %d", rank)
		}
		to := transfer(blocks(8, keys...))
		e.wipe(0, to.Blocks...)
		errs := make([]error, ranks)
		together(ranks, func(rank int) { errs[rank] = e.moveRank(r.Context(), rank, &to, false) })
		for rank, err := range errs {
			if rank == missing {
				e.failed(err, 9)
			} else if err != nil {
				r.Errorf("rank %d fails where only rank %d lacks a shard: %v", rank, missing, err)
			}
		}
		e.holds(to.Blocks[0], to.Blocks[2])
	}
}

func rankOrders(r *rig) {
	for n, order := range [][]int{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}} {
		e := r.closed(setup{world: ranks})
		for i, rank := range order {
			if i == n%4 {
				e.openScheduler()
			}
			e.openWorker(rank)
		}
		if e.scheduler == nil {
			e.openScheduler()
		}
		keys := e.keys(2)
		e.save(blocks(0, keys...)...)
		r.equal(2, e.match(keys...), "blocks offered when the ranks opened in the order %v", order)
		e.whole(keys, 4)
		e.closeAll()
		r.must(e.inst.Close(), "end")
	}
}

func otherWorld(r *rig) {
	saver := r.engine(setup{world: ranks})
	keys := saver.keys(2)
	saver.save(blocks(0, keys...)...)
	r.equal(2, saver.match(keys...), "blocks offered to the engine that saved them")
	last := saver
	var ofFewer [][]connector.BlockKey
	for world := 1; world < ranks; world++ {
		other := last.beside(setup{world: world})
		other.env.Shape = saver.env.Shape // so that nothing but the number of ranks differs
		other.openAll()
		other.seesNothing("an engine of fewer ranks", keys...)
		mine := other.keys(2)
		other.save(blocks(0, mine...)...)
		ofFewer = append(ofFewer, mine)
		last = other
	}
	if r.info.Scope == connector.ScopeEngine { // it has ended
		saver = last.beside(setup{world: ranks})
		saver.env.Shape = last.env.Shape
		saver.openAll()
	} else {
		r.equal(2, saver.match(keys...), "blocks offered to the engine that saved them, later")
	}
	for _, mine := range ofFewer {
		saver.seesNothing("an engine of more ranks", mine...)
	}
}

func ranksTogether(r *rig) {
	e := r.engine(setup{world: ranks})
	for range 5 {
		keys := e.keys(4)
		from, to := transfer(blocks(0, keys...)), transfer(blocks(8, keys...))
		e.fill(from.Blocks...)
		e.wipe(0, to.Blocks...)
		var mu sync.Mutex
		together(ranks, func(rank int) {
			err := e.moveRank(r.Context(), rank, &from, true)
			if err == nil {
				err = e.moveRank(r.Context(), rank, &to, false)
			}
			if err != nil {
				mu.Lock()
				defer mu.Unlock()
				r.Errorf("rank %d: %v", rank, err)
			}
		})
		e.holds(to.Blocks...)
		r.equal(4, e.match(keys...), "blocks offered when all ranks have saved")
	}
}
