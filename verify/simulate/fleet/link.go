package fleet

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/kvport/kvport/engine/kvevents"
)

// link is what goes from one instance to one router: registrations, answers to health checks, and KV events.
type link struct {
	front   *front
	machine *machine
	nonce   string
	place   int             // of the instance at the router; -1: it is not known there
	order   *kvevents.Order // of the connection for KV events; nil: there is none
	last    time.Duration   // when the latest batch on the way comes
	exact   bool            // the router was told everything since the instance has started
	known   bool            // the router knew the instance when that was last looked at
}

// register registers the instance, as an engine does: with the nonce of the last answer, and again if that was not good.
func (l *link) register() {
	if !l.machine.up {
		return
	}
	for range 2 {
		m := l.machine.says()
		m.Nonce = l.nonce
		body, err := json.Marshal(m)
		if err != nil {
			return
		}
		nonce, err := l.front.core.Register(body)
		if nonce != "" {
			l.nonce = nonce
		}
		if err == nil {
			l.front.count.Registrations++
			l.place = l.where()
			l.front.put(l.place, l.machine)
			return
		}
		l.front.count.Refused++
	}
}

// where is the place of the instance at the router.
func (l *link) where() int { return l.front.core.Place(l.machine.role(), l.machine.address) }

// probe is a health check of the router.
func (l *link) probe() {
	if l.place = l.where(); l.place < 0 {
		return // it checks those that it knows
	}
	l.front.count.Probes++
	up := l.machine.up || l.front.w.o.Mutant == StickyToDead
	l.front.core.Probed(l.place, maxInFlight, up, !up)
	if l.machine.up && l.front.w.tells {
		l.connect()
	}
}

// connect lets the router follow the instance, if it does not yet. What was published before comes by a replay.
func (l *link) connect() {
	sink, begun := l.front.core.Follow(l.place)
	if sink == nil || l.order != nil && !begun {
		return
	}
	l.order = &kvevents.Order{Sink: l.wrap(sink), Count: l.counted}
	if fill := l.fill(); fill != nil {
		_ = fill() // it never fails
	}
}

// counted takes what the order counts.
func (l *link) counted(what kvevents.Counted, n int) {
	l.front.core.Count(what, n)
	switch what {
	case kvevents.CountedGaps:
		l.front.count.Gaps += n
	case kvevents.CountedReplayed:
		l.front.count.Replayed += n
	case kvevents.CountedLost:
		l.front.count.Lost += n
	case kvevents.CountedEvents, kvevents.CountedReplays, kvevents.CountedInvalid:
	}
}

// cut ends the connection: the instance has died.
func (l *link) cut() {
	if l.order == nil || l.front.w.o.Mutant == EpochIgnored {
		return
	}
	l.order.Close()
	l.order = nil
}

// send puts a batch on its way.
func (l *link) send(b batch) {
	w := l.front.w
	if l.order == nil || w.o.Mutant == SecondDeaf && l.front.number == 1 {
		return
	}
	copies := w.copies()
	if copies == 0 {
		return
	}
	delay := eventDelay
	if w.o.Fault == LateEvents {
		delay = lateBy
	}
	l.last = max(l.last, w.Now()+delay)
	life := l.machine.life
	w.At(l.last, func() {
		for range copies {
			if l.order != nil && (l.machine.life == life && l.machine.up || w.o.Mutant == EpochIgnored) {
				l.deliver(b)
			}
		}
	})
}

// deliver gives a batch to the router.
func (l *link) deliver(b batch) {
	l.front.count.Batches++
	for i := range b.events {
		switch ev := &b.events[i]; ev.Kind {
		case kvevents.Stored:
			l.front.count.Stored += len(ev.Hashes)
		case kvevents.Removed:
			l.front.count.Removed += len(ev.Hashes)
		case kvevents.Cleared:
		}
	}
	seq := b.seq
	if m := l.front.w.o.Mutant; m == GapsUnnoticed || m == EpochIgnored {
		seq = l.order.Next()
	}
	_ = l.order.Live(seq, b.read, l.fill()) // fill never fails
}

func (b batch) read() ([]kvevents.Event, error) { return b.events, nil }

// fill is how the router asks for a replay of what is missing; nil: the instance has none.
func (l *link) fill() func() error {
	if l.front.w.o.Fault == LostEvents {
		return nil
	}
	return func() error {
		kept := l.machine.kept
		if l.front.w.o.Mutant == ReplayedTwice && l.order.Next() > 0 {
			for _, b := range kept[:min(len(kept), replayedAgain)] {
				l.order.Sink.Apply(b.events)
			}
		}
		for _, b := range kept {
			l.order.Replayed(b.seq, b.read)
		}
		return nil
	}
}

// replayedAgain is how many batches the mutant ReplayedTwice applies a second time.
const replayedAgain = 64

// wrap is the sink that a router has for the instance, with what a mutant has wrong.
func (l *link) wrap(sink kvevents.Sink) kvevents.Sink { return &noting{sink, l} }

// noting notes whether the router knows all of an instance.
type noting struct {
	kvevents.Sink
	link *link
}

// From implements kvevents.Sink.
func (n *noting) From(seq uint64) {
	n.link.exact = seq == 0
	n.Sink.From(seq)
}

// Lost implements kvevents.Sink.
func (n *noting) Lost() {
	n.link.exact = false
	n.Sink.Lost()
}

// Apply implements kvevents.Sink.
func (n *noting) Apply(events []kvevents.Event) {
	switch n.link.front.w.o.Mutant {
	case RemovalsForgotten:
		events = slices.DeleteFunc(slices.Clone(events), func(ev kvevents.Event) bool { return ev.Kind == kvevents.Removed })
	case MemoryUnbounded: // a block that no instance has, and so none removes
		n.link.front.leaked++
		odd := piece{n.link.front.leaked | 1<<63, blockTokens}
		events = append(slices.Clone(events), kvevents.Event{
			Kind: kvevents.Stored, Hashes: []kvevents.Hash{kvevents.NumberHash(odd.id)}, Tokens: appendTokens(nil, []piece{odd}, 0, blockTokens),
			BlockSize: blockTokens, Medium: kvevents.GPU, Group: -1,
		})
	default:
	}
	n.Sink.Apply(events)
}
