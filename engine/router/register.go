package router

import (
	"context"
	"crypto/hmac"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvport/kvport/engine/apikeys"
	"github.com/kvport/kvport/internal/pairid"
	"github.com/kvport/kvport/internal/register"
)

// Registration lets instances come and go by themselves, and lets the router tell them of each other: each
// says where its HTTP server is and where it takes KV blocks. The zero value is none.
type Registration struct {
	// Verify names the key of the deployment with which a registration was signed; empty: with none of them.
	Verify func(body, signature string) (by string)
	// Sign signs the text that names both ends of a request, 32 characters of 0-9 and a-f. by names the keys with
	// which the two have registered: both must be able to verify the signature.
	Sign func(text string, by ...string) string
	TTL  time.Duration // after the last registration an instance is forgotten; 0: 15 s
	// Groups lets a registration say to which group its instance belongs. Without it one that does is refused, since a
	// group that nobody minds would be taken for one that counts.
	Groups bool
}

// registrationTTL is how long a registration is good, unless a config says otherwise.
const registrationTTL = 15 * time.Second

// maxRegistration bounds a registration, in bytes.
const maxRegistration = 4 << 10

// registered is what the router knows about one instance, apart from its place in the table.
type registered struct {
	at     string    // its base URL in one spelling
	kv     string    // where it takes blocks; "" if it did not say
	by     string    // the key with which it said so
	engine string    // its id; "" if it did not say
	seen   time.Time // when its server registered last
	kvSeen time.Time // when its connector did
	signed string    // the key of the last registration of either

	sources source // who names it; none: it has left
	drains  source // which of them say that it gets no new requests
	words   []word // the groups that they say: by sources, as they spoke first, and then in the order of each one's list
	ignored string // groups that do not count, as the log has said
	users   int    // requests that have picked it and have not ended
	open    bool   // it has no tenants, as its /health says to whoever has no key
	fit     *fit   // what its /health says; nil: nothing yet, or nothing at all

	unwell  string       // what is wrong by its last probe; empty: nothing
	refusal string       // of the last request, if it was turned away
	warned  map[int]bool // statuses of refusals that the log has since the last change of state

	breaker breaker
	load    *inFlight
	busy    busy
	muted   time.Time          // when cache queries may come again, after it has failed one
	silent  int                // cache queries in a row that it did not answer in time
	stop    context.CancelFunc // of its probes; nil: it is not probed
}

// Registrar is the handler for registrations: POST /register. It needs a listener of its own, which clients
// cannot reach.
func (r *Router) Registrar() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /register", func(w http.ResponseWriter, req *http.Request) {
		status, nonce, by, err := r.register(req)
		r.metrics.registrations.WithLabelValues(strconv.Itoa(status)).Inc()
		if nonce != "" {
			w.Header().Set(register.NonceHeader, nonce)
		}
		if err != nil {
			r.auditRefusal(req, by, err)
			refuse(w, status, "registration_refused", err.Error())
			return
		}
		w.WriteHeader(http.StatusOK)
	})
	return mux
}

// register takes one registration. nonce is for the next one of the same instance; by names the key with which this one is signed.
func (r *Router) register(req *http.Request) (status int, nonce, by string, err error) {
	body, err := io.ReadAll(io.LimitReader(req.Body, maxRegistration))
	if err != nil {
		return http.StatusBadRequest, "", "", err
	}
	if verify := r.config.Register.Verify; verify != nil {
		by = verify(string(body), req.Header.Get(register.MacHeader))
	}
	if by == "" {
		return http.StatusForbidden, "", "", fmt.Errorf("the registration is not signed with this deployment's key")
	}
	var m register.Message
	if err := json.Unmarshal(body, &m); err != nil {
		return http.StatusBadRequest, "", by, err
	}
	part, err := partOf(&m, r.config.Register.Groups)
	if err != nil {
		return http.StatusBadRequest, "", by, err
	}
	nonce, news, err := r.pool.register(part, &m, by)
	if err != nil {
		return http.StatusConflict, nonce, by, err
	}
	if news {
		apikeys.Act{Action: "register", Key: by, Remote: req.RemoteAddr, Result: "ok"}.
			Log(r.config.Log, "instance", m.HTTP, "role", part.String(), "leaves", m.Leave)
	}
	return http.StatusOK, nonce, by, nil
}

