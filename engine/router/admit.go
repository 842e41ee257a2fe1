package router

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"github.com/kvport/kvport/engine/apikeys"
	"github.com/kvport/kvport/engine/router/admission"
)

// Limits say what each client may use. A client is an API key where the front checks keys, else an address.
type Limits struct {
	Each admission.Limits            // of a client that has none of its own
	Keys map[string]admission.Limits // by [KeyID], instead of those of the key's line; their numbers stand alone, a zero is no limit
}

// KeyID names an API key without showing it: the SHA-256 of the key, 64 hexadecimal digits.
func KeyID(key string) string {
	hash := sha256.Sum256([]byte(key))
	return hex.EncodeToString(hash[:])
}

// SetLimits replaces the limits of clients, from the next request on.
func (r *Router) SetLimits(l Limits) { r.limits.Store(&l) }

// gate is the queue with what it needs to be used from many goroutines.
type gate struct {
	patience time.Duration
	metrics  *metrics
	slots    func() int // how many requests may run at this moment

	mu    sync.Mutex // comes before that of the pool, which slots takes
	queue *admission.Queue
	room  admission.Room // for bodies
}

// hold takes room for a body of a client until drop. The error is an *admission.RefusedError.
func (g *gate) hold(client string, size int) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.room.Take(client, size)
}

func (g *gate) drop(client string, size int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.room.Give(client, size)
}

// enter waits until a request may run. The error is an *admission.RefusedError, or the cause of the context's end. What
// enters leaves.
func (g *gate) enter(ctx context.Context, client string, l admission.Limits, tokens int) (*admission.Request, error) {
	began := time.Now()
	var r *admission.Request
	var err error
	g.with(func(now time.Time) { r, err = g.queue.Arrive(now, client, l, tokens) })
	if err != nil {
		return nil, err
	}
	timer := time.NewTimer(g.patience)
	defer timer.Stop()
	select {
	case <-r.Decided():
	case <-ctx.Done():
		g.leave(r, unknown)
		return nil, context.Cause(ctx)
	case <-timer.C: // unless it runs by now
		g.with(func(now time.Time) { _ = g.queue.GiveUp(now, r) }) // the request says it too
		<-r.Decided()
	}
	g.metrics.queueSeconds.Observe(time.Since(began).Seconds())
	if refusal := r.Refused(); refusal != nil {
		return nil, refusal
	}
	return r, nil
}

// with does something with the queue, which lets as many requests run as may by now.
func (g *gate) with(do func(now time.Time)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	g.queue.SetSlots(now, g.slots())
	do(now)
	g.metrics.queued.Set(float64(g.queue.Waiting()))
}

// leave lets the next request in. used is how many tokens the request cost, or unknown.
func (g *gate) leave(r *admission.Request, used int) {
	g.with(func(now time.Time) { g.queue.End(now, r, used) })
}

// resize lets as many requests run as may by now.
func (g *gate) resize() { g.with(func(time.Time) {}) }

// counts is how many requests run and how many wait.
func (g *gate) counts() (running, waiting int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.queue.Running(), g.queue.Waiting()
}

// clientOf names the client of a request and what it may use. Without keys that the front has checked it is the address:
// a client that tries to get more than its share would vary whatever else is in a request. One client may have a whole
// IPv6 network of 64 bits.
func (r *Router) clientOf(req *http.Request, k *apikeys.Key) (name string, l admission.Limits) {
	limits := r.limits.Load()
	if k != nil {
		own, is := limits.Keys[k.ID]
		switch {
		case is:
			return k.ID, own
		case k.Limits != admission.Limits{}:
			return k.ID, k.Limits
		}
		return k.ID, limits.Each
	}
	host, _, err := net.SplitHostPort(req.RemoteAddr)
	if err != nil {
		return "", limits.Each
	}
	ip, err := netip.ParseAddr(host)
	if err != nil {
		return "", limits.Each
	}
	ip = ip.Unmap().WithZone("")
	if ip.Is6() {
		network, _ := ip.Prefix(64) // IPv6 has more bits than that
		return network.String(), limits.Each
	}
	return ip.String(), limits.Each
}

// queued lets a request of a client wait for its turn; leave is nil if it was answered instead.
func (r *Router) queued(c *call, req *http.Request, name string, limits *admission.Limits) (leave func(), o outcome) {
	prompt, answer := c.body.estimate()
	c.cost = consumption{prompt: prompt}
	entered, err := r.gate.enter(req.Context(), name, *limits, prompt+answer)
	refusal, refused := errors.AsType[*admission.RefusedError](err)
	switch {
	case refused:
		return nil, r.tellRefusal(c, refusal, limits)
	case err != nil:
		return nil, c.abandon(req.Context())
	}
	return func() { r.gate.leave(entered, c.cost.tokens()) }, ""
}

// tellRefusal answers a request that is not admitted.
func (r *Router) tellRefusal(c *call, refusal *admission.RefusedError, l *admission.Limits) outcome {
	r.metrics.refusals.WithLabelValues(string(refusal.Reason)).Inc()
	c.awaitClient(r.config.WriteTimeout)
	code, message, who := "overloaded", "", "this client"
	if c.key != nil {
		who = c.key.Name
	}
	switch refusal.Reason {
	case admission.QueueFull:
		running, waiting := r.gate.counts()
		message = fmt.Sprintf("%d requests are running already, and %d wait", running, waiting)
	case admission.QueueTimeout:
		message = fmt.Sprintf("the request has waited for %v, and other requests still run", r.config.QueueTimeout)
		if l != nil && l.InFlight > 0 {
			message += fmt.Sprintf("; %s may have %d running (max_in_flight)", who, l.InFlight)
		}
	case admission.Bodies:
		message = fmt.Sprintf("the requests of this client that are running and waiting may have seven eighths of what others leave of %d MiB", r.gate.room.Bytes>>20)
	case admission.RequestRate:
		code, message = "rate_limit_exceeded", fmt.Sprintf("%s may send %d requests a minute (requests_per_minute)", who, l.RequestsPerMinute)
	case admission.TokenRate:
		code, message = "rate_limit_exceeded", fmt.Sprintf("%s may use %d tokens a minute (tokens_per_minute)", who, l.TokensPerMinute)
	}
	c.w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(refusal.After.Seconds()))))
	refuse(c.w, http.StatusTooManyRequests, code, message)
	return overloaded
}
