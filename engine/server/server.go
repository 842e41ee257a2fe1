// Package server puts an engine behind the HTTP API of OpenAI, as far as text goes: completions and
// chat completions, whole or streamed, with the fields that vLLM adds for prefill/decode.
package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine"
	"github.com/kvport/kvport/engine/apikeys"
	"github.com/kvport/kvport/engine/kvevents"
	"github.com/kvport/kvport/engine/tokenizer"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/meter"
)

// Engine is what a Server needs of an engine; *engine.Engine has it.
type Engine interface {
	// Submit starts a request that ends with ctx at the latest. The channel is closed after the last
	// Output.
	Submit(ctx context.Context, r engine.Request) (<-chan engine.Output, error)
	// Health says how the engine and its connector do.
	Health() engine.Health
	// Reset empties the prefix cache, the connector's too if it can.
	Reset(ctx context.Context) error
	// Info says what the engine serves. It never changes.
	Info() engine.Info
}

// Config says what a Server serves. Zero values of the limits mean the defaults named.
type Config struct {
	Engine    Engine
	Tokenizer tokenizer.Tokenizer
	ModelName string          // what clients call the model
	EngineID  string          // told to consumers; empty: not told
	Events    *kvevents.Place // where the engine publishes which blocks it has, told to routers; nil: it does not

	MaxBody      int64         // bytes of a request body at most; 8 MiB
	MaxInFlight  int           // requests at once at most, from the end of their bodies on; 256
	BodyTimeout  time.Duration // to receive a whole body; 30 s
	WriteTimeout time.Duration // for a client to take one piece of an answer; 30 s

	// Key is the client's whose key an Authorization header has, or nil. Without a key a client learns from /health how
	// the engine is and how many requests it serves at once, and gets nothing else; with one that does not watch it learns no
	// more from there. Nil: there are no keys.
	Key func(authorization string) *apikeys.Key

	// CacheQueryRate is how many cache queries a second each API key may ask; 100. Below 0: none are answered.
	CacheQueryRate int
	// SharedKeys reports whether several API keys share the cache of prompts without a cache_salt: then cache queries need
	// one, so that no key learns of another's prompts. Nil: they do not.
	SharedKeys func() bool

	Log      *slog.Logger          // nil: none
	Metrics  prometheus.Registerer // nil: not registered
	Gatherer prometheus.Gatherer   // what /metrics shows; nil: no /metrics
}

// errLeft ends a request whose client is gone, errCutOff one that was cut off at shutdown: its client
// has been told.
var (
	errLeft   = errors.New("client went away")
	errCutOff = errors.New("cut off at shutdown")
)

// cutOff reports whether the server gave a request up, as opposed to its client.
func cutOff(ctx context.Context) bool { return errors.Is(context.Cause(ctx), http.ErrServerClosed) }

// maxTokenBytes is more than any token's text has: a prompt of more bytes per allowed token need not
// be tokenized to know that it is too long.
const maxTokenBytes = 256

// Server is an http.Handler. It does not own the engine.
type Server struct {
	config   Config
	info     engine.Info
	stops    []int32
	queries  *queryLimit
	fair     *fairness
	metrics  *metrics
	mux      *http.ServeMux
	draining atomic.Bool
	refusals apikeys.Refusals // of resets
	warned   atomic.Int64     // when an unknown field was last told as a warning, Unix nanoseconds
	toldIDs  sync.Map         // why ids were ignored, as the log has said
	started  time.Time
}

// New makes a Server.
func New(c Config) (*Server, error) {
	if c.Engine == nil || c.Tokenizer == nil || c.ModelName == "" {
		return nil, errors.New("server config: engine, tokenizer and model name are required")
	}
	setDefault(&c.MaxBody, 8<<20)
	setDefault(&c.MaxInFlight, 256)
	setDefault(&c.BodyTimeout, 30*time.Second)
	setDefault(&c.WriteTimeout, 30*time.Second)
	setDefault(&c.CacheQueryRate, 100)
	setDefault(&c.Log, slog.New(slog.DiscardHandler))
	m, err := newMetrics(c.Metrics)
	if err != nil {
		return nil, err
	}
	s := &Server{
		config: c, info: c.Engine.Info(), stops: c.Tokenizer.Stops(), metrics: m, queries: newQueryLimit(c.CacheQueryRate),
		fair: newFairness(max(1, c.Engine.Info().MaxSeqs), c.MaxInFlight, m.waiting), started: time.Now(),
	}
	s.mux = s.routes()
	return s, nil
}