// partOf is the part of the instance that a registration is about, or what is wrong with what it says.
func partOf(m *register.Message, groups bool) (part role, err error) {
	part, known := map[string]role{"P": prefill, "D": decode}[m.Type]
	switch {
	case !known:
		err = fmt.Errorf("type is %q, want P or D", m.Type)
	case !isHostPort(m.HTTP):
		err = fmt.Errorf("http_address is %q, want HOST:PORT", m.HTTP)
	case m.KV != "" && !isHostPort(m.KV):
		err = fmt.Errorf("zmq_address is %q, %s", m.KV, pairid.WantAddress)
	case m.Group != "" && !groups:
		err = errors.New("group is for a router with --mode replica")
	case m.Group != "" && !register.IsGroup(m.Group):
		err = fmt.Errorf("group is %q, %s", m.Group, register.WantGroup)
	}
	return part, err
}

// auditRefusal keeps a refused registration, signed with the key that by names, in the log. That an engine has no nonce
// yet is no refusal: so it gets one.
func (r *Router) auditRefusal(req *http.Request, by string, err error) {
	if errors.Is(err, errNonce) {
		return
	}
	r.refusals.Log(r.config.Log, apikeys.Act{Action: "register", Key: by, Remote: req.RemoteAddr, Result: err.Error()})
}

// isHostPort reports whether a text is an address that can be part of a URL and of a request id.
func isHostPort(address string) bool {
	host, port, err := net.SplitHostPort(address)
	return err == nil && host != "" && port != "" && port != "0" && !strings.ContainsAny(address, "/@?# _")
}

// register takes the registration of an instance, signed with the key that by names. news reports whether the instance has come
// or left by it.
func (p *pool) register(part role, m *register.Message, by string) (nonce string, news bool, err error) {
	defer p.changed()
	p.mu.Lock()
	defer p.mu.Unlock()
	nonce, err = p.fresh.check(freshKey(part, m.HTTP, m.KV != ""), m, p.now())
	if err != nil {
		return nonce, false, err
	}
	i, u := p.registeredAt(part, m)
	before := i >= 0 && p.known[i].isRegistered()
	who := registrant(m)
	switch {
	case m.Leave && i >= 0:
		p.ends(i, who)
		return nonce, before && !p.known[i].isRegistered(), nil
	case m.Leave:
		return nonce, false, nil
	case (i < 0 || p.known[i].sources == 0) && p.taken() >= maxInstances:
		return nonce, false, fmt.Errorf("%w: there are %d already", ErrTooMany, maxInstances)
	}
	i = p.claim(spec{role: part, group: m.Group, url: u}, who)
	p.regroup(i, who, []string{m.Group})
	p.believe(i, m, by)
	p.moved(i)
	p.wake()
	return nonce, !before && p.known[i].isRegistered(), nil
}

// registrant is who registers an engine: its connector says where it takes blocks, and its server does not. Each speaks
// for itself: when one says nothing more, what the other says still counts.
func registrant(m *register.Message) source {
	if m.KV != "" {
		return byConnector
	}
	return byServer
}

// isRegistered reports whether an instance is registered and has not said that it ends.
func (k *registered) isRegistered() bool {
	return k.sources&byRegistration != 0 && k.drains&byServer == 0
}

