// Package router spreads requests over prefill and decode instances: prompt to P, its answer's
// kv_transfer_params to D, D's tokens to the client, as vLLM's proxies do it.
//
// A request is retried on another instance as long as the client has not seen a byte of its answer.
// Without a prefill instance the decode instances serve alone.
package router

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvport/kvport/engine/apikeys"
	"github.com/kvport/kvport/engine/kvevents"
	"github.com/kvport/kvport/engine/router/admission"
	"github.com/kvport/kvport/engine/router/policy"
)

// Config says what a Router routes to. Zero values of all but Decode mean the defaults named.
type Config struct {
	Prefill  []string  // base URLs, or DNS names as in [Instance]; none: decode instances serve alone
	Decode   []string  // likewise, at least one unless instances may register, a file has them, or there are replicas
	Replicas []Replica // groups of instances, each of which hands blocks over within itself
	File     File      // further instances, and limits
	DNS      DNS

	Policy     string             // a name of policy.Names; round_robin
	Weights    map[string]float64 // of the policy's scorers, instead of its own
	SessionKey string             // header:NAME, cookie:NAME or field:NAME; header:X-Session-Id

	// Events says where instances publish which blocks they have, by base URL: those that do not tell it in /health,
	// such as vLLM's.
	Events map[string]kvevents.Place
	// IndexBlocks is how many blocks are known by these events, of all instances together, at about 50 bytes each; 16 Mi.
	IndexBlocks int

	// QueryTimeout is how long a request may wait for what instances answer to cache queries about its prompt, which they get
	// if nothing is known of it; 200 ms. Negative: they get none.
	QueryTimeout time.Duration

	HealthInterval time.Duration // between probes of an instance; 1 s
	HealthTimeout  time.Duration // of one probe; 2 s
	PrefillTimeout time.Duration // of one prefill attempt, after which another instance is tried; 2 min
	Attempts       int           // decode attempts of one request at most; 3
	Backoff        time.Duration // before the first retry of what an instance has answered or may have worked on; then doubled, to 1 s; 50 ms
	RetryShare     float64       // such retries of each role for each request that comes, in addition to 100 at once and 10 a second; 0.2

	// How long a decode instance may keep silent. Before the first byte has gone to the client another instance
	// is tried, after it the answer ends with an error.
	FirstByteTimeout time.Duration // before the first byte of a stream; 2 min
	IdleTimeout      time.Duration // between two pieces of an answer; 2 min
	AnswerTimeout    time.Duration // before an answer that is not streamed, which comes when all of it is generated; 10 min

	MaxBody      int64         // bytes of a request body at most; 8 MiB
	MaxInFlight  int           // requests at once at most, from the end of their bodies on; 1024
	MaxQueue     int           // further requests that wait until one of these has ended, at most; 0: none waits
	QueueTimeout time.Duration // how long a request may wait; 30 s
	Limits       Limits        // of each client; SetLimits changes them

	// InstanceInFlight is how many requests run on one instance at once at most. If it says in /health that fewer may, that
	// counts. 0: what it says, if it does.
	InstanceInFlight int

	BodyTimeout  time.Duration // to receive a whole body; 30 s
	WriteTimeout time.Duration // for a client to take one piece of an answer; 30 s

	Register Registration // zero: instances are those of the config

	// Turns is how many conversations are remembered: the decode instance that answered holds its blocks,
	// and the prefill instances that get the turns that follow load from there what they lack. Both ends must be
	// kv_both. 0: none.
	Turns int
	// TurnsWhereKnown leaves out decode instances whose /health does not say that they are kv_both and give tickets that a
	// prefill instance takes, which is kv_both too. Those of other makers say nothing.
	TurnsWhereKnown bool
	// TurnsFile keeps what is remembered of conversations for the router's next life. It is written every 5 s and when Run
	// ends, with mode 0600 since tickets are secret. Empty: none.
	TurnsFile string

	OwnKeys     bool   // the front checked Authorization itself: it is not passed on
	UpstreamKey string // API key that instances get instead of the client's; empty: none
	// Key finds the key that an Authorization header has; nil: it has none of them. A client without a key learns from
	// /health how the router is, and gets nothing else. One whose key does not let it watch learns no more from /health.
	// The cache_salt of a request becomes one within its client's tenant. A nil Key: there are no keys.
	Key func(authorization string) *apikeys.Key

	// SharedKeys reports whether several API keys, and so perhaps several tenants, use the router. X-Kvport-Route then names
	// the instances and not the reasons, which say what prompts of others have left there. nil: they do not.
	SharedKeys func() bool

	TLS       *tls.Config           // of connections to instances whose URLs are https; nil: the system's CAs
	Transport http.RoundTripper     // nil: a transport for many connections to few hosts
	Log       *slog.Logger          // nil: none
	Metrics   prometheus.Registerer // nil: not registered
	Gatherer  prometheus.Gatherer   // what /metrics shows; nil: no /metrics
}

