package conformance

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

// Two engines, one that prefills and one that decodes, as hosts run them: the producer's slots of a hold
// are left alone until the hold is over, and whatever is free is overwritten at once, since another
// request would be computed there. So whoever reads a block a moment too late reads another prompt's.

const (
	pdBlocks = 96
	// otherBlocks is how many blocks more than its producer a consumer has.
	otherBlocks = 37
	pdDeadline  = 3 * time.Second // of one load
	holdTTL     = 30 * time.Second
	// longLease is what cases wait for the end of a lease at most; the config must name a shorter one.
	longLease = 10 * time.Second
	// aWhile is how long nothing must be heard before it counts as silence.
	aWhile = 150 * time.Millisecond
)

// pd is one engine of a pair. Its connector's Consumed is asked all the time, as a host does.
type pd struct {
	*engine
	asking sync.Mutex // a host asks Match from one goroutine at a time

	mu      sync.Mutex
	free    []connector.BlockID // the last is taken first
	held    []*prompt
	used    map[connector.BlockID]int // how often each slot was taken or given away
	reports map[connector.HoldID]int
	heard   chan struct{} // holds one token when there is a new report
	hangUp  func()        // ends the asking; more than once
}

// prompt is a request and its KV in the producer's cache.
type prompt struct {
	request connector.RequestID
	keys    []connector.BlockKey // of the full blocks
	blocks  []connector.Block    // in the producer's cache; a partial one has a key too, of its content
	tokens  int
	hold    connector.Hold
	handed  time.Time // when its request ended
	ends    time.Time // its lease, at the earliest: it began while Finish was under way; zero: it has none
	until   time.Time // when the host takes the blocks back

	renumbered bool // another hold has or had its number: reports may be of either
}

// consumers is how often the prompt's hold is reported: once for each consumer, of which there is one unless
// the connector says otherwise.
func (pr *prompt) consumers() int { return max(1, pr.hold.Consumers) }

// pdCase is a case of a P/D profile.
func pdCase(id, rule, text string, profile Profile, body func(*rig)) Case {
	return Case{ID: id, Rule: rule, Text: text, Profiles: []Profile{profile}, Run: rigged(0, false, func(r *rig) {
		if r.info.Capabilities&connector.CanHold == 0 {
			r.Skipf("the connector gives no tickets")
		}
		body(r)
	})}
}

// sender opens a producer, taker a consumer for one.
func (r *rig) sender(world int) *pd {
	r.Helper()
	layout := interleaved(pdBlocks)
	return r.senderOf(setup{world: world, layout: &layout})
}

func (r *rig) senderOf(s setup) *pd {
	r.Helper()
	e := r.closed(s)
	e.env.Role = connector.RoleProducer
	return e.attend()
}

// another opens a producer that differs in nothing but its name.
func (p *pd) another() *pd {
	p.Helper()
	return p.twin(connector.RoleProducer, p.env.Layout).attend()
}

// next opens the next life of a producer, which has ended.
func (p *pd) next() *pd {
	p.Helper()
	e := p.twin(connector.RoleProducer, p.env.Layout)
	e.env.Engine = p.env.Engine
	return e.attend()
}

func (p *pd) taker() *pd {
	p.Helper()
	return p.takerOf(p.env.Layout.Blocks + otherBlocks)
}

// takerOf opens a consumer whose cache has a number of blocks of its own: nothing but the sizes of a block's parts is as in the producer's.
func (p *pd) takerOf(blocks int) *pd {
	p.Helper()
	return p.twin(connector.RoleConsumer, elsewhere(p.env.Layout, blocks)).attend()
}

func (p *pd) twin(role connector.Role, layout connector.Layout) *engine {
	p.Helper()
	e := p.closed(setup{world: p.env.World, layout: &layout})
	e.env.Model, e.env.Shape, e.env.Role = p.env.Model, p.env.Shape, role
	return e
}

// attend opens an engine's sides and begins to ask for what was consumed.
func (e *engine) attend() *pd {
	e.Helper()
	e.openAll()
	p := &pd{engine: e, reports: map[connector.HoldID]int{}, used: map[connector.BlockID]int{}, heard: make(chan struct{}, 1)}
	for id := e.env.Layout.Blocks - 1; id >= 0; id-- {
		p.free = append(p.free, connector.BlockID(id))
	}
	if !e.env.Role.Saves() {
		e.rand.Shuffle(len(p.free), func(i, j int) { p.free[i], p.free[j] = p.free[j], p.free[i] })
		p.hangUp = func() {}
		return p
	}
	ctx, cancel := context.WithCancel(e.Context())
	done, holder := make(chan struct{}), e.holder()
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			ids, err := holder.Consumed(ctx)
			p.hear(ids)
			if err != nil && ctx.Err() == nil {
				select {
				case <-time.After(askAgain):
				case <-ctx.Done():
				}
			}
		}
	}()
	p.hangUp = func() {
		cancel()
		ended := time.Now()
		if _, came := awaited(e.rig, done, soon); !came {
			e.check(e.timed(ended, fmt.Errorf("the call had not returned %v after its context ended: %w", soon, context.DeadlineExceeded)), "Consumed")
		}
	}
	e.closers = append(e.closers, func() error {
		p.hangUp()
		return nil
	})
	return p
}