// believe takes what a registration says about its instance, signed with the key that by names. The caller holds mu.
func (p *pool) believe(i int, m *register.Message, by string) {
	k, now := &p.known[i], p.now()
	k.signed = by
	if m.Engine != "" {
		k.engine = m.Engine
	}
	if registrant(m) == byServer {
		k.seen = now
		k.drains &^= byServer
		p.showUp(i)
		return
	}
	if k.kv == "" {
		p.metrics.known.Inc()
		p.log.Info("instance takes blocks of others", "instance", m.HTTP, "role", p.table.instances[i].role.String(), "kv", m.KV)
	}
	if k.kv != m.KV && !pairid.IsAddress(m.KV) {
		p.log.Warn("no request id can name where an instance takes blocks, so nothing is sent there unasked: give its connector another address",
			"instance", m.HTTP, "role", p.table.instances[i].role.String(), "kv", m.KV, "reason", pairid.WantAddress)
	}
	k.kv, k.by, k.kvSeen = m.KV, by, now
}

// ends takes note that an instance leaves, as its server or its connector says. Where the server does, the engine ends:
// it gets no new requests, though its connector goes on registering until the last one has ended. The caller holds mu.
func (p *pool) ends(i int, who source) {
	p.disclaim(i, who)
	if k := &p.known[i]; who == byServer && k.sources&byConnector != 0 {
		k.drains |= byServer
		p.showUp(i)
	}
}

// registeredAt is the place of an instance that registers, -1 if there is none, and where it is reached: by its URL where
// another source has one. The caller holds mu.
func (p *pool) registeredAt(part role, m *register.Message) (i int, u *url.URL) {
	u = &url.URL{Scheme: "http", Host: m.HTTP}
	if m.TLS != nil && *m.TLS {
		u.Scheme = "https"
	}
	if i = p.find(part, u); i < 0 || p.table.instances[i].left {
		if other := p.index(part, m.HTTP); other >= 0 {
			i = other
		}
	}
	switch {
	case i < 0:
	case p.known[i].sources&^byRegistration != 0 || m.TLS == nil || p.urls[i].Scheme == u.Scheme:
		u = p.urls[i]
	default: // it was there with HTTPS and is without, or the reverse
		p.disclaim(i, byRegistration)
		i = -1
	}
	return i, u
}

// moved forgets other addresses at which the same engine is registered: it has moved. One that registers on from an address that
// it has left is another engine with the same id, and both stay. The caller holds mu.
func (p *pool) moved(to int) {
	engine, part, now := p.known[to].engine, p.table.instances[to].role, p.now()
	if engine == "" {
		return
	}
	id := part.String() + " " + engine
	if p.moves.goesOn(p.urls[to].Host, id, now) {
		p.log.Warn("two engines register with the same engine_id, both stay: give each its own", "instance", p.urls[to].String(), "role", part.String(), "engine_id", engine)
	}
	if p.moves.twins[id] {
		return
	}
	for i := range p.known {
		if i != to && p.known[i].engine == engine && p.table.instances[i].role == part {
			p.moves.note(p.urls[i].Host, id, now)
			p.auditLeave(i, "moved")
			p.disclaim(i, byRegistration)
		}
	}
}

// moves tells engines that have moved from others that have the same id.
type moves struct {
	left  map[departure]time.Time
	twins map[string]bool // ids that several engines have, by role
}

// departure is the address from which an engine has moved away, and its role and id.
type departure struct{ host, engine string }

// settledMove is how long after a move the engine at the old address registers again if it is still there: engines do so every 3 s.
const settledMove = 7 * time.Second

// note takes note that an engine has moved away from an address.
func (m *moves) note(host, engine string, now time.Time) {
	if m.left == nil || len(m.left) >= maxFresh {
		m.left = map[departure]time.Time{}
	}
	m.left[departure{host, engine}] = now
}

