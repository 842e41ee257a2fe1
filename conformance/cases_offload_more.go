package conformance

import (
	"errors"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
)

func offloadPinned(r *rig) {
	const loaders, rounds = 3, 60
	e := r.tiers(tierFields{Blocks: smallTier})
	hot := e.keys(2)
	e.save(blocks(0, hot...)...)
	fresh := make([][]connector.BlockKey, rounds)
	for i := range fresh {
		fresh[i] = e.keys(2)
	}
	var wg sync.WaitGroup
	errs := make([]error, loaders)
	var loading atomic.Int64
	loading.Store(loaders)
	for n := range loaders {
		to := blocks(8+2*n, hot...)
		t := transfer(to)
		wg.Go(func() {
			defer loading.Add(-1)
			for range rounds {
				e.wipe(0, to...)
				if e.moveRank(r.Context(), 0, &t, false) != nil {
					continue // pushed out: that is no fault
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
	for i := 0; i < rounds || loading.Load() > 0; i++ { // others come in as long as somebody loads
		from := blocks(2, fresh[i%rounds]...)
		e.fill(from...)
		t := transfer(from)
		r.must(e.moveRank(r.Context(), 0, &t, true), "save")
		again := transfer(blocks(0, hot...))
		r.must(e.moveRank(r.Context(), 0, &again, true), "save again what was pushed out")
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			r.Errorf("%v", err)
		}
	}
}

func offloadAcknowledged(r *rig) {
	if r.isStaged() {
		r.Skipf("landing memory divides a save into several")
	}
	e := r.tiers(tierFields{Blocks: 2})
	keys := e.keys(5)
	from := blocks(0, keys...)
	e.fill(from...)
	err := e.saveOnly(r.Context(), transfer(from))
	stored := len(keys)
	var failed *connector.BlockError
	switch {
	case errors.As(err, &failed):
		for _, id := range failed.Blocks {
			stored = min(stored, int(id)) // block i lies in slot i
		}
		if !errors.Is(err, connector.ErrDeclined) {
			r.Errorf("error %q, want ErrDeclined", err)
		}
	case err != nil:
		stored = 0
	}
	if n := e.match(keys...); n < stored {
		r.Errorf("%d blocks were acknowledged, %d are offered", stored, n)
	}
	for _, k := range keys[:stored] {
		if !e.loadsRight(k) {
			r.Errorf("a block that was acknowledged cannot be loaded")
			return
		}
	}
}

func offloadSpill(r *rig) {
	e := r.tiers(r.onDisk(tierFields{Blocks: smallTier}, 8*smallTier))
	var keys []connector.BlockKey
	for range 4 * smallTier { // not faster than the disk: what waits too long may be dropped
		keys = append(keys, e.saveEach(1)...)
		e.pause(askAgain)
	}
	r.equal(len(keys), e.offered(keys), "blocks offered from memory and disk")
	for _, k := range keys {
		if !e.loadsRight(k) {
			r.Errorf("a block on disk cannot be loaded")
			return
		}
	}
}

func offloadRestart(r *rig) {
	f := r.onDisk(tierFields{Blocks: smallTier}, 8*smallTier)
	e := r.tiers(f)
	keys := e.saveEach(smallTier)
	e.closeAll()
	r.must(e.inst.Close(), "end the connector")

	next := r.tiered(f)
	next.env.Model, next.env.Shape = e.env.Model, e.env.Shape
	next.openAll()
	next.within("all blocks are offered to the next life", func() bool { return next.offered(keys) == len(keys) })
	for _, k := range keys {
		if !next.loadsRight(k) {
			r.Errorf("a block on disk cannot be loaded in the next life")
			return
		}
	}
}

func offloadLookups(r *rig) {
	e := r.tiers(r.onDisk(tierFields{Blocks: smallTier}, 8*smallTier))
	var cold []connector.BlockKey
	for range smallTier {
		cold = append(cold, e.saveEach(1)...)
		e.pause(askAgain)
	}
	for range smallTier { // now cold is on disk only
		e.saveEach(1)
		e.pause(askAgain)
	}
	hot := e.saveEach(smallTier)
	for range 3 {
		e.offered(cold)
		e.pause(askAgain)
	}
	// The folder goes, and with it what is not in memory.
	for _, path := range r.tierFiles() {
		r.must(os.Truncate(path, 0), "cut a file")
	}
	for _, k := range hot {
		if !e.loadsRight(k) {
			r.Errorf("a lookup has pushed a block out of memory")
			return
		}
	}
}

// declined wants a save to fail as declined, for exactly these blocks.
func (e *engine) declined(err error, bs []connector.Block) {
	e.Helper()
	ids := make([]connector.BlockID, len(bs))
	for i, b := range bs {
		ids[i] = b.ID
	}
	e.failed(err, ids...)
	if err != nil && !errors.Is(err, connector.ErrDeclined) {
		e.Errorf("error %q, want ErrDeclined", err)
	}
}

func offloadThreshold(r *rig) {
	e := r.tiers(tierFields{Blocks: 2 * smallTier, Threshold: 2})
	keys := e.keys(3)
	from := blocks(0, keys...)
	e.fill(from...)
	e.declined(e.saveOnly(r.Context(), transfer(from)), from)
	r.equal(0, e.match(keys...), "blocks offered after they were declined")
	r.must(e.saveOnly(r.Context(), transfer(from)), "save for the second time")
	r.equal(len(keys), e.match(keys...), "blocks offered after the second save")
	e.whole(keys, 8)
}

func offloadQuota(r *rig) {
	l := interleaved(slots)
	e := r.tiers(tierFields{Blocks: 2 * smallTier, Quota: 4 * l.BlockBytes(0)})
	save := func(tenant uint64, n int) ([]connector.BlockKey, []connector.Block, error) {
		keys := e.keys(n)
		from := blocks(0, keys...)
		e.fill(from...)
		t := transfer(from)
		t.Tenant = tenant
		return keys, from, e.moveRank(r.Context(), 0, &t, true)
	}
	first, _, err := save(1, 4)
	r.must(err, "save within the quota")
	over, from, err := save(1, 2)
	e.declined(err, from)
	r.equal(0, e.match(over...), "blocks offered beyond the quota")
	other, _, err := save(2, 4)
	r.must(err, "save of another tenant")
	for _, keys := range [][]connector.BlockKey{first, other} {
		r.equal(4, e.match(keys...), "blocks offered within the quota")
		e.whole(keys, 8)
	}
}

func offloadTTL(r *rig) {
	const ttl = 1
	f := r.onDisk(tierFields{Blocks: smallTier, TTL: ttl}, 8*smallTier)
	e := r.tiers(f)
	keys := e.saveEach(4)
	r.equal(4, e.offered(keys), "blocks offered before their time is over")
	e.pause(ttl*time.Second + 200*time.Millisecond)
	r.equal(0, e.offered(keys), "blocks offered after their time")
	e.saveEach(2 * smallTier) // so that memory has given up what it had
	r.equal(0, e.offered(keys), "blocks offered after their time from disk")
	if slices.ContainsFunc(keys, e.loadsRight) {
		r.Errorf("a block is loaded whose time is over")
		return
	}
	again := blocks(0, keys...)
	e.fill(again...)
	r.must(e.saveOnly(r.Context(), transfer(again)), "save anew")
	r.equal(4, e.match(keys...), "blocks offered after they were saved anew")
	e.whole(keys, 8)
}

func offloadReset(r *rig) {
	f := r.onDisk(tierFields{Blocks: smallTier}, 8*smallTier)
	e := r.tiers(f)
	keys := e.saveEach(3 * smallTier)
	resetter, ok := connector.As[connector.Resetter](e.scheduler)
	if !ok {
		r.Errorf("the scheduler side cannot reset")
		return
	}
	emptied, err := resetter.Reset(r.Context())
	r.must(err, "reset")
	if !emptied {
		r.Errorf("a reset has not emptied the tiers")
	}
	r.equal(0, e.offered(keys), "blocks offered after a reset")
	more := e.saveEach(2)
	r.equal(2, e.offered(more), "blocks offered that were saved after a reset")
	e.closeAll()
	r.must(e.inst.Close(), "end the connector")
	next := r.tiered(f)
	next.env.Model, next.env.Shape = e.env.Model, e.env.Shape
	next.openAll()
	r.equal(0, next.offered(keys), "blocks offered to the next life after a reset")
}

// flip changes one bit in every 64 bytes of a file.
func flip(data []byte) []byte {
	for i := 40; i < len(data); i += 64 {
		data[i] ^= 0x10
	}
	return data
}

func offloadDamaged(r *rig) {
	e := r.tiers(r.onDisk(tierFields{Blocks: smallTier}, 8*smallTier))
	var keys []connector.BlockKey
	for range 3 * smallTier {
		keys = append(keys, e.saveEach(1)...)
		e.pause(askAgain)
	}
	r.must(edit(r.tierFiles(), flip), "damage the files")
	lost := 0
	for _, k := range keys {
		if !e.loadsRight(k) {
			lost++
		}
	}
	if lost == 0 {
		r.Errorf("the damage was not met: every block was loaded")
	}
	e.mendedTier(keys)
}

// mendedTier saves blocks anew, as a host does with what it computed, and wants them right.
func (e *engine) mendedTier(keys []connector.BlockKey) {
	e.Helper()
	for _, k := range keys[len(keys)-smallTier:] {
		e.save(blocks(0, k)...)
		if !e.loadsRight(k) {
			e.Errorf("a block that was saved after the damage cannot be loaded")
			return
		}
	}
}

func offloadCut(r *rig) {
	f := r.onDisk(tierFields{Blocks: smallTier}, 8*smallTier)
	e := r.tiers(f)
	keys := e.saveEach(smallTier)
	e.closeAll()
	r.must(e.inst.Close(), "end the connector")
	r.must(edit(r.tierFiles(), func(data []byte) []byte { return data[:len(data)*3/4-7] }), "cut the files")

	next := r.tiered(f)
	next.env.Model, next.env.Shape = e.env.Model, e.env.Shape
	next.openAll()
	for _, k := range keys {
		next.loadsRight(k)
	}
	next.mendedTier(keys)
}

func offloadPieces(r *rig) {
	e := r.tiers(tierFields{Blocks: 2 * smallTier, Piece: 2 * blockTokens})
	keys := e.keys(5)
	e.save(blocks(0, keys...)...)
	r.equal(4, e.match(keys...), "blocks offered of five, in pieces of two")
	r.equal(2, e.match(keys[:3]...), "blocks offered of three, in pieces of two")
	e.whole(keys[:4], 8)
	odd := r.tiered(tierFields{Blocks: smallTier, Piece: blockTokens + 1})
	s, err := odd.inst.Scheduler(r.Context(), odd.env, odd.config)
	e.refuses("a block_size that is no multiple of the engine's", "scheduler", s, err)
}
