package router

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvport/kvport/engine/router/admission"
)

const maxBackoff = time.Second // before one retry

// allowance is a budget with its lock. That of retries is for those that an instance has had work with, or may have: a
// connection that breaks costs the other instances no more than the request itself. Each role has one: busy prefill
// instances, without which a request can be served, take no retry from decode instances.
type allowance struct {
	mu     sync.Mutex
	budget admission.Budget
}

// request takes note of a request that came.
func (r *allowance) request() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.budget.Request(time.Now())
}

// allow reports whether there is something left, and takes one.
func (r *allowance) allow() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.budget.Retry(time.Now())
}

// retryAfter is how long an instance that answers 429 or 503 asks to be left alone; 0 if it does not say.
func retryAfter(status int, h http.Header, now time.Time) time.Duration {
	if status != http.StatusTooManyRequests && status != http.StatusServiceUnavailable {
		return 0
	}
	said := strings.TrimSpace(h.Get("Retry-After"))
	if seconds, err := strconv.ParseUint(said, 10, 31); err == nil {
		return min(time.Duration(seconds)*time.Second, maxRest)
	}
	at, err := http.ParseTime(said)
	if err != nil {
		return 0
	}
	return min(max(0, at.Sub(now)), maxRest)
}

// nextChoice picks the instances for an attempt. While all decode instances that could serve are full, or have asked to be
// left alone, it waits for the first of them, but not longer than the queue would let the request wait. All but the first
// are retries.
func (c *call) nextChoice(ctx context.Context, params *json.RawMessage, first bool) (at route, ok bool) {
	if at, ok = c.choose(ctx, params); !ok {
		at, ok = c.awaitChoice(ctx, params)
	}
	if !ok && c.askAgain() {
		at, ok = c.awaitChoice(ctx, params)
	}
	if ok && !first {
		c.router.metrics.retries.WithLabelValues(decode.String()).Inc()
	}
	return at, ok
}

// awaitChoice waits in line for the instances of an attempt.
func (c *call) awaitChoice(ctx context.Context, params *json.RawMessage) (at route, ok bool) {
	pool := c.router.pool
	w := pool.line(c.request, c.failed)
	defer pool.leaveLine(w)
	for {
		at, ok = c.choose(ctx, params)
		pool.wakeBehind(w)
		if ok {
			return at, true
		}
		rest, left := pool.rest(decode, c.request.Client, c.failed), c.left()
		rests, full := rest > 0 && rest <= left, left > 0 && pool.full(decode, c.failed)
		if !rests && !full || !pauseUntil(ctx, left, w.woken) {
			return route{}, false
		}
		c.waited = true
	}
}

// left is how much longer the request may wait for an instance.
func (c *call) left() time.Duration { return time.Until(c.started.Add(c.router.config.QueueTimeout)) }

// begin takes note that an attempt at an instance begins.
func (c *call) begin(t target) {
	c.costly, c.busy = false, false // whatever the attempt before it was
	c.router.pool.sent(t)
}

// mayRetry reports whether another attempt may follow one that failed. An attempt that an instance has answered, or may
// have worked on, is retried after a pause and within the budget of its role; the number of the retry begins with 0. One at
// an instance that is busy is retried as long as there is an instance to be had: nextChoice bounds the time.
func (c *call) mayRetry(ctx context.Context, at role, retry int) bool {
	switch {
	case c.busy || !c.costly:
		return true
	case !c.router.retries[at].allow():
		c.router.metrics.exhausted.Inc()
		return false
	}
	return pause(ctx, admission.Backoff(retry, c.router.config.Backoff, maxBackoff))
}

// pause waits, and reports whether the context has not ended.
func pause(ctx context.Context, d time.Duration) bool { return pauseUntil(ctx, d, nil) }

// pauseUntil is a pause that something may end.
func pauseUntil(ctx context.Context, d time.Duration, end <-chan struct{}) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-end:
		return true
	case <-ctx.Done():
		return false
	}
}
