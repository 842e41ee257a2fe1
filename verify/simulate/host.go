package simulate

import (
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/ticket"
	"github.com/kvport/kvport/internal/tracker"
)

// host is the layer between an engine, the real tracker and a modelled plugin: what package host
// does with goroutines and processes. The mutants live here.
type host struct {
	w    *World
	e    *engine
	can  connector.Capability
	role connector.Role

	tracker *tracker.Tracker
	breaker tracker.Breaker
	guard   *ticket.Guard
	proc    *proc // nil while none runs
	n       uint64
	startAt time.Time      // when the next generation is up, while none runs
	since   time.Time      // of the generation
	rng     rng            // decides what no Op decides
	queue   []report       // what the engine has not taken yet
	reset   tracker.CallID // under way; 0: none

	arriving map[obligation]*arrival // loads whose layers are verified one by one

	turns   map[connector.RequestID]*turnUse // of requests that came with the ticket of an earlier turn
	due     map[obligation]*grant            // what the engine must still be told
	open    []*grant                         // whose end the engine has not taken yet
	holds   map[obligation]*lease
	answer  []tracker.CallID             // of calls that were answered, for answers that come again
	later   map[connector.RequestID]bool // a mutant's: whose answer was Later
	late    []*move                      // of generations that are gone; only a mutant looks at them
	orphans []*move                      // calls with which somebody goes on for ever
	slots   [][]*move                    // by rank and landing slot: the call that it was given to last
	windows [windows]*move               // of memory for source blocks: the same
	offers  offers
	own     own
	groups  []connector.Group
	unread  map[connector.BlockKey]int // blocks that the next save replaces, by when they were found
	found   int                        // blocks of loads so far
}

// obligation names something that must be answered exactly once.
type obligation struct {
	kind    tracker.EventKind
	request connector.RequestID
	step    uint64
}

// grant is the right of a plugin to touch the blocks of a transfer, from its step until the engine
// learns its end.
type grant struct {
	obligation
	blocks []connector.Block
	open   bool

	end     int                 // the token before which its blocks end
	weak    bool                // the end of a request whose consumer is only hoped for
	turn    bool                // a load by the ticket of an earlier turn
	dirty   bool                // a load that nobody has verified
	claimed bool                // the plugin says itself that what it loaded is damaged
	early   bool                // the plugin has said that it stored what was not computed
	damaged bool                // a load has brought something that is not what was saved, or the plugin says so
	foreign []connector.BlockID // that a load has brought, by a key that is not in the ring
}

// report is an event on its way to the engine.
type report struct {
	tracker.Event
	ticket []byte
	grant  *grant

	arrival *arrival // of Arriving
}

func newHost(e *engine) *host {
	o := &e.w.opt
	h := &host{
		w: e.w, e: e, role: e.role, can: o.capabilities(), later: map[connector.RequestID]bool{}, unread: map[connector.BlockKey]int{}, offers: newOffers(), arriving: map[obligation]*arrival{},
		guard: ticket.NewGuard(connector.Fingerprint{}, e.shape()), due: map[obligation]*grant{}, turns: map[connector.RequestID]*turnUse{}, holds: map[obligation]*lease{},
		rng:     rng(o.Seed<<8 ^ uint64(e.life)),
		breaker: newBreaker(),
	}
	h.slots = make([][]*move, o.Ranks)
	for r := range h.slots {
		h.slots[r] = make([]*move, o.Slots)
	}
	h.openReshape()
	c := h.trackerConfig()
	h.groups, h.tracker = c.Groups, tracker.New(c)
	h.up()
	return h
}

func newBreaker() tracker.Breaker {
	return tracker.Breaker{
		Deaths: 5, Window: 30 * time.Second, Cooldown: 30 * time.Second,
		BackoffMin: 10 * time.Millisecond, BackoffMax: time.Second,
	}
}