func (p *pd) hear(ids []connector.HoldID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, id := range ids {
		p.reports[id]++
	}
	if len(ids) > 0 {
		select {
		case p.heard <- struct{}{}:
		default:
		}
	}
}

// leave closes an engine's sides; its memory is the case's then.
func (p *pd) leave() {
	p.Helper()
	p.hangUp()
	p.closeAll()
}

// gone ends an engine and its connector.
func (p *pd) gone() {
	p.Helper()
	p.leave()
	p.must(p.inst.Close(), "end the connector")
}

// slots takes n slots.
func (p *pd) slots(n int) []connector.BlockID {
	p.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) < n {
		p.Errorf("the case has no %d slots left", n)
		p.FailNow()
	}
	at := len(p.free) - n
	out := slices.Clone(p.free[at:])
	p.free = p.free[:at]
	for _, id := range out {
		p.used[id]++
	}
	slices.Reverse(out)
	return out
}

// uses notes that somebody uses a free slot for a moment.
func (p *pd) uses(id connector.BlockID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used[id]++
}

// usesOf is how often the slot of each block was used so far.
func (p *pd) usesOf(bs []connector.Block) (out []int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, b := range bs {
		out = append(out, p.used[b.ID])
	}
	return out
}

// room reports whether n slots are free.
func (p *pd) room(n int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.free) >= n
}

// give gives slots back, to be taken first.
func (p *pd) give(bs ...connector.Block) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, b := range slices.Backward(bs) {
		if !slices.Contains(p.free, b.ID) {
			p.free = append(p.free, b.ID)
		}
	}
}

// prefer makes the next prompt use the slots that another used.
func (p *pd) prefer(bs []connector.Block) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = slices.DeleteFunc(p.free, func(id connector.BlockID) bool { return slices.Contains(idsOf(bs), id) })
	for _, id := range slices.Backward(idsOf(bs)) {
		p.free = append(p.free, id)
	}
}

// compute computes a prompt of full blocks and some more tokens, and saves it as a host does.
func (p *pd) compute(full, more int) *prompt {
	p.Helper()
	return p.computeBehind(nil, full, more)
}

// computeBehind is compute of a prompt that begins with full blocks which are known.
func (p *pd) computeBehind(known []connector.BlockKey, full, more int) *prompt {
	p.Helper()
	pr := p.layOut(known, full, more)
	p.must(p.saveOnly(p.Context(), pr.transfer(0, pr.blocks)), "save")
	return pr
}

// layOut computes a prompt as computeBehind does, and does not save it yet.
func (p *pd) layOut(known []connector.BlockKey, full, more int) *prompt {
	p.Helper()
	full += len(known)
	n := full
	if more > 0 {
		n++
	}
	content := slices.Concat(known, p.keys(n-len(known)))
	pr := &prompt{request: connector.RequestID(fmt.Sprintf("request-%x", content[n-1][:4])), keys: content[:full], tokens: full*blockTokens + more}
	pr.blocks = p.place(content, p.slots(n))
	p.fill(pr.blocks...)
	return pr
}

// place gives blocks of all groups for content in slots; a trailing group has only its last.
func (p *pd) place(content []connector.BlockKey, at []connector.BlockID) []connector.Block {
	var bs []connector.Block
	for g, group := range p.env.Layout.Groups {
		first := 0
		if group.Policy == connector.PolicyTrailing {
			first = max(0, len(content)-group.Trailing)
		}
		for i := first; i < len(content); i++ {
			bs = append(bs, connector.Block{Key: content[i], ID: at[i], Group: uint16(g)})
		}
	}
	return bs
}

// transfer is what a host moves of a prompt into or out of blocks, which begin with block first.
func (pr *prompt) transfer(first int, to []connector.Block) connector.Transfer {
	n := 0
	for _, b := range to {
		if b.Group == 0 {
			n++
		}
	}
	end := min(pr.tokens, (first+n)*blockTokens)
	return connector.Transfer{
		Request: pr.request, From: first * blockTokens, Tokens: end - first*blockTokens, Blocks: pr.named(to), Ticket: pr.hold.Ticket,
	}
}

