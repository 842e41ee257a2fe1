package fleet

import "github.com/kvport/kvport/engine/router/policy"

// The kinds of violations.
const (
	WrongIndex   = "index"   // the index has another number of blocks than the caches, or other hits
	Unbounded    = "memory"  // it has more than a cache can hold
	WrongLoad    = "load"    // a router counts requests that do not run
	ToTheDead    = "dead"    // a request went to an instance that had long been down
	WrongLease   = "lease"   // an instance that lives is forgotten, or one that is gone is not
	NotSpread    = "balance" // some instances have several times the mean
	LostRequests = "lost"    // requests neither answered nor failed
)

// How much is looked at, and what is too much.
const (
	exactly    = 64 // prefill instances up to which the fullest cache is looked for at every request
	sampled    = 8  // beyond: one request in that number
	remembers  = 32 // requests whose blocks are compared at rest
	mostUneven = 4  // times the mean load of a role
	enough     = 20 // requests of each instance, for that to mean anything
)

// chosen looks at a choice: what the fullest cache has of the prompt, and whether the router's count is right.
func (w *world) chosen(q *flight) {
	f := q.front
	if place := q.decode.Place(); !w.counted(f, place) {
		running, _ := f.core.Busy(place)
		w.violate(WrongLoad, "router %d counts %d requests at %d, and %d run there", f.number, running, f.at[place].number, f.sent[place])
	}
	if q.choices > 1 || q.from != policy.None || len(w.machines)/2 > exactly && w.arrivals%sampled > 0 {
		return
	}
	best, blocks := 0, q.turn.prompted()
	for _, m := range w.machines {
		if m.up && m.prefill == (q.prefill != nil) {
			best = max(best, m.cache.held(blocks, best))
		}
	}
	w.result.BestTokens += usable(best, q.turn.prompt)
	w.result.BestOf += q.turn.prompt
}

// usable is how many tokens of a prompt need not be computed if that many of its blocks are there: the last one always is.
func usable(blocks, prompt int) int { return min(blocks, (prompt-1)/blockTokens) * blockTokens }

// counted reports whether a router counts as many requests at a place as it has there.
func (w *world) counted(f *front, place int) bool {
	running, _ := f.core.Busy(place)
	return running == f.sent[place]
}

// reached looks at an instance to which a request goes.
func (w *world) reached(m *machine) {
	if !m.up && w.Now()-m.since > noticed {
		w.violate(ToTheDead, "instance %d has been down for %v", m.number, w.Now()-m.since)
	}
}

// computed notes what a prompt had in the cache of the instance that has computed it.
func (w *world) computed(q *flight, p *part, cached int) {
	w.result.PromptTokens += q.turn.prompt
	w.result.CachedTokens += cached
	w.result.OverTokens += max(0, p.Leg().Hit.Tokens()-cached)
}

// first notes the first token of an answer.
func (w *world) first(q *flight) {
	w.ttft = append(w.ttft, float32((w.Now()-q.turn.at).Seconds()*1e3))
}

// remember keeps the last requests that were answered.
func (w *world) remember(q *flight) {
	if len(w.recent) == remembers {
		w.recent = w.recent[1:]
	}
	w.recent = append(w.recent, q.turn)
}

// inspect looks at what a router knows of an instance.
func (f *front) inspect(m *machine) {
	l := m.links[f.number]
	place := l.where()
	if l.known && place < 0 {
		f.count.Expired++
	}
	l.known = place >= 0
	since := f.w.Now() - m.since
	switch {
	case m.up && !l.known && since > 2*registerEvery:
		f.w.violate(WrongLease, "router %d has forgotten instance %d, which registers", f.number, m.number)
	case !m.up && l.known && since > leaseTime+2*probeEvery:
		f.w.violate(WrongLease, "router %d knows instance %d, which has been gone for %v", f.number, m.number, since)
	case l.known && f.core.Indexed(place) > m.cache.most:
		f.w.violate(Unbounded, "router %d has %d blocks of instance %d, whose cache has room for %d", f.number, f.core.Indexed(place), m.number, m.cache.most)
	}
}

// check looks at everything once the fleet is at rest.
func (w *world) check() {
	if ended := w.result.Answered + w.result.Failed; ended != w.o.Requests {
		w.violate(LostRequests, "%d of %d requests have ended", ended, w.o.Requests)
	}
	for _, f := range w.fronts {
		for place := range f.at {
			if running, waiting := f.core.Busy(place); running != 0 || waiting != 0 || f.sent[place] != 0 {
				w.violate(WrongLoad, "router %d counts %d requests and %.0f tokens at instance %d, at rest", f.number, running, waiting, f.at[place].number)
			}
		}
		if w.tells {
			for _, m := range w.machines {
				w.checkIndex(f, m)
			}
			w.checkHits(f)
		}
	}
	for _, most := range []float64{w.result.Prefill, w.result.Decode} {
		if w.o.Fault != RacksFail && w.o.Requests >= enough*w.o.Instances && most > mostUneven {
			w.violate(NotSpread, "an instance has %.1f times the mean load of its role", most)
		}
	}
}

// checkIndex compares what a router has of an instance with its cache.
func (w *world) checkIndex(f *front, m *machine) {
	l := m.links[f.number]
	place := l.where()
	if !m.up || place < 0 {
		return
	}
	has, should := f.core.Indexed(place), m.cache.size()
	switch {
	case !l.exact && !w.o.Fault.confuses():
		w.violate(WrongIndex, "router %d does not know all of instance %d, though nothing was lost", f.number, m.number)
	case l.exact && has != should, has > should:
		w.violate(WrongIndex, "router %d has %d blocks of instance %d, which has %d", f.number, has, m.number, should)
	}
}

// checkHits compares what a router says about the last prompts with what the caches have.
func (w *world) checkHits(f *front) {
	for _, t := range w.recent {
		w.tokens = appendTokens(w.tokens[:0], t.pieces, 0, t.prompt)
		said := map[*machine]int{}
		for _, h := range f.core.Held(w.tokens) {
			said[f.at[h.Place]] = h.Hit.Engine
		}
		for _, m := range w.machines {
			is := usable(m.cache.held(t.prompted(), 0), t.prompt)
			if got := said[m]; m.up && (got > is || got < is && m.links[f.number].exact) {
				w.violate(WrongIndex, "router %d says that instance %d has %d tokens of a prompt, and it has %d", f.number, m.number, got, is)
			}
		}
	}
}