func setDefault[T comparable](v *T, value T) { *v = cmp.Or(*v, value) }

func (s *Server) routes() *http.ServeMux {
	mux := http.NewServeMux()
	handle := func(method, path string, h http.HandlerFunc) {
		mux.HandleFunc(method+" "+path, h)
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Allow", method)
			e := &Error{http.StatusMethodNotAllowed, "invalid_request_error", "", "method_not_allowed", fmt.Sprintf("%s requires %s, not %s", r.URL.Path, method, r.Method)}
			e.Write(w)
		})
	}
	handle("POST", "/v1/completions", s.generate(false))
	handle("POST", "/v1/chat/completions", s.generate(true))
	handle("GET", "/v1/models", s.models)
	handle("GET", "/v1/models/{model...}", s.models)
	handle("GET", "/health", s.health)
	handle("POST", "/reset_prefix_cache", s.reset)
	handle("POST", "/tokenize", s.tokenize)
	if s.config.Gatherer != nil {
		handle("GET", "/metrics", s.watched(promhttp.HandlerFor(s.config.Gatherer, promhttp.HandlerOpts{})))
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		e := &Error{http.StatusNotFound, "invalid_request_error", "", "not_found", "there is no " + r.URL.Path}
		e.Write(w)
	})
	return mux
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.mux.ServeHTTP(w, r) }

// Drain makes /health say 503 and refuses new requests. Running ones go on, until the context of one
// ends: with http.ErrServerClosed as its cause the client is told so, otherwise it has left.
func (s *Server) Drain() { s.draining.Store(true) }

// Ready says why no request should be sent here; "" if one may. A connector that is not ready is no
// reason: requests are served without it.
func (s *Server) Ready() string {
	if s.draining.Load() || s.config.Engine.Health().Closing {
		return "draining"
	}
	return ""
}

// exchange is one generation request on its way through the server.
type exchange struct {
	id     string // 128 random bits; a client's own id is a label only
	pair   string // begins the engine's request ids, if a label names two engines: connectors check its signature; else empty
	chat   bool
	key    *apikeys.Key // the client's; nil: there are no keys
	params params
	jobs   []job
	cached *engine.Cached // the answer to a cache query

	generated atomic.Int64 // tokens of all jobs, taken by the client or not; where there are keys
}

func (s *Server) generate(chat bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		x := &exchange{id: newID(), chat: chat}
		given := r.Header.Get("X-Request-Id")
		label := label(given, x.id)
		if x.pair = pairOf(label); x.pair == "" && pairOf(given) != "" {
			s.ignoreID(ignoredUnfit, given)
		}
		w.Header().Set("X-Request-Id", label)
		began := time.Now()
		err := s.serve(w, r, x)
		_ = http.NewResponseController(w).SetWriteDeadline(time.Time{}) // not for the next request on this connection
		code := "200"
		var e *Error
		switch {
		case errors.Is(err, errLeft):
			code = "499"
		case errors.Is(err, errCutOff):
			code = "503"
		case err != nil:
			e = asError(err)
			code = fmt.Sprint(e.Status)
			e.Write(w)
		}
		if x.params.query {
			s.metrics.queries.WithLabelValues(x.answered(e)).Inc()
		}
		s.metrics.requests.WithLabelValues(r.URL.Path, code).Inc()
		s.metrics.seconds.WithLabelValues(r.URL.Path).Observe(time.Since(began).Seconds())
		s.config.Log.Debug("request", "id", x.id, "label", label, "path", r.URL.Path, "code", code, "err", err)
	}
}

// serve answers one request. An error means that nothing was written yet, that the client left or that
// the request was cut off.
func (s *Server) serve(w http.ResponseWriter, r *http.Request, x *exchange) error {
	if s.draining.Load() {
		return errDraining()
	}
	var err error
	if x.key, err = s.keyOf(r); err != nil {
		return err
	}
	body, err := s.readBody(w, r) // before it has a slot: a client that dawdles takes none from the others
	if err != nil {
		return err
	}
	if s.draining.Load() { // by now
		return errDraining()
	}
	leave, err := s.fair.enter(x.key)
	if err != nil {
		return err
	}
	defer leave()
	s.metrics.inFlight.Inc()
	defer s.metrics.inFlight.Dec()
	admitted, err := s.admit(w, x.key)
	if err != nil {
		return err
	}
	used := 0
	defer func() { s.fair.end(admitted, used) }()
	if err := s.decode(x, body); err != nil {
		return err
	}
	if err := s.estimate(w, x, admitted); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(r.Context())
	pieces, err := s.start(ctx, x)
	if err != nil {
		cancel()
		return err
	}
	a := s.newWriter(ctx, w, x)
	defer func() {
		cancel()
		for range pieces { // until the engine has let go of the request
		}
		used = a.used(err)
	}()
	if x.params.stream {
		err = a.stream(pieces)
	} else {
		err = a.whole(pieces)
	}
	if errors.Is(err, errLeft) && cutOff(ctx) {
		return a.cut()
	}
	return err
}

