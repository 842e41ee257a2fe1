package host

import (
	"context"
	"errors"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
)

// childReports is what the scheduler side of a child has counted and reported in all its lives.
type childReports struct {
	stats *connectorStats

	mu    sync.Mutex
	mute  uint64 // the life that did not answer Stats and is not asked again
	seq   uint64 // of the last event that was passed on
	from  uint64 // the life whose events are read; 0: none yet
	order eventOrder
}

func newChildReports(c *child) *childReports {
	return &childReports{stats: newConnectorStats("", c.src.info.Stats)}
}

// Stats implements connector.StatsSource. Counters continue when the child starts again; while it is down
// they keep their values.
func (s childScheduler) Stats(ctx context.Context) ([]connector.Stat, error) {
	if l, side, err := s.scheduler(s.side); err == nil && !s.muted(l.n) {
		source, ok := connector.As[connector.StatsSource](side)
		if !ok {
			return nil, connector.ErrIncompatible
		}
		s.note(ctx, l, source)
	}
	return s.news.stats.values(), nil
}

func (s childScheduler) muted(life uint64) bool {
	s.news.mu.Lock()
	defer s.news.mu.Unlock()
	return s.news.mute == life
}

// note asks one life for its numbers.
func (s childScheduler) note(ctx context.Context, l *life, source connector.StatsSource) {
	ctx, cancel := context.WithTimeout(ctx, statsWait)
	defer cancel()
	stats, err := source.Stats(ctx)
	switch {
	case err == nil:
		if err := s.news.stats.take(l.n, stats); err != nil {
			s.src.complain("stats: " + err.Error())
		}
	case errors.Is(err, plugin.ErrUnanswered):
		s.news.mu.Lock()
		s.news.mute = l.n
		s.news.mu.Unlock()
		s.src.complain("stats: no answer, it is not asked again (rule STAT-03)")
	}
}

// complain counts what broke the contract.
func (s *source) complain(what string) {
	if s.violated != nil {
		s.violated(what)
	}
}

// Events implements connector.EventSource. The end of a process is reported as BlocksCleared: what it
// said does not hold while it is down, and what its heir still has nobody knows. Events that were lost
// show as a gap.
func (s childScheduler) Events(ctx context.Context) ([]connector.BlockEvent, error) {
	for {
		s.mu.Lock()
		l, changed := s.now, s.changed
		var side connector.Scheduler
		if l != nil {
			side = l.scheduler(s.side)
		}
		s.mu.Unlock()
		if cleared := s.news.enter(l); cleared != nil {
			return cleared, nil
		}
		var events []connector.BlockEvent
		var err error
		if source, ok := connector.As[connector.EventSource](side); ok {
			events, err = source.Events(ctx)
		} else if side != nil {
			return nil, connector.ErrIncompatible
		}
		if err == nil && len(events) > 0 {
			if events = s.passOn(l, events); len(events) > 0 {
				return events, nil
			}
			continue
		}
		gone := side == nil || errors.Is(err, plugin.ErrLost) || errors.Is(err, plugin.ErrUnanswered)
		if !gone || ctx.Err() != nil {
			return nil, errors.Join(err, ctx.Err())
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// enter notes the life that events are read from; l is nil while none takes calls. The answer, unless
// nil, says that those of the life before are over.
func (n *childReports) enter(l *life) []connector.BlockEvent {
	n.mu.Lock()
	defer n.mu.Unlock()
	was, is := n.from, uint64(0)
	if l != nil {
		is = l.n
	}
	n.from = is
	if was == is {
		return nil
	}
	n.order = eventOrder{}
	if was == 0 {
		return nil
	}
	n.seq++
	return []connector.BlockEvent{{Seq: n.seq, Kind: connector.BlocksCleared, Scope: connector.ScopeEngine}}
}

// passOn numbers the events of one life on from those of the ones before.
func (s childScheduler) passOn(l *life, events []connector.BlockEvent) []connector.BlockEvent {
	s.news.mu.Lock()
	defer s.news.mu.Unlock()
	if s.news.from != l.n {
		return nil
	}
	events, lost, err := s.news.order.check(events)
	if err != nil {
		s.src.complain(err.Error())
	}
	s.news.seq += lost
	for i := range events {
		s.news.seq++
		events[i].Seq = s.news.seq
	}
	return events
}
