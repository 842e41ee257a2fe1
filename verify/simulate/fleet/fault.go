package fleet

import "time"

// Fault is what goes wrong in a fleet.
type Fault uint8

// The faults.
const (
	NoFault         Fault = iota
	RacksFail             // three of ten racks fail at once, and come back with empty caches: one within its lease, two later
	LateEvents            // KV events come five seconds late
	MissedEvents          // one batch of KV events in twenty does not come, and replays have it
	LostEvents            // one in twenty does not come, and there are no replays
	RepeatedEvents        // one in fifty comes twice
	TwoRouters            // requests go to one of two routers by chance, each of which has its own history and events
	TwoRoutersApart       // conversations do: each stays at its router
	faults
)

// Faults are all of them.
func Faults() (list []Fault) {
	for f := NoFault + 1; f < faults; f++ {
		list = append(list, f)
	}
	return list
}

// String is the fault as tables name it.
func (f Fault) String() string {
	return [faults]string{
		"none", "racks fail", "events late", "events missed, replayed", "events lost", "events repeated", "two routers", "two routers, by conversation",
	}[f]
}

// The shares of batches that a fault takes or doubles.
const (
	lostShare     = 0.05
	repeatedShare = 0.02
)

// loses reports whether batches of events do not come.
func (f Fault) loses() bool { return f == MissedEvents || f == LostEvents }

// replays reports whether replays are needed all the time, so that instances keep batches. With racks that fail, an instance may come back and
// be followed just before its lease ends, and be followed from its beginning once it has registered.
func (f Fault) replays() bool { return f == MissedEvents || f == RepeatedEvents || f == RacksFail }

// confuses reports whether a router may not know all of an instance, however long nothing happens.
func (f Fault) confuses() bool { return f == LostEvents || f == RepeatedEvents }

// routers is how many routers there are.
func (f Fault) routers() int {
	if f == TwoRouters || f == TwoRoutersApart {
		return 2
	}
	return 1
}

// copies is how often the next batch comes.
func (w *world) copies() int {
	switch {
	case w.quiet:
	case w.o.Fault.loses() && w.rng.Float64() < lostShare:
		return 0
	case w.o.Fault == RepeatedEvents && w.rng.Float64() < repeatedShare:
		return 2
	}
	return 1
}

// shortOutage is how long the first of the racks is away that fail: less than a lease.
const shortOutage = 8 * time.Second

// schedule lets racks fail after two fifths of the trace. One of them comes back soon, the others after another fifth.
func (w *world) schedule() {
	if w.o.Fault != RacksFail {
		return
	}
	length := w.o.length()
	for _, m := range w.machines {
		if m.rack() >= racksFail {
			continue
		}
		fails := begin + length*2/5
		outage := length / 5
		if m.rack() == 0 {
			outage = shortOutage
		}
		w.At(fails, m.die)
		w.At(fails+outage, m.rise)
	}
}