// How many bytes of an answer are held. maxPrefillAnswer bounds a prefill instance's answer, of which only
// kv_transfer_params count, and a refusal. maxHeld is how much of a decode instance's whole answer is held before
// it is passed on as it comes: up to there, a request whose connection breaks can still be retried.
const (
	maxPrefillAnswer = 2 << 20
	maxHeld          = 256 << 10
)

// Router is an http.Handler. Run must be running for it to notice instances that come back.
type Router struct {
	config   Config
	client   *http.Client
	pool     *pool
	session  atomic.Pointer[sessionKey]
	seed     uint64   // of the hashes of prompts
	holders  []holder // instances' own word on what they hold
	metrics  *metrics
	mux      *http.ServeMux
	gate     *gate // lets requests in whose body has come
	limits   atomic.Pointer[Limits]
	retries  [roles]allowance // one does not use up what the other has
	lookups  *lookups
	file     *watchedFile // nil: none
	turns    *turns       // nil: conversations are not remembered
	asker    *asker
	ending   time.Duration // maxEnding, but in tests
	draining atomic.Bool
	refusals apikeys.Refusals // of registrations
	foreign  sync.Once        // has the log say that an id is of another router
}

// New makes a Router. Errors name the URL that is wrong.
func New(c Config) (*Router, error) {
	given, err := c.instances()
	if err != nil {
		return nil, err
	}
	later := c.Register.Verify != nil || c.File.Path != "" // instances may come
	if !given.has(decode) && !later {
		return nil, errors.New("no decode instance given")
	}
	c = withDefaults(c)
	chooser, err := policy.New(policy.Config{Policy: c.Policy, Weights: c.Weights})
	if err != nil {
		return nil, fmt.Errorf("--policy: %w", err)
	}
	session, err := parseSessionKey(c.SessionKey)
	if err != nil {
		return nil, fmt.Errorf("--session-key %w", err)
	}
	m, err := newMetrics(c.Metrics)
	if err != nil {
		return nil, err
	}
	r := &Router{
		config: c, metrics: m, ending: maxEnding, pool: newPool(given.specs, chooser, c.Log, m), seed: newSeed(),
		client: &http.Client{Transport: c.Transport, CheckRedirect: noRedirect},
		mux:    http.NewServeMux(), asker: newAsker(c.QueryTimeout),
		gate: &gate{patience: c.QueueTimeout, metrics: m, queue: admission.NewQueue(admission.Config{Slots: c.MaxInFlight, Waiting: c.MaxQueue})},
	}
	r.pool.mostEach, r.pool.changed = c.InstanceInFlight, r.gate.resize
	r.gate.slots = func() int { return r.pool.room(c.MaxInFlight) }
	r.pool.chosenBy = policy.Config{Policy: c.Policy, Weights: c.Weights}
	r.session.Store(&session)
	if r.pool.blocks, err = newBlocks(c, r.client, r.pool, m); err != nil {
		return nil, err
	}
	r.holders = append(r.holders, r.pool.blocks)
	r.SetLimits(c.Limits)
	for i := range r.retries {
		r.retries[i].budget.Share = c.RetryShare
	}
	r.gate.room.Bytes = max(maxBodies, 2*int(c.MaxBody))
	if c.Turns > 0 && (given.has(prefill) || later) {
		r.turns = newTurns(c.Turns)
	}
	if err := r.discover(given.names); err != nil {
		return nil, err
	}
	r.route()
	return r, nil
}

// discover takes the instances that are not given by their URLs, as far as they are known now, and what an earlier life
// remembers of turns.
func (r *Router) discover(names []dnsName) (err error) {
	r.lookups = newLookups(r.config.DNS, r.pool, r.metrics)
	r.lookups.set(byFlag, names)
	if r.config.File.Path != "" {
		if r.file, err = r.use(r.config.File); err != nil {
			return err
		}
	} else if _, _, err := r.choosing(&Settings{}); err != nil {
		return err
	}
	if r.config.Register.Verify == nil && len(r.lookups.given()) == 0 { // else others may come at any time
		r.pool.blocks.warnOfStrangers()
	}
	return r.restoreTurns()
}