// named is blocks as connectors see them: a partial one has no key.
func (pr *prompt) named(bs []connector.Block) []connector.Block {
	out := slices.Clone(bs)
	for i := range out {
		if !slices.Contains(pr.keys, out[i].Key) {
			out[i].Key = connector.BlockKey{}
		}
	}
	return out
}

// content is the keys of all of a prompt's blocks, also of a partial one.
func (pr *prompt) content() []connector.BlockKey {
	var out []connector.BlockKey
	for _, b := range pr.blocks {
		if b.Group == 0 {
			out = append(out, b.Key)
		}
	}
	return out
}

// endRequest ends a prompt's request. What is not held, or weakly, is free, and overwritten at once.
func (p *pd) endRequest(pr *prompt, reason connector.Reason) {
	p.Helper()
	began := time.Now()
	hold := p.finish(connector.Ended{Request: pr.request, Reason: reason, Tokens: pr.tokens, Remote: true, Blocks: pr.named(pr.blocks)})[0]
	limit := soon + time.Duration(len(pr.blocks)/pdBlocks)*soon // no rule gives a time for very long ones
	if took := p.watched().spent(began); took > limit {
		p.overdue(began, "Finish took %v", took)
	}
	hold.Ticket = bytes.Clone(hold.Ticket)
	pr.hold, pr.handed = hold, began
	if hold.ID == 0 || hold.Weak {
		p.give(pr.blocks...)
		p.churn()
		return
	}
	ttl := hold.TTL
	if ttl == 0 {
		ttl = holdTTL
	}
	pr.ends, pr.until = began.Add(ttl), time.Now().Add(ttl)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held = append(p.held, pr)
}

// handOver ends a request whose consumer is announced, so that its hold has a ticket.
func (p *pd) handOver(pr *prompt) {
	p.Helper()
	p.endRequest(pr, connector.ReasonLength)
	if pr.hold.Ticket == nil {
		p.Errorf("request %q, which has finished and whose consumer was announced, has no ticket", pr.request)
		p.FailNow()
	}
}

// hand computes a prompt and ends it with a consumer announced.
func (p *pd) hand(full, more int) *prompt {
	p.Helper()
	pr := p.compute(full, more)
	p.handOver(pr)
	return pr
}

// sweep frees what is no longer held, and overwrites all that is free. A report that may be of an older hold frees nothing.
func (p *pd) sweep() {
	now := time.Now()
	var over []*prompt
	p.mu.Lock()
	p.held = slices.DeleteFunc(p.held, func(pr *prompt) bool {
		is := !pr.renumbered && p.reports[pr.hold.ID] >= pr.consumers() || !now.Before(pr.until)
		if is {
			over = append(over, pr)
		}
		return is
	})
	p.mu.Unlock()
	for _, pr := range over {
		p.give(pr.blocks...)
	}
	p.churn()
}

// churn overwrites every free slot with what other requests compute.
func (p *pd) churn() {
	p.mu.Lock()
	free := slices.Clone(p.free)
	for _, id := range free {
		p.used[id]++
	}
	p.mu.Unlock()
	p.fill(p.place(p.keys(len(free)), free)...)
	for g, group := range p.env.Layout.Groups {
		if group.Policy == connector.PolicyTrailing { // place gives only its last
			for _, id := range free {
				p.wipe(0x3C, connector.Block{ID: id, Group: uint16(g)})
			}
		}
	}
}

// reported is how often Consumed has named a hold.
func (p *pd) reported(pr *prompt) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.reports[pr.hold.ID]
}

// consumed waits until a hold was reported the given number of times, and checks that no further report comes.
func (p *pd) consumed(pr *prompt, times int) {
	p.Helper()
	for w := p.patience(soon); p.reported(pr) < times; {
		select {
		case <-p.heard:
		case <-time.After(askAgain):
			if w.over() {
				p.overdue(w.began, "hold %d was reported %d times %v after its consumers had fetched it, want %d", pr.hold.ID, p.reported(pr), soon, times)
				return
			}
		case <-p.Context().Done():
			p.must(p.Context().Err(), "waiting")
		}
	}
	p.silent(pr, times)
}

// silent checks that a hold has been reported the given number of times, and not again within a while.
func (p *pd) silent(pr *prompt, times int) {
	p.Helper()
	p.pause(aWhile)
	if n := p.reported(pr); n != times {
		p.Errorf("hold %d was reported %d times, want %d", pr.hold.ID, n, times)
	}
}

// expire waits until the moment when a host takes the prompt's blocks back, and takes them back.
func (p *pd) expire(pr *prompt) {
	p.Helper()
	if left := time.Until(pr.until); left > 0 {
		if left > longLease {
			p.Skipf("a hold has %v to live; give the connector a config with a lease of less than %v", left.Round(time.Second), longLease)
		}
		p.pause(left)
	}
	p.sweep()
}
