package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/meter"
	"github.com/kvport/kvport/internal/tracker"
)

// child is one plugin of a MultiConnector, kept running. Its sides live as long as the composite: while
// the process is down a Match is a miss, and Load and Save fail with ErrGone.
type child struct {
	label   string // its place and name, such as 1/DiskConnector
	src     *source
	set     *Settings
	log     *slog.Logger
	metrics childCounters
	vital   *vital
	placing *childPlacing // nil: no blocks are placed

	mu      sync.Mutex
	now     *life         // nil while none takes calls
	last    *life         // the one that took calls last
	changed chan struct{} // closed when now changes
	lives   int
	failed  int // starts
	broken  bool
	since   time.Time
	lastErr error
	holds   *tracker.HoldTable
	poll    context.CancelFunc       // ends the wait for the next news of holds; nil: nobody waits
	ended   map[<-chan struct{}]bool // sessions that we close

	closing atomic.Bool
	leave   context.CancelFunc
	over    <-chan struct{} // closed when closing
	left    chan struct{}   // closed when the supervisor has ended
	watch   sync.WaitGroup
}

// adopt keeps a child running whose first life is open.
func (c *child) adopt(first *life) {
	var ctx context.Context
	ctx, c.leave = context.WithCancel(context.Background())
	c.over = ctx.Done()
	c.left, c.changed = make(chan struct{}), make(chan struct{})
	c.holds, c.ended = tracker.NewHoldTable(), map[<-chan struct{}]bool{}
	c.install(first)
	k := keeper[*life]{
		start: c.src.start, install: c.install, outlive: c.outlive, closing: c.closing.Load,
		died: func(pause time.Duration, broken bool) {
			c.mu.Lock()
			c.broken = broken
			c.mu.Unlock()
			c.vital.isOpen(broken)
			if broken && !c.closing.Load() {
				c.log.Error("child keeps dying, it is left alone for a while", "child", c.label, "pause", pause)
			}
		},
		failed: func(err error) {
			c.mu.Lock()
			c.lastErr = err
			c.failed++
			c.mu.Unlock()
			c.vital.failed()
			c.log.Warn("child does not start", "child", c.label, "error", err)
		},
	}
	go func() {
		defer close(c.left)
		k.keep(ctx, c.set.Breaker, first, first.n)
	}()
}

func (c *child) install(l *life) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing.Load() {
		l.proc.KillFor(errClosing)
		return
	}
	if !c.src.sides.match(l) {
		l.proc.KillFor(errors.New("a side was opened or closed while it started"))
		return
	}
	c.turn(l)
	c.last = l
	c.broken = false
	c.vital.isOpen(false)
	c.lives++
	if l.n > 1 {
		c.metrics.restarts.Inc()
		c.vital.restarted()
	}
	for _, side := range l.sides {
		c.guard(l, side)
	}
	c.log.Info("child is up", "child", c.label, "pid", l.proc.PID(), "generation", l.n)
}

// guard kills a process that ends a session: its calls have no answers any more. The caller holds mu.
func (c *child) guard(l *life, side io.Closer) {
	gone := endOf(side)
	if gone == nil {
		return
	}
	c.watch.Go(func() {
		select {
		case <-gone:
			c.mu.Lock()
			asked := c.ended[gone]
			delete(c.ended, gone)
			c.mu.Unlock()
			if !asked {
				c.down(l, errors.New("the plugin ended a session"))
			}
		case <-l.proc.Done():
		}
	})
}

// turn makes l the life that takes calls. The caller holds mu.
func (c *child) turn(l *life) {
	c.now, c.since = l, time.Now()
	close(c.changed)
	c.changed = make(chan struct{})
	meter.Mark(c.metrics.up, l != nil)
	c.vital.isUp(l != nil)
}

func (c *child) outlive(l *life) {
	<-l.proc.Done()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.now == l {
		c.turn(nil)
	}
	c.lastErr = l.proc.Err()
	c.holds.Lose(l.n, l.proc.Abandoned())
	c.wakePoll()
	if !c.closing.Load() {
		c.log.Warn("child is gone", "child", c.label, "pid", l.proc.PID(), "error", c.lastErr)
	}
}

// wakePoll has the news of holds told. The caller holds mu.
func (c *child) wakePoll() {
	if c.poll != nil && c.holds.Pending() {
		c.poll()
	}
}

// down takes a life out of use and kills its process.
func (c *child) down(l *life, reason error) {
	c.mu.Lock()
	if c.now == l {
		c.turn(nil)
	}
	c.mu.Unlock()
	if !c.closing.Load() {
		l.proc.KillFor(reason)
	}
}

