package conformance

import (
	"context"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

// powerCase is a case of an optional power.
func powerCase(c Case, needs connector.Capability, body func(*rig)) Case {
	c.Profiles, c.Needs, c.Run = []Profile{Power}, needs, rigged(needs, false, body)
	return c
}

func powerCases() []Case {
	return []Case{
		powerCase(Case{ID: "plan-within-step", Rule: "PLAN-01", Text: "A Plan contains only transfers of its Step."}, connector.CanPlan, planWithinStep),
		powerCase(Case{ID: "plan-given-back", Rule: "PLAN-02", Text: "A Plan does not touch blocks that are being given back."}, connector.CanPlan, planGivenBack),
		powerCase(Case{ID: "hold-order", Rule: "HOLD-01", Text: "Finish answers each Ended in order and holds only for a consumer."}, connector.CanHold, holdOrder),
		powerCase(Case{ID: "hold-consumed", Rule: "HOLD-02", Text: "A hold is reported once for each consumer that fetched it."}, connector.CanHold, holdConsumed),
		powerCase(Case{ID: "hold-waits", Rule: "HOLD-03", Text: "Consumed waits until its context is done."}, connector.CanHold, holdWaits),
		powerCase(Case{ID: "lease-soon", Rule: "LEASE-01", Text: "Renewals answers within a second, with a hold and without."}, connector.CanLease, leaseSoon),
		powerCase(Case{ID: "lease-open", Rule: "LEASE-02", Text: "Renewals names no hold that is over."}, connector.CanLease, leaseOpen),
		powerCase(Case{ID: "reset", Rule: "RESET-01", Text: "After a Reset nothing earlier matches, in the next life either, and saves work again."}, connector.CanReset, reset),
	}
}

// part fails the case unless got is one of the given transfers or takes a subset of its blocks in
// their order.
func (e *engine) part(what string, got connector.Transfer, given []connector.Transfer) {
	e.Helper()
	for _, g := range given {
		if g.Request != got.Request {
			continue
		}
		at := 0
		for _, b := range got.Blocks {
			i := slices.Index(g.Blocks[at:], b)
			if i < 0 {
				e.Errorf("%s of request %q names block %d, which the Step does not give it there", what, got.Request, b.ID)
				return
			}
			at += i + 1
		}
		return
	}
	e.Errorf("%s of request %q, which is not in the Step", what, got.Request)
}

func (e *engine) plan(s *connector.Step) *connector.Plan {
	e.Helper()
	planner, ok := connector.As[connector.Planner](e.scheduler)
	if !ok {
		e.Errorf("Info claims plan, the scheduler side does not have it")
		e.FailNow()
	}
	e.steps++
	s.ID = e.steps
	p, err := planner.Plan(e.Context(), s)
	e.must(err, "plan")
	if p == nil {
		p = &connector.Plan{}
	}
	return p
}

// request is a Query and the transfer of all its blocks.
func (e *engine) request(id connector.RequestID, first int) (connector.Query, connector.Transfer) {
	keys := e.keys(3)
	q, t := query(keys), transfer(blocks(first, keys...))
	q.Request, t.Request = id, id
	return q, t
}

func planWithinStep(r *rig) {
	e := r.engine(setup{})
	var arrived []connector.Query
	var given []connector.Transfer
	for i, id := range []connector.RequestID{"a", "b", "c", "d"} {
		q, t := e.request(id, 3*i)
		arrived, given = append(arrived, q), append(given, t)
	}
	steps := []*connector.Step{
		{Arrived: arrived},
		{Admitted: given[:2]},
		{Computed: given[2:]},
		{Admitted: given[3:], Computed: given[:1]},
		{Ended: []connector.Ended{{Request: "a", Reason: connector.ReasonStop, Tokens: 12, Blocks: given[0].Blocks}}},
	}
	for _, s := range steps {
		p := e.plan(s)
		for _, l := range p.Loads {
			e.part("a load", l, s.Admitted)
		}
		for _, w := range p.Saves {
			e.part("a save", w, s.Computed)
		}
	}
}

func planGivenBack(r *rig) {
	e := r.engine(setup{})
	qa, a := e.request("a", 0)
	qb, b := e.request("b", 4)
	e.plan(&connector.Step{Arrived: []connector.Query{qa, qb}, Admitted: []connector.Transfer{a, b}})
	p := e.plan(&connector.Step{
		Computed:  []connector.Transfer{a, b},
		Preempted: []connector.RequestID{"a"},
		Ended:     []connector.Ended{{Request: "b", Reason: connector.ReasonAbort}},
	})
	for _, t := range slices.Concat(p.Loads, p.Saves) {
		r.Errorf("the Plan moves blocks of request %q, which gave them back in the same Step", t.Request)
	}
}

func (e *engine) holder() connector.Holder {
	e.Helper()
	h, ok := connector.As[connector.Holder](e.scheduler)
	if !ok {
		e.Errorf("Info claims hold, the scheduler side does not have it")
		e.FailNow()
	}
	return h
}

func (e *engine) finish(ended ...connector.Ended) []connector.Hold {
	e.Helper()
	holds, err := e.holder().Finish(e.Context(), ended)
	e.must(err, "finish")
	if len(holds) != len(ended) {
		e.Errorf("Finish gave %d holds for %d ended requests", len(holds), len(ended))
		e.FailNow()
	}
	return holds
}

// ended is the end of a request whose blocks lie in the cache, with a consumer announced.
func ended(id connector.RequestID, bs []connector.Block) connector.Ended {
	return connector.Ended{Request: id, Reason: connector.ReasonLength, Tokens: len(bs) * blockTokens, Remote: true, Blocks: bs}
}

func holdOrder(r *rig) {
	e := r.engine(setup{})
	a, b := blocks(0, e.keys(2)...), blocks(2, e.keys(3)...)
	e.save(a...)
	e.save(b...)
	local := ended("local", a)
	local.Remote = false
	aborted := connector.Ended{Request: "aborted", Reason: connector.ReasonAbort, Remote: true}
	holds := e.finish(local, ended("a", a), aborted, ended("b", b))
	for i, name := range map[int]string{0: "no consumer", 2: "no blocks"} {
		if holds[i].ID != 0 || holds[i].Ticket != nil {
			r.Errorf("a request with %s is held: %+v", name, holds[i])
		}
	}
	if holds[1].ID != 0 && holds[1].ID == holds[3].ID {
		r.Errorf("two holds have id %d", holds[1].ID)
	}
	d := e.peer()
	for i, bs := range map[int][]connector.Block{1: a, 3: b} {
		q := query(keysOf(bs))
		q.Ticket = holds[i].Ticket
		r.equal(len(bs)*blockTokens, d.ask(q)[0].Tokens, "tokens offered for the ticket of answer %d", i)
	}
}

func keysOf(bs []connector.Block) []connector.BlockKey {
	keys := make([]connector.BlockKey, len(bs))
	for i, b := range bs {
		keys[i] = b.Key
	}
	return keys
}

func holdConsumed(r *rig) {
	p := r.engine(setup{})
	d := p.peer()
	holder := p.holder()
	seen := map[connector.HoldID]bool{}
	for n := range 3 {
		bs := blocks(0, p.keys(3)...)
		p.save(bs...)
		hold := p.finish(ended("producer", bs))[0]
		if hold.ID == 0 {
			r.Skipf("the connector holds nothing for a consumer")
		}
		if seen[hold.ID] {
			r.Errorf("hold id %d is used again", hold.ID)
		}
		seen[hold.ID] = true
		q := query(keysOf(bs))
		q.Ticket = hold.Ticket
		r.equal(3*blockTokens, d.ask(q)[0].Tokens, "tokens offered for the ticket")
		to := blocks(4, keysOf(bs)...)
		d.wipe(0, to...)
		p.pollsInVain(holder)
		r.must(d.loadTicket(r.Context(), to, hold.Ticket), "load with the ticket")
		d.holds(to...)
		ctx, cancel := context.WithTimeout(r.Context(), soon)
		ids, err := holder.Consumed(ctx)
		cancel()
		r.must(err, "consumed, after hold %d of %d was fetched", n, 3)
		if !slices.Equal(ids, []connector.HoldID{hold.ID}) {
			r.Errorf("Consumed gave %v, want [%d]", ids, hold.ID)
		}
	}
	ctx, cancel := context.WithTimeout(r.Context(), 50*time.Millisecond)
	defer cancel()
	if ids, _ := holder.Consumed(ctx); len(ids) > 0 {
		r.Errorf("Consumed gave %v again", ids)
	}
}

// pollsInVain ends a Consumed that has nothing to report, as hosts do for other news. What happens later is for the next call.
func (e *engine) pollsInVain(holder connector.Holder) {
	e.Helper()
	const wait = 30 * time.Millisecond
	ctx, cancel := context.WithTimeout(e.Context(), wait)
	defer cancel()
	if ids, _ := holder.Consumed(ctx); len(ids) > 0 {
		e.Errorf("Consumed gave %v, which nobody has fetched since the last call", ids)
	}
}

func holdWaits(r *rig) {
	e := r.engine(setup{})
	holder := e.holder()
	e.waits("Consumed", func(ctx context.Context) int {
		ids, _ := holder.Consumed(ctx)
		return len(ids)
	})
}

// waits checks that a long poll which has nothing to report waits until its context is done.
func (e *engine) waits(name string, poll func(ctx context.Context) int) {
	e.Helper()
	const wait = 100 * time.Millisecond
	type answer struct {
		n    int
		took time.Duration
	}
	done := make(chan answer, 1)
	go func() { // which measures, so that it does not matter when a busy machine runs the other one again
		start := time.Now()
		ctx, cancel := context.WithTimeout(e.Context(), wait)
		defer cancel()
		n := poll(ctx)
		done <- answer{n, time.Since(start)}
	}()
	select {
	case a := <-done:
		if a.n > 0 {
			e.Errorf("%s gave %d, nothing had happened", name, a.n)
		}
		if a.took < wait/2 {
			e.Errorf("%s returned after %v with nothing to report; it must wait", name, a.took)
		}
	case <-time.After(wait + soon):
		e.Errorf("%s does not return when its context is done", name)
	}
}

// leases asks once which holds stay longer.
func (e *engine) leases(ended ...connector.HoldID) []connector.HoldID {
	e.Helper()
	leaser, ok := connector.As[connector.Leaser](e.scheduler)
	if !ok {
		e.Errorf("Info claims lease, the scheduler side does not have it")
		e.FailNow()
	}
	ctx, cancel := context.WithTimeout(e.Context(), soon)
	defer cancel()
	ids, err := leaser.Renewals(ctx, ended)
	e.must(err, "renewals")
	return ids
}

// held ends a request of 3 blocks with a consumer.
func (e *engine) held() connector.Hold {
	e.Helper()
	bs := blocks(0, e.keys(3)...)
	e.save(bs...)
	hold := e.finish(ended("producer", bs))[0]
	if hold.ID == 0 {
		e.Skipf("the connector holds nothing for a consumer")
	}
	return hold
}

func leaseSoon(r *rig) {
	e := r.engine(setup{})
	e.equal(0, len(e.leases()), "holds that stay longer before there is one")
	e.held()
	e.leases()
	e.leases(4711) // a hold that never was
}

func leaseOpen(r *rig) {
	e := r.engine(setup{})
	over, open := e.held(), e.held()
	e.leases()
	for _, id := range append(e.leases(over.ID), e.leases()...) {
		if id != open.ID {
			r.Errorf("Renewals names hold %d, open is %d only", id, open.ID)
		}
	}
	for _, id := range append(e.leases(open.ID), e.leases()...) {
		r.Errorf("Renewals names hold %d, none is open", id)
	}
}

func reset(r *rig) {
	e := r.engine(setup{})
	peer := e.peer()
	keys, old := e.keys(3), e.keys(3)
	e.save(blocks(0, keys...)...)
	if e.info.Capabilities&connector.CanHold != 0 && e.match(keys...) < len(keys) {
		r.Skipf("what it keeps is found by ticket only")
		return
	}
	r.equal(3, e.match(keys...), "blocks offered before the Reset")
	e.save(blocks(4, old...)...)
	resetter, ok := connector.As[connector.Resetter](e.scheduler)
	if !ok {
		r.Errorf("Info claims reset, the scheduler side does not have it")
		return
	}
	emptied, err := resetter.Reset(r.Context())
	r.must(err, "reset")
	if emptied {
		r.equal(0, e.match(keys...), "blocks offered after a Reset that emptied")
		r.equal(0, peer.match(keys...), "blocks offered to another engine after a Reset that emptied")
		if e.load(blocks(4, keys...)...) == nil {
			r.Errorf("a load of what was reset succeeds")
		}
	}
	e.save(blocks(0, keys...)...)
	r.equal(3, e.match(keys...), "blocks offered after a Reset and a save")
	if emptied {
		e.stillReset(old)
	}
}

// stillReset opens the engine's sides in the connector's next life, which has the arena if there is one, and finds no earlier block there either:
// a Reset that forgets an index only has it made again of what lies in files or the arena.
func (e *engine) stillReset(old []connector.BlockKey) {
	e.Helper()
	var n *engine
	if len(e.env.Arena) > 0 {
		e.closeAll()
		n = e.again()
	} else {
		e.end()
		n = e.life()
	}
	e.equal(0, n.match(old...), "blocks offered in the connector's next life, of those before a Reset that emptied")
	if n.load(blocks(8, old...)...) == nil {
		e.Errorf("a load of what was reset succeeds in the connector's next life")
	}
}
