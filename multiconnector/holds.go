package multiconnector

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

// maxEarly bounds the reports of one child about holds that it has not announced yet.
const maxEarly = 1 << 10

// retryHolds is the pause after a failed long poll.
const retryHolds = 100 * time.Millisecond

// childHold names one child's hold.
type childHold struct {
	child int
	id    connector.HoldID
}

// held is one composite hold: it is over when no child waits for consumers any more.
type held struct {
	id      connector.HoldID
	waiting map[childHold]int // consumers that have not fetched yet
	ttl     time.Duration
	expires time.Time // the host has released it by then
	over    bool      // the host has released it before all was fetched
}

// tellOver is how long after the end of a hold the host may still speak of it.
const tellOver = 10 * time.Second

// renew notes that a hold's time begins again.
func (h *held) renew(now time.Time) { h.expires = now.Add(2*h.ttl + tellOver) }

// ledger counts holds.
type ledger struct {
	mu    sync.Mutex
	last  connector.HoldID
	open  map[childHold]*held
	early map[childHold]int // reported before they were announced
	over  []connector.HoldID
	wake  chan struct{}
}

func newLedger() ledger {
	return ledger{open: map[childHold]*held{}, early: map[childHold]int{}, wake: make(chan struct{}, 1)}
}

// Finish implements connector.Holder. Every child that holds is asked; the composite holds as long as
// one of them does, and its ticket has a section of each.
func (s *scheduler) Finish(ctx context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	answers := make([][]connector.Hold, len(s.lanes))
	var work sync.WaitGroup
	for i, l := range s.lanes {
		if _, can := connector.As[connector.Holder](l.side); !can {
			continue
		}
		got := make(chan []connector.Hold, 1)
		work.Go(func() {
			err := l.try(ctx, untilDeadline(ctx), func(ctx context.Context, side connector.Scheduler) error {
				h, _ := connector.As[connector.Holder](side)
				holds, err := h.Finish(ctx, ended)
				got <- holds
				return err
			})
			if err == nil {
				if holds := <-got; len(holds) == len(ended) {
					answers[i] = holds
				}
			}
		})
	}
	work.Wait()
	out := make([]connector.Hold, len(ended))
	for k := range ended {
		out[k] = s.hold(k, answers)
		s.routes.forget(ended[k].Request)
	}
	return out, nil
}

// hold joins the children's holds of one ended request.
func (s *scheduler) hold(k int, answers [][]connector.Hold) connector.Hold {
	now := time.Now()
	joint := connector.Hold{Consumers: 1, Weak: true}
	h := &held{waiting: map[childHold]int{}}
	var sections []section
	for i, holds := range answers {
		if holds == nil || holds[k].ID == 0 {
			continue
		}
		one := holds[k]
		if one.TTL <= 0 {
			one.TTL = HoldTTL
		}
		joint.TTL, joint.Weak = max(joint.TTL, one.TTL), joint.Weak && one.Weak
		sections = append(sections, section{s.children[i].Name, one.Ticket})
		if !one.Weak {
			h.waiting[childHold{i, one.ID}] = max(one.Consumers, 1)
		}
	}
	if len(sections) == 0 {
		return connector.Hold{}
	}
	h.ttl = joint.TTL
	h.renew(now)
	joint.ID, joint.Ticket = s.ledger.add(h, now), sealTicket(sections)
	return joint
}

// add takes on a hold and gives it a number.
func (l *ledger) add(h *held, now time.Time) connector.HoldID {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c, old := range l.open {
		if now.After(old.expires) {
			delete(l.open, c) // the host has released it long ago
		}
	}
	l.last++
	h.id = l.last
	for c, consumers := range h.waiting {
		h.waiting[c] = consumers - l.early[c]
		delete(l.early, c)
		if h.waiting[c] <= 0 {
			delete(h.waiting, c)
			if len(h.waiting) == 0 {
				l.report(h)
			}
			continue
		}
		l.open[c] = h
	}
	return h.id
}

// consumed counts one consumer of a child's hold.
func (l *ledger) consumed(c childHold) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.open[c]
	if h == nil {
		if len(l.early) < maxEarly {
			l.early[c]++
		}
		return
	}
	if h.waiting[c]--; h.waiting[c] > 0 {
		return
	}
	delete(h.waiting, c)
	delete(l.open, c)
	if len(h.waiting) == 0 && !h.over {
		l.report(h)
	}
}

// renew gives the composite holds that a child renews its parts of, and what it named that is not an
// open hold.
func (l *ledger) renew(child int, ids []connector.HoldID, now time.Time) (own, unknown []connector.HoldID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		h := l.open[childHold{child, id}]
		if h == nil || h.over {
			unknown = append(unknown, id)
			continue
		}
		h.renew(now)
		own = append(own, h.id)
	}
	return own, unknown
}

// end notes that the host has released composite holds, and gives the parts that children keep of them.
func (l *ledger) end(ids []connector.HoldID) (parts []childHold) {
	if len(ids) == 0 {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for c, h := range l.open {
		if !h.over && slices.Contains(ids, h.id) {
			parts = append(parts, c)
		}
	}
	for _, c := range parts {
		l.open[c].over = true
	}
	return parts
}

func (l *ledger) report(h *held) {
	l.over = append(l.over, h.id)
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// Consumed implements connector.Holder. A composite hold is reported once, after the last of its
// children's was fetched by all its consumers.
func (s *scheduler) Consumed(ctx context.Context) ([]connector.HoldID, error) {
	for {
		s.ledger.mu.Lock()
		over := s.ledger.over
		s.ledger.over = nil
		s.ledger.mu.Unlock()
		if len(over) > 0 {
			return over, nil
		}
		select {
		case <-s.ledger.wake:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// watchHolds learns what consumers fetched from one child.
func (s *scheduler) watchHolds(life context.Context, child int, holder connector.Holder) {
	for life.Err() == nil {
		ids, err := holder.Consumed(life)
		if err == nil {
			for _, id := range ids {
				s.ledger.consumed(childHold{child, id})
			}
			continue
		}
		if errors.Is(err, context.Canceled) && life.Err() != nil {
			return
		}
		select {
		case <-time.After(retryHolds):
		case <-life.Done():
		}
	}
}
