package host

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/ticket"
	"github.com/kvport/kvport/internal/tracker"
)

// waiter is the engine's loop waiting in MatchAll for the answer to one request.
type waiter struct {
	request connector.RequestID
	ready   chan struct{}
}

// askJob is one query on its way to the plugin.
type askJob struct {
	query  connector.Query
	ahead  bool // the engine has not asked it yet
	answer func(connector.Match, error)
}

// Match says what could be loaded for a request. It returns within 200 microseconds: an answer that
// takes longer is Later, an Answered event tells when to ask again, and after the Later deadline it
// is a miss. Asking often costs little. signed is the ticket that a router brought, or nil; it
// is verified once for each request, and a refused one is as good as none. The caller keeps q.Keys.
// An offer leaves at least one token to compute and ends with a full block; but one of what a Holder
// keeps may end anywhere, with the prompt too: then the engine computes the last token all the same.
func (h *Host) Match(q connector.Query, signed []byte) connector.Match {
	if q.Request == "" {
		began := time.Now()
		defer func() { h.metrics.match.Observe(time.Since(began).Seconds()) }()
		ctx, cancel := context.WithTimeout(context.Background(), h.cfg.Settings.Deadlines.Match)
		defer cancel()
		return h.Probe(ctx, q)
	}
	return h.MatchAll(q, signed, nil)[0]
}

