package router

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Registration lets instances come and go by themselves, and lets the router tell them of each other: each
// says where its HTTP server is and where it takes KV blocks. The zero value is none.
type Registration struct {
	// Verify reports whether a registration was made by somebody who has the deployment's key.
	Verify func(body, signature string) bool
	// Sign signs the text that names both ends of a request, 32 characters of 0-9 and a-f.
	Sign func(text string) string
	TTL  time.Duration // after the last registration an instance is forgotten; 0: 15 s
}

const (
	maxRegistration = 4 << 10
	macHeader       = "X-Kvport-Mac"
)

// registration is what an instance says. Type, HTTP and KV have the names of vLLM's proxies.
type registration struct {
	Type string `json:"type"`         // P or D
	HTTP string `json:"http_address"` // HOST:PORT
	KV   string `json:"zmq_address"`  // HOST:PORT
	At   int64  `json:"at"`           // ascends: nanoseconds of the instance's clock
}

// registered is what the router knows about one instance, apart from its place in the table.
type registered struct {
	kv   string    // where it takes blocks; "" if it never registered
	at   int64     // of the last registration
	seen time.Time // when that came

	sources source // who names it; none: it has left
	drains  source // which of them say that it gets no new requests
	users   int    // requests that have picked it and have not ended
	fit     *fit   // what its /health says; nil: nothing yet, or nothing at all

	unwell  string       // what is wrong by its last probe; empty: nothing
	refusal string       // of the last request, if it was turned away
	warned  map[int]bool // statuses of refusals that the log has since the last change of state

	breaker breaker
	rested  time.Time          // when requests may come again, after the instance has asked to be left alone
	stop    context.CancelFunc // of its probes; nil: it is not probed
}

// Registrar is the handler for registrations: POST /register. It needs a listener of its own, which clients
// cannot reach.
func (r *Router) Registrar() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /register", func(w http.ResponseWriter, req *http.Request) {
		status, err := r.register(req)
		r.metrics.registrations.WithLabelValues(strconv.Itoa(status)).Inc()
		if err != nil {
			refuse(w, status, "registration_refused", err.Error())
			return
		}
		w.WriteHeader(http.StatusOK)
	})
	return mux
}

func (r *Router) register(req *http.Request) (status int, err error) {
	body, err := io.ReadAll(io.LimitReader(req.Body, maxRegistration))
	if err != nil {
		return http.StatusBadRequest, err
	}
	if r.config.Register.Verify == nil || !r.config.Register.Verify(string(body), req.Header.Get(macHeader)) {
		return http.StatusForbidden, fmt.Errorf("the registration is not signed with this deployment's key")
	}
	var g registration
	if err := json.Unmarshal(body, &g); err != nil {
		return http.StatusBadRequest, err
	}
	in := map[string]role{"P": prefill, "D": decode}
	part, known := in[g.Type]
	if !known {
		return http.StatusBadRequest, fmt.Errorf("type is %q, want P or D", g.Type)
	}
	for name, address := range map[string]string{"http_address": g.HTTP, "zmq_address": g.KV} {
		if host, port, err := net.SplitHostPort(address); err != nil || host == "" || port == "0" || strings.ContainsAny(address, "/@?# _") {
			return http.StatusBadRequest, fmt.Errorf("%s is %q, want HOST:PORT", name, address)
		}
	}
	if err := r.pool.register(part, &g); err != nil {
		return http.StatusConflict, err
	}
	return http.StatusOK, nil
}

// register finds or makes the instance of a registration.
func (p *pool) register(part role, g *registration) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := p.index(part, g.HTTP)
	switch {
	case i >= 0 && g.At <= p.known[i].at:
		return fmt.Errorf("a registration of %s that is older than the last one", g.HTTP)
	case i < 0 && p.taken() >= maxInstances:
		return fmt.Errorf("%w: there are %d already", ErrTooMany, maxInstances)
	}
	u := &url.URL{Scheme: "http", Host: g.HTTP}
	if i >= 0 {
		u = p.urls[i]
	}
	i = p.claim(part, u, byRegistration)
	k := &p.known[i]
	if k.kv == "" {
		p.metrics.known.Inc()
	}
	k.kv, k.at, k.seen = g.KV, g.At, time.Now()
	return nil
}

// index is the place of an instance; -1 if there is none. The caller holds mu.
func (p *pool) index(part role, host string) int {
	for i, u := range p.urls {
		if u != nil && u.Host == host && p.table.instances[i].role == part {
			return i
		}
	}
	return -1
}

// expire forgets instances that have not registered for a while.
func (p *pool) expire(ttl time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.known {
		if k := &p.known[i]; k.sources&byRegistration != 0 && time.Since(k.seen) >= ttl {
			p.disclaim(i, byRegistration)
		}
	}
}

// forgetKV forgets where an instance takes blocks. The caller holds mu.
func (p *pool) forgetKV(k *registered) {
	if k.kv != "" {
		k.kv = ""
		p.metrics.known.Dec()
	}
	k.at = min(k.at, time.Now().UnixNano()) // an engine whose clock was ahead may come back when it is right
}

// admits reports whether the instance may get requests, as its sources, itself and its breaker say. The caller holds mu.
func (k *registered) admits(now time.Time) bool {
	return k.drains == 0 && !now.Before(k.rested) && k.breaker.admits(now)
}

// watching is what pool needs to probe instances that come later.
type watching struct {
	ctx     context.Context //nolint:containedctx // of Run
	checker checker
	tasks   *sync.WaitGroup
}

// watchLocked probes an instance from now on, if it is not already. The caller holds mu.
func (p *pool) watchLocked(i int) {
	if p.watching == nil || p.known[i].stop != nil || p.table.instances[i].left {
		return
	}
	ctx, stop := context.WithCancel(p.watching.ctx)
	p.known[i].stop = stop
	u, c := p.urls[i], p.watching.checker
	p.watching.tasks.Go(func() {
		c.watch(ctx, u, func(got checked) { p.report(ctx, i, got) })
	})
}

// run probes all instances, those that come later too, until ctx ends. forget drops what others remember of instances
// that are gone.
func (p *pool) run(ctx context.Context, c checker, ttl time.Duration, forget func(places map[int]bool)) {
	var tasks sync.WaitGroup
	p.mu.Lock()
	p.watching = &watching{ctx, c, &tasks}
	for i := range p.urls {
		p.watchLocked(i)
	}
	p.mu.Unlock()
	tick := time.NewTicker(ttl / 4)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-tick.C:
			p.expire(ttl)
			p.recycle(forget)
		case <-ctx.Done():
		}
	}
	p.mu.Lock()
	p.watching = nil
	for i := range p.known {
		if stop := p.known[i].stop; stop != nil {
			stop()
			p.known[i].stop = nil
		}
	}
	p.mu.Unlock()
	tasks.Wait()
}

// kvAddress is where an instance takes blocks; "" if it did not say.
func (p *pool) kvAddress(i int) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.known[i].kv
}

// meet names both ends of a request in its id for the engines, signed, if both have said where they take
// blocks. Each pair of attempts has an id of its own.
func (c *call) meet(p, d target) {
	c.pair = ""
	sign := c.router.config.Register.Sign
	from, to := c.router.pool.kvAddress(p.index), c.router.pool.kvAddress(d.index)
	if sign == nil || from == "" || to == "" {
		return
	}
	text := "___prefill_addr_" + from + "___decode_addr_" + to + "_" + newID()
	c.pair = text + "_" + sign(text)
	c.router.metrics.introduced.Inc()
}
