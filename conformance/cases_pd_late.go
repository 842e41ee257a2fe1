package conformance

import (
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

// The faults that matter most where the producer writes: it still writes when nobody waits any longer, and
// after a hold has ended too soon it sends what another request has put into the slots.

func pdLateCases() []Case {
	return []Case{
		netCase("pd-asked-late", "PD-13", "A message that reaches the producer after the load has given up moves no block.", PDConsumer, pdAskedLate),
		netCase("pd-late-next", "PD-13", "Blocks that arrive late do not end up in the next load of the same slots.", PDConsumer, pdLateNext),
		netCase("pd-under-way", "PD-04", "A hold does not end while its blocks are on their way.", PDConsumer, pdUnderWay),
	}
}

// pdAskedLate holds back what the consumer sends. When it arrives, the slots belong to another request.
func pdAskedLate(r *rig) {
	const limit = 250 * time.Millisecond
	p, d, w := r.routed()
	met := 0
	for n := 0; met < 2 && n < 6; n++ {
		pr := w.handThrough(p, 4)
		if d.offer(pr, 0) < 4 {
			r.Errorf("a hold is not offered")
			return
		}
		stalls := w.Count().Stalls
		w.Stall(true, false)
		var late []connector.Block
		_, _ = d.fetch(pr, loading{n: 4, limit: limit, after: func(to []connector.Block) {
			d.wipe(lateByte, to...)
			late = to
		}})
		w.Stall(false, false)
		d.pause(aWhile)
		d.unwritten(late)
		p.sweep()
		w.Cut()
		if w.Count().Stalls > stalls {
			met++
		}
	}
	d.recovers(p, w.through)
	if met == 0 {
		r.Skipf("no load sent anything to its producer: the consumer has the blocks when it offers them")
	}
}

// pdLateNext gives up a load in the middle of its transfer. The rest of that transfer arrives while the next load
// into the same slots, which goes through another relay, is stalled.
func pdLateNext(r *rig) {
	const limit = 250 * time.Millisecond
	p, d, w := r.routed()
	next := r.between(p.hand(1, 0))
	met, missed := 0, 0
	for n := 0; met < 3 && missed < 2 && n < 8 && p.room(8); n++ {
		first, second := w.handThrough(p, 4), next.handThrough(p, 4)
		stalls := w.Count().Stalls
		w.StallAfter(1 + r.rand.Int64N(150<<(n%4)))
		if d.offer(first, 0) < 4 { // some fetch when they are asked
			missed++
		} else {
			_, _ = d.fetch(first, loading{n: 4, limit: limit, after: func([]connector.Block) {}})
			if w.Count().Stalls > stalls && d.lateFor(second, w, next, 300<<(n%4)) {
				met++
			}
		}
		w.Stall(false, false)
		p.pause(aWhile) // it may wait before it dials again
		p.sweep()
	}
	d.recovers(p, w.through)
	if met == 0 {
		r.Skipf("no load was stalled while the blocks of another came late: the consumer has one connection for all loads, or fetches when it is asked")
	}
}

// lateFor loads a prompt through the relay by, which stalls after at most the given number of bytes. Then it lets
// the stalled relay late continue. It reports whether the load was stalled.
func (d *pd) lateFor(pr *prompt, late, by *between, most int64) bool {
	d.Helper()
	stalls := by.Count().Stalls
	by.StallAfter(1 + d.rand.Int64N(most))
	var wg sync.WaitGroup
	done := make(chan struct{})
	wg.Go(func() {
		defer close(done)
		d.try(pr)
	})
	met := by.stalled(stalls, done)
	late.Stall(false, false)
	d.pause(aWhile / 2)
	by.Stall(false, false)
	wg.Wait()
	return met
}

// pdUnderWay stalls a transfer for a moment. If the producer reports the hold meanwhile, its slots are overwritten.
func pdUnderWay(r *rig) {
	p, d, w := r.routed()
	for range 4 {
		early, right := false, 0
		w.halfwayOf(p, func(pr *prompt) {
			if n := d.offer(pr, 0); n > 0 {
				right, _ = d.fetch(pr, loading{n: n})
			}
		}, func(pr *prompt) {
			p.pause(aWhile / 2)
			early = p.reported(pr) > 0
			p.sweep()
		})
		if early && right < 4 {
			r.Errorf("a hold was reported when %d of its 4 blocks had arrived", right)
		}
		p.sweep()
	}
	w.hurts("stopped", w.Count().Stalls)
	d.recovers(p, w.through)
}
