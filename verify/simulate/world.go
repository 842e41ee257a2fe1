package simulate

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/keyring"
)

// World is one deployment at one moment of virtual time.
type World struct {
	opt     Options
	now     time.Time
	steps   int
	engines []*engine
	store   *store
	second  *store // of the other child of a MultiConnector
	router  *routing
	key     *keyring.Ring // signs tickets
	tickets ledger        // what was issued and accepted
	lives   uint16
	quiet   bool // no more faults: everything must come to its end

	violation *Violation
	digest    uint64
	stats     Stats
}

// Violation is a broken invariant. The rules are:
//
//	a  the accounts of the cache agree: every block is free or owned, no count is negative
//	b  attention reads the KV of its own prefix, and none from before a finished reset
//	c  a plugin touches a block only while its transfer's pins are open
//	d  every operation has exactly one end, and nothing after it
//	e  a hold is released when its time is over
//	f  in the end everything is free: requests, blocks, pins, holds, calls
//	g  the client's tokens are those of a single engine without faults, or a prefix of them and a clean error
//	h  a run is a function of its seed
//	i  when faults stop, everything ends in bounded time
//	t  no forged, stale or replayed ticket is accepted, and one of an earlier turn serves one load that is worth it
//	v  what a load brought and nobody has verified, and what is computed from it, stays with its request, and has no digest
//	k  a block by a key outside the ring is a miss, nobody is blamed for it, and its next save replaces it
//	p  nothing panics
type Violation struct {
	Rule byte
	Step int // of the script; len(script) and more: after its end
	Text string
}

// String tells the step, the rule and what happened.
func (v *Violation) String() string {
	return fmt.Sprintf("step %d, rule (%c): %s", v.Step, v.Rule, v.Text)
}

// Stats are what happened in a world, to see that the faults did happen.
type Stats struct {
	Tokens, Local, External           int // computed; found; loaded
	Requests, Answered, Broken, Gone  int // clients: whole answers, clean errors, left
	Loads, Saves, Damaged, LoadFailed int
	Crashes, Hangs, Kills, Restarts   int
	Holds, Expired, Consumed, Renewed int
	Refused                           int // tickets
	Resets, ResetsKept, ResetsFailed  int // emptied all; kept something; without an answer or with an error
	EngineRestarts, Faults            int
	Preemptions, Unknown, BookRetries int
	StoreFaults, Misses, Late, Reused int

	Queries, QueryFinds, QueryTickets      int // cache queries answered; that found something; with a ticket
	Turns, TurnLoads, TurnLoaded, TurnLost int // tickets for the next turn; loads by them; blocks
	Plans                                  int // calls of a Planner
	Early                                  int // saves that were answered before their blocks were computed
	Foreign, Relayed                       int // blocks by a key outside the ring; prefill requests with a ticket of another prefill engine
	Lost, LostHolds                        int // transfers and holds whose blocks are never used again; the holds among them
	Reshaped                               int // loads from an engine with blocks of another size
	Unverified, Tainted, TaintedEnds       int // loads that nobody has verified; chunks computed from those; ends of requests with them
	ChildDeaths, ChildCalls, ChildFailed   int // of the children of MultiConnectors: deaths; calls; loads that another must do
	ChildPlans, ChildFetches, ChildHolds   int // ... plans; questions to those whose Match fetches; holds that ended with one
	ChildStaged, ChildTurns                int // of MultiConnectors: calls through landing memory; loads by an earlier turn
	Overlapped, Dropped, Postponed         int // chunks computed during a load: that count; that do not, since the load did not end well or in time; whose layers did not come in time
	AloneAsks, Alone, AloneLayers          int // of hosts without a plugin: questions answered; loads made; loads of which layers were announced
	Layered, Stored, Staged                int // saves: handed over before they were computed; told stored before they were over; calls through landing memory
}

// Power is an optional power of connectors, and how often a run has met it.
type Power struct {
	Name string
	Met  int
}

