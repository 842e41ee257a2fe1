package conformance

import (
	"syscall"
	"time"

	"github.com/kvport/kvport/connector"
)

// What networks, and the deaths of those behind them, do to a hand-over. All of it passes through a relay.

// netCase is a case with a relay. It cannot run where tickets name no address in plain text.
func netCase(id, rule, text string, profile Profile, body func(*rig)) Case {
	c := pdCase(id, rule, text, profile, body)
	c.Optional = true
	return c
}

// pipeNetCase is one that pipes between engines must pass too.
func pipeNetCase(id, rule, text string, body func(*rig)) Case {
	c := netCase(id, rule, text, PDConsumer, body)
	c.Profiles = append(c.Profiles, Pipe)
	return c
}

func pdNetworkCases() []Case {
	return []Case{
		netCase("pd-expired-reading", "PD-06", "If a lease ends during a load, the blocks are right or the load fails.", PDProducer, pdExpiredReading),
		netCase("pd-epoch", "PD-08", "The ticket of a producer's former life brings no block of its next life at the same address.", PDProducer, pdEpoch),
		netCase("pd-wrong-engine", "PD-08", "A ticket that leads to another engine's port brings no block of that engine and ends none of its holds.", PDProducer, pdWrongEngine),
		netCase("pd-closed-reading", "PD-10", "If a producer closes during a load, the blocks are right or the load fails.", PDProducer, pdClosedReading),
		netCase("pd-deadline", "PD-13", "A load past its deadline returns soon, and what arrives later is not written.", PDConsumer, pdDeadlinePassed),
		netCase("pd-late", "PD-13", "Answers that arrive after the deadline are not written.", PDConsumer, pdLate),
		pipeNetCase("pd-cut", "PD-15", "Connections that are cut during a transfer cost no more than its blocks.", pdCut),
		pipeNetCase("pd-corrupt", "PD-15", "Bytes that were changed on their way are detected.", pdCorrupt),
		pipeNetCase("pd-corrupt-asked", "PD-15", "Questions that were changed on their way bring no wrong block and end no other hold.", pdCorruptAsked),
		pipeNetCase("pd-drip", "PD-15", "Blocks arrive whole when the network passes three bytes at a time.", pdDrip),
		pipeNetCase("pd-reordered", "PD-15", "Connections that overtake each other are not confused.", pdReordered),
		pipeNetCase("pd-refused", "PD-16", "Blocks of a producer that refuses connections are soon a miss, and the producer is asked again later.", pdRefused),
		netCase("pd-one-way", "PD-16", "What a consumer sends is lost: its load ends soon, and the next request works.", PDConsumer, pdOneWay),
		netCase("pd-killed", "PD-16", "If a producer is killed during a load, the load soon ends with right blocks or an error.", PDConsumer, pdKilled),
		netCase("pd-stopped", "PD-16", "If a producer is stopped during a load, the load soon gives up.", PDConsumer, pdStopped),
		netCase("pd-taker-killed", "PD-05", "If a consumer is killed during a load, another one can still fetch the hold.", PDProducer, pdTakerKilled),
	}
}

func pdExpiredReading(r *rig) {
	p, d, w := r.routed()
	if left := time.Until(p.hand(1, 0).until); left >= pdDeadline { // the load would end before
		r.Skipf("a hold has %v to live; give the connector a config with a lease of less than %v", left.Round(time.Second), pdDeadline)
	}
	w.halfway(p, d, p.expire)
	d.recovers(p, w.through)
}

func pdEpoch(r *rig) {
	p, d, w := r.routed()
	old := w.handThrough(p, 4) // the third hold of its life
	p.gone()
	n := p.next()
	n.hand(2, 0)
	n.hand(2, 0)
	n.prefer(old.blocks)
	now := n.hand(4, 0) // the third of its life, in the same slots
	n.churn()
	w.leadTo(now)
	d.try(old)
	r.inLease(now)
	n.silent(now, 0)
	d.take(now)
}

func pdWrongEngine(r *rig) {
	p, d, w := r.routed()
	mine := w.handThrough(p, 2) // the third hold of its life
	other := p.another()
	other.hand(2, 0)
	other.hand(2, 0)
	theirs := other.hand(2, 0)
	w.leadTo(theirs)
	w.Cut()
	d.try(mine)
	other.silent(theirs, 0)
	d.take(theirs)
}

func pdClosedReading(r *rig) {
	p, d, w := r.routed()
	w.halfway(p, d, func(pr *prompt) {
		p.leave()
		p.give(pr.blocks...)
		p.churn()
	})
	next := p.another()
	d.take(next.hand(3, 0))
}

// pdDeadlinePassed stops a load for good. When the relay goes on the slots are another request's.
func pdDeadlinePassed(r *rig) {
	const limit = 300 * time.Millisecond
	p, d, w := r.routed()
	for range 2 {
		pr := w.handThrough(p, 6)
		w.StallAfter(1 + r.rand.Int64N(700))
		var late []connector.Block
		if d.offer(pr, 0) > 0 {
			_, _ = d.fetch(pr, loading{n: 6, limit: limit, after: func(to []connector.Block) {
				d.wipe(lateByte, to...)
				late = to
			}})
		}
		w.Stall(false, false)
		d.pause(aWhile)
		d.unwritten(late)
		p.sweep()
		w.Cut()
	}
	w.hurts("stopped", w.Count().Stalls)
	d.recovers(p, w.through)
}