// sideOf is a scheduler or worker side of the life that takes calls.
func sideOf[S any](c *child, number int) (l *life, side S, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	open := false
	if c.now != nil {
		side, open = c.now.sides[number].(S)
	}
	if !open {
		return nil, side, fmt.Errorf("%s is not running: %w", c.label, connector.ErrGone)
	}
	return c.now, side, nil
}

// judge looks at the error of a call of the scheduler side: without an answer the process is at its
// end.
func (c *child) judge(l *life, err error) error {
	if errors.Is(err, plugin.ErrLost) || errors.Is(err, plugin.ErrUnanswered) {
		c.down(l, fmt.Errorf("scheduler side: %w", err))
		return c.gone(err)
	}
	return err
}

// gone is the error that callers get for a process that went away. It must not look like the end of the whole
// connector.
func (c *child) gone(err error) error {
	return fmt.Errorf("%s went away (%s): %w", c.label, err.Error(), connector.ErrGone)
}

// health says how the process is.
func (c *child) health() Health {
	c.mu.Lock()
	defer c.mu.Unlock()
	h := Health{Connector: c.label, State: "restarting", Restarts: max(c.lives-1, 0), StartFailures: c.failed, Since: time.Since(c.since), Trust: c.set.Trust}
	h.Sandbox, h.SandboxLacks = c.src.box.state()
	switch {
	case c.now != nil:
		h.State, h.PID = "ready", c.now.proc.PID()
		if h.FencesLost = c.src.left.Count(); h.FencesLost > 0 {
			h.State = "degraded"
		}
	case c.last != nil && c.last.proc.Waiting():
		h.State = "waiting_for_fence"
	case c.broken:
		h.State = "broken"
	}
	if c.lastErr != nil && h.State != "ready" {
		h.Error = c.lastErr.Error()
	}
	return h
}

// close ends the process: politely until ctx is done. No call may be running, or it is killed.
func (c *child) close(ctx context.Context, polite bool) error {
	c.closing.Store(true)
	c.leave()
	c.mu.Lock()
	l := c.now
	c.now = nil
	c.mu.Unlock()
	var err error
	switch {
	case l == nil:
	case polite:
		unhook := context.AfterFunc(ctx, func() { l.proc.KillFor(errClosing) })
		defer unhook()
		for _, side := range l.sides {
			_ = side.Close()
		}
		err = l.proc.Close(ctx)
	default:
		l.proc.KillFor(errClosing)
		<-l.proc.Done()
	}
	<-c.left
	c.watch.Wait()
	return errors.Join(err, c.src.close())
}

// open opens a side in this life and all that follow. A child that is down opens it when it comes
// back.
func (c *child) open(ctx context.Context, o opening) (side int, err error) {
	o.env.Role = c.src.cfg.Role
	c.mu.Lock()
	defer c.mu.Unlock()
	side = c.src.sides.add(o)
	if c.now == nil {
		return side, nil
	}
	open, err := c.src.openSide(ctx, c.now, o)
	if err != nil {
		c.src.sides.remove(side)
		return 0, err
	}
	c.now.sides[side] = open
	c.guard(c.now, open)
	return side, nil
}

// closeSide closes a side in the current life. The process goes on.
func (c *child) closeSide(side int) error {
	c.mu.Lock()
	c.src.sides.remove(side)
	var open io.Closer
	if c.now != nil {
		open = c.now.sides[side]
		delete(c.now.sides, side)
	}
	if gone := endOf(open); gone != nil {
		c.ended[gone] = true
	}
	c.mu.Unlock()
	if open == nil {
		return nil
	}
	return open.Close()
}

func (c *child) openScheduler(ctx context.Context, env connector.Env) (connector.Scheduler, error) {
	side, err := c.open(ctx, opening{env: env})
	return childScheduler{c, side, newChildReports(c)}, err
}

func (c *child) openWorker(ctx context.Context, env connector.Env) (connector.Worker, error) {
	side, err := c.open(ctx, opening{worker: true, env: env})
	return childWorker{c, side, env.Rank}, err
}

// childWorker is the worker side of one rank of a child, through all its lives.
type childWorker struct {
	*child
	side   int
	number int // of the rank
}

// Load implements connector.Worker. It returns when no process of the child can write the blocks.
func (w childWorker) Load(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	if over, err := w.loadPlaced(ctx, t, kv); over {
		return err
	}
	return w.move(ctx, w.loadLimit(t), "load", t, func(ctx context.Context, side connector.Worker) error { return w.loadFrom(ctx, side, t, kv) })
}