// do carries out what the tracker decided.
func (h *host) do(actions []tracker.Action) {
	for _, a := range actions {
		switch a := a.(type) {
		case tracker.Tell:
			h.tell(&a.Event)
		case tracker.Ask:
			h.ask(&a)
		case tracker.Plan:
			h.w.stats.Plans++
			h.send(&job{plan: &a, id: a.ID, deadline: a.Deadline})
		case tracker.Finish:
			h.makeTails(a.Partial)
			h.send(&job{finish: &a, id: a.ID, deadline: a.Deadline})
		case tracker.Move:
			h.start(&a)
		case tracker.Reset:
			h.send(&job{reset: &a, id: a.ID, deadline: a.Deadline})
		case tracker.ResetOver:
			h.resetOver(&a)
		case tracker.Advance:
			h.advance(a)
		case tracker.CancelCall:
			h.cancel(a.ID)
		case tracker.Kill:
			if h.proc != nil && h.proc.n == a.Gen && !h.w.is(NoDeadline) {
				h.w.stats.Kills++
				h.w.say("%s kills its plugin: %s", h.e.name, a.Reason)
				h.proc.die()
			}
		}
	}
}

func (h *host) ask(a *tracker.Ask) {
	if a.Gen == 0 {
		h.askAlone(a)
		return
	}
	h.send(&job{ask: a, id: a.ID})
}

func (h *host) send(j *job) {
	h.w.mix('j', uint64(j.id))
	if h.proc != nil {
		h.proc.jobs = append(h.proc.jobs, j)
	}
}

func (h *host) start(a *tracker.Move) {
	h.w.mix('m', uint64(a.ID), uint64(a.Rank))
	m := &move{Move: *a, grant: h.grantOf(a)}
	h.onceAnnounced(m)
	if a.Gen == 0 {
		h.loadAlone(m)
		return
	}
	if h.proc == nil {
		h.w.fail('c', "%s starts a %s without a plugin", h.e.name, a.Kind)
		return
	}
	if a.Gen != h.proc.n {
		h.w.fail('c', "%s sends a %s of generation %d to generation %d", h.e.name, a.Kind, a.Gen, h.proc.n)
	}
	if h.w.is(LayerEarly) {
		m.Layers = layers
	}
	h.shareSlots(m)
	h.occupy(m)
	h.beginReshape(m)
	h.checkTicketUse(m)
	h.useTurn(m)
	h.replaces(m)
	h.proc.moves = append(h.proc.moves, m)
	if h.proc.comp != nil {
		h.proc.comp.begin(m)
		return
	}
	if a.Kind == tracker.Save && h.w.is(AckBeforeSave) {
		m.reported = true
		h.makeDigests(m)
		h.do(h.tracker.Moved(h.w.now, a.ID, tracker.Outcome{Layers: layers}))
	}
}

// grantOf finds the transfer that a call belongs to.
func (h *host) grantOf(a *tracker.Move) *grant {
	kind := tracker.Loaded
	if a.Kind == tracker.Save {
		kind = tracker.Saved
	}
	for _, g := range h.open {
		if g.kind != kind || g.request != a.Transfer.Request {
			continue
		}
		for _, b := range g.blocks {
			if b.ID == a.Transfer.Blocks[0].ID && b.Group == a.Transfer.Blocks[0].Group {
				return g
			}
		}
	}
	return nil
}

func (h *host) cancel(id tracker.CallID) {
	if h.cancelAlone(id) || h.proc == nil {
		return
	}
	for _, m := range h.proc.moves {
		if m.ID != id {
			continue
		}
		m.canceled = true
		if m.stop != nil {
			m.stop()
		}
		if h.w.is(FreeOnAbort) && !m.reported {
			m.reported = true
			h.do(h.tracker.Moved(h.w.now, id, tracker.Outcome{Err: errCanceled}))
		}
		return
	}
}

