package router

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
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

	misfits map[pair]string // why not; only pairs that do not fit
	wasted  map[pair]wasted // only pairs whose last hand-off was wasted

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
	p := &pool{log: log, metrics: m, misfits: map[pair]string{}, wasted: map[pair]wasted{}}
	for r, urls := range [roles][]*url.URL{prefill: prefills, decode: decodes} {
		for _, u := range urls {
			p.known[p.add(role(r), u)].fixed = true
		}
	}
	return p
}

// pickDecode chooses a decode instance for one attempt and adds it to tried.
func (p *pool) pickDecode(tried map[int]bool) (target, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pickIf(decode, tried, func(int) bool { return true })
}

// pickFor chooses among the prefill instances that fit a decode instance. If there is none, why says whether
// that is because of those that do not fit; it is empty where there are no prefill instances.
func (p *pool) pickFor(d target, tried map[int]bool) (t target, why string, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	why = noPrefill
	t, ok = p.pickIf(prefill, tried, func(i int) bool {
		if p.misfits[pair{i, d.index}] == "" {
			return true
		}
		why = incompatible
		return false
	})
	if !ok && !slices.ContainsFunc(p.table.instances, func(in instance) bool { return in.role == prefill && !in.left }) {
		why = "" // the decode instances are meant to serve alone
	}
	return t, why, ok
}

// pickIf chooses an instance that may be had and whose breaker admits it. The caller holds mu.
func (p *pool) pickIf(r role, tried map[int]bool, may func(i int) bool) (target, bool) {
	now := time.Now()
	i, ok := p.table.pickIf(r, func(i int) bool { return !tried[i] && p.known[i].breaker.admits(now) && may(i) })
	if !ok {
		return target{}, false
	}
	tried[i] = true
	p.known[i].breaker.picked()
	return target{index: i, role: r, url: p.urls[i], life: p.lives[i].ctx}, true
}

// usable reports whether an instance may be talked to.
func (p *pool) usable(i int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.table.instances[i].state <= suspect
}

// failed takes note that a request failed in a way that blames the instance. One that is only overloaded
// is not broken.
func (p *pool) failed(t target, overload bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.table.failed(t.index)
	b := &p.known[t.index].breaker
	switch {
	case overload:
		b.released()
	case b.failed(time.Now()):
		p.metrics.setBroken(t.url.String(), t.role, true)
		p.log.Warn("instance fails every request and is left out", "instance", t.url.String(), "role", t.role.String(),
			"failures", b.failures, "pause", b.pause.String())
	}
}

// worked takes note that the instance answered a request.
func (p *pool) worked(t target) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.known[t.index].breaker.worked() {
		p.metrics.setBroken(t.url.String(), t.role, false)
		p.log.Info("instance answers requests again", "instance", t.url.String(), "role", t.role.String())
	}
}

// released takes note that a request left the instance without a verdict, or has begun to be answered.
func (p *pool) released(t target) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known[t.index].breaker.released()
}

// probed takes the result of a health check; why says what is wrong.
func (p *pool) probed(i int, result probe, why string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.table.instances[i].left {
		return
	}
	p.known[i].unwell = why
	before := p.table.instances[i].state
	changed := p.table.probed(i, result)
	in := p.table.instances[i]
	if before == down && in.state == up { // somebody may have mended it: no need to wait for the trial
		p.known[i].breaker.until = time.Time{}
	}
	switch {
	case in.hangs():
		p.lives[i].end(errLost)
	case in.state != down && p.lives[i].ctx.Err() != nil:
		p.lives[i] = newLife()
	}
	if !changed {
		return
	}
	p.known[i].warned, p.known[i].refusal = nil, ""
	p.metrics.setUp(p.urls[i].String(), in.role, in.state == up)
	level, attrs := slog.LevelInfo, []any{"instance", p.urls[i].String(), "role", in.role.String(), "state", in.state.String()}
	if in.state == down {
		level, attrs = slog.LevelWarn, append(attrs, "err", why)
	}
	p.log.Log(context.Background(), level, "instance changed state", attrs...)
}

