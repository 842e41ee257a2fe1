package conformance

import (
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

// What hurts when a producer looks for its holds by anything but their numbers: prompts that are alike have the same keys, requests
// that begin alike share slots, and the name of a request may contain whatever stands between the words of a message.

func pdAlikeCases() []Case {
	return []Case{
		pdCase("pd-alike", "PD-01", "Open holds of the same prompt, of prompts that differ in a partial last block only, and of the same slots are each fetched and reported, whatever their requests are called.", PDProducer, pdAlike),
	}
}

func pdAlike(r *rig) {
	const atOnce = 4
	p := r.sender(1)
	d := p.taker()
	for names := range slices.Chunk(oddNames(), atOnce) {
		keys := p.keys(3)
		var all []*prompt
		for i, name := range names {
			all = append(all, p.handAs(name, keys, i%2*2))
		}
		p.churn()
		r.rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		if !p.fetchedBy(d, all) {
			return
		}
		p.sweep()
	}
	p.sharesSlots(d)
}

// handAs is hand of a prompt of known full blocks and some more tokens, whose request has a name of its own.
func (p *pd) handAs(name connector.RequestID, keys []connector.BlockKey, more int) *prompt {
	p.Helper()
	pr := p.layOut(keys, 0, more)
	pr.request = name
	p.must(p.saveOnly(p.Context(), pr.transfer(0, pr.blocks)), "save of request %q", name)
	p.handOver(pr)
	p.forget(pr)
	return pr
}

// forget drops reports of an older hold, which is over, with the number of a prompt's.
func (p *pd) forget(pr *prompt) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.reports, pr.hold.ID)
}

// fetchedBy has a consumer fetch each hold as often as it has consumers, and checks that each was reported as often as that and not more. False: some were
// fetched so late in their leases that their reports, which may be left out, may also come while another hold has the number.
func (p *pd) fetchedBy(d *pd, all []*prompt) bool {
	p.Helper()
	const reportTime = soon // before the end of a lease
	var sure []*prompt
	for _, pr := range all {
		for range pr.consumers() {
			d.take(pr)
		}
		if pr.ends.IsZero() || time.Until(pr.ends) > reportTime {
			sure = append(sure, pr)
		}
	}
	for _, pr := range sure {
		p.reportedBy(pr)
	}
	p.pause(aWhile)
	for _, pr := range all {
		if n := p.reported(pr); n > pr.consumers() {
			d.Errorf("hold %d, of request %q, was reported %d times, and fetched %d times", pr.hold.ID, pr.request, n, pr.consumers())
		}
	}
	return len(sure) == len(all)
}

// reportedBy waits until a hold, which all its consumers have fetched, was reported.
func (p *pd) reportedBy(pr *prompt) {
	p.Helper()
	if pr.hold.ID == 0 {
		return
	}
	for w := p.patience(soon); p.reported(pr) < pr.consumers(); p.pause(askAgain) {
		if w.over() {
			p.overdue(w.began, "hold %d, of request %q, was reported %d times %v after its consumers had fetched it, want %d",
				pr.hold.ID, pr.request, p.reported(pr), soon, pr.consumers())
			return
		}
	}
}

// sharesSlots has two requests that begin alike share the slots of their first blocks, as an engine has them do that finds the prefix in
// its cache. When the first hold is over, its own slots are another request's, and the shared ones still belong to the second.
func (p *pd) sharesSlots(d *pd) {
	p.Helper()
	const shared, own = 2, 2
	first := p.hand(shared+own, 0)
	if first.hold.ID == 0 || first.hold.Weak {
		return // the slots were given back
	}
	keys := slices.Concat(first.keys[:shared], p.keys(own))
	second := &prompt{request: "shares", keys: keys, tokens: len(keys) * blockTokens}
	second.blocks = p.place(keys, slices.Concat(idsOf(first.blocks[:shared]), p.slots(own)))
	p.fill(second.blocks[shared:]...)
	p.must(p.saveOnly(p.Context(), second.transfer(0, second.blocks)), "save")
	p.endRequest(second, connector.ReasonLength)
	if second.hold.ID == 0 || second.hold.Weak {
		return
	}
	p.forget(first)
	p.forget(second)
	if !p.fetchedBy(d, []*prompt{first}) {
		return
	}
	first.blocks = first.blocks[shared:]
	p.sweep()
	if !second.over() {
		p.fetchedBy(d, []*prompt{second})
	}
}

// handInParts is hand of a prompt that is computed in two steps, of which the first ends with full block k. What becomes full is saved after
// each step, as engines do. A partial last block is in no Save: the connector learns of it when the request has ended.
func (p *pd) handInParts(full, more, k int) *prompt {
	p.Helper()
	pr := p.layOut(nil, full, more)
	p.must(p.saveOnly(p.Context(), pr.transfer(0, pr.blocks[:k])), "save of the first blocks of a prompt")
	p.must(p.saveOnly(p.Context(), pr.transfer(k, pr.blocks[k:full])), "save of the next blocks of a prompt")
	p.handOver(pr)
	return pr
}
