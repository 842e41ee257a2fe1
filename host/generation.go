package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/tracker"
	"github.com/kvport/kvport/multiconnector"
)

// generation is one life of the connector with all its sides open, at work for the tracker.
type generation struct {
	h       *Host
	n       uint64
	proc    body
	sched   connector.Scheduler
	workers []connector.Worker
	caps    connector.Capability

	retire  context.CancelFunc                       // ends the calls that wait; nil before serve
	work    sync.WaitGroup                           // every goroutine that may touch blocks or call the plugin
	cancels map[tracker.CallID]context.CancelFunc    // guarded by h.mu
	layers  map[tracker.CallID]*connector.LayerCount // of calls that wait for them; guarded by h.mu

	mu     sync.Mutex
	jobs   []job
	ended  bool // no more jobs
	wake   chan struct{}
	polite bool // ended because the host closed
}

var errClosing = errors.New("the host closes")

// job is one call of the scheduler side. Its calls are made one at a time, in order.
type job struct {
	ask      *askJob // several are sent as one Match
	deadline time.Time
	run      func(ctx context.Context, s connector.Scheduler) error
}

// body is what a generation runs in: a process, or the children of a MultiConnector.
type body interface {
	// Done is closed when nothing of it can touch a block any more.
	Done() <-chan struct{}
	// Err says how it ended.
	Err() error
	// Close asks it to end and waits, until ctx is done at most; then it is killed.
	Close(ctx context.Context) error
	// KillFor ends it without waiting.
	KillFor(reason error)
}

// pid is the number of the generation's process; 0 for several.
func (g *generation) pid() int {
	if p, one := g.proc.(*plugin.Process); one {
		return p.PID()
	}
	return 0
}

// waiting says that the process is dead, and that others, which may still write its memory, are waited for.
func (g *generation) waiting() bool {
	p, one := g.proc.(*plugin.Process)
	return one && p.Waiting()
}

// abandoned says that the wait for them ended without success.
func (g *generation) abandoned() bool {
	p, one := g.proc.(*plugin.Process)
	return one && p.Abandoned()
}

// generation makes a life of the plugin one that the tracker can use.
func (h *Host) generation(l *life) *generation {
	g := h.newGeneration(l.n, l.proc, l.scheduler(h.src.sched))
	g.caps &= h.src.info.Capabilities
	for _, side := range h.src.workers {
		g.workers = append(g.workers, l.worker(side))
	}
	return g
}

func (h *Host) newGeneration(n uint64, proc body, sched connector.Scheduler) *generation {
	return &generation{
		h: h, n: n, proc: proc, sched: sched, caps: connector.CapabilitiesOf(sched),
		cancels: map[tracker.CallID]context.CancelFunc{}, layers: map[tracker.CallID]*connector.LayerCount{}, wake: make(chan struct{}, 1),
	}
}

// serve starts the goroutines of a generation.
func (g *generation) serve() {
	var life context.Context
	life, g.retire = context.WithCancel(context.Background())
	g.work.Go(func() { g.callScheduler(life) })
	if g.caps&connector.CanHold != 0 {
		g.work.Go(func() { g.watchHolds(life) })
	}
	if g.caps&connector.CanHold != 0 && g.caps&connector.CanLease != 0 {
		g.work.Go(func() { g.watchLeases(life) })
	}
	if g.caps&connector.CanStat != 0 {
		g.work.Go(func() { g.watchStats(life) })
	}
	if g.caps&connector.CanEvents != 0 && g.h.blockEvents.out != nil {
		g.work.Go(func() { g.watchEvents(life) })
	}
	for i, w := range g.workers {
		if l, ok := connector.As[connector.Lender](w); ok && g.h.place != nil && l.Lends() > 0 {
			g.h.place.pools[i].open(l.Lends())
			g.work.Go(func() { g.borrow(life, i, l) })
		}
	}
	list := []io.Closer{g.sched}
	for _, w := range g.workers {
		list = append(list, w)
	}
	for _, side := range list {
		if gone := endOf(side); gone != nil {
			g.work.Go(func() { g.watchSide(life, gone) })
		}
	}
}

// endOf is closed when the plugin ends the session of a side; nil for sides that have none.
func endOf(side io.Closer) <-chan struct{} {
	if s, ok := side.(interface{ Gone() <-chan struct{} }); ok {
		return s.Gone()
	}
	return nil
}

// watchSide ends a plugin that ends one of its sides: its calls have no answers any more, and only
// the end of the process says that their blocks are free.
func (g *generation) watchSide(life context.Context, gone <-chan struct{}) {
	select {
	case <-gone:
		g.down(errors.New("the plugin ended a session"))
	case <-life.Done():
	}
}

// down takes a generation out of use and kills its process. It must not be called with h.mu held.
func (g *generation) down(reason error) {
	g.h.mu.Lock()
	defer g.h.mu.Unlock()
	g.fail(reason)
	if g.h.gen == g {
		g.h.vital.isUp(false)
	}
	g.h.do(g.h.tracker.Down(time.Now(), g.n))
}

// fail kills the process; the rest follows from its death.
func (g *generation) fail(reason error) {
	g.mu.Lock()
	polite := g.polite
	g.mu.Unlock()
	if !polite {
		g.proc.KillFor(reason)
	}
}

