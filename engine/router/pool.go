package router

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/url"
	"sync"
	"syscall"
	"time"
)

// errLost ends the requests that run on an instance which stopped answering.
var errLost = errors.New("instance stopped answering health checks")

// target is an instance as picked for one attempt.
type target struct {
	index int
	role  role
	url   *url.URL
	life  context.Context //nolint:containedctx // ends when the instance is found hanging, for each attempt on it
}

// pool is the table with what it needs to be used from many goroutines: a lock, and a context for
// each instance that ends when it hangs.
type pool struct {
	log     *slog.Logger
	metrics *metrics

	mu    sync.Mutex
	table table
	lives []life
	urls  []*url.URL
	known []registered

	watching *watching // nil: Run does not run
}

type life struct {
	ctx context.Context //nolint:containedctx // ends with the instance, not with a call
	end context.CancelCauseFunc
}

func newLife() life {
	ctx, end := context.WithCancelCause(context.Background())
	return life{ctx, end}
}

func newPool(prefills, decodes []*url.URL, log *slog.Logger, m *metrics) *pool {
	p := &pool{log: log, metrics: m}
	for r, urls := range [roles][]*url.URL{prefill: prefills, decode: decodes} {
		for _, u := range urls {
			p.known[p.add(role(r), u)].fixed = true
		}
	}
	return p
}

// pick chooses an instance for one attempt and adds it to tried.
func (p *pool) pick(r role, tried map[int]bool) (target, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	i, ok := p.table.pick(r, tried)
	if !ok {
		return target{}, false
	}
	tried[i] = true
	return target{index: i, role: r, url: p.urls[i], life: p.lives[i].ctx}, true
}

// usable reports whether an instance may be talked to.
func (p *pool) usable(i int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.table.instances[i].state <= suspect
}

func (p *pool) failed(t target) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.table.failed(t.index)
}

func (p *pool) probed(i int, result probe) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.table.instances[i].left {
		return
	}
	changed := p.table.probed(i, result)
	in := p.table.instances[i]
	switch {
	case in.hangs():
		p.lives[i].end(errLost)
	case in.state != down && p.lives[i].ctx.Err() != nil:
		p.lives[i] = newLife()
	}
	if !changed {
		return
	}
	p.metrics.setUp(p.urls[i].String(), in.role, in.state == up)
	p.log.Info("instance changed state", "instance", p.urls[i].String(), "role", in.role.String(), "state", in.state.String())
}

// InstanceHealth is what /health says of one instance.
type InstanceHealth struct {
	URL   string `json:"url"`
	Role  string `json:"role"`
	State string `json:"state"` // up, suspect, draining, down
}

// health lists the instances and counts the available ones of each role.
func (p *pool) health() (list []InstanceHealth, available [roles]int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, in := range p.table.instances {
		if in.left {
			continue
		}
		list = append(list, InstanceHealth{p.urls[i].String(), in.role.String(), in.state.String()})
	}
	for r := range roles {
		available[r] = p.table.available(r)
	}
	return list, available
}

// close ends the lives, so that nothing waits on them.
func (p *pool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, l := range p.lives {
		l.end(http.ErrServerClosed)
	}
}

// checker probes one instance again and again.
type checker struct {
	client   *http.Client
	interval time.Duration
	timeout  time.Duration
}

// watch reports a probe of url/health at once and then about every interval until ctx ends. Intervals
// vary by a fifth, so that many routers do not probe in step.
func (c *checker) watch(ctx context.Context, u *url.URL, report func(probe)) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		result := c.probe(ctx, u)
		if ctx.Err() != nil {
			return
		}
		report(result)
		timer.Reset(time.Duration(float64(c.interval) * (0.8 + 0.4*rand.Float64())))
	}
}

func (c *checker) probe(ctx context.Context, u *url.URL) probe {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.JoinPath("health").String(), nil)
	if err != nil {
		return silent
	}
	resp, err := c.client.Do(req)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return refused
	case err != nil:
		return silent
	}
	defer resp.Body.Close()
	drain(resp.Body)
	switch resp.StatusCode {
	case http.StatusOK:
		return healthy
	case http.StatusServiceUnavailable:
		return leaving
	}
	return silent
}