// step hands over what the engine decided.
func (h *host) step(s *connector.Step) {
	h.w.mix('s', s.ID, uint64(len(s.Admitted)), uint64(len(s.Computed)), uint64(len(s.Ended)), uint64(len(s.Preempted)))
	if h.w.tracing() {
		h.w.say("%s step %d: %s", h.e.name, s.ID, describeStep(s))
	}
	h.w.stats.Preemptions += len(s.Preempted)
	h.taints(s)
	for i := range s.Admitted {
		h.w.stats.Loads++
		h.oweTransfer(tracker.Loaded, s.ID, &s.Admitted[i])
	}
	for i := range s.Computed {
		h.w.stats.Saves++
		h.oweTransfer(tracker.Saved, s.ID, &s.Computed[i])
	}
	for i := range s.Computing {
		h.w.stats.Saves++
		h.w.stats.Layered++
		h.oweTransfer(tracker.Saved, s.ID, &s.Computing[i])
	}
	for i := range s.Ended {
		g := h.owe(tracker.Finished, s.ID, s.Ended[i].Request, s.Ended[i].Blocks)
		g.weak, g.end = s.Ended[i].Weak, s.Ended[i].Tokens
		s.Ended[i].Weak = s.Ended[i].Weak && !h.w.is(TurnKept)
	}
	tails := tracker.Tails{}
	for i := range s.Admitted {
		tails[s.Admitted[i].Request] = h.e.sched.Tail(s.Admitted[i].Request)
	}
	for i := range s.Ended {
		tails[s.Ended[i].Request] = h.e.sched.Tail(s.Ended[i].Request)
	}
	admitted, ended := s.Admitted, s.Ended // s is the tracker's from now on
	h.do(h.tracker.Step(h.w.now, s, tails))
	for i := range ended {
		delete(h.later, ended[i].Request)
		h.offers.forget(ended[i].Request)
		delete(h.turns, ended[i].Request)
	}
	if h.w.is(PublishEarly) {
		for i := range admitted {
			h.queue = append(h.queue, report{Event: tracker.Event{Kind: tracker.Loaded, Request: admitted[i].Request, Step: s.ID}})
		}
	}
}

func (h *host) oweTransfer(kind tracker.EventKind, step uint64, t *connector.Transfer) {
	h.owe(kind, step, t.Request, t.Blocks).end = t.From + t.Tokens
}

func (h *host) owe(kind tracker.EventKind, step uint64, id connector.RequestID, blocks []connector.Block) *grant {
	g := &grant{obligation: obligation{kind, id, step}, blocks: blocks, open: true}
	if h.due[g.obligation] != nil {
		h.w.fail('d', "%s gives its host the same thing twice: %v", h.e.name, g.obligation)
	}
	h.due[g.obligation] = g
	h.open = append(h.open, g)
	return g
}

// tell queues an event of the tracker for the engine.
func (h *host) tell(ev *tracker.Event) {
	switch {
	case h.w.is(LostFinish) && ev.Kind == tracker.Finished && (h.proc == nil || h.proc.dying):
		return
	case h.w.is(HoldForever) && ev.Kind == tracker.Released && ev.Reason == tracker.ReleasedExpired:
		return
	case h.w.is(FreeHeld) && ev.Kind == tracker.Finished && ev.Held:
		h.emit(ev)
		h.queue[len(h.queue)-1].Held = false
		return
	case h.w.is(HoldOutlivesPlugin) && ev.Kind == tracker.Released && ev.Reason == tracker.ReleasedPluginDied:
		return
	case h.tellsTwice(ev.Kind):
		h.emit(ev)
	}
	h.emit(ev)
}

// tellsTwice is a host that reports something twice.
func (h *host) tellsTwice(kind tracker.EventKind) bool {
	switch kind { //nolint:exhaustive // of the others nothing comes of it
	case tracker.Finished:
		return h.w.is(DoubleFinish)
	case tracker.Loaded:
		return h.w.is(DoubleLoaded)
	case tracker.Released:
		return h.w.is(DoubleRelease)
	}
	return false
}

// emit checks that the event was due, and due once.
func (h *host) emit(ev *tracker.Event) {
	r := report{Event: *ev}
	key := obligation{ev.Kind, ev.Request, ev.Step}
	switch ev.Kind {
	case tracker.Answered:
	case tracker.Arriving:
		h.arrives(ev)
		return
	case tracker.Stored:
		key.kind = tracker.Saved
		if r.grant = h.due[key]; r.grant == nil {
			h.w.fail('d', "%s is told that %s is stored, step %d, and its save is over", h.e.name, ev.Request, ev.Step)
			return
		}
		h.w.stats.Stored++
	case tracker.Released:
		key.kind = tracker.Finished
		l := h.holds[key]
		if l == nil {
			h.w.fail('d', "%s is told that a hold of %s is over, which is not open", h.e.name, ev.Request)
			return
		}
		h.release(key, l, ev)
	default:
		if r.grant = h.due[key]; r.grant == nil {
			h.w.fail('d', "%s is told %s of %s, step %d, which was not due or told before", h.e.name, eventName(ev.Kind), ev.Request, ev.Step)
			return
		}
		delete(h.due, key)
		if ev.Kind == tracker.Loaded {
			h.endArriving(ev)
		}
		h.checkWeak(r.grant, ev)
		h.checkTaint(r.grant, ev)
		h.checkForeign(r.grant, ev)
		if r.grant.early && len(ev.Failed) == 0 {
			h.w.fail('d', "%s: a save of %s counts as stored, and was answered before its blocks were computed", h.e.name, ev.Request)
		}
		if ev.Kind == tracker.Finished {
			r.ticket = h.finished(key, r.grant, ev)
		}
	}
	h.w.mix('e', uint64(ev.Kind), hash(string(ev.Request)), ev.Step, uint64(len(ev.Failed)))
	h.queue = append(h.queue, r)
}