// MatchAll is Match with questions about other requests, each about another one, that the engine will probably ask next. It waits
// for the answer to q alone, while ahead is read, and the others are answered as far as is known by then. A connector whose Match has
// what it asks for sent is not asked ahead: the answers end with that to q. Of a question that the engine never asks nothing remains
// but what Ended ends of any request.
func (h *Host) MatchAll(q connector.Query, signed []byte, ahead iter.Seq[connector.Query]) []connector.Match {
	began := time.Now()
	defer func() { h.metrics.match.Observe(time.Since(began).Seconds()) }()
	ready := h.askFirst(began, q, signed)
	requests := append([]connector.RequestID{q.Request}, h.askAhead(ahead)...)
	if ready != nil {
		select {
		case <-ready:
		case <-time.After(h.cfg.Settings.Deadlines.Match - time.Since(began)):
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.waiter = nil
	out := make([]connector.Match, len(requests))
	for i, id := range requests {
		out[i] = h.tracker.Match(time.Now(), id)
	}
	return out
}

// askFirst asks the engine's question. What it returns is closed when there is an answer; nil: there is no reason to wait.
func (h *Host) askFirst(now time.Time, q connector.Query, signed []byte) <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(signed) > 0 && h.tracker.WantsTicket(q.Request) {
		h.bring(&q, signed)
	}
	w := &waiter{q.Request, make(chan struct{})}
	h.waiter = w
	wait, actions := h.tracker.Query(now, q)
	h.do(actions)
	if !wait {
		h.waiter = nil
		return nil
	}
	return w.ready
}

// askAhead puts the questions that the engine has not asked yet, and gives their requests.
func (h *Host) askAhead(ahead iter.Seq[connector.Query]) (requests []connector.RequestID) {
	if ahead == nil || h.info.MatchFetches {
		return nil // what nobody may ever ask for would be sent
	}
	for q := range ahead {
		h.mu.Lock() // for each alone: the first answer comes meanwhile, and loads end
		_, actions := h.tracker.Ahead(time.Now(), q)
		h.do(actions)
		h.mu.Unlock()
		requests = append(requests, q.Request)
	}
	return requests
}

// bring opens the ticket that came with a request's first question. The caller holds mu.
func (h *Host) bring(q *connector.Query, signed []byte) {
	e, reason, err := h.tickets.verify(signed, q.Request)
	if err == nil {
		reason, err = h.take(q, e)
	}
	if err != nil {
		h.metrics.refused.WithLabelValues(reason).Inc()
		h.log.Warn("ticket refused", "reason", reason, "error", err)
		h.tracker.Refuse(q.Request, h.mismatch(e, reason, err))
	}
}

// take tells the tracker what a ticket says that was opened, or says why it is refused. The caller holds mu.
func (h *Host) take(q *connector.Query, e *ticket.Envelope) (reason string, err error) {
	t := &tracker.Ticket{
		Tokens: e.Tokens, Lease: e.Lease, Plugin: e.Plugin,
		Cut: tracker.Cut{BlockTokens: e.Cut.BlockTokens, Last: e.Cut.Last, Tail: e.Cut.Tail},
	}
	if t.Source, err = h.sourceOf(e); err != nil {
		return "incompatible", fmt.Errorf("ticket of engine %q: %w", e.Engine, err)
	}
	if !h.tracker.Accept(q, t) {
		return "prompt", fmt.Errorf("ticket of engine %q is for another prompt", e.Engine)
	}
	return "", nil
}

// Probe answers a query that belongs to no request and leaves no trace. It is Later if ctx or the plugin ends
// first: whoever asks again waits for a new answer. After the Later deadline it is a miss. The caller keeps q.Keys.
func (h *Host) Probe(ctx context.Context, q connector.Query) connector.Match {
	q.Keys, q.Ticket = slices.Clone(q.Keys), nil
	answer := make(chan connector.Match, 1)
	h.mu.Lock()
	g, up := h.gen, h.tracker.Taking()
	h.mu.Unlock()
	if !h.cfg.Role.Loads() {
		return connector.Match{}
	}
	switch m, ok := h.probePlaced(&q, up); {
	case ok:
		return m
	case g == nil:
		return connector.Match{}
	}
	g.enqueue(job{ask: &askJob{query: q, answer: func(m connector.Match, err error) {
		if err != nil || m.Tokens < 0 || m.Tokens > q.Tokens-q.Computed {
			m = connector.Match{}
		}
		answer <- m
	}}})
	select {
	case m := <-answer:
		return m
	case <-g.proc.Done():
	case <-ctx.Done():
	}
	return connector.Match{Later: true}
}

// startAsk has a query answered: from what is placed, or by the scheduler side. The caller holds mu.
func (h *Host) startAsk(a *tracker.Ask) {
	if a.Gen == 0 {
		h.askAlone(a)
		return
	}
	id, request := a.ID, a.Query.Request
	answer := func(m connector.Match, err error) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.do(h.tracker.Matched(time.Now(), id, m, err))
		h.wakeWaiter(request)
	}
	g, ask := h.gen, &askJob{query: a.Query, ahead: a.Ahead, answer: answer}
	if !h.place.open() {
		g.enqueue(job{ask: ask})
		return
	}
	g.work.Go(func() { // a long prompt has many keys to look for, and nobody waits for mu meanwhile
		if m, ok := h.matchPlaced(&ask.query); ok {
			answer(m, nil)
			return
		}
		g.enqueue(job{ask: ask})
	})
}

// wakeWaiter ends the wait for the answer to a request. The caller holds mu.
func (h *Host) wakeWaiter(request connector.RequestID) {
	if h.waiter != nil && h.waiter.request == request {
		close(h.waiter.ready)
		h.waiter = nil
	}
}

// matchPlaced answers a query without the plugin, if the index says enough.
func (h *Host) matchPlaced(q *connector.Query) (connector.Match, bool) {
	m, ok := h.place.match(q)
	if ok {
		h.metrics.placedMatches.Inc()
	}
	return m, ok
}

// askAll sends several queries as one call. Without an answer nobody is told: the generation is at
// its end, and the next one is asked.
func (h *Host) askAll(ctx context.Context, s connector.Scheduler, asks []*askJob) error {
	queries := make([]connector.Query, len(asks))
	for i, a := range asks {
		queries[i] = a.query
	}
	fault.Crash("host.match")
	began := time.Now()
	matches, err := s.Match(ctx, queries)
	h.metrics.answer.Observe(time.Since(began).Seconds())
	if err == nil {
		err = fault.Point("host.matched")
	}
	if errors.Is(err, plugin.ErrLost) || errors.Is(err, plugin.ErrUnanswered) {
		return err
	}
	for i, a := range asks {
		var m connector.Match
		if err == nil {
			m = matches[i]
		}
		a.answer(m, err)
	}
	return nil
}