// route makes the paths of the API.
func (r *Router) route() {
	handle := func(method, path string, h http.HandlerFunc) {
		r.mux.HandleFunc(method+" "+path, h)
		r.mux.HandleFunc(path, func(w http.ResponseWriter, req *http.Request) {
			w.Header().Set("Allow", method)
			refuse(w, http.StatusMethodNotAllowed, "method_not_allowed", fmt.Sprintf("%s requires %s, not %s", req.URL.Path, method, req.Method))
		})
	}
	handle("POST", "/v1/completions", r.generate)
	handle("POST", "/v1/chat/completions", r.generate)
	handle("GET", "/v1/models", r.models)
	handle("GET", "/v1/models/{model...}", r.models)
	handle("GET", "/health", r.health)
	if r.config.Gatherer != nil {
		handle("GET", "/metrics", r.watched(promhttp.HandlerFor(r.config.Gatherer, promhttp.HandlerOpts{})))
	}
	r.mux.HandleFunc("/", func(w http.ResponseWriter, req *http.Request) {
		refuse(w, http.StatusNotFound, "not_found", fmt.Sprintf("there is no %s", req.URL.Path))
	})
}

// parseURL reads a base URL. Where only the scheme is missing, the error has the whole URL.
func parseURL(s string) (*url.URL, error) {
	if u, err := url.Parse(s); err == nil && isBase(u) {
		return u, nil
	}
	want := "http://HOST:PORT"
	if u, err := url.Parse("http://" + s); err == nil && !strings.Contains(s, "://") && isBase(u) {
		want = u.String()
	}
	return nil, fmt.Errorf("%q is no URL, want %s", s, want)
}

