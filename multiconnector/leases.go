package multiconnector

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

const (
	renewWait     = 500 * time.Millisecond // for a child that renews a hold (rule LEASE-01)
	restRenewals  = 5 * time.Millisecond   // after a call: a child that never waits gets no more of the processor than this
	retryRenewals = 100 * time.Millisecond // after a call that failed
	maxOver       = 1 << 12                // ended holds that one child has not heard of
)

// leases carry renewals from the children to the host and the host's answers back (rule MULTI-11). A
// child is called again only after the host has answered what it named, because that call tells it
// that the host agrees (LEASE-02).
type leases struct {
	begin sync.Once // of the calls

	mu       sync.Mutex
	children []lease
	wake     chan struct{} // of one: a child has named holds
}

// lease is what one child and the host have to say to each other.
type lease struct {
	leaser   bool
	named    []connector.HoldID // by the child's last call, in its own numbers
	passed   bool               // named was passed to the host, which has not answered yet
	answered chan struct{}      // closed when the host has answered named
	over     []connector.HoldID // ended holds that the child must be told about
}

func newLeases(children []connector.Scheduler) leases {
	list := make([]lease, len(children))
	for i, side := range children {
		_, list[i].leaser = connector.As[connector.Leaser](side)
	}
	return leases{children: list, wake: make(chan struct{}, 1)}
}

// Renewals implements connector.Leaser. A composite hold is renewed when any child renews its part,
// and every child that keeps a part of an ended hold learns about its end.
func (s *scheduler) Renewals(ctx context.Context, ended []connector.HoldID) ([]connector.HoldID, error) {
	s.leases.begin.Do(func() {
		for i, l := range s.lanes {
			if leaser, ok := connector.As[connector.Leaser](l.side); ok {
				s.work.Go(func() { s.watchLeases(i, leaser) })
			}
		}
	})
	s.leases.answer(s.ledger.end(ended))
	timer := time.NewTimer(renewWait)
	defer timer.Stop()
	for {
		if ids := s.renewed(); len(ids) > 0 {
			return ids, nil
		}
		select {
		case <-s.leases.wake:
		case <-timer.C:
			return nil, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// renewed are the composite holds that children have named since the last call. What a child names
// that is not an open hold of ours is refused.
func (s *scheduler) renewed() []connector.HoldID {
	s.leases.mu.Lock()
	defer s.leases.mu.Unlock()
	var ids []connector.HoldID
	for i := range s.leases.children {
		c := &s.leases.children[i]
		if len(c.named) == 0 || c.passed {
			continue
		}
		own, unknown := s.ledger.renew(i, c.named, time.Now())
		c.end(unknown)
		if len(own) == 0 {
			c.settle()
			continue
		}
		c.passed = true
		ids = append(ids, own...)
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// watchLeases learns which holds one child renews and tells it which are over. A call that fails
// renews nothing and is made again; the other children do not wait for it.
func (s *scheduler) watchLeases(child int, leaser connector.Leaser) {
	for s.life.Err() == nil {
		over := s.leases.overOf(child)
		ids, err := leaser.Renewals(s.life, slices.Clone(over))
		rest := restRenewals
		switch {
		case err == nil:
			answered := s.leases.name(child, ids, len(over))
			select {
			case <-answered:
			case <-s.life.Done():
				return
			}
		case errors.Is(err, context.Canceled) && s.life.Err() != nil:
			return
		default:
			rest = retryRenewals
		}
		select {
		case <-time.After(rest):
		case <-s.life.Done():
		}
	}
}

// overOf are the ended holds that a child has not heard of. The caller does not change them.
func (l *leases) overOf(child int) []connector.HoldID {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.children[child].over
}

// name takes the answer of a child that has been told about heard ended holds. The channel is closed when
// the host has answered what the child named.
func (l *leases) name(child int, ids []connector.HoldID, heard int) <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := &l.children[child]
	c.over = slices.Clone(c.over[heard:])
	answered := make(chan struct{})
	c.named, c.answered = ids, answered
	if len(ids) == 0 {
		c.settle()
		return answered
	}
	select {
	case l.wake <- struct{}{}:
	default:
	}
	return answered
}

// answer takes the host's word on what it was told last: all is renewed, except for these parts.
func (l *leases) answer(ended []childHold) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, part := range ended {
		l.children[part.child].end([]connector.HoldID{part.id})
	}
	for i := range l.children {
		if c := &l.children[i]; c.passed {
			c.settle()
		}
	}
}

// settle lets the child be called again.
func (c *lease) settle() {
	c.named, c.passed = nil, false
	close(c.answered)
}

// end notes that the child must be told about the end of holds.
func (c *lease) end(ids []connector.HoldID) {
	if c.leaser && len(c.over)+len(ids) <= maxOver {
		c.over = append(c.over, ids...)
	}
}
