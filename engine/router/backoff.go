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

// How long requests keep away from instances.
const (
	maxRest    = time.Minute // however long an instance that does not serve asks for
	maxBusy    = time.Second // likewise, one that has too much to do: it says so of one request, or of one client
	maxBackoff = time.Second // before one retry

	// How long an instance may go on counting a request that has ended here: until then a 429 says nothing else.
	settle = 20 * time.Millisecond
)

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

// rests keeps new requests away from an instance for a while. One that is only busy with others, and so refused the request
// with a 429, gets the next as soon as one of these has ended.
func (p *pool) rests(t target, limit time.Duration, busy bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k, now, others := &p.known[t.index], time.Now(), 0
	if busy {
		limit, others = min(limit, maxBusy), k.load.running()
		if t.kind.counts() {
			others-- // the request itself still does
		}
		if others < p.limit(t.index) && t.picked.Sub(k.load.ended) < settle {
			limit = min(limit, settle)
		}
	}
	if now.Before(k.rested) {
		others = min(others, k.others)
	}
	k.others = others
	if until := now.Add(limit); until.After(k.rested) {
		k.rested = until
	}
}

// rest is how long it takes until the first instance of a role that rests may be asked again, of those that are not in
// tried; 0: none rests that could be asked.
func (p *pool) rest(r role, tried map[int]bool) (shortest time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	for i, in := range p.table.instances {
		k := &p.known[i]
		if left := k.rested.Sub(now); in.role == r && !tried[i] && in.state <= suspect && k.drains == 0 && left > 0 && (shortest == 0 || left < shortest) {
			shortest = left
		}
	}
	return shortest
}

// nextChoice picks the instances for an attempt. While all decode instances that could serve are full, or have asked to be
// left alone, it waits for the first of them, but not longer than the queue would let the request wait. All but the first
// are retries.
func (c *call) nextChoice(ctx context.Context, params *json.RawMessage, first bool) (at route, ok bool) {
	pool := c.router.pool
	for {
		freed := pool.next() // before the choice, so that it misses none
		if at, ok = c.choose(ctx, params); ok {
			if !first {
				c.router.metrics.retries.WithLabelValues(decode.String()).Inc()
			}
			return at, true
		}
		rest, left := pool.rest(decode, c.failed), time.Until(c.started.Add(c.router.config.QueueTimeout))
		switch {
		case rest > 0 && rest <= left:
			left = rest + admission.Backoff(0, min(rest, c.router.config.Backoff), maxBackoff)
		case left <= 0 || !pool.full(decode, c.failed):
			return route{}, false
		}
		if !pauseUntil(ctx, left, freed) {
			return route{}, false
		}
	}
}

// mayRetry reports whether another attempt may follow one that failed. An attempt that an instance has answered, or may
// have worked on, is retried after a pause and within the budget of its role; the number of the retry begins with 0. One at
// an instance that is busy is retried as long as a request may wait.
func (c *call) mayRetry(ctx context.Context, at role, retry int) bool {
	costly, busy := c.costly, c.busy
	c.costly, c.busy = false, false
	switch {
	case busy:
		return time.Since(c.started) < c.router.config.QueueTimeout
	case !costly:
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
