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
	"sync"
	"syscall"
	"time"

	"github.com/kvport/kvport/engine/kvevents"
	"github.com/kvport/kvport/engine/router/policy"
)

// errLost ends the requests that run on an instance which stopped answering.
var errLost = errors.New("instance stopped answering health checks")

// target is an instance as picked for one attempt.
type target struct {
	index int
	role  role
	url   *url.URL
	life  context.Context //nolint:containedctx // ends when the instance is found hanging, for each attempt on it
	leg   *policy.Leg     // what the policy counts
	kind  kind

	client  uint64 // as in policy.Request
	picked  time.Time
	stopped *bool // what was sent there no longer runs; nil: nothing was
}

// pool is the table with what it needs to be used from many goroutines: a lock, and a context for
// each instance that ends when it hangs.
type pool struct {
	log     *slog.Logger
	metrics *metrics
	now     func() time.Time // time.Now, but in simulations

	mu       sync.Mutex
	table    table
	mostEach int       // requests on one instance at once, unless it says less; 0: any number
	waiting  []*waiter // requests that wait for a decode instance, in the order in which they came
	policy   *policy.Policy
	chosenBy policy.Config // what the policy was made of
	lives    []life
	urls     []*url.URL
	known    []registered

	blocks  *blocks         // nil: nobody is asked which blocks it has
	misfits map[pair]string // why not; only pairs that do not fit
	wasted  map[pair]wasted // only pairs whose last hand-off was wasted

	fresh freshness // of registrations
	moves moves     // of engines that register

	places      map[identity]int
	free        []int // places that a new instance can have
	cooling     gone  // places of instances that are gone, before they are free
	everPrefill bool  // there is a prefill instance, or was one

	watching *watching // nil: Run does not run
	changed  func()    // called without mu when the instances may take another number of requests together
}

type life struct {
	ctx context.Context //nolint:containedctx // ends with the instance, not with a call
	end context.CancelCauseFunc
}

func newLife() life {
	ctx, end := context.WithCancelCause(context.Background())
	return life{ctx, end}
}

func newPool(list []spec, chooser *policy.Policy, log *slog.Logger, m *metrics) *pool {
	p := &pool{
		log: log, metrics: m, now: time.Now, policy: chooser, misfits: map[pair]string{}, wasted: map[pair]wasted{},
		fresh: newFreshness(time.Now()), changed: func() {},
	}
	p.places, p.cooling = map[identity]int{}, gone{}
	for _, s := range list {
		p.regroup(p.claim(s, byFlag), byFlag, []string{s.group})
	}
	return p
}

// goesBack reports whether a prefill instance may load what a decode instance holds, as far as is known: they may be a
// pair, and both are kv_both. The caller holds mu.
func (p *pool) goesBack(d, to int) bool {
	from, at := &p.table.instances[d], &p.table.instances[to]
	if from.state > suspect || at.role != prefill || at.left || from.group != at.group || p.misfits[pair{to, d}] != "" {
		return false
	}
	a, b := p.known[d].fit, p.known[to].fit
	return a == nil || b == nil || a.Role == "kv_both" && b.Role == "kv_both"
}

// bothWays reports whether answers of a decode instance can go back to some prefill instance by ticket: both say which they
// are, and by which connector blocks come and go. What lies in a store is found there without one.
func (p *pool) bothWays(d int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	from := p.known[d].fit
	for i := range p.known {
		if to := p.known[i].fit; from != nil && to != nil && p.goesBack(d, i) && from.givesTickets(to) {
			return true
		}
	}
	return false
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
	case b.failed(p.now()):
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

// report takes what a health check found out, unless the instance has left meanwhile.
func (p *pool) report(ctx context.Context, i int, got checked) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if ctx.Err() != nil { // the place may be another's
		return
	}
	if got.result == healthy {
		p.saysLimit(i, got.limit)
		p.known[i].open = got.open
		p.sawLocked(i, got.says)
		if p.policy.UsesPrompts() {
			p.blocks.follow(p.urls[i], got.events)
		} else {
			p.blocks.leave(p.urls[i])
		}
	}
	p.probedLocked(i, got.result, got.why)
}

