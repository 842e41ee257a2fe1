package host

import (
	"context"
	"time"

	"github.com/kvport/kvport/internal/book"
	"github.com/kvport/kvport/internal/fault"
)

// supervise keeps a plugin running until the host closes. g is at work already.
func (h *Host) supervise(life context.Context, g *generation) {
	defer h.work.Done()
	defer close(h.left)
	b := h.cfg.Settings.Breaker
	breaker := &book.Breaker{
		Deaths: b.Deaths, Window: b.Window, Cooldown: b.Cooldown, BackoffMin: b.BackoffMin, BackoffMax: b.BackoffMax,
	}
	n := g.n
	for {
		if g != nil {
			began := time.Now()
			h.outlive(g)
			if time.Since(began) > b.Window {
				breaker.Proved()
			}
		}
		wait, broken := breaker.Died(time.Now())
		h.mu.Lock()
		if h.broken = broken; broken && !h.closing.Load() {
			h.log.Error("plugin keeps dying, it is left alone for a while", "connector", h.info.Name, "pause", wait)
			h.do(h.book.Broken(time.Now()))
		}
		h.mu.Unlock()
		pause(life, wait)
		if h.closing.Load() {
			return
		}
		fault.Crash("host.restart.start")
		n++
		var err error
		if g, err = h.start(life, n); err != nil {
			g = nil
			h.mu.Lock()
			h.lastErr = err
			h.mu.Unlock()
			h.log.Warn("plugin does not start", "connector", h.info.Name, "error", err)
			continue
		}
		h.install(g)
	}
}

// install puts a generation to work, or ends it if the host closes.
func (h *Host) install(g *generation) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closing.Load() {
		g.proc.kill(errClosing)
		return
	}
	h.gen, h.broken, h.since = g, false, time.Now()
	if g.n > 1 {
		fault.Crash("host.restart.up")
		h.restarts++
		h.metrics.restarts.Inc()
	}
	g.serve()
	h.do(h.book.Up(time.Now(), g.n))
	h.log.Info("plugin is up", "connector", h.info.Name, "pid", g.proc.PID(), "generation", g.n)
}

// outlive waits until nothing of a generation is left and settles its accounts.
func (h *Host) outlive(g *generation) {
	<-g.proc.Done()
	h.mu.Lock()
	h.do(h.book.Down(time.Now(), g.n))
	h.mu.Unlock()
	g.finished()
	h.mu.Lock()
	defer h.mu.Unlock()
	fault.Crash("host.restart.reaped")
	h.gen, h.since = nil, time.Now()
	h.lastErr = g.proc.Err()
	if !h.closing.Load() {
		h.log.Warn("plugin is gone", "connector", h.info.Name, "pid", g.proc.PID(), "error", h.lastErr)
	}
	h.do(h.book.Reaped(time.Now(), g.n))
}

// violation counts an answer that broke the protocol.
func (h *Host) violation(what string) {
	h.metrics.violations.Inc()
	if n := h.broke.Add(1); n&(n-1) == 0 { // a hostile plugin must not fill the log
		h.log.Warn("plugin broke the contract", "connector", h.info.Name, "what", what, "so_far", n)
	}
}
