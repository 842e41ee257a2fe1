package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

func workCases() []Case {
	return []Case{
		storeCase("round-trip", "WORK-01", "Another engine loads what one has saved, byte for byte.", roundTrip),
		storeCase("partial-load", "WORK-02", "A load of absent blocks names exactly those and fills the others.", partialLoad),
		storeCase("load-granted", "WORK-03", "A load changes no block but its own.", loadGranted),
		storeCase("load-ends", "WORK-04", "After a load has returned, even a cancelled one, nothing writes to its blocks.", loadEnds),
		storeCase("save-reads", "WORK-06", "A save changes nothing in the cache.", saveReads),
		storeCase("done-context", "WORK-07", "Calls whose context is done return within 2 s.", doneContext),
		storeCase("amid-call", "WORK-07", "Calls whose context ends while they run return within 2 s.", amidCall),
		storeCase("cancelled-save", "WORK-08", "Whatever a cancelled save left behind is whole.", cancelledSave),
		storeCase("offered-whole", "WORK-08", "While up to 500 blocks are saved, what is offered of them is loaded at once, and right; then all are offered.", offeredWhole),
		storeCase("concurrent", "WORK-09", "Loads and saves of the same blocks run at the same time.", concurrent),
		storeCase("beside-cancelled", "WORK-09", "Of three saves, and of three loads, of the same blocks at once one is cancelled: the others end well, and what they have saved is offered at once.", besideCancelled),
		storeCase("error-kind", "ERR-02", "A load of an absent block fails with ErrGone.", errorKind),
	}
}

func roundTrip(r *rig) {
	a := r.engine(setup{})
	b := a.peer()
	keys := a.keys(5)
	a.save(blocks(0, keys...)...)
	r.equal(5, b.match(keys...), "blocks offered")
	to := []connector.Block{{Key: keys[0], ID: 17}, {Key: keys[1], ID: 9}, {Key: keys[2], ID: 12}, {Key: keys[3], ID: 23}, {Key: keys[4], ID: 6}}
	b.wipe(0, to...)
	r.must(b.load(to...), "load")
	b.holds(to...)
	r.equal(5, a.match(keys...), "blocks offered after they were loaded")
}

func partialLoad(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(5)
	e.save(blocks(0, keys[1], keys[3])...)
	to := blocks(6, keys...)
	e.wipe(0, to...)
	e.failed(e.load(to...), 6, 8, 10)
	e.holds(to[1], to[3])
}

func loadGranted(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(2)
	e.save(blocks(0, keys...)...)
	to := []connector.Block{{Key: keys[0], ID: 7}, {Key: keys[1], ID: 11}}
	granted := map[connector.BlockID]bool{7: true, 11: true}
	before := e.memory()
	r.must(e.load(to...), "load")
	was, err := connector.NewKV(e.env.Layout, before[:1])
	r.must(err, "cache")
	for _, s := range e.kv[0].Segments(0) {
		for id := range connector.BlockID(slots) {
			if at := firstDifference(was.View(s, id), e.kv[0].View(s, id)); at >= 0 && !granted[id] {
				r.Errorf("byte %d of block %d in segment %d was changed; the load was of 7 and 11", at, id, s)
			}
		}
	}
}

func loadEnds(r *rig) {
	const settle = 150 * time.Millisecond
	e := r.engine(setup{})
	keys := e.keys(4)
	e.save(blocks(0, keys...)...)
	// Cancelled before it begins, early, in the middle, late; the last one is not cancelled.
	for n, limit := range []time.Duration{0, 200 * time.Microsecond, time.Millisecond, 5 * time.Millisecond, soon} {
		to := blocks(4+4*n, keys...)
		_ = e.returns("Load", limit, func(ctx context.Context) error { return e.loadTicket(ctx, to, nil) }) // it may have been in time
		e.wipe(0xEE, to...)                                                                                 // the blocks are another request's now
	}
	e.pause(settle)
	for id := connector.BlockID(4); id < 24; id++ {
		for _, s := range e.kv[0].Segments(0) {
			for i, b := range e.kv[0].View(s, id) {
				if b != 0xEE {
					r.Errorf("byte %d of block %d in segment %d was written after the load had returned", i, id, s)
					return
				}
			}
		}
	}
}

func saveReads(r *rig) {
	e := r.engine(setup{})
	bs := blocks(3, e.keys(4)...)
	e.fill(bs...)
	before := e.memory()
	r.must(e.saveOnly(r.Context(), transfer(bs)), "save")
	if at := firstDifference(before[0], e.inst.Memory[0]); at >= 0 {
		r.Errorf("byte %d of the region was changed by a save", at)
	}
}

