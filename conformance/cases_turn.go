package conformance

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

// What hurts when a decode engine offers its answer to the prefill engine of the next turn: nothing keeps the
// blocks, both engines are producer and consumer at a time, and most answers are never asked for.

func turnCases() []Case {
	random := pdCase("random-turns", "TURN-04", "Random histories of conversations: prompts and answers of many turns, from any block on, on one and two ranks, in slots that are reused, given up, and a decode engine that closes.", Bidirectional, randomTurns)
	return []Case{
		pdCase("turn-round", "TURN-04", "A prompt goes to the decode engine, and its answer back, turn after turn.", Bidirectional, turnRound),
		pdCase("turn-both-ways", "TURN-04", "Prompts and answers go both ways at once.", Bidirectional, turnBothWays),
		pdCase("turn-suffix", "TURN-04", "An engine that has the prompt loads the answer that follows it, before what is new.", Bidirectional, turnSuffix),
		pdCase("turn-ranks", "TURN-04", "Each rank gets its own part of an answer.", Bidirectional, turnRanks),
		pdCase("turn-reused", "TURN-05", "Another request has some slots of an answer by now: the other blocks arrive.", Bidirectional, turnReused),
		pdCase("turn-held-anew", "TURN-05", "The slots of an answer are now held for another consumer, which gets its own blocks.", Bidirectional, turnHeldAnew),
		pdCase("turn-twice", "TURN-06", "An answer is fetched twice, and reported no more often than it has consumers.", Bidirectional, turnTwice),
		pdCase("turn-forks", "TURN-08", "Several consumers fetch an answer, as many as its hold says: one after the other, and two at once.", Bidirectional, turnForks),
		pdCase("turn-diverges", "TURN-06", "The next turn's prompt continues differently: it gets the blocks that both share, or none.", Bidirectional, turnDiverges),
		pdCase("turn-gone", "TURN-06", "The decode engine is gone: a load ends soon with an error, and its next life is served.", Bidirectional, turnGone),
		pdCase("turn-never", "TURN-07", "Answers that nobody asks for do no harm to a hold that was there before.", Bidirectional, turnNever),
		budgeted(random),
	}
}

// talkers opens two engines that are both producer and consumer.
func (r *rig) talkers(world int) (p, d *pd) {
	r.Helper()
	layout := interleaved(pdBlocks)
	p = r.closed(setup{world: world, layout: &layout}).attend()
	return p, p.talker()
}

// talker opens another engine that is both. Its cache has more blocks, which lie elsewhere, and its slots are in no order.
func (p *pd) talker() *pd {
	p.Helper()
	d := p.twin(connector.RoleBoth, elsewhere(p.env.Layout, p.env.Layout.Blocks+otherBlocks)).attend()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.rand.Shuffle(len(d.free), func(i, j int) { d.free[i], d.free[j] = d.free[j], d.free[i] })
	return d
}