// isBase reports whether a URL is that of an instance.
func isBase(u *url.URL) bool {
	return (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" && u.RawQuery == "" && u.User == nil
}

// maxBodies is how many bytes the bodies of all running and waiting requests may have: each is held, in a few copies,
// until its request ends. 128 KiB each, where all slots are taken. One client gets seven eighths of what
// others leave.
const maxBodies = 128 << 20

// maxUpstreamHeader is how many bytes of headers an instance may answer with: each running request may hold as much.
const maxUpstreamHeader = 64 << 10

func withDefaults(c Config) Config {
	setDefault(&c.HealthInterval, time.Second)
	setDefault(&c.HealthTimeout, 2*time.Second)
	setDefault(&c.PrefillTimeout, 2*time.Minute)
	setDefault(&c.FirstByteTimeout, 2*time.Minute)
	setDefault(&c.IdleTimeout, 2*time.Minute)
	setDefault(&c.AnswerTimeout, 10*time.Minute)
	setDefault(&c.Register.TTL, registrationTTL)
	setDefault(&c.Attempts, 3)
	setDefault(&c.Policy, policy.RoundRobin)
	setDefault(&c.SessionKey, "header:X-Session-Id")
	setDefault(&c.QueryTimeout, queryPatience)
	setDefault(&c.Backoff, 50*time.Millisecond)
	setDefault(&c.RetryShare, 0.2)
	setDefault(&c.MaxBody, 8<<20)
	setDefault(&c.MaxInFlight, 1024)
	setDefault(&c.QueueTimeout, 30*time.Second)
	setDefault(&c.BodyTimeout, 30*time.Second)
	setDefault(&c.WriteTimeout, 30*time.Second)
	setDefault(&c.Log, slog.New(slog.DiscardHandler))
	if c.Transport == nil {
		c.Transport = &http.Transport{
			MaxResponseHeaderBytes: maxUpstreamHeader,
			TLSClientConfig:        c.TLS,
			DialContext:            (&net.Dialer{Timeout: 5 * time.Second}).DialContext,
			MaxIdleConnsPerHost:    256, IdleConnTimeout: 90 * time.Second,
			DisableCompression: true, // bytes pass through as they are
		}
	}
	return c
}

func setDefault[T comparable](v *T, value T) { *v = cmp.Or(*v, value) }

// noRedirect keeps a redirect from sending a prompt to a host that nobody configured.
func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// ServeHTTP implements http.Handler.
func (r *Router) ServeHTTP(w http.ResponseWriter, req *http.Request) { r.mux.ServeHTTP(w, req) }

// Run probes the instances, and finds new ones, until ctx ends. It returns when nothing that it started is left.
func (r *Router) Run(ctx context.Context) {
	r.pool.blocks.begin(ctx)
	var tasks sync.WaitGroup
	defer tasks.Wait()
	tasks.Go(func() { r.lookups.run(ctx) })
	if r.file != nil {
		tasks.Go(func() { r.watch(ctx, r.file) })
	}
	if r.turns != nil && r.config.TurnsFile != "" {
		tasks.Go(func() { r.saveTurns(ctx) })
	}
	r.pool.run(ctx, checker{
		client: r.client, interval: r.config.HealthInterval, timeout: r.config.HealthTimeout,
		key: r.config.UpstreamKey, remedy: r.config.keyRemedy(),
	}, r.config.Register.TTL, r.forgetPlaces)
	r.pool.blocks.end()
}

// Ready says why no request should be sent here; "" if one may.
func (r *Router) Ready() string {
	if r.draining.Load() {
		return "draining"
	}
	if r.pool.health().available[decode] == 0 {
		return "no decode instance is available"
	}
	return ""
}

// Drain makes /health say 503 and refuses new requests. Running ones go on, until the context of one
// ends: with http.ErrServerClosed as its cause the client is told so, otherwise it has left.
func (r *Router) Drain() { r.draining.Store(true) }

// Close ends what still runs and closes idle connections.
func (r *Router) Close() {
	r.Drain()
	r.pool.close()
	r.client.CloseIdleConnections()
}

// generate serves completions and chat completions.
func (r *Router) generate(w http.ResponseWriter, req *http.Request) {
	c := &call{
		router: r, w: w, path: req.URL.Path, id: newID(), started: time.Now(),
		failed: make(map[int]bool),
	}
	w.Header().Set("X-Request-Id", c.id)
	r.noteForeign(req.Header.Get("X-Request-Id"))
	result := r.admit(c, req)
	r.pool.leave(c.picked)
	c.awaitClient(0) // not for the next request on this connection
	r.metrics.requests.WithLabelValues(string(result)).Inc()
	r.config.Log.Debug("request", "id", c.id, "label", req.Header.Get("X-Request-Id"), "path", c.path,
		"outcome", string(result), "seconds", time.Since(c.started).Seconds())
}

// admit refuses what cannot be served and runs the rest.
func (r *Router) admit(c *call, req *http.Request) outcome {
	if r.draining.Load() {
		refuse(c.w, http.StatusServiceUnavailable, "draining", "the router is shutting down")
		return unavailable
	}
	body, refusal := r.readBody(c.w, req) // before it has a slot: a client that dawdles takes none from the others
	if refusal != nil {
		c.awaitClient(r.config.WriteTimeout)
		refusal(c.w)
		return clientError
	}
	if r.draining.Load() { // by now
		refuse(c.w, http.StatusServiceUnavailable, "draining", "the router is shutting down")
		return unavailable
	}
	var known bool
	c.key, known = r.keyOf(req)
	if !known { // any more
		refuse(c.w, http.StatusUnauthorized, "invalid_api_key", apikeys.WantKey)
		return clientError
	}
	client, limits := r.clientOf(req, c.key)
	c.client = client
	err := r.gate.hold(client, len(body))
	if refusal, refused := errors.AsType[*admission.RefusedError](err); refused {
		return r.tellRefusal(c, refusal, &limits)
	}
	defer r.gate.drop(client, len(body))
	if c.body, err = parse(body); err != nil {
		refuse(c.w, http.StatusBadRequest, "bad_request", err.Error())
		return clientError
	}
	if err = r.salt(c.body, c.key); err != nil {
		refuse(c.w, http.StatusBadRequest, "invalid_value", err.Error())
		return clientError
	}
	if c.body.asksForCache() {
		refuse(c.w, http.StatusBadRequest, "unsupported_value", "kv_transfer_params.cache_query: the router answers none, ask an instance")
		return clientError
	}
	c.size, c.session = len(body), r.session.Load().of(req, c.body)
	c.explain = req.Header.Get(routeHeader) != ""
	leave, answered := r.queued(c, req, client, &limits)
	if leave == nil {
		return answered
	}
	defer leave()
	for i := range r.retries {
		r.retries[i].request()
	}
	r.metrics.inFlight.Inc()
	defer r.metrics.inFlight.Dec()
	c.header = r.upstreamHeader(req, c.id)
	c.header.Set("Content-Type", "application/json")
	return c.run(req.Context())
}

// readBody reads a body within its limits of size and time, or gives the answer that refuses it.
func (r *Router) readBody(w http.ResponseWriter, req *http.Request) (body []byte, refusal func(http.ResponseWriter)) {
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(r.config.BodyTimeout)) // a recorder in a test has none
	body, err := io.ReadAll(http.MaxBytesReader(w, req.Body, r.config.MaxBody))
	if err == nil {
		_ = control.SetReadDeadline(time.Time{}) // from here on a read only notices that the client left
		return body, nil
	}
	w.Header().Set("Connection", "close") // the deadline stays, so that nothing waits for the rest
	status, code, message := http.StatusBadRequest, "bad_request", "request body: "+err.Error()
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		status, code, message = http.StatusRequestEntityTooLarge, "request_too_large", fmt.Sprintf("request body is over %d bytes", tooLarge.Limit)
	case errors.Is(err, os.ErrDeadlineExceeded):
		status, code, message = http.StatusRequestTimeout, "request_timeout", fmt.Sprintf("request body took over %v", r.config.BodyTimeout)
	}
	return nil, func(w http.ResponseWriter) { refuse(w, status, code, message) }
}

