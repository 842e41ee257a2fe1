package conformance

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
)

func cancelCases() []Case {
	return []Case{
		faultCase("past-deadline", "WORK-07", "Calls whose deadline passed an hour ago return and do no harm.", pastDeadline),
		faultCase("cancel-storm", "FAULT-02", "400 calls are cancelled at random moments: nothing is torn.", cancelStorm),
		faultCase("cancelled-match", "SCHED-02", "Matches that are cancelled leave no trace.", cancelledMatch),
	}
}

func pastDeadline(r *rig) {
	e := r.engine(setup{})
	keys, fresh := e.keys(3), e.keys(3)
	e.save(blocks(0, keys...)...)
	ctx, cancel := context.WithDeadline(r.Context(), time.Now().Add(-time.Hour))
	defer cancel()
	load, save := transfer(blocks(4, keys...)), transfer(blocks(8, fresh...))
	e.wipe(0, load.Blocks...)
	e.fill(save.Blocks...)
	worker, scheduler, kv := e.workers[0], e.scheduler, e.kv[0]
	_ = e.returns("Match", 0, func(context.Context) error {
		_, err := scheduler.Match(ctx, []connector.Query{query(keys)})
		return err
	})
	if e.returns("Load", 0, func(context.Context) error { return worker.Load(ctx, &load, kv) }) == nil {
		e.holds(load.Blocks...)
	}
	saved := e.returns("Save", 0, func(context.Context) error { return worker.Save(ctx, &save, kv) })
	found := e.match(fresh...)
	if saved == nil {
		r.equal(3, found, "blocks offered after a save that succeeded")
	}
	e.whole(fresh[:found], 12)
	r.equal(3, e.match(keys...), "blocks offered afterwards")
	e.whole(keys, 16)
}

func cancelStorm(r *rig) {
	const callers, rounds, each = 16, 25, 4
	layout := planes(callers*each*2 + slots)
	e := r.engine(setup{layout: &layout})
	keys := make([][]connector.BlockKey, callers)
	acked := make([]bool, callers)
	for i := range keys {
		keys[i] = e.keys(each)
		e.fill(blocks(2*i*each, keys[i]...)...)
	}
	var torn atomic.Int64
	together(callers, func(i int) {
		random := rand.New(rand.NewPCG(e.settings.seed, uint64(i)))
		save, load := transfer(blocks(2*i*each, keys[i]...)), transfer(blocks((2*i+1)*each, keys[i]...))
		for n := range rounds {
			ctx, cancel := context.WithTimeout(r.Context(), time.Duration(random.IntN(2000))*time.Microsecond)
			if random.IntN(8) == 0 {
				cancel() // before it begins
			}
			e.wipe(0, load.Blocks...)
			if n%2 == 0 {
				save.Replace = random.IntN(2) == 0
				acked[i] = e.workers[0].Save(ctx, &save, e.kv[0]) == nil || acked[i]
			} else if err := e.workers[0].Load(ctx, &load, e.kv[0]); r.torn(err) {
				torn.Add(1)
			} else if err == nil {
				for _, b := range load.Blocks {
					if e.differs(b) != "" {
						torn.Add(1)
					}
				}
			}
			cancel()
		}
	})
	r.equal(0, int(torn.Load()), "wrong blocks of loads that succeeded")
	for i := range keys {
		found := 0
		e.eventually(soon, func() string { // one that composes others may leave out a child that is late
			if found = e.match(keys[i]...); acked[i] && found < each {
				return fmt.Sprintf("%d blocks are offered of a save that succeeded, want %d", found, each)
			}
			return ""
		})
		e.whole(keys[i][:found], callers*each*2)
	}
	e.works("after the storm")
}

func cancelledMatch(r *rig) {
	e := r.engine(setup{})
	keys, absent := e.keys(5), e.keys(5)
	e.save(blocks(0, keys...)...)
	scheduler := e.scheduler
	for n := range 40 {
		ctx, cancel := context.WithTimeout(r.Context(), time.Duration(e.rand.IntN(500))*time.Microsecond)
		if n%4 == 0 {
			cancel() // before it begins
		}
		_ = e.returns("Match", 0, func(context.Context) error {
			_, err := scheduler.Match(ctx, []connector.Query{query(keys), query(absent)})
			return err
		})
		cancel()
	}
	r.equal(5, e.match(keys...), "stored blocks offered after Matches were cancelled")
	e.save(blocks(8, absent...)...)
	r.equal(5, e.match(absent...), "blocks offered after cancelled Matches and a save")
}