// answer computes an answer to a prompt, of full blocks and some more tokens, and offers it to the next turn. Its
// slots are free then; others take them last.
func (p *pd) answer(to *prompt, full, more int) *prompt {
	p.Helper()
	var known []connector.BlockKey
	if to != nil {
		known = to.keys
	}
	pr := p.computeBehind(known, full, more)
	pr.handed = time.Now()
	hold := p.finish(connector.Ended{
		Request: pr.request, Reason: connector.ReasonLength, Tokens: pr.tokens, Remote: true, Weak: true, Blocks: pr.named(pr.blocks),
	})[0]
	if hold.Ticket == nil {
		p.Errorf("an answer that the next turn may want has no ticket")
		p.FailNow()
	}
	pr.hold = hold
	pr.hold.Ticket, pr.hold.Weak = bytes.Clone(hold.Ticket), true // as the host has it (rule TURN-01)
	if hold.TTL > 0 {
		pr.ends = pr.handed.Add(hold.TTL)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = append(idsOf(pr.blocks), p.free...)
	return pr
}

// lies says whether a block that was loaded is what lies in the producer's slot now.
func (p *pd) lies(pr *prompt, first int, to []connector.Block, b connector.Block, d *engine) bool {
	at := first + slices.IndexFunc(to, func(o connector.Block) bool { return o.ID == b.ID && o.Group == b.Group })
	if b.Group != 0 || at >= len(pr.blocks) {
		return false
	}
	for rank, kv := range d.kv {
		for _, s := range kv.Segments(b.Group) {
			if !bytes.Equal(kv.View(s, b.ID), p.kv[rank].View(s, pr.blocks[at].ID)) {
				return false
			}
		}
	}
	return true
}

// longer is the next turn's prompt: an answer and what the user says then.
func (p *pd) longer(pr *prompt, full int) *prompt {
	next := *pr
	next.keys = slices.Concat(pr.keys, p.keys(full))
	next.tokens = len(next.keys)*blockTokens + 1
	return &next
}

func turnRound(r *rig) {
	p, d := r.talkers(1)
	for more := range 4 {
		pr := p.hand(3, 0)
		d.take(pr)
		p.take(d.answer(pr, 3, more))
		p.sweep()
	}
}

func turnBothWays(r *rig) {
	p, d := r.talkers(1)
	for range 2 {
		a, b := p.hand(6, 0), d.answer(nil, 6, 0)
		together(2, func(i int) {
			if i == 0 {
				d.take(a)
			} else {
				p.take(b)
			}
		})
		p.sweep()
	}
}

func turnSuffix(r *rig) {
	p, d := r.talkers(1)
	for have := 1; have < 5; have++ {
		next := p.longer(d.answer(nil, 5, 0), 2)
		r.equal(5-have, p.offer(next, have), "blocks offered to an engine that has %d of an answer of 5", have)
		right, err := p.fetch(next, loading{first: have, n: 5 - have})
		r.must(err, "load of an answer from block %d on", have)
		r.equal(5-have, right, "blocks that arrived")
	}
}

func turnRanks(r *rig) {
	p, d := r.talkers(2)
	for range 2 {
		pr := p.hand(3, 0)
		d.take(pr)
		p.take(d.answer(pr, 3, 0))
	}
}

func turnReused(r *rig) {
	p, d := r.talkers(1)
	for range 3 {
		pr := d.answer(nil, 6, 0)
		lost := []connector.Block{pr.blocks[1], pr.blocks[2], pr.blocks[4]}
		for i, k := range d.keys(len(lost)) {
			lost[i].Key = k
		}
		d.fill(lost...)
		r.equal(6, p.offer(pr, 0), "blocks offered")
		right, err := p.fetch(pr, loading{n: 6, now: d})
		if errors.Is(err, connector.ErrCorrupt) {
			r.Errorf("slots that were reused are called damaged: %v", err)
		}
		if right < 3 {
			r.Errorf("%d blocks arrive of 3 that nobody has reused: %v", right, err)
		}
	}
}

func turnHeldAnew(r *rig) {
	p, d := r.talkers(1)
	for range 3 {
		old := d.answer(nil, 4, 0)
		d.prefer(old.blocks)
		now := d.hand(4, 0)
		if !now.hold.Weak && !slices.EqualFunc(old.blocks, now.blocks, func(a, b connector.Block) bool { return a.ID == b.ID }) {
			r.Errorf("the case did not get the same slots again")
		}
		_, _ = p.fetch(old, loading{n: 4, now: d})
		d.silent(now, 0)
		p.take(now)
		d.consumed(now, now.consumers())
		d.sweep()
	}
}

func turnTwice(r *rig) {
	p, d := r.talkers(1)
	pr := d.answer(nil, 4, 0)
	p.take(pr)
	p.try(pr)
	d.pause(aWhile)
	if n, most := d.reported(pr), min(pr.consumers(), 2); n > most {
		r.Errorf("an answer for %d consumers that was fetched twice at most is reported %d times, want %d at most", pr.consumers(), n, most)
	}
	p.take(d.answer(nil, 4, 0))
}

// forks is how many consumers the case has at most.
const forks = 4

func turnForks(r *rig) {
	p, d := r.talkers(1)
	pr := d.answer(nil, 4, 0)
	n := min(pr.consumers(), forks)
	takers := []*pd{p, p.talker()}
	for i := range max(1, n-len(takers)) {
		takers[i%len(takers)].take(pr)
	}
	if n >= forks {
		together(len(takers), func(i int) { takers[i].take(pr) })
	} else if n > 1 {
		takers[1].take(pr)
	}
	d.pause(aWhile)
	if got := d.reported(pr); got > n {
		r.Errorf("an answer that was fetched %d times is reported %d times", n, got)
	}
	p.take(d.answer(nil, 4, 0))
}

func turnDiverges(r *rig) {
	p, d := r.talkers(1)
	pr := d.answer(nil, 4, 2)
	for _, same := range []int{2, 0} {
		next := &prompt{request: "next", keys: slices.Concat(pr.keys[:same], p.keys(6-same)), tokens: 6*blockTokens + 1, hold: pr.hold}
		next.blocks = blocks(0, next.keys...)
		p.try(next)
	}
	p.take(d.answer(nil, 4, 0))
}

func turnGone(r *rig) {
	p, d := r.talkers(1)
	pr, known := d.answer(nil, 4, 0), d.answer(nil, 3, 0)
	p.take(known)
	d.leave()
	d.churn()
	began := time.Now()
	p.try(pr)
	if took := r.watched().spent(began); took > pdDeadline+2*soon {
		r.overdue(began, "an engine that is gone is waited for %v", took)
	}
	next := p.talker()
	p.eventually(p.recovery(), func() string {
		if p.try(next.answer(nil, 3, 0)) < 3 {
			return "the next decode engine's answer does not arrive"
		}
		return ""
	})
	next.take(p.hand(3, 0))
}

// unasked is how many answers nobody asks for.
const unasked = 24

func turnNever(r *rig) {
	p, d := r.talkers(1)
	kept := d.hand(3, 0)
	var answers []*prompt
	for range unasked {
		answers = append(answers, d.answer(nil, 2, 0))
	}
	p.offer(answers[len(answers)-1], 0) // asked about, and not fetched
	if r.info.Capabilities&connector.CanLease != 0 {
		d.unrenewed(answers)
	}
	for _, pr := range answers {
		if n := d.reported(pr); n != 0 {
			r.Errorf("an answer that nobody has fetched is reported %d times", n)
		}
	}
	if kept.until.IsZero() || time.Now().Before(kept.until) {
		p.take(kept)
	}
	p.take(d.hand(3, 0))
}

// unrenewed checks that Renewals names none of the answers: nothing keeps them.
func (p *pd) unrenewed(answers []*prompt) {
	p.Helper()
	leaser, ok := connector.As[connector.Leaser](p.scheduler)
	if !ok {
		p.Errorf("Info claims leases, the scheduler side does not have them")
		return
	}
	var ids []connector.HoldID
	p.must(p.returns("Renewals", soon, func(ctx context.Context) (err error) {
		ids, err = leaser.Renewals(ctx, nil)
		return err
	}), "renewals")
	for _, pr := range answers {
		if slices.Contains(ids, pr.hold.ID) {
			p.Errorf("Renewals asks to keep an answer that is not held")
		}
	}
}
