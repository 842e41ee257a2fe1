package simulate

import (
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/sched"
)

// ask makes a cache query for the prompt of a request that an engine got. One that is refused has no answer.
func (e *engine) ask(of *stream) {
	st := *of
	st.id += "?"
	hold := e.w.opt.Turns
	st.req.ID, st.req.Query, st.req.MaxTokens, st.req.Ticket, st.req.Remote, st.req.Turn = st.id, true, 1, nil, hold, hold
	_ = e.add(&st)
}

// answered verifies the answer to a cache query. What it found may be gone by now, so only those who go on from there
// find out whether its ticket is good.
func (e *engine) answered(st *stream, o *sched.Output) {
	e.w.mix('q', uint64(e.index), hash(string(o.Request)), uint64(o.Reason), uint64(o.Local), uint64(o.External))
	delete(e.streams, o.Request)
	found := o.Local + o.External
	switch {
	case o.Reason != connector.ReasonStop:
		e.w.fail('g', "%s: cache query %s ends with %s: %v", e.name, o.Request, reasonName(o.Reason), o.Err)
		return
	case len(o.Tokens) > 0 || o.Generated > 0 || found >= len(st.req.Prompt):
		e.w.fail('g', "%s: cache query %s has the answer %s", e.name, o.Request, describeOutput(o))
		return
	}
	e.w.stats.Queries++
	if found > 0 {
		e.w.stats.QueryFinds++
	}
	if o.Ticket != nil {
		e.w.stats.QueryTickets++
		e.w.router.keepAnswer(st.client, o.Ticket)
	}
	if e.w.tracing() {
		e.w.say("%s -> cache query %s: %s", e.name, o.Request, describeOutput(o))
	}
}

// keepAnswer remembers the ticket of a cache query: somebody whose prompt begins so may load by it.
func (r *routing) keepAnswer(c *client, ticket []byte) {
	if r.given {
		return
	}
	r.turns = append(r.turns, turn{c.prompt, c.salt, ticket, c.round + 1})
	if len(r.turns) > 8 {
		r.turns = r.turns[1:]
	}
}