// keyOf is the client's key; nil if there are no keys. The front has checked it, but the keys may have changed since then.
func (s *Server) keyOf(r *http.Request) (*apikeys.Key, error) {
	if s.config.Key == nil {
		return nil, nil
	}
	if key := s.config.Key(r.Header.Get("Authorization")); key != nil {
		return key, nil
	}
	return nil, &Error{http.StatusUnauthorized, "invalid_request_error", "", "invalid_api_key", apikeys.WantKey}
}

// readBody reads a body within its limits of size and time.
func (s *Server) readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(s.config.BodyTimeout)) // a recorder in a test has none
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, s.config.MaxBody))
	if err == nil {
		_ = control.SetReadDeadline(time.Time{}) // from here on a read only notices that the client left
		return body, nil
	}
	w.Header().Set("Connection", "close") // the deadline stays, so that nothing waits for the rest
	if tooLarge, is := errors.AsType[*http.MaxBytesError](err); is {
		return nil, &Error{http.StatusRequestEntityTooLarge, "invalid_request_error", "", "request_too_large", fmt.Sprintf("request body is over %d bytes", tooLarge.Limit)}
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil, &Error{http.StatusRequestTimeout, "invalid_request_error", "", "request_timeout", fmt.Sprintf("request body took over %v", s.config.BodyTimeout)}
	}
	return nil, invalid("", "bad_request", "request body: %v", err)
}

// unknownPause is how long a warning of unknown fields stands for those that come after it.
const unknownPause = time.Minute

// tellUnknown counts the fields of a request that nobody knows and names one: it may be misspelt. That is a
// warning once in a while only, since some clients send such fields with every request.
func (s *Server) tellUnknown(p *params) {
	if p.unexpected == 0 {
		return
	}
	s.metrics.unknownFields.Add(float64(p.unexpected))
	level := slog.LevelDebug
	now, last := time.Now().UnixNano(), s.warned.Load()
	if now-last >= int64(unknownPause) && s.warned.CompareAndSwap(last, now) {
		level = slog.LevelWarn
	}
	s.config.Log.Log(context.Background(), level, "a request has a field that is not known and has no effect", "field", p.unknown, "unknown_fields", p.unexpected)
}

// decode fills in the exchange from a request body.
func (s *Server) decode(x *exchange, body []byte) error {
	var prompts []prompt
	field := "prompt"
	if x.chat {
		c, err := decodeChat(body)
		if err != nil {
			return err
		}
		chat, chatErr := s.config.Tokenizer.Chat(c.messages)
		if chatErr != nil {
			return invalid("messages", "invalid_value", "messages: %v", chatErr)
		}
		x.params, prompts, field = c.params, []prompt{{chat: chat}}, "messages"
	} else {
		c, err := decodeCompletion(body)
		if err != nil {
			return err
		}
		x.params, prompts = c.params, c.prompts
	}
	s.tellUnknown(&x.params)
	if err := s.knownModel(x.params.model); err != nil {
		return err
	}
	var err error
	if x.params.salt, err = x.key.Salt(x.params.salt); err != nil {
		return invalid("cache_salt", "invalid_value", "%v", err)
	}
	if err := s.admitQuery(x); err != nil { // before its prompt costs anything
		return err
	}
	s.takePair(x, len(prompts))
	for i, p := range prompts {
		j, err := s.job(x, p, field)
		if err != nil {
			return err
		}
		j.request.ID = connector.RequestID(x.requestID(i))
		x.jobs = append(x.jobs, j)
	}
	return nil
}

// knownModel refuses the name of a model that is not here.
func (s *Server) knownModel(name string) error {
	if name == "" || name == "default" || name == s.config.ModelName {
		return nil
	}
	return &Error{http.StatusNotFound, "invalid_request_error", "model", "model_not_found", fmt.Sprintf("there is no model %q here, only %q", name, s.config.ModelName)}
}

