package multiconnector

import (
	"context"
	"slices"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/eventlog"
)

// The limits of what is kept of events.
const (
	maxReported = 1 << 17 // blocks that were reported as stored
	maxGone     = 1 << 12 // keys of one event that the queue makes itself
)

// eventQueue merges the events of the children into one stream. A block is stored when the first child has
// it, and removed when the last one has lost it. After a gap in a child's events nobody knows which blocks it
// has: all of them count as lost.
type eventQueue struct {
	begin sync.Once // of the long polls
	log   *eventlog.Log

	mu     sync.Mutex
	has    map[connector.BlockKey]*reported
	oldest []connector.BlockKey // of has, by their first report; may name some that are gone
}

// reported is what was reported about a block.
type reported struct {
	children uint32 // who have it, as bits
	medium   string // where it was first
	scope    connector.Scope
}

func newEventQueue() eventQueue {
	return eventQueue{has: map[connector.BlockKey]*reported{}, log: eventlog.New()}
}

// Events implements connector.EventSource.
func (s *scheduler) Events(ctx context.Context) ([]connector.BlockEvent, error) {
	s.events.begin.Do(func() {
		for i, l := range s.lanes {
			if source, ok := connector.As[connector.EventSource](l.side); ok {
				s.work.Go(func() { s.watchEvents(i, source) })
			}
		}
	})
	return s.events.log.Next(ctx)
}

// watchEvents reads one child's events.
func (s *scheduler) watchEvents(child int, source connector.EventSource) {
	last, begun := uint64(0), false
	for s.life.Err() == nil {
		events, err := source.Events(s.life)
		if err != nil || len(events) == 0 {
			s.pause(s.life, retryPoll)
			continue
		}
		for i := range events {
			e := &events[i]
			if begun && e.Seq <= last {
				continue // it was reported before
			}
			if begun && e.Seq != last+1 {
				s.events.lose(child)
			}
			last, begun = e.Seq, true
			s.events.hear(child, e)
		}
	}
}

// hear takes a child's event.
func (d *eventQueue) hear(child int, e *connector.BlockEvent) {
	switch e.Kind {
	case connector.BlocksStored:
		d.stored(child, e)
	case connector.BlocksRemoved:
		d.mu.Lock()
		defer d.mu.Unlock()
		d.removed(child, e.Keys)
	case connector.BlocksCleared:
		d.lose(child)
	}
}

// stored notes that a child has blocks and reports those that no other has.
func (d *eventQueue) stored(child int, e *connector.BlockEvent) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var fresh []connector.BlockKey
	for _, k := range e.Keys {
		t := d.has[k]
		if t == nil {
			t = &reported{medium: e.Medium, scope: e.Scope}
			d.has[k] = t
			d.oldest = append(d.oldest, k)
			fresh = append(fresh, k)
		}
		t.children |= 1 << child
	}
	if len(fresh) > 0 {
		d.log.Add(connector.BlockEvent{Kind: connector.BlocksStored, Keys: fresh, Medium: e.Medium, Scope: e.Scope})
	}
	for len(d.has) > maxReported { // nobody waits for its end any more
		k := d.oldest[0]
		d.oldest = d.oldest[1:]
		if t := d.has[k]; t != nil {
			delete(d.has, k)
			d.log.Add(connector.BlockEvent{Kind: connector.BlocksRemoved, Keys: []connector.BlockKey{k}, Medium: t.medium, Scope: t.scope})
		}
	}
	if len(d.oldest) > 2*maxReported { // most are gone
		d.oldest = slices.DeleteFunc(d.oldest, func(k connector.BlockKey) bool { return d.has[k] == nil })
	}
}

// removed notes that a child has lost blocks and reports those that no other has. The caller holds mu.
func (d *eventQueue) removed(child int, keys []connector.BlockKey) {
	type place struct {
		medium string
		scope  connector.Scope
	}
	gone := map[place][]connector.BlockKey{}
	for _, k := range keys {
		t := d.has[k]
		if t == nil || t.children&(1<<child) == 0 {
			continue
		}
		if t.children &^= 1 << child; t.children == 0 {
			delete(d.has, k)
			at := place{t.medium, t.scope}
			if gone[at] = append(gone[at], k); len(gone[at]) == maxGone {
				d.log.Add(connector.BlockEvent{Kind: connector.BlocksRemoved, Keys: gone[at], Medium: at.medium, Scope: at.scope})
				delete(gone, at)
			}
		}
	}
	for at, list := range gone {
		d.log.Add(connector.BlockEvent{Kind: connector.BlocksRemoved, Keys: list, Medium: at.medium, Scope: at.scope})
	}
}

// lose notes that nothing is known any more of what a child has.
func (d *eventQueue) lose(child int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var keys []connector.BlockKey
	others := false
	for k, t := range d.has {
		if t.children&(1<<child) != 0 {
			keys = append(keys, k)
		}
		others = others || t.children != 1<<child
	}
	if len(keys) > 0 && !others {
		clear(d.has)
		d.oldest = nil
		d.log.Add(connector.BlockEvent{Kind: connector.BlocksCleared, Scope: connector.ScopeEngine})
		return
	}
	d.removed(child, keys)
}