// goesOn reports whether an engine registers at an address from which it has just moved away, for the first time of its id.
func (m *moves) goesOn(host, engine string, now time.Time) bool {
	left, known := m.left[departure{host, engine}]
	delete(m.left, departure{host, engine})
	if !known || now.Sub(left) >= settledMove || m.twins[engine] {
		return false
	}
	if m.twins == nil || len(m.twins) >= maxFresh {
		m.twins = map[string]bool{}
	}
	m.twins[engine] = true
	return true
}

// auditLeave keeps in the log that an instance is not registered any more, though it has not said so. The caller holds mu.
func (p *pool) auditLeave(i int, why string) {
	if k := &p.known[i]; k.isRegistered() {
		apikeys.Act{Action: "register", Key: k.signed, Result: why}.
			Log(p.log, "instance", p.urls[i].Host, "role", p.table.instances[i].role.String(), "leaves", true)
	}
}

// freshness tells a registration from a copy of an earlier one, without a clock: for each instance there is one nonce,
// which the next registration must have. Registrations of earlier versions have none; their times must ascend, be those of
// this life of the router, and be about right.
type freshness struct {
	began  time.Time
	nonces map[string]string // by freshKey
	times  map[string]int64  // of those without nonces
}

func newFreshness(began time.Time) freshness {
	return freshness{began: began, nonces: map[string]string{}, times: map[string]int64{}}
}

// clockError is how far the clock of an engine that registers without a nonce may be off.
const clockError = 5 * time.Minute

// maxFresh bounds both maps. An instance whose nonce is dropped gets another one and says again what it said.
const maxFresh = 4 * maxInstances

// check says what is wrong with a registration, and gives the nonce for the next one.
func (f *freshness) check(who string, m *register.Message, now time.Time) (nonce string, err error) {
	if m.Nonce == "" {
		last, known := f.times[who]
		at := time.Unix(0, m.At)
		switch {
		case at.Before(f.began) || now.Sub(at).Abs() > clockError:
			return "", fmt.Errorf("a registration of %s without a nonce whose time %s is before the start of the router or over %v off",
				m.HTTP, at.UTC().Format(time.RFC3339), clockError)
		case known && m.At <= last:
			return "", fmt.Errorf("a registration of %s that is older than the last one", m.HTTP)
		case !known && len(f.times) >= maxFresh:
			return "", fmt.Errorf("%w register without a nonce, as earlier versions of kvport do", ErrTooMany)
		}
		f.times[who] = m.At
		return "", nil
	}
	want, known := f.nonces[who]
	if known && hmac.Equal([]byte(want), []byte(m.Nonce)) {
		f.nonces[who] = newID()
		return f.nonces[who], nil
	}
	if !known {
		for other := range f.nonces {
			if len(f.nonces) < maxFresh {
				break
			}
			delete(f.nonces, other)
		}
		f.nonces[who] = newID()
	}
	if known && m.Nonce != register.NoNonce {
		return f.nonces[who], errReplay
	}
	return f.nonces[who], errNonce
}

// What is wrong with a nonce. Engines begin without one, and after the router has begun again they have one that it does not know.
var (
	errNonce  = errors.New("the registration has no valid nonce: it must have the one of this answer")
	errReplay = errors.New("the registration has an earlier nonce, as a copy of an earlier one has, and one after an answer that was lost: it must have that of this answer")
)

// freshKey is how freshness knows an instance, and who registers it: a connector that says where it takes blocks, or the engine's server.
// Both may, each with nonces of its own.
func freshKey(part role, host string, kv bool) string { return fmt.Sprintf("%v %s %t", part, host, kv) }

// late lets an engine come back whose clock was ahead when it registered last, once that is over.
func (f *freshness) late(who string, now time.Time) {
	if at, known := f.times[who]; known {
		f.times[who] = min(at, now.UnixNano())
	}
}

// index is the place of an instance that has not left, by whichever scheme it is reached; -1 if there is none. The
// caller holds mu.
func (p *pool) index(part role, host string) int {
	for _, scheme := range []string{"http", "https"} {
		if i := p.find(part, &url.URL{Scheme: scheme, Host: host}); i >= 0 && !p.table.instances[i].left {
			return i
		}
	}
	return -1
}