func (h *host) release(key obligation, l *lease, ev *tracker.Event) {
	h.checkLease(key.request, l)
	delete(h.holds, key)
	switch ev.Reason {
	case tracker.ReleasedExpired:
		if h.w.now.Before(l.until) {
			h.w.fail('e', "%s: the hold of %s expires %v before its time", h.e.name, key.request, l.until.Sub(h.w.now))
		}
		h.w.stats.Expired++
	case tracker.ReleasedConsumed:
		if h.proc != nil && h.proc.fetched[l.id] < l.consumers {
			h.w.fail('e', "%s: the hold of %s is over after %d of %d consumers", h.e.name, key.request, h.proc.fetched[l.id], l.consumers)
		}
		h.w.stats.Consumed++
	}
}

// finished notes a hold and signs the ticket of a request that has a consumer.
func (h *host) finished(key obligation, g *grant, ev *tracker.Event) []byte {
	if ev.Held {
		h.w.stats.Holds++
		l := &lease{blocks: g.blocks, id: ev.Hold.ID, ttl: ev.Hold.TTL, began: h.w.now, until: h.w.now.Add(ev.Hold.TTL), consumers: ev.Hold.Consumers}
		for _, b := range g.blocks {
			l.sums = append(l.sums, h.e.mem[0][b.ID].digest(b, 0))
		}
		h.holds[key] = l
	}
	if ev.Ticket == nil {
		return nil
	}
	return h.w.issue(h.e, ev.Ticket, g.weak)
}

// checkLease verifies that held blocks are what they were.
func (h *host) checkLease(id connector.RequestID, l *lease) {
	for i, b := range l.blocks {
		if h.e.mem[0][b.ID].digest(b, 0) != l.sums[i] {
			h.w.fail('c', "%s: block %d changed while it was held for the consumer of %s", h.e.name, b.ID, id)
			return
		}
	}
}

// deliver gives the engine up to n events.
func (h *host) deliver(n int) {
	n = min(n, len(h.queue))
	batch := h.queue[:n]
	h.queue = append([]report(nil), h.queue[n:]...)
	for i := range batch {
		r := &batch[i]
		if h.w.tracing() {
			h.w.say("%s hears: %s", h.e.name, describeEvent(&r.Event))
		}
		if r.Lost {
			h.giveLost(r)
		} else {
			h.give(r)
		}
	}
}

func (h *host) give(r *report) {
	s := h.e.sched
	if r.Kind == tracker.Stored { // the save goes on for others, on the same blocks
		h.giveStored(r)
		return
	}
	h.revoke(r.grant)
	switch r.Kind { //nolint:exhaustive // Stored is above
	case tracker.Loaded:
		if len(r.Failed) > 0 {
			h.w.stats.LoadFailed++
		}
		failed := r.Failed
		if h.w.is(FailedUntold) {
			failed = nil
		}
		h.e.loadEnded(r.Request, len(failed) == 0)
		s.Loaded(r.Step, r.Request, failed, isCorrupt(r.Err), h.unverified(r))
		h.forgetTaint(r)
		if h.w.is(RetryForever) && len(r.Failed) > 0 {
			h.resubmit(r.Request)
		}
	case tracker.Saved:
		s.Saved(r.Step, r.Request)
		if h.w.is(DoubleUnpin) && r.grant != nil {
			for _, b := range r.grant.blocks {
				h.e.pool.Unpin(b.ID)
			}
		}
	case tracker.Finished:
		s.Finished(r.Step, r.Request, r.Held, r.ticket)
	case tracker.Released:
		s.Released(r.Step, r.Request)
	case tracker.Answered:
		s.Answered(r.Request)
	case tracker.Arriving:
		h.e.arriving[r.Request] = r.arrival
		s.Arriving(r.Step, r.Request)
	}
}

