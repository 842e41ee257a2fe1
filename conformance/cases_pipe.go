package conformance

import (
	"bytes"
	"context"
	"slices"

	"github.com/kvport/kvport/connector"
)

// The known faults of pipes between engines: a first-in-first-out pipe stalls behind a request that has no
// blocks, or never comes; a consumer waits for ever for a producer that died; a pipe that was opened again
// loses what was on its way, or brings it twice; a producer knows only one consumer.

func pipeCase(id, rule, text string, body func(*rig)) Case {
	return Case{ID: id, Rule: rule, Text: text, Profiles: []Profile{Pipe}, Run: rigged(0, false, func(r *rig) {
		if r.info.Capabilities&connector.CanHold == 0 {
			r.Skipf("the connector gives no tickets")
		}
		body(r)
	})}
}

func pipeCases() []Case {
	return []Case{
		pipeCase("handoff-unwanted", "PIPE-01", "Blocks that a consumer asks about and never loads do not hold up others.", handoffUnwanted),
		pipeCase("handoff-order", "PIPE-01", "Requests are loaded in another order than they were computed in.", handoffOrder),
		pipeCase("producer-gone", "PIPE-02", "Blocks of a producer that has ended are soon a miss.", producerGone),
		pipeCase("producer-gone-late", "PIPE-02", "If a producer ends before the load, the load soon ends with right blocks or ErrGone.", producerGoneLate),
		pipeCase("producer-again", "PIPE-03", "The next life of a producer serves the same consumer.", producerAgain),
		pipeCase("consumer-again", "PIPE-03", "The next life of a consumer is served by the same producer.", consumerAgain),
		pipeCase("two-consumers", "PIPE-04", "Two consumers get the blocks of one prefix.", twoConsumers),
		pipeCase("two-producers", "PIPE-04", "One consumer gets blocks from two producers.", twoProducers),
		pipeCase("same-prefix", "PIPE-04", "Two requests with the same prefix both load it.", samePrefix),
		pipeCase("handoff", "PIPE-05", "A consumer loads by ticket what a producer saved, byte for byte.", handoff),
		pipeCase("handoff-latest", "PIPE-05", "A block that was saved again with Replace arrives as it is now.", handoffLatest),
		pipeCase("handoff-ranks", "PIPE-05", "Each of two ranks gets its own part.", handoffRanks),
		pipeCase("handoff-cancelled", "PIPE-06", "A load that was cancelled can be made again.", handoffCancelled),
		pipeCase("strange-ticket", "PIPE-07", "A ticket that no producer made is soon a miss, and harms nothing.", strangeTicket),
	}
}

// producer and consumer open one engine of a role, like another one in all else, but that a consumer's cache is larger and cut in another way.
func (r *rig) producer(world int) *engine {
	r.Helper()
	p := r.closed(setup{world: world})
	p.env.Role = connector.RoleProducer
	p.openAll()
	return p
}

func (e *engine) like(role connector.Role) *engine {
	e.Helper()
	layout := e.env.Layout
	if role == connector.RoleConsumer {
		layout = elsewhere(layout, layout.Blocks+otherBlocks)
	}
	d := e.closed(setup{world: e.env.World, layout: &layout})
	d.env.Model, d.env.Shape, d.env.Role = e.env.Model, e.env.Shape, role
	d.openAll()
	return d
}

func (e *engine) consumer() *engine { return e.like(connector.RoleConsumer) }

// end ends an engine and its connector's process.
func (e *engine) end() {
	e.Helper()
	e.closeAll()
	e.must(e.inst.Close(), "end the connector")
}

// hand computes blocks on a producer and gives the ticket.
func (e *engine) hand(keys []connector.BlockKey) connector.Ticket {
	e.Helper()
	bs := blocks(0, keys...)
	e.save(bs...)
	return e.finish(ended("producer", bs))[0].Ticket
}

// handed is how many blocks a consumer is offered for a ticket.
func (e *engine) handed(keys []connector.BlockKey, ticket connector.Ticket) int {
	e.Helper()
	q := query(keys)
	q.Ticket = ticket
	return e.ask(q)[0].Tokens / blockTokens
}

// take checks that all blocks are offered, and loads them.
func (e *engine) take(keys []connector.BlockKey, ticket connector.Ticket) {
	e.Helper()
	e.equal(len(keys), e.handed(keys, ticket), "blocks offered for the ticket")
	e.loadRight(keys, ticket)
}

func (e *engine) loadRight(keys []connector.BlockKey, ticket connector.Ticket) {
	e.Helper()
	to := blocks(8, keys...)
	e.wipe(0, to...)
	e.must(e.loadTicket(e.Context(), to, ticket), "load with the ticket")
	e.holds(to...)
}

func handoff(r *rig) {
	p := r.producer(1)
	d := p.consumer()
	for range 5 {
		keys := p.keys(4)
		d.take(keys, p.hand(keys))
	}
}

