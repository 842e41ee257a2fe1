// Package eventlog is the queue between whoever makes block events and the long poll that fetches them.
package eventlog

import (
	"context"
	"slices"
	"sync"

	"github.com/kvport/kvport/connector"
)

// The limits of a log.
const (
	MaxWaiting = 1 << 17 // keys of events that nobody has fetched
	MaxAnswer  = 1 << 16 // keys of one answer, as far as events can be parted
)

// Log numbers events and keeps them until they are fetched. What nobody fetches goes, the oldest
// event first, which its reader sees as a gap in the numbers. A Log is safe for use by several
// goroutines.
type Log struct {
	mu    sync.Mutex
	seq   uint64
	queue []connector.BlockEvent
	keys  int // of queue
	wake  chan struct{}
}

// New returns an empty Log, whose first event has number 1.
func New() *Log { return &Log{wake: make(chan struct{})} }

// Add gives an event the next number and appends it.
func (l *Log) Add(e connector.BlockEvent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seq++
	e.Seq = l.seq
	l.queue, l.keys = append(l.queue, e), l.keys+len(e.Keys)
	for len(l.queue) > 1 && (l.keys > MaxWaiting || len(l.queue) > connector.MaxEvents) {
		l.keys -= len(l.queue[0].Keys)
		l.queue = l.queue[1:]
	}
	close(l.wake)
	l.wake = make(chan struct{})
}

// Next takes the oldest events out, as many as one answer may hold, and waits while there are none.
func (l *Log) Next(ctx context.Context) ([]connector.BlockEvent, error) {
	for {
		events, wake := l.take()
		if len(events) > 0 {
			return events, nil
		}
		select {
		case <-wake:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// take gives what fits into one answer, and what is closed when there is more.
func (l *Log) take() ([]connector.BlockEvent, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n, keys := 0, 0
	for n < len(l.queue) && (n == 0 || keys+len(l.queue[n].Keys) <= MaxAnswer) {
		keys += len(l.queue[n].Keys)
		n++
	}
	events := slices.Clone(l.queue[:n])
	l.queue, l.keys = l.queue[n:], l.keys-keys
	return events, l.wake
}
