package host

import (
	"context"
	"time"

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
	defer h.work.Done()
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
		h.metrics.restarts.Inc()
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