// end closes a generation because the host closes: politely if nothing runs.
func (g *generation) end(ctx context.Context, polite bool) {
	g.mu.Lock()
	g.polite = polite
	g.mu.Unlock()
	if !polite {
		g.proc.KillFor(errClosing)
		return
	}
	unhook := context.AfterFunc(ctx, func() { g.proc.KillFor(errClosing) })
	defer unhook()
	g.retire()
	g.stopJobs()
	g.work.Wait()
	for _, w := range g.workers {
		_ = w.Close()
	}
	_ = g.sched.Close()
	_ = g.proc.Close(ctx)
}

// finished waits for the end of the process and of every goroutine that works for it.
func (g *generation) finished() {
	<-g.proc.Done()
	if g.retire != nil {
		g.retire()
	}
	g.stopJobs()
	g.work.Wait()
}

func (g *generation) stopJobs() {
	g.mu.Lock()
	g.ended = true
	g.mu.Unlock()
	g.signal()
}

func (g *generation) signal() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// enqueue adds a call of the scheduler side. It never waits. When the plugin is gone the call is not made: the
// tracker learns that from Down.
func (g *generation) enqueue(j job) {
	g.mu.Lock()
	if !g.ended {
		g.jobs = append(g.jobs, j)
	}
	g.mu.Unlock()
	g.signal()
}

// callScheduler makes the calls of the scheduler side, one at a time.
func (g *generation) callScheduler(life context.Context) {
	dead := false
	for {
		g.mu.Lock()
		batch, ended := g.jobs, g.ended
		g.jobs = nil
		g.mu.Unlock()
		for len(batch) > 0 && !dead {
			var err error
			batch, err = g.callNext(life, batch)
			if errors.Is(err, plugin.ErrLost) || errors.Is(err, plugin.ErrUnanswered) {
				dead = true
				g.down(fmt.Errorf("scheduler side: %w", err))
			}
		}
		if ended {
			return
		}
		<-g.wake
	}
}

// callNext makes the first call of batch, or of all leading asks together, and returns the rest. Whoever is asked about ahead has
// no part in the call for which the engine waits.
func (g *generation) callNext(life context.Context, batch []job) ([]job, error) {
	j, rest := batch[0], batch[1:]
	if j.ask == nil {
		ctx, cancel := context.WithDeadline(life, j.deadline)
		defer cancel()
		return rest, j.run(ctx, g.sched)
	}
	asks := []*askJob{j.ask}
	for len(rest) > 0 && rest[0].ask != nil && rest[0].ask.ahead == j.ask.ahead && len(asks) < maxAsks {
		asks, rest = append(asks, rest[0].ask), rest[1:]
	}
	ctx, cancel := context.WithTimeout(life, g.h.cfg.Settings.Deadlines.Later)
	defer cancel()
	return rest, g.h.askAll(ctx, g.sched, asks)
}

// cancelCall ends the wait of a call. The caller holds h.mu; g may be nil.
func (g *generation) cancelCall(id tracker.CallID) {
	if g == nil {
		return
	}
	if cancel := g.cancels[id]; cancel != nil {
		cancel()
	}
}

// cancelCalls asks all transfers to stop: one may wait for layers that nobody computes any more. The caller holds h.mu; g may be nil.
func (g *generation) cancelCalls() {
	if g == nil {
		return
	}
	for _, cancel := range g.cancels {
		cancel()
	}
}

// killFor ends the process if it is the one that the tracker means. The caller holds h.mu; g may be
// nil.
func (g *generation) killFor(k tracker.Kill) {
	if g != nil && g.n == k.Gen {
		g.fail(errors.New(k.Reason))
	}
}

// watchHolds learns what consumers have fetched, and of a MultiConnector which holds ended with a child's process.
func (g *generation) watchHolds(life context.Context) {
	holder, ok := connector.As[connector.Holder](g.sched)
	for ok && life.Err() == nil {
		over, err := multiconnector.WaitHoldsOver(life, holder)
		switch {
		case err == nil:
			g.h.mu.Lock()
			g.h.do(g.h.tracker.Consumed(g.n, over.Fetched))
			g.h.do(g.h.tracker.HoldsDied(g.n, over.Died, false))
			g.h.do(g.h.tracker.HoldsDied(g.n, over.Lost, true))
			g.h.mu.Unlock()
		case errors.Is(err, plugin.ErrLost), errors.Is(err, plugin.ErrUnanswered):
			return
		default:
			pause(life, slowestRetry)
		}
	}
}

// watchLeases learns which holds stay longer and tells which are over.
func (g *generation) watchLeases(life context.Context) {
	leaser, ok := connector.As[connector.Leaser](g.sched)
	for ok && life.Err() == nil {
		g.h.mu.Lock()
		over := g.h.tracker.Over(g.n)
		g.h.mu.Unlock()
		ids, err := leaser.Renewals(life, over)
		switch {
		case err == nil:
			g.h.mu.Lock()
			g.h.tracker.Renewed(time.Now(), g.n, ids)
			g.h.mu.Unlock()
			pause(life, firstRetry) // one that does not wait gets no more of the processor than this
		case errors.Is(err, plugin.ErrLost), errors.Is(err, plugin.ErrUnanswered):
			return
		default:
			pause(life, slowestRetry)
		}
	}
}

// pause waits, but not beyond the end of ctx.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