// defaultTokens is max_tokens of a completion that does not say: OpenAI's default. Chat goes on as
// long as the model can.
const defaultTokens = 16

// encode gives the tokens of a prompt.
func (s *Server) encode(p prompt, field string) (tokens []int32, err error) {
	if p.tokens != nil {
		return p.tokens, nil
	}
	size, limit := len(p.text), s.info.MaxModelLen
	if p.chat != nil {
		size = len(p.chat.String())
	}
	if size > limit*maxTokenBytes {
		return nil, invalid(field, "context_length_exceeded", "%s: %d bytes of text cannot fit into the model's %d tokens", field, size, limit)
	}
	if p.chat != nil {
		tokens, err = s.config.Tokenizer.EncodeChat(p.chat)
	} else {
		tokens, err = s.config.Tokenizer.Encode(p.text, true)
	}
	if err != nil {
		return nil, invalid(field, "invalid_value", "%s: %v", field, err)
	}
	return tokens, nil
}

// job checks one prompt and makes the engine's request of it.
func (s *Server) job(x *exchange, p prompt, field string) (job, error) {
	limit := s.info.MaxModelLen
	tokens, err := s.encode(p, field)
	if err != nil {
		return job{}, err
	}
	known := func(t int32) bool { return t >= 0 && int(t) < s.info.Vocab }
	if i := slices.IndexFunc(tokens, func(t int32) bool { return !known(t) }); i >= 0 {
		return job{}, wrongValue(field, "token %d is %d, want 0 to %d", i, tokens[i], s.info.Vocab-1)
	}
	n := x.params.maxTokens
	switch {
	case x.params.query: // what follows a prompt does not matter to what is cached of it
		n = 1
	case n == 0 && x.chat:
		n = max(1, limit-len(tokens))
	case n == 0:
		n = max(1, min(defaultTokens, limit-len(tokens)))
	}
	if len(tokens)+n > limit {
		return job{}, invalid(field, "context_length_exceeded",
			"this model's maximum context length is %d tokens; the request has %d tokens in %s and asks for %d more", limit, len(tokens), field, n)
	}
	return job{stops: x.params.stops, prompt: slices.Clone(tokens), request: engine.Request{
		Prompt: tokens, Params: x.params.sampling, MaxTokens: n, IgnoreEOS: x.params.ignoreEOS,
		Salt: x.params.salt, Ticket: x.params.ticket, Remote: x.params.remote, Turn: x.params.turn,
		Query: x.params.query, Hold: x.params.hold,
	}}, nil
}

// model is an entry of /v1/models.
type model struct {
	ID          string `json:"id"`
	Object      string `json:"object"`
	Created     int64  `json:"created"`
	OwnedBy     string `json:"owned_by"`
	MaxModelLen int    `json:"max_model_len"`
}

func (s *Server) models(w http.ResponseWriter, r *http.Request) {
	m := model{s.config.ModelName, "model", s.started.Unix(), "kvport", s.info.MaxModelLen}
	var err error
	switch name := r.PathValue("model"); name {
	case "":
		err = s.sendJSON(w, http.StatusOK, struct {
			Object string  `json:"object"`
			Data   []model `json:"data"`
		}{"list", []model{m}})
	case s.config.ModelName:
		err = s.sendJSON(w, http.StatusOK, m)
	default:
		err = &Error{http.StatusNotFound, "invalid_request_error", "model", "model_not_found", fmt.Sprintf("there is no model %q here, only %q", name, m.ID)}
	}
	if err != nil {
		asError(err).Write(w)
	}
}