// Powers lists the powers that the simulation covers.
func (s *Stats) Powers() []Power {
	return []Power{
		{"holds", s.Holds},
		{"leases (renewals)", s.Renewed},
		{"turns (tickets of weak holds)", s.Turns},
		{"turns (loads by them)", s.TurnLoads},
		{"cache queries", s.Queries},
		{"cache queries (with a ticket)", s.QueryTickets},
		{"layers (saves while computing)", s.Layered},
		{"overlaps (chunks computed during a load)", s.Overlapped},
		{"stored before saved", s.Stored},
		{"staged (calls through landing memory)", s.Staged},
		{"resets", s.Resets},
		{"resets that fail or keep something", s.ResetsKept + s.ResetsFailed},
		{"plans", s.Plans},
		{"reshapes (loads from engines with other blocks)", s.Reshaped},
		{"loads that nobody has verified", s.Unverified},
		{"chunks computed from what nobody has verified", s.Tainted},
		{"requests that end with what nobody has verified", s.TaintedEnds},
		{"children (deaths, one by one)", s.ChildDeaths},
		{"children (calls of a composite)", s.ChildCalls},
		{"children (loads that fail, and others are asked)", s.ChildFailed},
		{"children (plans)", s.ChildPlans},
		{"children (questions to those whose Match fetches)", s.ChildFetches},
		{"children (calls of a composite through landing memory)", s.ChildStaged},
		{"children (loads of a composite by an earlier turn)", s.ChildTurns},
		{"transfers and holds whose blocks are lost", s.Lost},
		{"stores with blocks by a key outside the ring", s.Foreign},
		{"placement (loads while no plugin is up)", s.Alone},
	}
}

func (s *Stats) add(t *Stats) {
	pairs := s.fields()
	for i, v := range t.fields() {
		*pairs[i].n += *v.n
	}
}

type field struct {
	name string
	n    *int
}

func (s *Stats) fields() []field {
	return []field{
		{"tokens computed", &s.Tokens},
		{"found", &s.Local},
		{"loaded", &s.External},
		{"requests", &s.Requests},
		{"answered", &s.Answered},
		{"broken off", &s.Broken},
		{"left", &s.Gone},
		{"loads", &s.Loads},
		{"saves", &s.Saves},
		{"blocks found damaged", &s.Damaged},
		{"loads failed", &s.LoadFailed},
		{"plugin crashes", &s.Crashes},
		{"hangs", &s.Hangs},
		{"kills", &s.Kills},
		{"plugin restarts", &s.Restarts},
		{"holds", &s.Holds},
		{"expired", &s.Expired},
		{"consumed", &s.Consumed},
		{"renewed", &s.Renewed},
		{"tickets refused", &s.Refused},
		{"resets", &s.Resets},
		{"resets that keep something", &s.ResetsKept},
		{"resets that fail", &s.ResetsFailed},
		{"engine restarts", &s.EngineRestarts},
		{"faulty messages", &s.Faults},
		{"preemptions", &s.Preemptions},
		{"answers nobody waited for", &s.Unknown},
		{"calls retried", &s.BookRetries},
		{"store faults", &s.StoreFaults},
		{"misses", &s.Misses},
		{"later", &s.Late},
		{"ids reused", &s.Reused},
		{"plans", &s.Plans},
		{"cache queries", &s.Queries},
		{"cache queries that found something", &s.QueryFinds},
		{"cache queries with a ticket", &s.QueryTickets},
		{"turn tickets", &s.Turns},
		{"turn loads", &s.TurnLoads},
		{"turn blocks loaded", &s.TurnLoaded},
		{"turn blocks lost", &s.TurnLost},
		{"saves while computing", &s.Layered},
		{"saves stored before they were over", &s.Stored},
		{"chunks computed during a load", &s.Overlapped},
		{"chunks that do not count", &s.Dropped},
		{"chunks whose layers come late", &s.Postponed},
		{"staged calls", &s.Staged},
		{"reshaped loads", &s.Reshaped},
		{"loads that nobody verified", &s.Unverified},
		{"chunks computed from them", &s.Tainted},
		{"requests that end with them", &s.TaintedEnds},
		{"saves answered too early", &s.Early},
		{"children died", &s.ChildDeaths},
		{"calls of children", &s.ChildCalls},
		{"loads that a child failed", &s.ChildFailed},
		{"plans of children", &s.ChildPlans},
		{"questions to children whose Match fetches", &s.ChildFetches},
		{"holds that ended with a child", &s.ChildHolds},
		{"staged calls of composites", &s.ChildStaged},
		{"turn loads of composites", &s.ChildTurns},
		{"blocks by a key outside the ring", &s.Foreign},
		{"questions answered without a plugin", &s.AloneAsks},
		{"loads without a plugin", &s.Alone},
		{"layer-wise loads without a plugin", &s.AloneLayers},
		{"prefill requests with another's ticket", &s.Relayed},
		{"transfers and holds lost", &s.Lost},
		{"holds lost", &s.LostHolds},
	}
}