// probedLocked takes the result of a health check; why says what is wrong. The caller holds mu.
func (p *pool) probedLocked(i int, result probe, why string) {
	if p.table.instances[i].left {
		return
	}
	p.known[i].unwell = why
	before, silence := p.table.instances[i].state, p.table.instances[i].silence
	changed := p.table.probed(i, result)
	in := p.table.instances[i]
	if result == refused && (changed || silence > 0) { // what starts there again has nothing of what it held
		p.policy.Forget(i)
	}
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
	p.showUp(i)
	p.wake()
	level, attrs := slog.LevelInfo, []any{"instance", p.urls[i].String(), "role", in.role.String(), "state", in.state.String()}
	if in.state == down {
		level, attrs = slog.LevelWarn, append(attrs, "err", why)
	}
	p.log.Log(context.Background(), level, "instance changed state", attrs...)
}

// showUp tells the metrics whether an instance takes requests. The caller holds mu.
func (p *pool) showUp(i int) {
	if p.urls[i] != nil {
		p.metrics.setUp(p.urls[i].String(), p.table.instances[i].role, p.table.available(i) && p.known[i].drains == 0)
	}
}

// InstanceHealth is what /health says about one instance.
type InstanceHealth struct {
	URL      string `json:"url"`
	Role     string `json:"role"`
	State    string `json:"state"`                   // up, suspect, draining, loading, down
	Group    string `json:"group,omitempty"`         // its replica
	InFlight int    `json:"in_flight"`               // requests that this router runs there, of both roles
	Limit    int    `json:"max_in_flight,omitempty"` // requests that may run there at once; 0: any number
	Breaker  string `json:"breaker,omitempty"`       // open: it is left out since it fails every request
	Error    string `json:"error,omitempty"`         // what is wrong with it
}

// poolHealth is what the pool knows of its instances.
type poolHealth struct {
	instances    []InstanceHealth
	available    [roles]int // how many of each role take requests
	everPrefill  bool
	incompatible []Misfit
	recomputing  []Misfit
	paired       bool // some available prefill instance fits an available decode instance
}

func (p *pool) health() (h poolHealth) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	available := func(i int) bool { return p.table.available(i) && p.known[i].serves(now) }
	h.everPrefill = p.everPrefill
	for i, in := range p.table.instances {
		if available(i) {
			h.available[in.role]++
		}
		if in.left {
			continue
		}
		k := &p.known[i]
		one := InstanceHealth{
			URL: p.urls[i].String(), Role: in.role.String(), Group: in.group, State: in.state.String(),
			InFlight: k.load.running(), Limit: p.limit(i), Error: cmp.Or(k.unwell, k.refusal),
		}
		if k.breaker.open() {
			one.Breaker = "open"
		}
		if k.drains != 0 && in.state <= suspect {
			one.State = draining.String()
		}
		h.instances = append(h.instances, one)
	}
	h.recomputing = p.recomputing()
	h.incompatible = p.incompatible()
	h.paired = p.paired(available)
	return h
}

// paired reports whether some prefill instance that is available may be the partner of a decode instance that is. The
// caller holds mu.
func (p *pool) paired(available func(i int) bool) bool {
	for i, a := range p.table.instances {
		if a.role != prefill || !available(i) {
			continue
		}
		for j, b := range p.table.instances {
			if b.role == decode && b.group == a.group && p.misfits[pair{i, j}] == "" && available(j) {
				return true
			}
		}
	}
	return false
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
	says   *fit            // of what fits, with a healthy one; nil if nothing
	limit  int             // of requests at once, with a healthy one; 0: it does not say
	open   bool            // it has no tenants, as far as a healthy one says
	events *kvevents.Place // where it publishes its blocks, if the router reads that
	why    string          // what is wrong; empty: nothing
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
	body, broken := io.ReadAll(io.LimitReader(resp.Body, maxHealth)) // the status is what counts, except for what only a whole body can say
	switch resp.StatusCode {
	case http.StatusOK:
		return checked{result: healthy, says: parseFit(body), limit: parseLimit(body), open: c.key == "" && broken == nil && isOpen(body)}
	case http.StatusServiceUnavailable:
		return unready(body, resp.Header)
	case http.StatusUnauthorized, http.StatusForbidden:
		return checked{result: silent, why: fmt.Sprintf("HTTP %d at /health: %s", resp.StatusCode, c.remedy)}
	}
	return checked{result: silent, why: fmt.Sprintf("HTTP %d at /health", resp.StatusCode)}
}

// unready says what a 503 means: an instance that is still loading says so, and one that drains says so or when to come
// back. One that says neither is broken: vLLM answers so when its engine has died.
func unready(body []byte, header http.Header) checked {
	var h struct {
		Status string `json:"status"`
	}
	_ = json.Unmarshal(body, &h) // what is no JSON has no status
	switch {
	case h.Status == "loading":
		return checked{result: starting}
	case h.Status == "draining" || header.Get("Retry-After") != "":
		return checked{result: leaving}
	}
	return checked{result: failing, why: "HTTP 503 at /health, which says neither that it is loading nor that it is draining"}
}

// When an instance is left out, and how long.
const (
	breakAfter   = 5 // failures in a row
	firstPause   = time.Second
	longestPause = 30 * time.Second
)

// breaker leaves an instance out that fails every request, though it may answer its health checks. After
// a pause one request tries it again; each failure of such a trial doubles the pause. Only an answer
// to a request ends that.
type breaker struct {
	failures int           // in a row
	pause    time.Duration // the last one
	until    time.Time     // its end
	trial    bool          // a request tries the instance
}

func (b *breaker) open() bool { return b.failures >= breakAfter }

// admits reports whether a request may go to the instance.
func (b *breaker) admits(now time.Time) bool { return !b.open() || !b.trial && !now.Before(b.until) }

// picked notes that a request goes there.
func (b *breaker) picked() { b.trial = b.open() }

// failed notes that one failed and reports whether the instance is left out from now on.
func (b *breaker) failed(now time.Time) (opened bool) {
	if b.open() && !b.trial {
		return false // it began before the pause
	}
	b.failures++
	if !b.open() {
		return false
	}
	b.pause = min(max(firstPause, 2*b.pause), longestPause)
	b.until, b.trial = now.Add(b.pause), false
	return true
}

// worked notes that a request got its answer and reports whether the instance was left out before.
func (b *breaker) worked() (closed bool) {
	closed = b.open()
	*b = breaker{}
	return closed
}

// released notes that a trial is over without a verdict, or goes well so far: another may follow.
func (b *breaker) released() { b.trial = false }

// role is the part an instance plays for the router.
type role uint8

const (
	prefill role = iota
	decode
	roles // how many there are
)

// String names the role in logs and metrics.
func (r role) String() string {
	if r == prefill {
		return "prefill"
	}
	return "decode"
}

// instance is what the policy is told about an instance of the role.
func (r role) instance(name, group string) policy.Instance {
	is := policy.Instance{Role: policy.Decode, Name: name, Group: group}
	if r == prefill {
		is.Role = policy.Prefill
	}
	return is
}

// state is what the router believes of an instance.
type state uint8

const (
	up       state = iota // also before the first probe: trying is how a router finds out soonest
	suspect               // a request failed there since the last good probe; used when none is up
	draining              // it answers, but takes no new requests
	loading               // it answers, but does not take requests yet
	down                  // it does not answer probes
)

// String names the state in /health.
func (s state) String() string {
	return [...]string{"up", "suspect", "draining", "loading", "down"}[s]
}

// probe is the result of one health check.
type probe uint8

const (
	healthy  probe = iota
	leaving        // 503 that says so: the instance drains
	starting       // 503 that says so: its model is still loading
	failing        // 503 that says nothing: the engine behind the server has died
	refused        // nobody listens
	silent         // no answer in time, a broken one, or another status
)

// silences is how many silent probes in a row mean that an instance is down. A busy instance may
// miss one; a refused connection is certain at once. With the defaults of Config one that hangs is down within
// 10 s: three times 1.2 s until a probe, and 2 s for it.
const silences = 3

// table knows the instances and their states. It has no clock and does no I/O.
type table struct {
	instances []instance
}

type instance struct {
	role    role
	group   string // its replica
	state   state
	silence int  // silent probes in a row
	left    bool // it was registered and no longer is; then it is down
}

// hangs reports whether the requests that run on the instance are lost. Those of an instance that
// refuses connections are not: it may be finishing them before it ends, and if it is dead already
// their connections break by themselves.
func (in *instance) hangs() bool { return in.state == down && in.silence >= silences }

// probed takes the result of a health check and reports whether the state changed.
func (t *table) probed(i int, p probe) (changed bool) {
	in := &t.instances[i]
	before := in.state
	if p != silent {
		in.silence = 0
	}
	switch p {
	case healthy:
		in.state = up
	case leaving:
		in.state = draining
	case starting:
		in.state = loading
	case failing, refused:
		in.state = down
	case silent:
		if in.silence++; in.silence >= silences {
			in.state = down
		}
	}
	return in.state != before
}

// failed takes note that a request to the instance failed in a way that blames it.
func (t *table) failed(i int) {
	if in := &t.instances[i]; in.state == up {
		in.state = suspect
	}
}

// standing is what an instance's state means for the policy.
func (t *table) standing(i int) policy.Standing {
	switch t.instances[i].state {
	case up:
		return policy.Up
	case suspect:
		return policy.Suspect
	case draining, loading, down:
	}
	return policy.Out
}

// available reports whether an instance may be chosen.
func (t *table) available(i int) bool { return t.instances[i].state <= suspect }

// Choice is the part of a Router that decides which instance gets a request, without its clock and
// its network: what a simulation drives. It is not safe for concurrent use.
type Choice struct {
	table  table
	policy *policy.Policy // round_robin
}

// NewChoice makes the choice among instances that are numbered from 0, prefill instances first.
// All count as up.
func NewChoice(prefills, decodes int) *Choice {
	var list []role
	for i := range prefills + decodes {
		list = append(list, map[bool]role{true: prefill, false: decode}[i < prefills])
	}
	return newChoice(list)
}

func newChoice(list []role) *Choice {
	p, _ := policy.New(policy.Config{}) // what is given in a config may be wrong, and nothing is
	c := &Choice{policy: p}
	for i, r := range list {
		c.table.instances = append(c.table.instances, instance{role: r})
		p.Add(i, r.instance("", ""))
	}
	return c
}

// Prefill picks a prefill instance that is not in tried, if there is one to be had.
func (c *Choice) Prefill(tried map[int]bool) (index int, ok bool) { return c.pick(prefill, tried) }

// Decode picks a decode instance that is not in tried, if there is one to be had.
func (c *Choice) Decode(tried map[int]bool) (index int, ok bool) { return c.pick(decode, tried) }

func (c *Choice) pick(r role, tried map[int]bool) (index int, ok bool) {
	q := &policy.Request{Alone: r == decode, Standing: func(i int) policy.Standing {
		if tried[i] {
			return policy.Out
		}
		return c.table.standing(i)
	}}
	var leg *policy.Leg
	if r == prefill {
		leg = c.policy.ChoosePrefill(q, &policy.Leg{}).Prefill // in turn, whichever the decode instance is
	} else if choice, ok := c.policy.Choose(q); ok {
		leg = choice.Decode
	}
	if leg == nil {
		return 0, false
	}
	c.policy.Done(leg)
	return leg.Place, true
}

// Failed takes note that an instance failed a request.
func (c *Choice) Failed(index int) { c.table.failed(index) }

// Probed takes the result of a health check: whether the instance answered that it is well, and if
// not, whether its address refused the connection, which is certain, or only kept silent.
func (c *Choice) Probed(index int, well, refusing bool) {
	switch {
	case well:
		c.table.probed(index, healthy)
	case refusing:
		c.table.probed(index, refused)
	default:
		c.table.probed(index, silent)
	}
}