func doneContext(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(2)
	e.save(blocks(0, keys...)...)
	ctx, cancel := context.WithCancel(r.Context())
	cancel()
	load, save := transfer(blocks(4, keys...)), transfer(blocks(0, keys...))
	var loadErr error
	scheduler, worker, kv := e.scheduler, e.workers[0], e.kv[0] // a call that hangs outlives the case
	calls := []struct {
		name string
		run  func()
	}{
		{"Match", func() { _, _ = scheduler.Match(ctx, []connector.Query{query(keys)}) }},
		{"Save", func() { _ = worker.Save(ctx, &save, kv) }},
		{"Load", func() { loadErr = worker.Load(ctx, &load, kv) }},
	}
	e.wipe(0, load.Blocks...)
	for _, c := range calls {
		done := make(chan struct{})
		go func() {
			defer close(done)
			c.run()
		}()
		began := time.Now()
		if _, came := awaited(r, done, soon); !came {
			r.late(began, "%s with a context that was done has not returned after %v", c.name, soon)
		}
	}
	if loadErr == nil {
		e.holds(load.Blocks...)
	}
	r.equal(2, e.match(keys...), "blocks offered afterwards")
}

// amidCall ends the context of calls that have run for a while. One that has returned by then did so in time.
func amidCall(r *rig) {
	const many = 48
	layout := planes(2 * many)
	e := r.engine(setup{layout: &layout})
	keys := e.keys(many)
	save, load := transfer(blocks(0, keys...)), transfer(blocks(many, keys...))
	save.Replace = true
	e.fill(save.Blocks...)
	scheduler, worker, kv := e.scheduler, e.workers[0], e.kv[0] // a call that hangs outlives the case
	for delay := 20 * time.Millisecond; delay > 50*time.Microsecond; delay /= 4 {
		e.cutShort("Save", delay, func(ctx context.Context) { _ = worker.Save(ctx, &save, kv) })
		e.cutShort("Load", delay, func(ctx context.Context) { _ = worker.Load(ctx, &load, kv) })
		e.cutShort("Match", delay, func(ctx context.Context) { _, _ = scheduler.Match(ctx, []connector.Query{query(keys)}) })
	}
	e.works("after calls were cancelled")
}

// cutShort ends the context of a call after a while and checks that the call returns soon then.
func (e *engine) cutShort(what string, delay time.Duration, call func(context.Context)) {
	e.Helper()
	ctx, cancel := context.WithCancel(e.Context())
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		call(ctx)
	}()
	select {
	case <-done:
		return
	case <-time.After(delay):
	}
	cancel()
	ended := time.Now()
	if _, came := awaited(e.rig, done, soon); !came {
		e.late(ended, "%s had not returned %v after its context ended, which was %v after it began", what, soon, delay)
	}
}

func cancelledSave(r *rig) {
	e := r.engine(setup{})
	half := slots / 2
	for n := range 12 {
		keys := e.keys(half)
		from, to := blocks(0, keys...), blocks(half, keys...)
		e.fill(from...)
		ctx, cancel := context.WithTimeout(r.Context(), time.Duration(e.rand.IntN(1500))*time.Microsecond)
		if n%4 == 0 {
			cancel()
		}
		t := transfer(from)
		err := e.workers[0].Save(ctx, &t, e.kv[0])
		deadline, _ := ctx.Deadline()
		over := ctx.Err() != nil || time.Until(deadline) < time.Millisecond // deadlines cross the wire as durations
		cancel()
		var part *connector.BlockError
		if err != nil && !errors.As(err, &part) && !over {
			r.must(err, "save whose context has not ended")
		}
		found := e.match(keys...)
		if err == nil {
			r.equal(half, found, "blocks offered after a save that succeeded")
		}
		if found > half {
			r.must(fmt.Errorf("%d blocks offered of %d", found, half), "match")
		}
		if found == 0 {
			continue
		}
		e.wipe(0, to...)
		r.must(e.load(to[:found]...), "load of what a cancelled save left")
		e.holds(to[:found]...)
	}
}

