package fleet

import (
	"strconv"
	"time"

	"github.com/kvport/kvport/engine/router"
	"github.com/kvport/kvport/engine/router/policy"
)

// front is one router.
type front struct {
	w      *world
	number int
	core   *router.Core
	at     []*machine // by place
	sent   []int      // by place: parts of requests that the router has there
	count  Traffic
	spent  time.Duration // by the clock of the options, for decisions
	leaked uint64        // of a mutant
}

func newFront(w *world, number int) (*front, error) {
	ttl := leaseTime
	if w.o.Mutant == LeaseTooShort {
		ttl = registerEvery * 2 / 3
	}
	core, err := router.NewCore(router.CoreConfig{
		Policy: w.o.policy(), TTL: ttl, Seed: w.o.Seed, Now: func() time.Time { return time.Unix(1e9, 0).Add(w.Now()) },
	})
	return &front{w: w, number: number, core: core}, err
}

// put notes which machine is at a place.
func (f *front) put(place int, m *machine) {
	for len(f.at) <= place {
		f.at, f.sent = append(f.at, nil), append(f.sent, 0)
	}
	f.at[place] = m
}

// ask is what the choice for a request depends on, as a router prepares it.
func (f *front) ask(t *turn) *policy.Request {
	w := f.w
	r := &policy.Request{Tokens: t.prompt, Session: strconv.Itoa(t.session)}
	if !f.core.UsesPrompts() {
		return r
	}
	w.tokens = appendTokens(w.tokens[:0], t.pieces, 0, t.prompt)
	w.text = w.text[:0]
	for _, token := range w.tokens {
		w.text = append(w.text, byte(token), byte(token>>8), byte(token>>16), byte(token>>24))
	}
	r.Prompt = f.core.Prompt(w.text)
	switch w.o.Knowledge {
	case ByEvents:
		r.Held = f.core.Held(w.tokens)
	case ByOracle:
		blocks := t.prompted()
		for place, m := range f.at {
			if m.up {
				hit := policy.Hit{Engine: min(m.cache.held(blocks, 0)*blockTokens, t.prompt)}
				r.Held = append(r.Held, policy.Held{Place: place, Hit: hit, Sure: true})
			}
		}
	case ByHistory:
	}
	return r
}

// timed is ask and the first choice for a request.
func (f *front) timed(q *flight) (prefill, decode *router.Sending, ok bool) {
	f.count.Decisions++
	began := f.w.clock()
	if q.ask == nil {
		q.ask = f.ask(q.turn)
	}
	prefill, decode, ok = f.core.Choose(q.ask, q.tried, q.from)
	f.spent += f.w.clock() - began
	return prefill, decode, ok
}

// choose picks the instances for an attempt.
func (f *front) choose(q *flight) bool {
	prefill, decode, ok := f.timed(q)
	if !ok {
		return false
	}
	if f.w.o.Mutant == LoadCountedTwice {
		_, _, _ = f.core.Choose(q.ask, map[int]bool{}, policy.None)
	}
	q.decode = f.begins(q, decode)
	q.prefill = nil
	if prefill != nil {
		q.prefill = f.begins(q, prefill)
	}
	return true
}

// begins counts a part of a request.
func (f *front) begins(q *flight, s *router.Sending) *part {
	q.picked = append(q.picked, s.Place())
	f.sent[s.Place()]++
	return &part{s, f.at[s.Place()]}
}

// done ends a part of a request.
func (f *front) done(p *part, failed bool) {
	f.sent[p.Place()]--
	if failed && f.w.o.Mutant == LoadNeverEnds {
		return
	}
	f.core.Done(p.Sending)
}

// failed takes note that the connection to an instance broke.
func (f *front) failed(p *part) {
	if f.w.o.Mutant != StickyToDead {
		f.core.Failed(p.Sending)
	}
	f.done(p, true)
}

// sweep is what a router does every second.
func (f *front) sweep() {
	if f.w.o.Mutant != LeaseForever {
		f.core.Sweep()
	}
	for _, m := range f.w.machines {
		f.inspect(m)
	}
}