// startPlan sends a step to the scheduler side. The caller holds mu.
func (h *Host) startPlan(a *tracker.Plan) {
	call(h, a.Deadline, func(ctx context.Context, p connector.Planner) (*connector.Plan, error) {
		return p.Plan(ctx, a.Step)
	}, func(now time.Time, plan *connector.Plan, err error) []tracker.Action {
		return h.tracker.Planned(now, a.ID, plan, err)
	})
}

// startFinish sends ended requests to the scheduler side. The caller holds mu.
func (h *Host) startFinish(a *tracker.Finish) {
	h.makeTails(a.Partial)
	call(h, a.Deadline, func(ctx context.Context, holder connector.Holder) ([]connector.Hold, error) {
		fault.Crash("host.hold")
		holds, err := holder.Finish(ctx, a.Ended)
		if err == nil {
			err = fault.Point("host.held")
		}
		return holds, err
	}, func(now time.Time, holds []connector.Hold, err error) []tracker.Action {
		return h.tracker.FinishAnswered(now, a.ID, holds, err)
	})
}

// startReset has the scheduler side forget every block. The caller holds mu.
func (h *Host) startReset(a *tracker.Reset) {
	resume := h.place.pause()
	call(h, a.Deadline, h.resetBy, func(now time.Time, emptied bool, err error) []tracker.Action {
		resume()
		return h.tracker.ResetAnswered(now, a.ID, emptied, err)
	})
}

// resetBy calls Reset once no call of Lend is under way: that would wait for it in the plugin, and has an earlier deadline.
func (h *Host) resetBy(ctx context.Context, r connector.Resetter) (emptied bool, err error) {
	if err := h.place.quiet(ctx); err != nil {
		return false, err
	}
	return r.Reset(ctx)
}

// call has the scheduler side use a power and gives the answer to the tracker, unless none comes: then the
// generation is at its end, and the tracker learns that. The caller holds mu.
func call[P, T any](h *Host, deadline time.Time, use func(context.Context, P) (T, error), answer func(time.Time, T, error) []tracker.Action) {
	h.gen.enqueue(job{deadline: deadline, run: func(ctx context.Context, s connector.Scheduler) error {
		v, err := usePower(ctx, s, use)
		if errors.Is(err, plugin.ErrLost) || errors.Is(err, plugin.ErrUnanswered) {
			return err
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		h.do(answer(time.Now(), v, err))
		return nil
	}})
}

// tails asks the engine for the addresses of the partial blocks of a step. Most steps have none.
func (h *Host) tails(s *connector.Step) tracker.Tails {
	if h.eng.Tail == nil || len(s.Admitted)+len(s.Ended) == 0 {
		return nil
	}
	tails := tracker.Tails{}
	for i := range s.Admitted {
		tails[s.Admitted[i].Request] = h.eng.Tail(s.Admitted[i].Request)
	}
	for i := range s.Ended {
		tails[s.Ended[i].Request] = h.eng.Tail(s.Ended[i].Request)
	}
	return tails
}

// makeTails makes the digests of partial blocks that a Holder may keep. The caller holds mu: the blocks are
// pinned, and there is one in each group.
func (h *Host) makeTails(partial []connector.Block) {
	for _, b := range partial {
		for _, r := range h.ranks {
			if err := r.hasher.Make(r.kv, b); err != nil {
				h.log.Error("a partial block has no digest, its consumer will compute it", "block", b.ID, "error", err)
			}
		}
	}
}

// usePower calls a side that has a power. One that does not have it is of another build of the plugin, after a restart.
func usePower[P, T any](ctx context.Context, side any, use func(context.Context, P) (T, error)) (T, error) {
	if p, ok := connector.As[P](side); ok {
		return use(ctx, p)
	}
	var none T
	return none, fmt.Errorf("the connector cannot do this any longer: %w", connector.ErrIncompatible)
}
