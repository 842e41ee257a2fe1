package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/multiconnector"
)

// childScheduler is the scheduler side of a child, through all its lives.
type childScheduler struct {
	*child
	side int
	news *childReports
}

// Capabilities implements connector.Partial.
func (s childScheduler) Capabilities() connector.Capability { return s.src.info.Capabilities }

// Match implements connector.Scheduler.
func (s childScheduler) Match(ctx context.Context, qs []connector.Query) ([]connector.Match, error) {
	matches, asked := s.matchPlaced(qs)
	if len(asked) == 0 {
		return matches, nil
	}
	rest := make([]connector.Query, len(asked))
	for n, i := range asked {
		rest[n] = qs[i]
	}
	answers, err := childCall(ctx, s, s.set.Deadlines.Later, func(ctx context.Context, _ *life, side connector.Scheduler) ([]connector.Match, error) {
		return side.Match(ctx, rest)
	})
	if err != nil {
		return nil, err
	}
	for n, i := range asked {
		matches[i] = answers[n]
	}
	return matches, nil
}

// Plan implements connector.Planner.
func (s childScheduler) Plan(ctx context.Context, step *connector.Step) (*connector.Plan, error) {
	return childCall(ctx, s, s.set.Deadlines.Plan, func(ctx context.Context, _ *life, side connector.Planner) (*connector.Plan, error) {
		return side.Plan(ctx, step)
	})
}

// Finish implements connector.Holder.
func (s childScheduler) Finish(ctx context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	return childCall(ctx, s, s.set.Deadlines.Finish, func(ctx context.Context, l *life, side connector.Holder) ([]connector.Hold, error) {
		s.mu.Lock()
		s.holds.Ask(true)
		s.mu.Unlock()
		holds, err := side.Finish(ctx, ended)
		s.mu.Lock()
		defer s.mu.Unlock()
		defer s.holds.Ask(false)
		if err != nil {
			return nil, err
		}
		for i := range holds {
			holds[i].Weak = holds[i].Weak || i < len(ended) && ended[i].Weak // rule TURN-01
			holds[i].ID = s.holds.Add(time.Now(), l.n, &holds[i], s.set.Deadlines.HoldMax)
		}
		s.wakePoll()
		return holds, nil
	})
}

// Consumed implements connector.Holder.
func (s childScheduler) Consumed(ctx context.Context) ([]connector.HoldID, error) {
	over, err := s.HoldsOver(ctx)
	return over.Consumed(), err
}

// HoldsOver implements multiconnector.HoldWatcher. What a process kept that died is over.
func (s childScheduler) HoldsOver(ctx context.Context) (multiconnector.HoldsOver, error) {
	for {
		s.mu.Lock()
		pending, l, changed := s.holds.Pending(), s.now, s.changed
		over := multiconnector.HoldsOver(s.holds.Take())
		var side connector.Scheduler
		if l != nil {
			side = l.scheduler(s.side)
		}
		poll, cancel := context.WithCancel(ctx)
		s.child.poll = cancel
		s.mu.Unlock()
		if pending || ctx.Err() != nil {
			cancel()
			return over, ctx.Err()
		}
		var err error
		if side == nil {
			select {
			case <-changed:
			case <-poll.Done():
			}
		} else {
			err = s.poll(poll, l, side)
		}
		interrupted := poll.Err() != nil
		cancel()
		if err != nil && !interrupted {
			return multiconnector.HoldsOver{}, err
		}
	}
}

// poll asks one life once what consumers have fetched.
func (s childScheduler) poll(ctx context.Context, l *life, side connector.Scheduler) error {
	h, ok := connector.As[connector.Holder](side)
	if !ok {
		return connector.ErrIncompatible
	}
	ids, err := h.Consumed(ctx)
	switch {
	case err == nil:
		s.mu.Lock()
		s.holds.Consumed(l.n, ids)
		s.wakePoll()
		s.mu.Unlock()
	case errors.Is(err, plugin.ErrLost) || errors.Is(err, plugin.ErrUnanswered):
		s.down(l, fmt.Errorf("scheduler side: %w", err))
		return nil // its holds are over when it is reaped
	}
	return err
}

// Renewals implements connector.Leaser. A life hears only of its own holds, and of what it has named
// that is not one of them.
func (s childScheduler) Renewals(ctx context.Context, ended []connector.HoldID) ([]connector.HoldID, error) {
	l, side, err := sideOf[connector.Scheduler](s.child, s.side)
	if err != nil {
		return nil, err
	}
	leaser, ok := connector.As[connector.Leaser](side)
	if !ok {
		return nil, connector.ErrIncompatible
	}
	s.mu.Lock()
	over := s.holds.Ended(l.n, ended)
	s.mu.Unlock()
	ids, err := leaser.Renewals(ctx, over)
	if err != nil {
		return nil, s.judge(l, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.holds.Renewed(l.n, ids), nil
}

// Reset implements connector.Resetter.
func (s childScheduler) Reset(ctx context.Context) (bool, error) {
	defer s.src.place.pause()()
	return childCall(ctx, s, s.set.Deadlines.Save, func(ctx context.Context, _ *life, side connector.Resetter) (bool, error) {
		return side.Reset(ctx)
	})
}

// Close implements connector.Scheduler. The process goes on.
func (s childScheduler) Close() error { return s.closeSide(s.side) }

// childCall has the life that takes calls use a power.
func childCall[P, T any](ctx context.Context, c childScheduler, limit time.Duration, use func(context.Context, *life, P) (T, error)) (T, error) {
	l, side, err := sideOf[connector.Scheduler](c.child, c.side)
	if err != nil {
		var none T
		return none, err
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	v, err := usePower(ctx, side, func(ctx context.Context, p P) (T, error) { return use(ctx, l, p) })
	return v, c.judge(l, err)
}