// InstanceHealth is what /health says about one instance.
type InstanceHealth struct {
	URL     string `json:"url"`
	Role    string `json:"role"`
	State   string `json:"state"`             // up, suspect, draining, loading, down
	Breaker string `json:"breaker,omitempty"` // open: it is left out since it fails every request
	Error   string `json:"error,omitempty"`   // what is wrong with it
}

// poolHealth is what the pool knows of its instances.
type poolHealth struct {
	instances    []InstanceHealth
	available    [roles]int // how many of each role take requests
	everPrefill  bool       // there is a prefill instance, or was one
	incompatible []Misfit
	recomputing  []Misfit
	paired       bool // some available prefill instance fits an available decode instance
}

func (p *pool) health() (h poolHealth) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	available := func(i int) bool { return p.table.available(i) && p.known[i].breaker.admits(now) }
	for i, in := range p.table.instances {
		h.everPrefill = h.everPrefill || in.role == prefill
		if available(i) {
			h.available[in.role]++
		}
		if in.left {
			continue
		}
		one := InstanceHealth{URL: p.urls[i].String(), Role: in.role.String(), State: in.state.String(), Error: cmp.Or(p.known[i].unwell, p.known[i].refusal)}
		if p.known[i].breaker.open() {
			one.Breaker = "open"
		}
		h.instances = append(h.instances, one)
	}
	h.recomputing = p.recomputing()
	var apart int
	h.incompatible, apart = p.incompatible(available)
	h.paired = h.available[prefill]*h.available[decode] > apart
	return h
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
	key      string // API key of the instances; empty: none
	remedy   string // what to do if they ask for another one
}

// checked is what a probe finds out.
type checked struct {
	result probe
	says   *fit   // of what fits, with a healthy one; nil if nothing
	why    string // what is wrong; empty: nothing
}

// watch reports a probe of url/health at once and then about every interval until ctx ends. Intervals
// vary by a fifth, so that many routers do not probe in step.
func (c *checker) watch(ctx context.Context, u *url.URL, report func(checked)) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		got := c.probe(ctx, u)
		if ctx.Err() != nil {
			return
		}
		report(got)
		timer.Reset(time.Duration(float64(c.interval) * (0.8 + 0.4*rand.Float64())))
	}
}

// maxHealth bounds a body of /health, in bytes.
const maxHealth = 64 << 10

func (c *checker) probe(ctx context.Context, u *url.URL) checked {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.JoinPath("health").String(), nil)
	if err != nil {
		return checked{result: silent, why: err.Error()}
	}
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	resp, err := c.client.Do(req)
	var at *url.Error
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return checked{result: refused, why: "connection refused: nobody listens there"}
	case err != nil && ctx.Err() != nil:
		return checked{result: silent, why: fmt.Sprintf("no answer at /health within %v", c.timeout)}
	case errors.As(err, &at):
		return checked{result: silent, why: at.Err.Error()} // the log names the URL by itself
	case err != nil:
		return checked{result: silent, why: err.Error()}
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxHealth)) // the status is what counts
	switch resp.StatusCode {
	case http.StatusOK:
		return checked{result: healthy, says: parseFit(body)}
	case http.StatusServiceUnavailable:
		return checked{result: unready(body)}
	case http.StatusUnauthorized, http.StatusForbidden:
		return checked{result: silent, why: fmt.Sprintf("HTTP %d at /health: %s", resp.StatusCode, c.remedy)}
	}
	return checked{result: silent, why: fmt.Sprintf("HTTP %d at /health", resp.StatusCode)}
}

// unready says what a 503 with such a body means: an engine that is still loading says so.
func unready(body []byte) probe {
	var h struct {
		Status string `json:"status"`
	}
	if json.Unmarshal(body, &h) == nil && h.Status == "loading" {
		return starting
	}
	return leaving
}