// newWorld builds a deployment in which every plugin is up.
func newWorld(o Options) *World {
	w := &World{
		opt: o, now: time.Unix(0, 0), store: newStore(), second: newStore(), key: keyring.Of([]byte("a key of at least thirty-two bytes")),
		tickets: newLedger(), digest: basis,
	}
	w.router = newRouting(w)
	for i := range o.Prefills + o.Decodes {
		name := fmt.Sprintf("d%d", i-o.Prefills)
		if i < o.Prefills {
			name = fmt.Sprintf("p%d", i)
		}
		e := &engine{w: w, index: i, name: name, size: o.size(i), role: o.role(i)}
		w.engines = append(w.engines, e)
		e.start()
	}
	return w
}

// fail notes the first violation.
func (w *World) fail(rule byte, format string, args ...any) {
	if w.violation == nil {
		w.violation = &Violation{rule, w.steps, fmt.Sprintf(format, args...)}
		w.say("VIOLATION (%c): %s", rule, w.violation.Text)
	}
}

func (w *World) tracing() bool { return w.opt.Trace != nil }

// say writes a line of the transcript. Callers on hot paths ask tracing first.
func (w *World) say(format string, args ...any) {
	if w.opt.Trace == nil {
		return
	}
	t := w.now.Sub(time.Unix(0, 0))
	_, _ = io.WriteString(w.opt.Trace, fmt.Sprintf("%8.3fs %s\n", t.Seconds(), fmt.Sprintf(format, args...)))
}

// mix adds to the digest of the run.
func (w *World) mix(values ...uint64) {
	h := w.digest
	for _, v := range values {
		h = (h ^ v) * prime
		h ^= h >> 31
	}
	w.digest = h
}

func hash(s string) uint64 {
	h := uint64(basis)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * prime
	}
	return h
}

// keys are those of a prompt's full blocks.
func (w *World) keys(space *connector.KeySpace, tokens []int32, size int) []connector.BlockKey {
	if w.opt.Mutant != KeyOfBlockAlone {
		return space.Keys(tokens, size)
	}
	var keys []connector.BlockKey
	for i := size; i <= len(tokens); i += size {
		keys = append(keys, space.Next(space.Root(), tokens[i-size:i]))
	}
	return keys
}

// advance lets time pass, everything that is due happening at its time.
func (w *World) advance(d time.Duration) {
	end := w.now.Add(d)
	for range 10_000 {
		first := end
		var next *host
		for _, e := range w.engines {
			if e.host == nil {
				continue
			}
			t, ok := e.host.next()
			if ok && !t.After(first) && (next == nil || t.Before(first)) {
				first, next = t, e.host
			}
		}
		if next == nil {
			w.now = end
			return
		}
		if first.After(w.now) {
			w.now = first
		}
		next.fire()
		if w.violation != nil {
			return
		}
	}
	w.fail('i', "timers fire for ever")
}

// idleUntil is when something would happen by itself, if anything would.
func (w *World) idleUntil() (time.Time, bool) {
	var first time.Time
	found := false
	consider := func(t time.Time) {
		if !found || t.Before(first) {
			first, found = t, true
		}
	}
	for _, e := range w.engines {
		if e.host != nil {
			if t, ok := e.host.next(); ok {
				consider(t)
			}
		}
		if !e.askAt.IsZero() {
			consider(e.askAt)
		}
	}
	return first, found
}

// checkAll verifies what must hold after every step.
func (w *World) checkAll() {
	for _, e := range w.engines {
		e.check()
	}
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }
