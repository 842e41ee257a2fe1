package fleet

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/kvport/kvport/verify/simulate/clock"
)

// world is a fleet while it runs: one loop over what happens in virtual time.
type world struct {
	clock.Clock
	o        Options
	rng      *rand.Rand // of faults, and of when registrations and health checks come
	trace    *trace
	machines []*machine
	fronts   []*front
	tells    bool // instances publish KV events, because routers look at them
	quiet    bool // the trace is over, and nothing is lost any more
	over     bool
	left     int           // requests that have not ended
	ended    time.Duration // when the trace was over or, if that was later, the last request has ended
	lost     bool          // the mutant RequestLost has lost its request

	result   Result
	ttft     []float32 // milliseconds
	recent   []*turn   // the last that were answered
	broken   map[string]bool
	arrivals int

	tokens []int32 // scratch
	text   []byte
}

// every makes something happen again and again, with times between that vary by a part of them.
func (w *world) every(first, pause time.Duration, vary float64, do func()) {
	var again func()
	again = func() {
		do()
		if !w.over {
			w.After(time.Duration(float64(pause)*(1+vary*(2*w.rng.Float64()-1))), again)
		}
	}
	w.At(first, again)
}

// clock is the time by which decisions are measured.
func (w *world) clock() time.Duration {
	if w.o.Clock == nil {
		return 0
	}
	return w.o.Clock()
}

// Run plays a fleet. An error says what is wrong with the options, or that ctx has ended; what is wrong with the fleet is in the
// result.
func Run(ctx context.Context, o Options) (*Result, error) {
	if o.Rate == 0 {
		o.Rate = 2
	}
	if err := o.Check(); err != nil {
		return nil, err
	}
	if o.Mutant == TimeInTrace {
		o.Seed += uint64(time.Now().UnixNano())
	}
	w := &world{o: o, rng: rand.New(rand.NewPCG(o.Seed, 0x666c656574)), trace: newTrace(&o), left: o.Requests, broken: map[string]bool{}}
	for i := range o.Fault.routers() {
		f, err := newFront(w, i)
		if err != nil {
			return nil, err
		}
		w.fronts = append(w.fronts, f)
	}
	w.tells = o.Knowledge == ByEvents && w.fronts[0].core.UsesPrompts()
	for i := range o.Instances {
		w.machines = append(w.machines, newMachine(w, i))
	}
	w.start()
	for n := 0; !w.over; n++ {
		if n%1024 == 0 && ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if !w.Next() {
			break
		}
	}
	w.finish()
	r := w.result // the fleet is not kept with it
	return &r, nil
}

// start lets everything begin that happens by itself.
func (w *world) start() {
	for _, m := range w.machines {
		for _, l := range m.links {
			w.every(w.within(time.Second), registerEvery, 0.1, func() {
				l.register()
				if w.o.Mutant == RegistrationsFlood {
					w.flood(l)
				}
			})
			w.every(time.Second+w.within(probeEvery*4/5), probeEvery, 0.2, l.probe)
		}
	}
	for _, f := range w.fronts {
		w.every(time.Second, time.Second, 0, f.sweep)
	}
	w.schedule()
	w.arriveNext()
}

func (w *world) within(d time.Duration) time.Duration { return time.Duration(w.rng.Int64N(int64(d))) }

// flood lets all other instances register with a router.
func (w *world) flood(by *link) {
	for _, m := range w.machines {
		if l := m.links[by.front.number]; l != by {
			l.register()
		}
	}
}

// arriveNext draws the next request of the trace, if there is one.
func (w *world) arriveNext() {
	if w.arrivals == w.o.Requests {
		w.ended = w.Now()
		w.rest()
		return
	}
	w.arrivals++
	t := w.trace.next()
	w.At(t.at, func() {
		w.arrive(t)
		w.arriveNext()
	})
}

// rest waits for the last requests to end, and then for all that is on its way to come. It gives up if for long none has ended:
// what is left is lost.
func (w *world) rest() {
	if w.left > 0 && w.Now()-w.ended < longest {
		w.After(time.Second, w.rest)
		return
	}
	w.result.Seconds = w.Now().Seconds()
	for _, f := range w.fronts {
		w.result.UntilRest.add(&f.count)
	}
	w.quiet = true
	for _, m := range w.machines { // a batch without events shows a router that something is missing before it
		if m.up && w.tells {
			m.publish(nil)
		}
	}
	w.After(settled, func() { w.over = true })
}

// violate notes that something is wrong, once for each kind.
func (w *world) violate(kind, format string, args ...any) {
	if w.broken[kind] {
		return
	}
	w.broken[kind] = true
	w.result.Violations = append(w.result.Violations, fmt.Sprintf("%s: after %v: %s", kind, w.Now(), fmt.Sprintf(format, args...)))
}
