package host

import (
	"context"
	"time"

	"github.com/kvport/kvport/internal/book"
)

// supervise keeps a plugin running until the host closes.
func (h *Host) supervise(g *generation) {
	defer h.work.Done()
	defer close(h.left)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-h.closing:
			cancel()
		case <-ctx.Done():
		}
	}()
	b := h.cfg.Settings.Breaker
	breaker := &book.Breaker{
		Deaths: b.Deaths, Window: b.Window, Cooldown: b.Cooldown, BackoffMin: b.BackoffMin, BackoffMax: b.BackoffMax,
	}
	n := g.n
	for {
		if g != nil {
			began := time.Now()
			h.live(g)
			if time.Since(began) > b.Window {
				breaker.Proved()
			}
		}
		wait, broken := breaker.Died(time.Now())
		h.mu.Lock()
		if h.broken = broken; broken && !h.isClosing() {
			h.log.Error("plugin keeps dying, it is left alone for a while", "connector", h.info.Name, "pause", wait)
			h.do(h.book.Broken(time.Now()))
		}
		h.mu.Unlock()
		pause(ctx, wait)
		if h.isClosing() {
			return
		}
		n++
		var err error
		if g, err = h.start(ctx, n); err != nil {
			g = nil
			h.mu.Lock()
			h.lastErr = err
			h.mu.Unlock()
			h.log.Warn("plugin does not start", "connector", h.info.Name, "error", err)
		}
	}
}

// live serves one generation from its start to the moment when nothing of it is left.
func (h *Host) live(g *generation) {
	h.mu.Lock()
	if h.isClosing() {
		h.mu.Unlock()
		g.abandon()
		return
	}
	h.gen, h.broken = g, false
	if g.n > 1 {
		h.restarts++
		h.metrics.restarts.Inc()
	}
	g.serve()
	h.do(h.book.Up(time.Now(), g.n))
	h.mu.Unlock()
	h.log.Info("plugin is up", "connector", h.info.Name, "pid", g.proc.PID(), "generation", g.n)

	<-g.proc.Done()
	h.mu.Lock()
	h.do(h.book.Down(time.Now(), g.n))
	h.mu.Unlock()
	g.finished()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.gen = nil
	h.lastErr = g.proc.Err()
	if !h.isClosing() {
		h.log.Warn("plugin is gone", "connector", h.info.Name, "pid", g.proc.PID(), "error", h.lastErr)
	}
	h.do(h.book.Reaped(time.Now(), g.n))
}

// violation counts an answer that broke the protocol.
func (h *Host) violation(what string) {
	h.log.Warn("plugin broke the contract", "connector", h.info.Name, "what", what)
	h.metrics.violations.Inc()
}
