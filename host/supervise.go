package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/tracker"
)

// keeper keeps something running that can die: L is one life of it. All hooks are called from one
// goroutine.
type keeper[L any] struct {
	start   func(ctx context.Context, n uint64) (L, error)
	install func(L)
	outlive func(L) // returns when nothing of it is left
	died    func(pause time.Duration, broken bool)
	failed  func(error) // it does not start
	closing func() bool
}

// keep works until closing. first is installed already; n counts the lives.
func (k *keeper[L]) keep(ctx context.Context, b Breaker, first L, n uint64) {
	breaker := &tracker.Breaker{
		Deaths: b.Deaths, Window: b.Window, Cooldown: b.Cooldown, BackoffMin: b.BackoffMin, BackoffMax: b.BackoffMax,
	}
	for now, alive := first, true; ; {
		if alive {
			began := time.Now()
			k.outlive(now)
			if time.Since(began) > b.Window {
				breaker.Proved()
			}
		}
		wait, broken := breaker.Died(time.Now())
		k.died(wait, broken)
		pause(ctx, wait)
		if k.closing() {
			return
		}
		fault.Crash("host.restart.start")
		n++
		next, err := k.start(ctx, n)
		if alive = err == nil; !alive {
			k.failed(err)
			continue
		}
		now = next
		k.install(now)
	}
}

// supervise keeps a plugin running until the host closes. g is at work already.
func (h *Host) supervise(life context.Context, g *generation) {
	defer close(h.left)
	k := keeper[*generation]{
		start: func(ctx context.Context, n uint64) (*generation, error) {
			l, err := h.src.start(ctx, n)
			if err != nil {
				return nil, err
			}
			return h.generation(l), nil
		},
		install: h.install,
		outlive: h.outlive,
		died:    h.died,
		failed: func(err error) {
			h.mu.Lock()
			h.lastErr = err
			h.failures++
			h.mu.Unlock()
			h.vital.failed()
			h.log.Warn("plugin does not start", "connector", h.info.Name, "error", err)
		},
		closing: h.closing.Load,
	}
	k.keep(life, h.cfg.Settings.Breaker, g, g.n)
}

// died notes that the plugin is gone and when it will be started again.
func (h *Host) died(pause time.Duration, broken bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.vital.isOpen(broken)
	if h.broken = broken; broken && !h.closing.Load() {
		h.log.Error("plugin keeps dying, it is left alone for a while", "connector", h.info.Name, "pause", pause)
		h.do(h.tracker.Broken(time.Now()))
	}
}

// install puts a generation to work, or ends it if the host closes.
func (h *Host) install(g *generation) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closing.Load() {
		g.proc.KillFor(errClosing)
		return
	}
	h.gen, h.broken, h.since = g, false, time.Now()
	if g.n > 1 {
		fault.Crash("host.restart.up")
		h.restarts++
		h.vital.restarted()
	}
	h.vital.isUp(true)
	h.vital.isOpen(false)
	g.serve()
	h.do(h.tracker.Up(time.Now(), g.n))
	h.log.Info("plugin is up", "connector", h.info.Name, "pid", g.pid(), "generation", g.n)
}

// outlive waits until nothing of a generation is left and settles its accounts.
func (h *Host) outlive(g *generation) {
	<-g.proc.Done()
	h.mu.Lock()
	h.vital.isUp(false)
	h.do(h.tracker.Down(time.Now(), g.n))
	h.mu.Unlock()
	g.finished()
	h.mu.Lock()
	defer h.mu.Unlock()
	fault.Crash("host.restart.reaped")
	h.gen, h.since = nil, time.Now()
	h.lastErr = g.proc.Err()
	if !h.closing.Load() {
		h.log.Warn("plugin is gone", "connector", h.info.Name, "pid", g.pid(), "error", h.lastErr)
	}
	if g.abandoned() && h.lands == nil {
		h.do(h.tracker.Abandoned(time.Now(), g.n))
		return
	}
	h.do(h.tracker.Reaped(time.Now(), g.n))
}

// violation counts an answer that broke the protocol.
func (h *Host) violation(what string) {
	h.metrics.violations.Inc()
	if n := h.broke.Add(1); n&(n-1) == 0 { // a hostile plugin must not fill the log
		h.log.Warn("plugin broke the contract", "connector", h.info.Name, "what", what, "so_far", n)
	}
}

// maxAbandoned is how many lives of one plugin may leave such memory behind. It is not started again then.
const maxAbandoned = 3

// abandon gives a fence up.
func (s *source) abandon(f *plugin.Fence) {
	s.left.Add(f)
	s.log.Error("a plugin left a process behind that holds its fence and may write its memory for ever: "+
		"that memory is lost until the engine is started again", "plugin", s.prog.Path, "waited", s.cfg.Settings.Deadlines.Fence)
}