func pdLate(r *rig) {
	const step, limit = 75 * time.Millisecond, 150 * time.Millisecond
	p, d, w := r.routed()
	for _, late := range []time.Duration{3 * step, 2 * step, step} {
		pr := w.handThrough(p, 4)
		w.Delay(late)
		var late []connector.Block
		if d.offer(pr, 0) > 0 {
			_, _ = d.fetch(pr, loading{n: 4, limit: limit, after: func(to []connector.Block) {
				d.wipe(lateByte, to...)
				late = to
			}})
		}
		d.pause(2 * limit)
		d.unwritten(late)
		w.Delay(0)
		p.sweep()
	}
	w.hurts("delayed", w.Count().Delayed)
	d.recovers(p, w.through)
}

func pdCut(r *rig) {
	p, d, w := r.routed()
	for n := range 6 {
		pr := w.handThrough(p, 4)
		if limit := 1 + r.rand.Int64N(1500>>(n/2)); n%2 == 0 {
			w.CutAfter(limit)
		} else {
			w.CutSentAfter(1 + limit/8)
		}
		d.try(pr)
		w.CutAfter(0)
		w.CutSentAfter(0)
		p.sweep()
	}
	w.hurts("cut", w.Cuts())
	d.recovers(p, w.through)
}

func pdCorrupt(r *rig) { r.corrupted((*between).Corrupt) }

func pdCorruptAsked(r *rig) { r.corrupted((*between).CorruptSent) }

// corrupted has bytes changed in one of two directions until ten hand-overs were hurt.
func (r *rig) corrupted(change func(*between, int64)) {
	r.Helper()
	const enough, most = 10, 60
	p, d, w := r.routed()
	bystander := p.hand(2, 0)
	for n, hurt := 0, 0; n < most && hurt < enough && p.room(4); n++ {
		w.Cut() // so that the connection's beginning is hurt too
		pr, before := w.handThrough(p, 2), w.Count().Corrupted
		change(w, 64<<(n%8))
		d.try(pr)
		change(w, 0)
		if w.Count().Corrupted > before {
			hurt++
		} else {
			p.pause(aWhile / 2) // a consumer may wait before it dials again
		}
		p.sweep()
	}
	w.hurts("changed", w.Count().Corrupted)
	if bystander.until.IsZero() || time.Now().Before(bystander.until) {
		p.silent(bystander, 0)
	}
	w.Cut()
	d.recovers(p, w.through)
}

func pdDrip(r *rig) {
	p, _, w := r.routed()
	d := p.taker() // its connections begin under the fault
	w.Drip(3)
	d.take(w.handThrough(p, 3))
	d.take(w.handThrough(p, 3))
}

func pdReordered(r *rig) {
	p, d, w := r.routed()
	w.Shuffle(60 * time.Millisecond)
	for range 5 {
		takers := []*pd{p.taker(), p.taker(), p.taker()} // with connections of their own
		var all []*prompt
		for range 2 * len(takers) {
			all = append(all, w.handThrough(p, 2))
		}
		p.churn()
		together(len(all), func(i int) { takers[i%len(takers)].take(all[i]) })
		p.pause(aWhile)
		p.sweep()
		if w.Count().Overtaken > 1 {
			break
		}
	}
	w.hurts("overtaken", w.Count().Overtaken)
	w.Shuffle(0)
	d.recovers(p, w.through)
}

func pdRefused(r *rig) {
	p, d, w := r.routed()
	w.Refuse(true)
	for range 3 {
		if n := d.try(w.handThrough(p, 3)); n > 0 {
			r.Errorf("%d blocks arrive from a producer that cannot be reached", n)
		}
		p.sweep()
	}
	w.hurts("refused", w.Count().Refused)
	w.Refuse(false)
	d.recovers(p, w.through)
}

func pdOneWay(r *rig) {
	p, d, w := r.routed()
	w.Stall(true, false)
	pr := w.handThrough(p, 3)
	d.try(pr)
	if n := p.reported(pr); n > 0 {
		r.Errorf("hold %d is reported, its consumer could say nothing", pr.hold.ID)
	}
	w.Stall(false, false)
	w.hurts("lost", w.Count().Stalls)
	d.recovers(p, w.through)
	if n := p.reported(pr); n > 1 {
		r.Errorf("hold %d was reported %d times", pr.hold.ID, n)
	}
}

func pdKilled(r *rig) {
	p, d, w := r.routed()
	p.process()
	w.halfway(p, d, func(pr *prompt) {
		p.hangUp()
		p.kill()
		p.give(pr.blocks...)
		p.churn()
	})
	d.take(p.another().hand(3, 0))
}

func pdStopped(r *rig) {
	p, d, w := r.routed()
	process := p.process()
	next := w.handThrough(p, 3)
	defer func() { _ = syscall.Kill(process.PID(), syscall.SIGCONT) }()
	w.halfway(p, d, func(*prompt) { p.signal(syscall.SIGSTOP) })
	d.try(next)
	p.signal(syscall.SIGCONT)
	d.recovers(p, w.through)
}

func pdTakerKilled(r *rig) {
	p, first, w := r.routed()
	first.process()
	second := p.taker()
	var left *prompt
	w.halfway(p, first, func(pr *prompt) {
		first.kill()
		left = pr
	})
	if left == nil {
		return
	}
	p.silent(left, 0)
	w.Cut()
	if !left.until.IsZero() && time.Until(left.until) < aWhile {
		r.Skipf("the lease of %v is over too soon to say", left.hold.TTL)
	}
	second.take(left)
	p.consumed(left, 1)
}
