package conformance

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

// What hurts in buffers between engines (the two calls insert and drop_select): an insert that waits
// for a reader stops the producer's engine, a select that drops first loses what could not be placed,
// a select that waits stops the consumer's, and two consumers of one prefix take it from each other.

func bufferCase(id, rule, text string, body func(*rig)) Case {
	return Case{ID: id, Rule: rule, Text: text, Profiles: []Profile{Buffer}, Run: rigged(0, false, body)}
}

func bufferCases() []Case {
	return []Case{
		bufferCase("buffer-full", "BUFFER-01", "Saves that nobody loads return soon, however many there are, and what is offered then is whole.", bufferFull),
		bufferCase("buffer-cancelled", "BUFFER-02", "A cancelled load takes nothing out.", bufferCancelled),
		bufferCase("buffer-two-loads", "BUFFER-03", "Two loads of one prefix at the same time end soon, each right or with ErrGone.", bufferTwoLoads),
		bufferCase("buffer-gone", "BUFFER-04", "A load of blocks that are not there does not wait for them.", bufferGone),
		bufferCase("buffer-part", "BUFFER-04", "A load whose blocks are partly there fills those and names the rest.", bufferPart),
		bufferCase("buffer-take", "BUFFER-05", "Another engine loads what one has saved, byte for byte.", bufferTake),
		bufferCase("buffer-again", "BUFFER-05", "What was taken out can be saved and loaded again.", bufferAgain),
		bufferCase("buffer-ranks", "BUFFER-05", "Each of two ranks gets its own part, and none is offered before both are there.", bufferRanks),
	}
}

// quick fails the case unless a call took less than what "soon" means.
func (r *rig) quick(what string, call func() error) error {
	r.Helper()
	began := time.Now()
	err := call()
	if took := r.watched().spent(began); took > soon {
		r.overdue(began, "%s took %v", what, took)
	}
	return err
}

// orGone fails the case if there is an error other than ErrGone.
func (r *rig) orGone(err error, what string) {
	r.Helper()
	if err != nil && !errors.Is(err, connector.ErrGone) {
		r.Errorf("%s: got error %v, want ErrGone", what, err)
	}
}

func bufferFull(r *rig) {
	e := r.engine(setup{})
	var all [][]connector.BlockKey
	for n := range 100 {
		keys := e.keys(3)
		bs := blocks(0, keys...)
		e.fill(bs...)
		err := r.quick("a save that nobody loads", func() error {
			ctx, cancel := context.WithTimeout(r.Context(), 2*soon)
			defer cancel()
			t := transfer(bs)
			return e.workers[0].Save(ctx, &t, e.kv[0])
		})
		if err != nil && !errors.Is(err, connector.ErrBusy) {
			r.Errorf("save %d: got error %v, want ErrBusy", n, err)
			return
		}
		all = append(all, keys)
	}
	for _, keys := range all {
		if n := e.match(keys...); n > 0 {
			to := blocks(4, keys[:n]...)
			e.wipe(0, to...)
			r.must(e.load(to...), "load of what was offered")
			e.holds(to...)
		}
	}
}

func bufferCancelled(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(3)
	e.save(blocks(0, keys...)...)
	to := transfer(blocks(4, keys...))
	ctx, cancel := context.WithCancel(r.Context())
	cancel()
	if err := r.quick("a cancelled load", func() error { return e.workers[0].Load(ctx, &to, e.kv[0]) }); err == nil {
		e.holds(to.Blocks...) // it was faster
		return
	}
	r.equal(3, e.match(keys...), "blocks offered after a cancelled load")
	e.wipe(0, to.Blocks...)
	r.must(e.load(to.Blocks...), "load after a cancelled load")
	e.holds(to.Blocks...)
}

func bufferTwoLoads(r *rig) {
	e := r.engine(setup{})
	for range 10 {
		keys := e.keys(3)
		e.save(blocks(0, keys...)...)
		to := []connector.Transfer{transfer(blocks(4, keys...)), transfer(blocks(8, keys...))}
		errs := make([]error, 2)
		var both sync.WaitGroup
		for i := range to {
			e.wipe(0, to[i].Blocks...)
			both.Go(func() {
				errs[i] = r.quick("one of two loads", func() error { return e.workers[0].Load(r.Context(), &to[i], e.kv[0]) })
			})
		}
		both.Wait()
		for i, err := range errs {
			r.orGone(err, "one of two loads")
			if err == nil {
				e.holds(to[i].Blocks...)
			}
		}
	}
}

func bufferGone(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(3)
	r.equal(0, e.match(keys...), "blocks offered that nobody saved")
	err := r.quick("a load of what is not there", func() error { return e.load(blocks(4, keys...)...) })
	if err == nil {
		r.Errorf("a load of what nobody saved succeeds")
	}
	r.orGone(err, "a load of what nobody saved")
}

func bufferPart(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(4)
	e.save(blocks(0, keys[0], keys[2])...)
	to := blocks(4, keys...)
	e.wipe(0, to...)
	e.failed(r.quick("a load of which a part is there", func() error { return e.load(to...) }), 5, 7)
	e.holds(to[0], to[2])
}

func bufferTake(r *rig) {
	e := r.engine(setup{})
	peer := e.peer()
	for range 5 {
		keys := e.keys(3)
		e.save(blocks(0, keys...)...)
		r.equal(3, peer.match(keys...), "blocks offered")
		to := blocks(4, keys...)
		peer.wipe(0, to...)
		r.must(peer.load(to...), "load")
		peer.holds(to...)
	}
}

func bufferAgain(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(3)
	for round := range 3 {
		e.save(blocks(0, keys...)...)
		r.equal(3, e.match(keys...), "blocks offered in round %d", round)
		to := blocks(4, keys...)
		e.wipe(0, to...)
		r.must(e.load(to...), "load in round %d", round)
		e.holds(to...)
	}
}

func bufferRanks(r *rig) {
	e := r.engine(setup{world: 2})
	keys := e.keys(3)
	bs := blocks(0, keys...)
	e.fill(bs...)
	t := transfer(bs)
	for rank := range e.workers {
		r.equal(0, e.match(keys...), "blocks offered when %d of 2 ranks have saved", rank)
		r.must(e.moveRank(r.Context(), rank, &t, true), "save on rank %d", rank)
	}
	r.equal(3, e.match(keys...), "blocks offered when both ranks have saved")
	to := blocks(4, keys...)
	e.wipe(0, to...)
	r.must(e.load(to...), "load on both ranks")
	e.holds(to...)
}