func concurrent(r *rig) {
	const loaders, rounds = 4, 15
	e := r.engine(setup{})
	keys := e.keys(4)
	from := blocks(0, keys...)
	e.save(from...)
	var wg sync.WaitGroup
	errs := make([]error, loaders+2)
	for n := range 2 {
		t := transfer(from)
		t.Replace = n == 1
		wg.Go(func() {
			for range rounds {
				errs[loaders+n] = errors.Join(errs[loaders+n], e.moveRank(r.Context(), 0, &t, true))
			}
		})
	}
	for n := range loaders {
		to := blocks(4+4*n, keys...)
		t := transfer(to)
		wg.Go(func() {
			for range rounds {
				e.wipe(0, to...)
				if errs[n] = e.moveRank(r.Context(), 0, &t, false); errs[n] != nil {
					return
				}
				for _, b := range to {
					if d := e.differs(b); d != "" {
						errs[n] = errors.New(d)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			r.Errorf("%v", err)
		}
	}
}

// besideCancelled ends the context of one call after a part of the time that such a call takes, another one in each round.
func besideCancelled(r *rig) {
	const rounds, n = 24, 4
	e := r.engine(setup{})
	var times []time.Duration
	for range 4 { // the first also makes connections
		from := blocks(0, e.keys(n)...)
		e.fill(from...)
		began := time.Now()
		r.must(e.saveOnly(r.Context(), transfer(from)), "save")
		times = append(times, time.Since(began))
	}
	slices.Sort(times[1:])
	took, enough := times[2], e.left()/3
	var asking sync.Mutex // a host asks Match from one goroutine at a time
	for round := range rounds {
		if e.left() < enough { // it is slow, and was cancelled early and late in some rounds
			break
		}
		part := round * 7 % rounds
		keys := e.keys(n)
		from := blocks(0, keys...)
		e.fill(from...)
		e.threeAtOnce(took*time.Duration(part)/rounds, true, func(int) connector.Transfer { return transfer(from) }, func() error {
			asking.Lock()
			defer asking.Unlock()
			q := query(keys)
			q.Request = connector.RequestID(fmt.Sprintf("request-%d", round))
			ms, err := e.scheduler.Match(r.Context(), []connector.Query{q})
			if err == nil && len(ms) == 1 && !ms[0].Later && ms[0].Tokens < n*blockTokens {
				return fmt.Errorf("%d of %d blocks are offered when a save of them has returned", ms[0].Tokens/blockTokens, n)
			}
			return nil
		})
		e.whole(keys, n)
		began := time.Now()
		r.must(e.load(blocks(n, keys...)...), "load")
		loaded := time.Since(began)
		e.threeAtOnce(loaded*time.Duration(part)/rounds, false, func(i int) connector.Transfer { return transfer(blocks((1+i)*n, keys...)) }, func() error { return nil })
		e.holds(append(blocks(2*n, keys...), blocks(3*n, keys...)...)...)
	}
}

// threeAtOnce makes three calls on rank 0, of which the first is cancelled after a while. Then comes with each other that has ended well.
func (e *engine) threeAtOnce(after time.Duration, save bool, of func(i int) connector.Transfer, then func() error) {
	e.Helper()
	errs := make([]error, 3)
	begun := make(chan struct{}) // others may wait for what the first has begun
	together(len(errs), func(i int) {
		t := of(i)
		if i == 0 {
			close(begun)
			ctx, cancel := context.WithTimeout(e.Context(), after)
			defer cancel()
			_ = e.moveRank(ctx, 0, &t, save)
			return
		}
		<-begun
		if errs[i] = e.moveRank(e.Context(), 0, &t, save); errs[i] == nil {
			errs[i] = then()
		}
	})
	for _, err := range errs {
		e.must(err, "a call beside another of the same blocks that was cancelled (save: %v)", save)
	}
}

func errorKind(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(1)
	err := e.load(blocks(0, keys...)...)
	if err == nil {
		r.Errorf("the load of an absent block succeeds")
	} else if !errors.Is(err, connector.ErrGone) {
		r.Errorf("error %q does not wrap ErrGone", err)
	}
}

// offeredWhole asks for blocks again and again while they are saved, and loads the last of those that are offered. Where a save of some
// blocks takes long, there are fewer of them: then a round has as many calls all the same.
func offeredWhole(r *rig) {
	const many, last, rounds, roundTime = 500, 8, 4, time.Second
	layout := planes(many + last)
	e := r.engine(setup{layout: &layout})
	some := e.keys(last)
	e.fill(blocks(0, some...)...)
	began := time.Now()
	r.must(e.saveOnly(r.Context(), transfer(blocks(0, some...))), "save")
	n := min(many, max(last, int(last*roundTime/max(1, time.Since(began)))))
	for range rounds {
		if wrong := e.offeredMeanwhile(e.keys(n), many, last); wrong != "" {
			r.Errorf("%s", wrong)
			return
		}
	}
}

// offeredMeanwhile saves blocks, and says what is wrong with those that are offered meanwhile or afterwards; "" if nothing is. It loads the last
// of them into the slots from first on. In the end all must be offered, also by a connector that answers no Match while it saves.
func (e *engine) offeredMeanwhile(keys []connector.BlockKey, first, last int) (wrong string) {
	e.Helper()
	save := transfer(blocks(0, keys...))
	e.fill(save.Blocks...)
	var failed error
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		failed = e.moveRank(e.Context(), 0, &save, true)
	}()
	defer func() { <-ended }() // also when a Match ends the case: nothing is closed under it
	for running := true; running; {
		select {
		case <-ended:
			running = false
		default:
			if wrong = e.brings(keys[:min(e.tryMatch(keys), len(keys))], first, last); wrong != "" {
				return wrong
			}
		}
	}
	e.must(failed, "save")
	e.equal(len(keys), e.match(keys...), "blocks offered after they were saved")
	return e.brings(keys, first, last)
}

// brings loads the last of the blocks that are offered into the slots from first on, and says what is wrong with that; "" if nothing is.
func (e *engine) brings(offered []connector.BlockKey, first, last int) string {
	e.Helper()
	to := blocks(first, offered[max(0, len(offered)-last):]...)
	if len(to) == 0 {
		return ""
	}
	e.wipe(0x55, to...)
	load := transfer(to)
	if err := e.moveRank(e.Context(), 0, &load, false); err != nil {
		return fmt.Sprintf("%d blocks were offered of those that a save writes, and the last of them could not be loaded: %v", len(offered), err)
	}
	for _, b := range to {
		if d := e.differs(b); d != "" {
			return fmt.Sprintf("%d blocks were offered of those that a save writes: %s", len(offered), d)
		}
	}
	return ""
}