// upstreamHeader is what instances get of a request's headers.
func (r *Router) upstreamHeader(req *http.Request, id string) http.Header {
	h := forwarded(req.Header)
	h.Set("X-Request-Id", id)
	h.Del(routeHeader)
	switch {
	case r.config.UpstreamKey != "":
		h.Set("Authorization", "Bearer "+r.config.UpstreamKey)
	case r.config.OwnKeys:
		h.Del("Authorization")
	}
	return h
}

// models passes /v1/models and what is below it on to the first decode instance that answers.
func (r *Router) models(w http.ResponseWriter, req *http.Request) {
	if path.Clean(req.URL.Path) != req.URL.Path { // escaped dots must not lead elsewhere on an instance
		refuse(w, http.StatusNotFound, "not_found", fmt.Sprintf("there is no %s", req.URL.Path))
		return
	}
	c := &call{router: r, w: w, path: req.URL.EscapedPath(), id: newID(), started: time.Now(), failed: make(map[int]bool)}
	c.header = r.upstreamHeader(req, c.id)
	c.method = http.MethodGet
	w.Header().Set("X-Request-Id", c.id)
	c.run(req.Context())
	r.pool.leave(c.picked)
	c.awaitClient(0) // not for the next request on this connection
}

// health tells a load balancer in front, and a person, what the router sees.
func (r *Router) health(w http.ResponseWriter, req *http.Request) {
	h := r.pool.health()
	answer := struct {
		Status       string           `json:"status"` // ok, degraded (no prefill instance, or none that fits), unavailable, draining
		TLS          bool             `json:"tls"`    // the port speaks HTTPS
		Instances    []InstanceHealth `json:"instances,omitempty"`
		Incompatible []Misfit         `json:"incompatible,omitempty"`
		Recomputing  []Misfit         `json:"recomputing,omitempty"` // pairs whose hand-offs are all wasted
	}{"ok", req.TLS != nil, h.instances, h.incompatible, h.recomputing}
	code := http.StatusOK
	switch {
	case r.draining.Load():
		answer.Status, code = "draining", http.StatusServiceUnavailable
	case h.available[decode] == 0:
		answer.Status, code = "unavailable", http.StatusServiceUnavailable
	case h.everPrefill && !h.paired:
		answer.Status = "degraded"
	}
	if k, known := r.keyOf(req); !known || !k.Watches() {
		answer.Instances, answer.Incompatible, answer.Recomputing = nil, nil, nil
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(answer) // a client that left needs no answer
}

// watched lets only clients through that may see what is about all tenants.
func (r *Router) watched(next http.Handler) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		switch k, known := r.keyOf(req); {
		case !known: // any more
			refuse(w, http.StatusUnauthorized, "invalid_api_key", apikeys.WantKey)
		case !k.Watches():
			refuse(w, http.StatusForbidden, "metrics_key_required", apikeys.WantMetrics)
		default:
			next.ServeHTTP(w, req)
		}
	}
}

// newSeed is 64 random bits.
func newSeed() uint64 {
	var seed [8]byte
	_, _ = rand.Read(seed[:]) // never fails, says its documentation
	return binary.LittleEndian.Uint64(seed[:])
}

// newID is 128 random bits.
func newID() string {
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails, says its documentation
	return hex.EncodeToString(id[:])
}