// LoadLayers implements connector.LayerLoader.
func (w childWorker) LoadLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, arrived connector.Arrivals) error {
	if over, err := w.loadPlaced(ctx, t, kv); over {
		return err
	}
	return w.move(ctx, w.loadLimit(t), "load", t, func(ctx context.Context, side connector.Worker) error {
		loader, ok := connector.As[connector.LayerLoader](side)
		if !ok {
			return w.loadFrom(ctx, side, t, kv)
		}
		return loader.LoadLayers(ctx, t, kv, arrived)
	})
}

// loadLimit is how long a load may take.
func (w childWorker) loadLimit(t *connector.Transfer) time.Duration {
	d := &w.set.Deadlines
	bytes := int64(0)
	for _, b := range t.Blocks {
		bytes += w.src.layout.BlockBytes(b.Group)
	}
	return d.Transfer + time.Duration(float64(bytes)/(1<<30)*float64(d.TransferPerGiB))
}

// Reshape implements connector.Reshaper. A child that cannot is not asked: it has offered nothing.
func (w childWorker) Reshape(ctx context.Context, t *connector.Transfer, from connector.Source, kv *connector.KV) error {
	return w.move(ctx, w.set.Deadlines.Transfer, "load", t, func(ctx context.Context, side connector.Worker) error {
		reshaper, ok := connector.As[connector.Reshaper](side)
		if !ok {
			return fmt.Errorf("%s cannot %v: %w", w.label, connector.CanReshape, connector.ErrIncompatible)
		}
		return reshaper.Reshape(ctx, t, from, kv)
	})
}

// Save implements connector.Worker.
func (w childWorker) Save(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	return w.move(ctx, w.set.Deadlines.Save, "save", t, func(ctx context.Context, side connector.Worker) error { return w.saveTo(ctx, side, t, kv) })
}

// SaveLayers implements connector.LayerWorker. Its deadline begins when the last layer is final, or no more will be.
func (w childWorker) SaveLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, progress connector.Progress) error {
	l, side, err := sideOf[connector.Worker](w.child, w.side)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	returned := make(chan struct{})
	var clock sync.WaitGroup
	clock.Go(func() {
		_ = connector.AwaitLayers(ctx, progress, kv.Layout().Layers())
		limit := w.set.Deadlines.Save
		defer time.AfterFunc(limit, cancel).Stop()
		defer w.killAfter(limit+w.set.Deadlines.Grace, l, "save", t)()
		<-returned
	})
	defer func() {
		close(returned)
		cancel()
		clock.Wait()
	}()
	return w.answered(ctx, l, "save", t, saveLayersTo(ctx, side, t, kv, progress))
}

// move makes a call with a deadline. A child that misses it is killed, alone; the call returns when it
// is gone.
func (w childWorker) move(ctx context.Context, limit time.Duration, what string, t *connector.Transfer, call func(context.Context, connector.Worker) error) error {
	l, side, err := sideOf[connector.Worker](w.child, w.side)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	end, _ := ctx.Deadline()
	defer w.killAfter(time.Until(end)+w.set.Deadlines.Grace, l, what, t)()
	return w.answered(ctx, l, what, t, call(ctx, side))
}

// killAfter kills a process unless stop is called in time.
func (w childWorker) killAfter(limit time.Duration, l *life, what string, t *connector.Transfer) (stop func() bool) {
	return time.AfterFunc(limit, func() {
		w.metrics.kills.Inc()
		w.down(l, fmt.Errorf("%s of request %q past its deadline", what, t.Request))
		l.proc.KillFor(errClosing) // when closing, down leaves it alone
	}).Stop
}

// answered is the end of a call: without an answer the process is at its end, and it returns when that is gone.
func (w childWorker) answered(ctx context.Context, l *life, what string, t *connector.Transfer, err error) error {
	w.metrics.moved(what, t, err)
	if !errors.Is(err, plugin.ErrLost) {
		return err
	}
	w.down(l, errors.New("worker side: the connection is gone"))
	<-l.proc.Done() // until then it may still touch the blocks
	if l.proc.Abandoned() && !loseBlocks(ctx) {
		<-w.over // the host of this process ends it for that: others have the blocks otherwise
	}
	return w.gone(err)
}

// Close implements connector.Worker. The process goes on.
func (w childWorker) Close() error { return w.closeSide(w.side) }