// expire forgets what has not been registered for a while.
func (p *pool) expire(ttl time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.known {
		k, late := &p.known[i], source(0)
		for by, seen := range map[source]time.Time{byServer: k.seen, byConnector: k.kvSeen} {
			if k.sources&by != 0 && p.now().Sub(seen) >= ttl {
				late |= by
			}
		}
		if late != 0 && k.sources&byRegistration == late {
			p.auditLeave(i, "expired")
		}
		p.disclaim(i, late)
	}
}

// unregistered takes note that an instance's server or connector, or both, do not register it any more. The caller
// holds mu.
func (p *pool) unregistered(i int, by source) {
	k, part := &p.known[i], p.table.instances[i].role
	if by&byConnector != 0 {
		if k.kv != "" {
			p.metrics.known.Dec()
		}
		k.kv, k.by = "", ""
		k.drains &^= byServer // nobody is left of an engine whose server has said that it ends
	}
	if by&byServer != 0 || k.sources&byRegistration == 0 {
		engine := k.engine
		k.engine = ""
		p.untwin(part, engine)
	}
	for _, one := range []source{byServer, byConnector} {
		if by&one != 0 {
			p.fresh.late(freshKey(part, p.urls[i].Host, one == byConnector), p.now())
		}
	}
}

// untwin forgets that several engines have one id when at most one of them is left, so that it is followed again when
// it moves. The caller holds mu.
func (p *pool) untwin(part role, engine string) {
	n := 0
	for i := range p.known {
		if p.known[i].engine == engine && p.table.instances[i].role == part {
			n++
		}
	}
	if n < 2 {
		delete(p.moves.twins, part.String()+" "+engine)
	}
}

// admits reports whether the instance may get requests of a client now, as its sources, itself and its breaker say. The caller holds mu.
func (k *registered) admits(now time.Time, client uint64) bool {
	return k.serves(now) && k.busy.admits(now, client, k.load.running())
}

// serves is admits without what the instance says itself: requests wait for one that asks to be left alone for a while.
func (k *registered) serves(now time.Time) bool { return k.drains == 0 && k.breaker.admits(now) }

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
		c.watch(ctx, u, func(got checked) {
			got.events = p.blocks.where(u, got.says)
			p.report(ctx, i, got)
			p.changed()
		})
	})
}

// sweep is the time between two looks for instances that have not registered for too long and for places that are free.
const sweep = time.Second

// run probes all instances, those that come later too, until ctx ends. forget drops what others remember of instances
// that are gone.
func (p *pool) run(ctx context.Context, c checker, ttl time.Duration, forget func(gone)) {
	var tasks sync.WaitGroup
	p.mu.Lock()
	p.watching = &watching{ctx, c, &tasks}
	for i := range p.urls {
		p.watchLocked(i)
	}
	p.mu.Unlock()
	tick := time.NewTicker(sweep)
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

// kvAddress is where an instance takes blocks, "" if it did not say, and the key with which it registered.
func (p *pool) kvAddress(i int) (kv, by string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.known[i].kv, p.known[i].by
}

// meet names both ends of a request in its id for the engines, signed, if both have said where they take
// blocks. Each pair of attempts has an id of its own.
func (c *call) meet(p, d target) {
	c.pair = ""
	sign := c.router.config.Register.Sign
	from, byPrefill := c.router.pool.kvAddress(p.index)
	to, byDecode := c.router.pool.kvAddress(d.index)
	if sign == nil || from == "" || to == "" {
		return
	}
	text, ok := pairid.New(from, to, newID())
	if !ok { // no engine could read it; the log has said whose address it is
		c.router.metrics.unnamed.Inc()
		return
	}
	c.pair = text + "_" + sign(text, byPrefill, byDecode)
	c.router.metrics.introduced.Inc()
}
