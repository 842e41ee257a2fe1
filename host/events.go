package host

import (
	"sync"
	"time"

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
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-q.done:
	case <-timer.C:
		close(q.giveUp)
		<-q.done
	}
}

// tell passes an event of the tracker on to the engine. The caller holds mu.
func (h *Host) tell(b *tracker.Event) {
	e := Event{
		Request: b.Request, Step: b.Step, Blocks: b.Blocks, Failed: b.Failed, Held: b.Held, Lost: b.Lost, Err: b.Err,
	}
	switch b.Kind {
	case tracker.Loaded:
		e.Kind = Loaded
		h.metrics.moved("load", b)
		if b.Damaged > 0 {
			h.log.Warn("damaged blocks, they are computed again", "connector", h.info.Name, "request", b.Request, "blocks", b.Damaged)
		}
		h.complain("load", &h.badLoads, b)
	case tracker.Saved:
		e.Kind = Saved
		h.endProgress(b.Step)
		h.metrics.moved("save", b)
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
	}
	h.events.put(e)
}
