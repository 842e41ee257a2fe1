package host

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/tracker"
)

// eventQueue is an unbounded queue with a channel at its end.
type eventQueue struct {
	out chan Event

	mu      sync.Mutex
	waiting []Event
	closed  bool
	wake    chan struct{} // capacity 1
	giveUp  chan struct{}
	done    chan struct{}
}

func newEventQueue() *eventQueue {
	q := &eventQueue{
		out: make(chan Event), wake: make(chan struct{}, 1),
		giveUp: make(chan struct{}), done: make(chan struct{}),
	}
	go q.pump()
	return q
}

// put adds an event; it never waits.
func (q *eventQueue) put(e Event) {
	q.mu.Lock()
	q.waiting = append(q.waiting, e)
	q.mu.Unlock()
	q.signal()
}

func (q *eventQueue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

func (q *eventQueue) pump() {
	defer close(q.done)
	defer close(q.out)
	for {
		q.mu.Lock()
		batch, closed := q.waiting, q.closed
		q.waiting = nil
		q.mu.Unlock()
		for _, e := range batch {
			select {
			case q.out <- e:
			case <-q.giveUp:
				return
			}
		}
		switch {
		case len(batch) > 0:
		case closed:
			return
		default:
			<-q.wake
		}
	}
}

// close ends the queue when all is read, or when the reader has not read it all within patience.
func (q *eventQueue) close(patience time.Duration) {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.signal()
	select {
	case <-q.done:
	case <-time.After(patience):
		close(q.giveUp)
		<-q.done
	}
}

// tell passes an event of the tracker on to the engine. The caller holds mu.
func (h *Host) tell(b *tracker.Event) {
	e := Event{
		Request: b.Request, Step: b.Step, Blocks: b.Blocks, Failed: b.Failed, Held: b.Held, Lost: b.Lost, Replace: b.Replace, Err: b.Err, Took: b.Took,
	}
	switch b.Kind {
	case tracker.Loaded:
		e.Kind, e.Unverified = Loaded, b.Unverified
		h.endArriving(b)
		h.metrics.byLayer.Add(float64(b.ByLayer))
		h.metrics.moved("load", b)
		if b.Damaged > 0 {
			h.log.Warn("damaged blocks, they are computed again", "connector", h.info.Name, "request", b.Request, "blocks", b.Damaged, "first", b.Damage)
		}
		h.complain("load", &h.badLoads, b)
	case tracker.Saved:
		e.Kind = Saved
		if !b.Refused {
			h.metrics.moved("save", b)
		}
		h.complain("save", &h.badSaves, b)
	case tracker.Finished:
		e.Kind = Finished
		e.Ticket = h.seal(b.Request, b.Ticket)
	case tracker.Released:
		fault.Crash("host.hold.release")
		e.Kind = Released
		h.metrics.released.WithLabelValues(b.Reason).Inc()
	case tracker.Answered:
		e.Kind = Answered
	case tracker.Stored:
		e.Kind = Stored
	case tracker.Arriving:
		h.tellArriving(b)
		return
	}
	h.events.put(e)
}

// BlockReport is what a connector has reported about blocks that came and went, in order (capability
// CanEvents). Keys are those of the engine's queries and transfers.
type BlockReport struct {
	// Gap: events before these were lost, or the plugin has started again. Only what Events say is known
	// about this connector's blocks now.
	Gap    bool
	Events []connector.BlockEvent // the reader's; may be empty
}

// blockEventReporter passes on what the connector reports about blocks. It is used by one generation at a time.
type blockEventReporter struct {
	out chan<- BlockReport // nil: nobody asked
	gap bool               // to be said with the next report
}

// report passes events on, if the reader has room for them.
func (h *Host) report(events []connector.BlockEvent) {
	if len(events) == 0 && !h.blockEvents.gap {
		return
	}
	select {
	case h.blockEvents.out <- BlockReport{Gap: h.blockEvents.gap, Events: events}:
		h.blockEvents.gap = false
		h.metrics.events.Add(float64(len(events)))
	default:
		h.blockEvents.gap = true
		h.metrics.lost.Add(float64(len(events)))
	}
}

// watchEvents waits for events of the connector and passes them on. What was reported before the plugin
// started again is no longer known to hold: that is a gap.
func (g *generation) watchEvents(life context.Context) {
	h := g.h
	if g.n > 1 {
		h.blockEvents.gap = true
		h.report(nil)
	}
	source, ok := connector.As[connector.EventSource](g.sched)
	order := &eventOrder{}
	for ok && life.Err() == nil {
		events, err := source.Events(life)
		switch {
		case errors.Is(err, plugin.ErrLost), errors.Is(err, plugin.ErrUnanswered):
			return
		case err != nil || len(events) == 0: // it did not wait
			pause(life, slowestRetry)
			continue
		}
		events, lost, err := order.check(events)
		if err != nil {
			h.violation(err.Error())
		}
		if lost > 0 {
			h.blockEvents.gap = true
			h.metrics.lost.Add(float64(lost))
		}
		h.report(events)
		pause(life, betweenEvents)
	}
}

// eventOrder checks that events come in order (rule EVENT-02).
type eventOrder struct {
	last  uint64
	begun bool
}

// check gives the events that are new. Those before a gap are left out: what they say does not hold
// when nothing is known any more. lost is how many are missing.
func (o *eventOrder) check(events []connector.BlockEvent) (fresh []connector.BlockEvent, lost uint64, err error) {
	fresh = events[:0]
	for _, e := range events {
		switch {
		case o.begun && e.Seq <= o.last:
			err = fmt.Errorf("events: seq %d after %d (rule EVENT-02)", e.Seq, o.last)
			continue
		case o.begun && e.Seq > o.last+1:
			lost += e.Seq - o.last - 1 + uint64(len(fresh))
			fresh = events[:0]
		}
		o.last, o.begun = e.Seq, true
		fresh = append(fresh, e)
	}
	return fresh, lost, err
}