// health answers 200 as long as the engine serves, also when it has lost its connector.
func (s *Server) health(w http.ResponseWriter, r *http.Request) {
	type kv struct { // for routers: which engines can hand blocks to each other, and where they say which they have
		host.Fit
		Events *kvevents.Place `json:"events,omitempty"`
	}
	type details struct {
		Model string `json:"model"`
		engine.Health
		KV         *kv  `json:"kv,omitempty"`
		CacheQuery bool `json:"cache_query,omitempty"` // cache queries are answered
		InFlight   int  `json:"in_flight"`             // requests that run, of any kind that counts for max_in_flight
	}
	h := s.config.Engine.Health()
	running, waiting := s.fair.counts()
	h.Waiting += waiting
	answer := struct {
		Status      string `json:"status"`        // ok, degraded (connector not ready), draining
		MaxInFlight int    `json:"max_in_flight"` // requests beyond these get a 429: routers without a key must know it, too
		TLS         bool   `json:"tls"`           // the port speaks HTTPS
		*details           // nil: for strangers
	}{Status: "ok", MaxInFlight: s.fair.places, TLS: r.TLS != nil}
	if key, err := s.keyOf(r); err == nil && key.Watches() {
		answer.details = &details{Model: s.config.ModelName, Health: h, CacheQuery: s.config.CacheQueryRate > 0, InFlight: running}
		if fit := s.config.Engine.Info().Fit; fit.Role != "" { // its keys may have changed
			answer.KV = &kv{Fit: fit}
			if key == nil || key.Tenant == "" { // a router whose requests are all of one tenant would find none of its salts in events
				answer.KV.Events = s.config.Events
			}
		}
	}
	code := http.StatusOK
	switch {
	case h.Closing || s.draining.Load():
		answer.Status, code = "draining", http.StatusServiceUnavailable
	case h.Host != nil && h.Host.State != "ready":
		answer.Status = "degraded"
	}
	if err := s.sendJSON(w, code, answer); err != nil {
		asError(err).Write(w)
	}
}

func (s *Server) reset(w http.ResponseWriter, r *http.Request) {
	key, err := s.keyOf(r)
	if err == nil && key != nil && !key.Admin {
		err = &Error{
			http.StatusForbidden, "invalid_request_error", "", "admin_key_required",
			"only a client whose line in the file of API keys says admin may empty the cache, which all tenants share",
		}
	}
	if err == nil {
		err = s.config.Engine.Reset(r.Context())
	}
	act := apikeys.Act{Action: "reset", Remote: r.RemoteAddr, Result: apikeys.ResultOf(err)}
	if key != nil {
		act.Key = key.Name
	}
	s.audit(act, err)
	if err == nil {
		err = s.sendJSON(w, http.StatusOK, struct {
			Reset bool `json:"reset"`
		}{true})
	}
	if err != nil {
		asError(err).Write(w)
	}
}

// audit keeps an act in the log, and of a client's refused ones a line once in a while.
func (s *Server) audit(act apikeys.Act, err error) {
	if e, refused := errors.AsType[*Error](err); !refused || e.Status >= http.StatusInternalServerError {
		act.Log(s.config.Log)
		return
	}
	s.refusals.Log(s.config.Log, act)
}

// watched lets only clients through that may see what is about all tenants.
func (s *Server) watched(next http.Handler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		key, err := s.keyOf(r)
		if err == nil && !key.Watches() {
			err = &Error{http.StatusForbidden, "invalid_request_error", "", "metrics_key_required", apikeys.WantMetrics}
		}
		if err != nil {
			asError(err).Write(w)
			return
		}
		next.ServeHTTP(w, r)
	}
}

// newID is 128 random bits.
func newID() string {
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails, says its documentation
	return hex.EncodeToString(id[:])
}

type metrics struct {
	requests      *prometheus.CounterVec
	seconds       *prometheus.HistogramVec
	queries       *prometheus.CounterVec
	unknownFields prometheus.Counter
	ignoredIDs    *prometheus.CounterVec
	inFlight      prometheus.Gauge
	waiting       prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	s := meter.New()
	m := &metrics{
		requests:      s.Counters("kvport_http_requests_total", "Generation requests by path and status; 499: the client went away.", "path", "code"),
		seconds:       s.Histograms("kvport_http_request_seconds", "From a generation request's arrival to the end of its answer.", prometheus.ExponentialBuckets(0.002, 2, 18), "path"),
		queries:       s.Counters("kvport_cache_queries_total", "Cache queries by how they ended: answered, unknown (a connector of some scope did not say in time), limited (too many of one API key), failed.", "result"),
		unknownFields: s.Counter("kvport_http_unknown_fields_total", "Fields of request bodies that were ignored because nothing here knows them."),
		ignoredIDs:    s.Counters("kvport_http_request_ids_ignored_total", "Request ids that name two engines and do not get to the connector: nobody has signed them and their client's key is no router's (key), or they are no text of a header that such an id could be (unfit).", "reason"),
		inFlight:      s.Gauge("kvport_http_requests_in_flight", "Generation requests being served."),
		waiting:       s.Gauge("kvport_http_prompts_waiting", "Prompts of clients with API keys that wait for their turn: the engine does not have them yet."),
	}
	return m, s.Register(reg)
}