func (h *host) giveStored(r *report) {
	h.e.sched.Stored(r.Step, r.Request)
	if h.w.is(StoredFrees) {
		h.revoke(r.grant)
		h.e.sched.Saved(r.Step, r.Request)
	}
}

// revoke ends the right to touch the blocks of a transfer.
func (h *host) revoke(g *grant) {
	if g == nil {
		return
	}
	g.open = false
	h.forget(g)
}

// forget ends what the engine expects of a transfer.
func (h *host) forget(g *grant) {
	for i := range h.open {
		if h.open[i] == g {
			h.open = append(h.open[:i], h.open[i+1:]...)
			return
		}
	}
}

// match answers the engine's question. fast says that the plugin answers while the loop waits.
func (h *host) match(q connector.Query, signed []byte, fast bool) connector.Match {
	if len(signed) > 0 && h.tracker.WantsTicket(q.Request) {
		h.bring(&q, signed)
	}
	wait, actions := h.tracker.Query(h.w.now, q)
	h.do(actions)
	if wait && fast {
		h.answerAskAlone(q.Request)
	}
	if wait && fast && h.proc != nil {
		h.proc.answerAsk(q.Request)
	}
	m := h.tracker.Match(h.w.now, q.Request)
	h.checkMatch(&q, m)
	h.checkTurn(&q, m)
	if h.w.is(LaterForever) {
		m.Later = m.Later || h.later[q.Request] && m.Tokens == 0
		h.later[q.Request] = m.Later
	}
	switch {
	case m.Later:
		h.w.stats.Late++
	case m.Tokens == 0:
		h.w.stats.Misses++
	}
	if h.w.tracing() {
		h.w.say("%s asks about %s with %d of %d tokens: %s", h.e.name, q.Request, q.Computed, q.Tokens, describeMatch(m))
	}
	h.w.mix('q', uint64(m.Tokens))
	return m
}

// checkMatch verifies that an offer leaves a token to compute and consists of whole blocks.
func (h *host) checkMatch(q *connector.Query, m connector.Match) {
	if m.Later || m.Tokens == 0 {
		return
	}
	byTicket := h.offers.offered(q.Request)
	held := byTicket && h.can&connector.CanHold != 0 // what a Holder keeps may end anywhere
	whole := m.Tokens+q.Computed < q.Tokens && m.Tokens%h.e.size == 0
	if m.Tokens < 0 || m.Tokens+q.Computed > q.Tokens || !held && !whole {
		h.w.fail('c', "%s: match of %d tokens beyond %d for a prompt of %d", h.e.name, m.Tokens, q.Computed, q.Tokens)
	}
}

// bring opens the ticket that came with a request's first question.
func (h *host) bring(q *connector.Query, signed []byte) {
	e, err := h.verify(signed, q.Request)
	if err == nil && h.tracker.Accept(q, h.opened(e)) {
		if h.w.tickets.accepted(h.w, h.e, q.Request, signed) {
			h.turns[q.Request] = &turnUse{}
		}
		return
	}
	h.w.stats.Refused++
	h.w.say("%s refuses the ticket of %s: %v", h.e.name, q.Request, err)
	h.tracker.Refuse(q.Request, "ticket")
}

// check verifies what must hold after every step.
func (h *host) check() {
	for key, l := range h.holds {
		if h.w.now.After(l.until) {
			h.w.fail('e', "%s: the hold of %s is still there after its time", h.e.name, key.request)
		}
	}
	c := h.tracker.Counters()
	if c.Unknown < 0 || c.Violations < 0 {
		h.w.fail('d', "%s: counters %+v", h.e.name, c)
	}
}

// resubmit is an engine without a denylist: it tries the whole request again.
func (h *host) resubmit(id connector.RequestID) {
	st := h.e.streams[id]
	if st == nil || len(st.tokens) > len(st.req.Prompt) {
		return
	}
	h.e.sched.Abort(id, connector.ReasonAbort, nil)
	for _, o := range h.e.sched.Outputs() {
		if o.Request != id {
			h.e.output(o)
		}
	}
	delete(h.e.streams, id)
	again := *st
	again.id += "'"
	again.req.ID = again.id
	if h.e.add(&again) == nil && st.client.id == id {
		st.client.id = again.id
	}
}
