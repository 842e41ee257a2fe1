package host

import (
	"context"
	"io"
	"maps"
	"slices"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/fault"
)

// sides are those that every life of a plugin has open, by a number of their own.
type sides struct {
	mu   sync.Mutex
	last int
	open map[int]opening
}

// opening is one side that is open.
type opening struct {
	worker bool
	env    connector.Env
}

func (s *sides) add(o opening) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == nil {
		s.open = map[int]opening{}
	}
	s.last++
	s.open[s.last] = o
	return s.last
}

func (s *sides) remove(side int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, side)
}

func (s *sides) all() map[int]opening {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.open)
}

// match reports whether a life has open what it should.
func (s *sides) match(l *life) bool {
	want := s.all()
	for side := range l.sides {
		if _, ok := want[side]; !ok {
			return false
		}
	}
	return len(want) == len(l.sides)
}

// openAll says that every life has the scheduler side and a worker side for each region.
func (s *source) openAll() {
	env := connector.Env{
		Engine: s.eng.ID, Epoch: s.epoch, Role: s.cfg.Role, World: len(s.regions),
		Model: s.eng.Model, Shape: s.eng.Shape, Base: s.eng.Base, Layout: s.eng.Layout, Log: s.log,
	}
	s.sched = s.sides.add(opening{env: env})
	// The scheduler side gets the layout of the cache, a worker that of the memory it maps.
	env.Layout = s.layout
	s.workers = nil
	for rank := range s.regions {
		env.Rank = rank
		s.workers = append(s.workers, s.sides.add(opening{worker: true, env: env}))
	}
}

// openSides opens in a new life all sides that must be open.
func (s *source) openSides(ctx context.Context, l *life) error {
	want := s.sides.all()
	l.sides = map[int]io.Closer{}
	for _, side := range slices.Sorted(maps.Keys(want)) {
		if side == s.sched+1 {
			fault.Crash("host.open.worker")
		}
		open, err := s.openSide(ctx, l, want[side])
		if err != nil {
			return err
		}
		l.sides[side] = open
	}
	fault.Crash("host.open.done")
	return nil
}

func (s *source) openSide(ctx context.Context, l *life, o opening) (io.Closer, error) {
	o.env.Arena = s.arena.Bytes()
	var err error
	if o.env.LinkKey, o.env.RouterKey, err = s.keys.of(s.name, &s.info); err != nil {
		return nil, err
	}
	var side io.Closer
	if o.worker {
		side, err = l.proc.OpenWorker(ctx, o.env, s.cfg.Extra)
	} else {
		side, err = l.proc.OpenScheduler(ctx, o.env, s.cfg.Extra)
	}
	if err != nil {
		return nil, openError(ctx, s.info.Name, err)
	}
	return side, nil
}

// scheduler is a side of this life; nil if it is not open.
func (l *life) scheduler(side int) connector.Scheduler {
	s, _ := l.sides[side].(connector.Scheduler)
	return s
}

// worker is a side of this life; nil if it is not open.
func (l *life) worker(side int) connector.Worker {
	w, _ := l.sides[side].(connector.Worker)
	return w
}