func handoffOrder(r *rig) {
	p := r.producer(1)
	d := p.consumer()
	var keys [][]connector.BlockKey
	var tickets []connector.Ticket
	for range 4 {
		k := p.keys(3)
		keys, tickets = append(keys, k), append(tickets, p.hand(k))
		r.equal(3, d.handed(k, tickets[len(tickets)-1]), "blocks offered for the ticket")
	}
	for i := range slices.Backward(keys) {
		d.loadRight(keys[i], tickets[i])
	}
}

func handoffUnwanted(r *rig) {
	p := r.producer(1)
	d := p.consumer()
	for range 10 {
		keys := p.keys(3)
		r.equal(3, d.handed(keys, p.hand(keys)), "blocks offered for the ticket of a request that is then given up")
	}
	keys := p.keys(3)
	d.take(keys, p.hand(keys))
}

func producerGone(r *rig) {
	p := r.producer(1)
	d := p.consumer()
	keys := p.keys(3)
	ticket := p.hand(keys)
	p.end()
	if n := d.handed(keys, ticket); n != 0 { // ask ends the case when the answer stays Later
		r.Errorf("%d blocks are offered, which a producer that has ended had", n)
	}
}

func producerGoneLate(r *rig) {
	p := r.producer(1)
	d := p.consumer()
	keys := p.keys(3)
	ticket := p.hand(keys)
	r.equal(3, d.handed(keys, ticket), "blocks offered for the ticket")
	p.end()
	to := blocks(8, keys...)
	d.wipe(0, to...)
	ctx, cancel := context.WithTimeout(r.Context(), 2*soon)
	defer cancel()
	err := r.quick("a load from a producer that has ended", func() error { return d.loadTicket(ctx, to, ticket) })
	r.orGone(err, "a load from a producer that has ended")
	if err == nil {
		d.holds(to...)
	}
}

func producerAgain(r *rig) {
	p := r.producer(1)
	d := p.consumer()
	keys := p.keys(3)
	d.take(keys, p.hand(keys))
	p.end()
	next := p.like(connector.RoleProducer)
	keys = next.keys(3)
	d.take(keys, next.hand(keys))
}

func consumerAgain(r *rig) {
	p := r.producer(1)
	d := p.consumer()
	keys := p.keys(3)
	d.take(keys, p.hand(keys))
	d.end()
	next := p.consumer()
	keys = p.keys(3)
	next.take(keys, p.hand(keys))
}

func twoConsumers(r *rig) {
	p := r.producer(1)
	a, b := p.consumer(), p.consumer()
	keys := p.keys(3)
	a.take(keys, p.hand(keys))
	b.take(keys, p.hand(keys))
}

func twoProducers(r *rig) {
	p := r.producer(1)
	other := p.like(connector.RoleProducer)
	d := p.consumer()
	for range 3 {
		for _, e := range []*engine{p, other} {
			keys := e.keys(3)
			d.take(keys, e.hand(keys))
		}
	}
}

func samePrefix(r *rig) {
	p := r.producer(1)
	d := p.consumer()
	keys := p.keys(4)
	first, second := p.hand(keys), p.hand(keys[:3])
	r.equal(4, d.handed(keys, first), "blocks offered to the first request")
	r.equal(3, d.handed(keys[:3], second), "blocks offered to the second request")
	d.loadRight(keys, first)
	d.loadRight(keys[:3], second)
}

func handoffLatest(r *rig) {
	p := r.producer(1)
	d := p.consumer()
	keys := p.keys(2)
	bs := blocks(0, keys...)
	p.spoil(bs...)
	r.must(p.saveOnly(r.Context(), transfer(bs)), "save")
	p.fill(bs...)
	t := transfer(bs)
	t.Replace = true
	r.must(p.saveReplace(r.Context(), t), "save with Replace")
	d.take(keys, p.finish(ended("producer", bs))[0].Ticket)
}

func handoffRanks(r *rig) {
	p := r.producer(2)
	d := p.consumer()
	keys := p.keys(3)
	d.take(keys, p.hand(keys))
}

func handoffCancelled(r *rig) {
	p := r.producer(1)
	d := p.consumer()
	keys := p.keys(3)
	ticket := p.hand(keys)
	r.equal(3, d.handed(keys, ticket), "blocks offered for the ticket")
	ctx, cancel := context.WithCancel(r.Context())
	cancel()
	to := blocks(8, keys...)
	if d.loadTicket(ctx, to, ticket) == nil {
		return // it was faster
	}
	d.take(keys, ticket)
}

func strangeTicket(r *rig) {
	p := r.producer(1)
	d := p.consumer()
	keys := p.keys(3)
	ticket := p.hand(keys)
	strange := [][]byte{{0}, []byte("127.0.0.1:1"), bytes.Repeat([]byte{0xff}, 2000), append(bytes.Clone(ticket), 'x'), ticket[:len(ticket)/2]}
	for _, s := range strange {
		other := p.keys(2)
		if n := d.handed(other, s); n != 0 {
			r.Errorf("%d blocks that nobody saved are offered for ticket %q", n, s[:min(len(s), 20)])
		}
	}
	d.take(keys, ticket)
}
