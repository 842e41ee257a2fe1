package conformance

import (
	"bytes"
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

// What hurts when blocks stay in their producer's cache for a consumer: they are given to another request
// too early and read nevertheless, or are never given back.

func pdProducerCases() []Case {
	list := []Case{
		pdCase("pd-handoff", "PD-01", "Held blocks arrive byte for byte, though all other slots of the producer are in use.", PDProducer, pdHandoff),
		pdCase("pd-many", "PD-01", "Twelve open holds are fetched in any order.", PDProducer, pdMany),
		pdCase("pd-same-request", "PD-01", "Two ended requests with the same id each have their own hold.", PDProducer, pdSameRequest),
		pdCase("pd-tail", "PD-02", "A partial last block arrives with its ticket, or is not offered.", PDProducer, pdTail),
		pdCase("pd-groups", "PD-02", "The blocks of every group arrive.", PDProducer, pdGroups),
		pdCase("pd-ranks", "PD-02", "Each of three ranks that load at the same time gets its own part of what is held.", PDProducer, pdRanks),
		pdCase("pd-aborted", "PD-03", "Blocks of a request that was aborted or failed are not served once they are given back.", PDProducer, pdAborted),
		pdCase("pd-once", "PD-04", "A hold that was fetched twice is reported once.", PDProducer, pdOnce),
		pdCase("pd-consumed-reused", "PD-04", "A hold that was consumed brings nothing of what its slots contain next.", PDProducer, pdConsumedReused),
		pdCase("pd-count", "PD-04", "As many consumers as the hold allows can fetch it, and each is reported.", PDProducer, pdCount),
		pdCase("pd-all-ranks", "PD-04", "A hold is reported when the last of the consumer's ranks has fetched, whichever that is, and although one has fetched twice.", PDProducer, pdAllRanks),
		pdCase("pd-asked", "PD-05", "A consumer that only asks leaves the hold as it is.", PDProducer, pdAsked),
		pdCase("pd-unread", "PD-05", "A load that was cancelled leaves the hold as it is.", PDProducer, pdUnread),
		pdCase("pd-long", "PD-01", "Of a prompt of 260 blocks, of which the slots have no order and no number of one byte, the last four arrive, and of another one all.", PDProducer, pdLong),
		pdCase("pd-large", "PD-01", "Blocks arrive whole whose parts are longer than 64 KiB.", PDProducer, pdLarge),
		pdCase("pd-expired-part", "PD-06", "Half its time after the hold began one of two ranks reads: the lease ends when it would have, and brings nothing then of what its slots contain next.", PDProducer, pdExpiredPart),
		pdCase("pd-expired", "PD-06", "A hold whose lease is over brings nothing of what its slots contain next.", PDProducer, pdExpired),
		pdCase("pd-generation", "PD-06", "The ticket of an old hold does not bring the blocks that are held in its slots now.", PDProducer, pdGeneration),
		pdCase("pd-reaper", "PD-06", "Every lease ends by itself, even after one that was fetched.", PDProducer, pdReaper),
		pdCase("pd-lease", "PD-07", "A hold can be fetched until its lease is over.", PDProducer, pdLease),
		pdCase("pd-two-engines", "PD-08", "Holds of two producers with the same numbers are not confused.", PDProducer, pdTwoEngines),
		pdCase("pd-forged", "PD-09", "Tickets that were changed anywhere bring no wrong block and end no hold.", PDProducer, pdForged),
		pdCase("pd-closed", "PD-10", "A producer that has closed serves nothing of its former memory.", PDProducer, pdClosed),
	}
	for i := range list {
		if list[i].ID == "pd-groups" {
			list[i].Optional = true
		}
	}
	return list
}

func pdHandoff(r *rig) {
	p := r.sender(1)
	d := p.taker()
	for range 4 {
		pr := p.hand(4, 0)
		p.churn()
		d.take(pr)
		p.sweep()
	}
}

func pdMany(r *rig) {
	p := r.sender(1)
	d := p.taker()
	var all []*prompt
	for range 12 {
		all = append(all, p.hand(3, 0))
	}
	p.churn()
	r.rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	for _, pr := range all {
		d.take(pr)
	}
}

func pdSameRequest(r *rig) {
	p := r.sender(1)
	d := p.taker()
	a, b := p.compute(3, 0), p.compute(4, 0)
	b.request = a.request
	p.endRequest(a, connector.ReasonLength)
	p.endRequest(b, connector.ReasonLength)
	if a.hold.ID == b.hold.ID {
		r.Errorf("two open holds have id %d", a.hold.ID)
	}
	p.churn()
	d.take(b)
	d.take(a)
}

func pdTail(r *rig) {
	p := r.sender(1)
	d := p.taker()
	for more := range 4 {
		pr := p.hand(3, more)
		p.churn()
		d.take(pr)
	}
	for more := range 2 {
		pr := p.handInParts(3, 2*more, 1+more)
		p.churn()
		d.take(pr)
	}
}

func pdGroups(r *rig) {
	if !r.info.Groups {
		r.Skipf("the connector does not serve caches of several groups")
	}
	layout := twoGroups()
	p := r.senderOf(setup{layout: &layout})
	d := p.taker()
	pr := p.hand(4, 0)
	p.churn()
	d.take(pr)
}

func pdRanks(r *rig) {
	p := r.sender(3)
	d := p.taker()
	for range 2 {
		pr := p.hand(3, 0)
		p.churn()
		d.take(pr)
	}
}

func pdAborted(r *rig) {
	p := r.sender(1)
	d := p.taker()
	for _, reason := range []connector.Reason{connector.ReasonAbort, connector.ReasonError} {
		pr := p.compute(4, 0)
		p.endRequest(pr, reason)
		p.churn()
		if pr.hold.Ticket != nil {
			d.try(pr)
		}
	}
	d.take(p.hand(4, 0))
}

func pdOnce(r *rig) {
	p := r.sender(1)
	d := p.taker()
	pr := p.hand(3, 0)
	for range pr.consumers() {
		d.take(pr)
	}
	d.try(pr)
	p.consumed(pr, pr.consumers())
	d.try(pr)
	p.silent(pr, pr.consumers())
}

func pdConsumedReused(r *rig) {
	p := r.sender(1)
	d := p.taker()
	pr := p.hand(4, 0)
	for range pr.consumers() {
		d.take(pr)
	}
	p.consumed(pr, pr.consumers())
	p.sweep()
	d.try(pr)
	other := p.hand(4, 0) // in the same slots, unless the connector keeps them
	d.try(pr)
	d.take(other)
}

func pdCount(r *rig) {
	p := r.sender(1)
	pr := p.hand(3, 0)
	n := pr.consumers()
	for range n {
		p.taker().take(pr)
	}
	p.consumed(pr, n)
}

func pdAllRanks(r *rig) {
	p := r.sender(3)
	d := p.taker()
	for _, order := range [][]int{{0, 1, 2}, {2, 1, 0}} {
		pr := p.hand(3, 0)
		p.forget(pr)
		r.equal(3, d.offer(pr, 0), "blocks offered")
		last := len(order) - 1
		for i, rank := range order {
			if i == last && !pr.hold.Weak && pr.hold.Consumers < 2 {
				p.silent(pr, 0)
			}
			if _, err := d.fetch(pr, loading{n: 3, ranks: []int{rank}, insists: true}); err != nil {
				r.inLease(pr)
				d.missed(pr, err, "load of rank %d: %v", rank, err)
				return
			}
			if i == 0 { // as one that was tried again; it may bring nothing
				_, _ = d.fetch(pr, loading{n: 3, ranks: []int{rank}, insists: true})
			}
		}
		p.consumed(pr, 1)
		p.sweep()
	}
}

func pdAsked(r *rig) {
	p := r.sender(1)
	d := p.taker()
	pr := p.hand(3, 0)
	for range 5 {
		r.equal(3, d.offer(pr, 0), "blocks offered")
	}
	p.silent(pr, 0)
	p.sweep()
	d.take(pr)
	p.consumed(pr, 1)
}

func pdUnread(r *rig) {
	p := r.sender(1)
	d := p.taker()
	pr := p.hand(3, 0)
	r.equal(3, d.offer(pr, 0), "blocks offered")
	t := pr.transfer(0, d.place(pr.content(), d.slots(3)))
	ctx, cancel := context.WithCancel(r.Context())
	cancel()
	if err := d.workers[0].Load(ctx, &t, d.kv[0]); err == nil {
		p.consumed(pr, 1) // it may be faster than the end of its context
		return
	}
	p.silent(pr, 0)
	p.sweep()
	d.take(pr)
	p.consumed(pr, 1)
}

func pdExpired(r *rig) {
	p := r.sender(1)
	d := p.taker()
	pr := p.hand(4, 0)
	p.expire(pr)
	d.try(pr)
	d.take(p.hand(4, 0))
}

// pdLong has more blocks, and slots with larger numbers, than a byte can count, and than the consumer has. Only the end is fetched, as by an
// engine that has the beginning; then all of another prompt, in a load of 1,040 parts of blocks.
func pdLong(r *rig) {
	const byteful, full = 256, 260
	layout := interleaved(2 * full)
	p := r.senderOf(setup{layout: &layout})
	d := p.takerOf(full)
	r.rand.Shuffle(len(p.free), func(i, j int) { p.free[i], p.free[j] = p.free[j], p.free[i] })
	slices.SortStableFunc(p.free, func(a, b connector.BlockID) int { return cmp.Compare(min(a, byteful), min(b, byteful)) }) // the last are taken
	d.takeFrom(p.hand(full, 0), byteful)
	d.takeFrom(p.hand(full, 0), 0)
}

// takeFrom is take of a prompt that may take its time, by an engine that has its first blocks. A lease that ends before the load says nothing.
func (d *pd) takeFrom(pr *prompt, first int) {
	d.Helper()
	began, content := time.Now(), len(pr.content())
	n := d.offer(pr, first)
	switch {
	case n >= len(pr.keys)-first:
	case n == 0 && !pr.over(): // it may be that the answer came too late
		d.overdue(began, "nothing of hold %d is offered to a consumer that has %d of %d blocks", pr.hold.ID, first, content)
		return
	default:
		d.inLease(pr)
		d.missed(pr, nil, "%d blocks of hold %d are offered to a consumer that has %d of %d", n, pr.hold.ID, first, content)
		return
	}
	if n = min(n, content-first); n == 0 {
		return // nothing but a partial block is left, and that is not offered
	}
	right, err := d.fetch(pr, loading{first: first, n: n, insists: true, limit: pdDeadline * time.Duration(1+n/pdBlocks)})
	if err != nil {
		d.inLease(pr)
		d.missed(pr, err, "load of %d blocks of hold %d from block %d on: %v", n, pr.hold.ID, first, err)
		return
	}
	d.equal(n, right, "blocks that arrived")
}

// pdLarge has parts of blocks that are longer than 16 bits can count, as layers of real models are: one of the shortest such length,
// and one of which 16 bits leave a part.
func pdLarge(r *rig) {
	const blocks = 12
	layout := interleaved(blocks, 1<<16, 1<<16+segmentBytes[1], segmentBytes[2])
	p := r.senderOf(setup{layout: &layout})
	p.churn()
	p.takerOf(blocks/2).takeFrom(p.hand(3, 2), 0)
}

func pdExpiredPart(r *rig) {
	const attempts = 3 // of which a busy machine may spoil some
	p := r.sender(2)
	d := p.taker()
	for range attempts {
		if d.expiredPart(p) {
			d.take(p.hand(4, 0))
			return
		}
	}
	r.inconclusive("in each of %d attempts the case was too late to read a part within the lease, or to ask again before a lease that began with that would have ended", attempts)
}

// expiredPart reads a part in the middle of a lease and tries all of it after the end. It reports whether both were in time to show a lease
// that begins again when somebody reads.
func (d *pd) expiredPart(p *pd) bool {
	d.Helper()
	pr := p.hand(4, 0)
	left := time.Until(pr.until)
	if left > longLease {
		d.Skipf("a hold has %v to live; give the connector a config with a lease of less than %v", left.Round(time.Second), longLease)
	}
	p.pause(left / 2)
	read := time.Now()
	_, err := d.fetch(pr, loading{n: 4, ranks: []int{0}})
	p.expire(pr)
	inTime := time.Since(read) < pr.ends.Sub(pr.handed)*3/4 // what is left is for the question
	d.try(pr)
	return pr.ends.IsZero() || err == nil && inTime // a weak hold has no lease
}

func pdGeneration(r *rig) {
	p := r.sender(1)
	d := p.taker()
	old := p.hand(4, 0)
	p.expire(old)
	now := p.hand(4, 0)
	if !slices.EqualFunc(old.blocks, now.blocks, func(a, b connector.Block) bool { return a.ID == b.ID }) {
		r.Errorf("the case did not get the same slots again")
	}
	p.churn()
	d.try(old)
	d.take(now)
}

func pdReaper(r *rig) {
	p := r.sender(1)
	d := p.taker()
	var all []*prompt
	for range 6 {
		all = append(all, p.hand(2, 0))
	}
	d.take(all[0])
	p.consumed(all[0], all[0].consumers())
	d.take(all[3])
	p.expire(all[5])
	for _, pr := range all {
		d.try(pr)
	}
	d.take(p.hand(2, 0))
}

func pdLease(r *rig) {
	p := r.sender(1)
	d := p.taker()
	pr := p.hand(3, 0)
	p.pause(min(time.Second, max(0, time.Until(pr.until))/2))
	p.sweep()
	d.take(pr)
}

func pdTwoEngines(r *rig) {
	a := r.sender(1)
	b := a.another()
	d := a.taker()
	var all []*prompt
	for range 3 {
		all = append(all, a.hand(3, 0), b.hand(3, 0))
	}
	a.churn()
	b.churn()
	for _, pr := range all {
		d.take(pr)
	}
}

func pdForged(r *rig) {
	p := r.sender(1)
	d := p.taker()
	pr, other, third := p.hand(3, 0), p.hand(3, 0), p.hand(3, 0)
	n := len(pr.hold.Ticket)
	tickets := [][]byte{{}, pr.hold.Ticket[:n/2], append(bytes.Clone(pr.hold.Ticket), 'x')}
	address := addressIn(pr.hold.Ticket)
	for at, b := range pr.hold.Ticket {
		if address != nil && at >= address[0] && at < address[1] || at >= maxForged {
			continue // it would lead to a stranger
		}
		for bit := range 3 {
			if isDigit := b >= '0' && b <= '9'; bit == 0 || isDigit {
				changed := bytes.Clone(pr.hold.Ticket)
				changed[at] ^= 1 << bit
				tickets = append(tickets, changed)
			}
		}
	}
	for _, ticket := range tickets {
		forged := *pr
		forged.hold.Ticket = ticket
		d.try(&forged)
	}
	for _, pr := range []*prompt{other, third} {
		if pr.until.IsZero() || time.Now().Before(pr.until) {
			p.silent(pr, 0)
		}
	}
	p.sweep()
	d.take(p.hand(3, 0))
}

// maxForged is how many bytes of a ticket are changed.
const maxForged = 300

func pdClosed(r *rig) {
	p := r.sender(1)
	d := p.taker()
	pr := p.hand(4, 0)
	p.leave()
	p.give(pr.blocks...)
	p.churn()
	d.try(pr)
}