// renew gives the next life of the plugin other memory where somebody may still write that of the last one:
// an arena, and landing memory if it is this plugin's alone. Cache blocks cannot be replaced: the tracker keeps
// those that the last life had from ever being used again.
func (s *source) renew() error {
	if n := s.left.Count(); n >= maxAbandoned {
		return fmt.Errorf("%d lives of the plugin did not give their fences back, so it is not started until the engine is started again: %w", n, plugin.ErrAbandoned)
	}
	if !s.left.Spoil(false) {
		return nil
	}
	s.place.close()
	err := s.arena.Renew()
	if err == nil && s.reland != nil {
		err = s.reland()
	}
	if err != nil {
		s.left.Spoil(true)
		return fmt.Errorf("memory in place of what was lost: %w", err)
	}
	return nil
}

// Renew replaces the arena by an empty one of the same size. No process may be using it except one that
// nobody can find any more.
func (a *Arena) Renew() error {
	next, err := NewArena()
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mem != nil {
		if err := next.Fit(a.mem.Size()); err != nil {
			return errors.Join(err, next.Close())
		}
		err = a.mem.Close()
	}
	old := a.file
	a.file, a.mem = next.file, next.mem
	return errors.Join(err, old.Close())
}

// reland gives every rank that has landing memory other memory, and does the same for source blocks. No transfer may be
// running.
func (h *Host) reland() error {
	for i, r := range h.ranks {
		if r.landing == nil {
			continue
		}
		size := r.landing.region.Size()
		next, err := newLanding(*h.lands, size)
		if err != nil {
			return fmt.Errorf("landing memory of %d bytes: %w", size, err)
		}
		old := r.landing
		r.landing, h.src.regions[i] = next, next.region
		if err := old.region.Close(); err != nil {
			return err
		}
	}
	if h.sources == nil {
		return nil
	}
	next, err := newSources(h.sources.Size())
	if err != nil {
		return err
	}
	old := h.sources
	h.sources, h.src.sources = next, next
	return old.Close()
}

// lostSome says in the health of a plugin that is up that it is not as it was. The caller holds mu.
func (h *Host) lostSome(s *Health) {
	if h.src == nil {
		return
	}
	if s.FencesLost = h.src.left.Count(); s.FencesLost > 0 {
		s.State = "degraded"
	}
}

// loserKey is the key of a function in the context of a transfer's call: to be called by whoever finds that
// the blocks of the call are lost, although the call goes on. Composites pass contexts on as they are.
type loserKey struct{}

// losing gives a call's context the function.
func (h *Host) losing(ctx context.Context, id tracker.CallID) context.Context {
	return context.WithValue(ctx, loserKey{}, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.do(h.tracker.Lose(time.Now(), id))
	})
}

// loseBlocks says that the blocks of a call are lost. It is false if there is nobody to hear it.
func loseBlocks(ctx context.Context) bool {
	lose, ok := ctx.Value(loserKey{}).(func())
	if ok {
		lose()
	}
	return ok
}

// complaints says how often failed transfers of one direction were logged.
type complaints struct {
	next    time.Time // not before
	dropped int       // since the last that was logged
}

// complain logs a transfer that failed, but not more than one a second: what fails once often fails
// for every request. The end of a request that nobody waits for is not a failure, nor is what a connector
// chose not to store. The caller holds mu.
func (h *Host) complain(direction string, c *complaints, b *tracker.Event) {
	if len(b.Failed) == 0 || b.Err == nil || errors.Is(b.Err, context.Canceled) || errors.Is(b.Err, connector.ErrDeclined) {
		return
	}
	if errors.Is(b.Err, tracker.ErrForeignKey) || errors.Is(b.Err, connector.ErrOutdated) {
		return // unread has said so, with the remedy
	}
	now := time.Now()
	if now.Before(c.next) {
		c.dropped++
		return
	}
	h.log.Warn("transfer failed", "connector", h.info.Name, "direction", direction, "request", b.Request,
		"blocks", len(b.Failed), "error", b.Err, "not_logged", c.dropped)
	*c = complaints{next: now.Add(time.Second)}
}

// missed logs that matches stayed undecided, which looks like a cold cache otherwise, but not more often than
// missedEvery: a slow store is slow for every request. The caller holds mu.
func (h *Host) missed(matches int) {
	now, c := time.Now(), &h.misses
	if now.Before(c.next) {
		c.dropped += matches
		return
	}
	later := h.cfg.Settings.Deadlines.Later
	h.log.Warn(fmt.Sprintf("match undecided after %s, counted as a miss; raise kvport.deadlines.later if the connector's store is that slow", later),
		"connector", h.info.Name, "matches", matches, "not_logged", c.dropped)
	*c = complaints{next: now.Add(missedEvery)}
}
