package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/kvport/kvport/engine/apikeys"
)

// api is the handler behind a front.
type api interface {
	http.Handler
	// Ready says why it cannot serve; "" if it can.
	Ready() string
	// Drain makes it refuse new requests. Running ones go on, until their contexts end: with
	// http.ErrServerClosed as cause they are to end their answers properly.
	Drain()
}

// errCutOff says that requests did not end in time after a signal.
var errCutOff = errors.New("requests were cut off")

// front is an HTTP server's life: it answers from the start, also while there is no API yet, and until
// the last request that was running at a signal has ended.
type front struct {
	url   string
	drain time.Duration
	gate  *gate
	srv   *http.Server
	keys  atomic.Pointer[apikeys.Keys] // nil: everybody may come in
	api   atomic.Pointer[api]          // nil: it loads
	stop  context.CancelFunc
	ended chan error // of Serve

	strangers *strangers

	mu       sync.Mutex
	draining bool
	running  int           // requests that came whole before the signal
	idle     chan struct{} // closed when draining and none runs
}

// newFront answers at l from now on. close ends it, if serve was not called.
func newFront(l *net.TCPListener, f *listenFlags, keys *apikeys.Keys, registry prometheus.Registerer) *front {
	t := &front{
		strangers: newStrangers(),
		url:       fmt.Sprintf("%s://%s", f.certificate.scheme(), l.Addr()), drain: f.drainTimeout, gate: newGate(l, f.connections()),
		ended: make(chan error, 1), idle: make(chan struct{}),
	}
	t.keys.Store(keys)
	registry.MustRegister(t.strangers.refused)
	names := names{any: true}
	if addr, ok := l.Addr().(*net.TCPAddr); ok {
		names = hostNames(addr, f.host, f.allowedHosts)
	}
	base, cut := context.WithCancelCause(context.Background())
	t.stop = func() { cut(http.ErrServerClosed) }
	t.srv = &http.Server{
		Handler:           bounded(names.fromBrowsers(t.withKey(http.HandlerFunc(t.route))), t.begin),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(slog.Default().Handler(), slog.LevelDebug),
		BaseContext:       func(net.Listener) context.Context { return base },
		ConnContext:       withConnection,
	}
	go func() { t.ended <- t.srv.Serve(f.certificate.around(t.gate)) }()
	t.reload(base, f)
	slog.Debug("listening", "url", t.url)
	return t
}

// serve announces the API and serves it until ctx ends. Then it lets running requests finish until the
// deadline that it returns, or ends them: errCutOff.
func (t *front) serve(ctx context.Context, cmd *cobra.Command, a api) (deadline time.Time, err error) {
	t.api.Store(&a)
	if s, is := a.(interface{ start() }); is { // it has something to do once requests may come
		s.start()
	}
	fmt.Fprintf(cmd.OutOrStdout(), "kvport: ready url=%s\n", t.url)
	select {
	case err := <-t.ended:
		return time.Now().Add(t.drain), err
	case <-ctx.Done():
	}
	deadline = time.Now().Add(t.drain)
	slog.Info("draining", "seconds", t.drain.Seconds())
	a.Drain()
	return deadline, t.finish(t.startDrain(), t.drain)
}

// startDrain makes the front refuse new requests; the channel is closed when none runs any more.
func (t *front) startDrain() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.draining = true
	if t.running == 0 {
		close(t.idle)
	}
	return t.idle
}

// finish waits for what runs. A fifth of the time is for what comes after: the last words of requests
// that are cut off, then the engine and its plugin.
func (t *front) finish(idle <-chan struct{}, limit time.Duration) (err error) {
	defer t.close()
	if !within(limit-limit/5, idle) {
		t.mu.Lock()
		n := t.running
		t.mu.Unlock()
		err = fmt.Errorf("%w: %d had not ended in --drain-timeout %s", errCutOff, n, limit)
		slog.Warn("requests are cut off", "requests", n)
		t.stop()
		within(max(lastWords, limit/10), idle)
	}
	ctx, cancel := context.WithTimeout(context.Background(), lastWords)
	defer cancel()
	if t.srv.Shutdown(ctx) != nil {
		slog.Debug("connections are cut off")
	}
	return err
}

// lastWords is how long answers that are complete or cut off may take to be written.
const lastWords = time.Second

// within waits for done, but not longer than limit.
func within(limit time.Duration, done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	case <-time.After(limit):
	}
	select {
	case <-done: // both at once
		return true
	default:
		return false
	}
}

// close ends all connections and the listener.
func (t *front) close() {
	t.stop()
	_ = t.srv.Close() // its error is the listener's
}

// begin counts a request that has come whole, until end.
func (t *front) begin() (end func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.draining { // the API refuses it
		return func() {}
	}
	t.running++
	return t.end
}

func (t *front) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.running--; t.running == 0 && t.draining {
		close(t.idle)
	}
}

func (t *front) isDraining() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.draining
}

// condition is the answer of /livez and /readyz, and that of /health while there is no API.
type condition struct {
	Status string `json:"status"`
}

func (c condition) write(w http.ResponseWriter, code int) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	if code == http.StatusServiceUnavailable {
		h.Set("Retry-After", "1")
	}
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(c) // a client that left needs no answer
}

// route answers what asks for the process's life and passes everything else to the API.
func (t *front) route(w http.ResponseWriter, r *http.Request) {
	if t.isDraining() {
		w.Header().Set("Connection", "close")
	}
	a := t.api.Load()
	switch path := r.URL.Path; {
	case path == "/livez":
		condition{"ok"}.write(w, http.StatusOK)
	case path == "/readyz":
		if reason := t.notReady(); reason != "" {
			condition{reason}.write(w, http.StatusServiceUnavailable)
			return
		}
		condition{"ready"}.write(w, http.StatusOK)
	case a == nil && path == "/health":
		condition{"loading"}.write(w, http.StatusServiceUnavailable)
	case a == nil:
		refuse(w, http.StatusServiceUnavailable, "loading", "the model is still loading: /readyz says when it is there")
	case isJSON(w, r):
		(*a).ServeHTTP(w, r)
	}
}

// notReady says why no request should be sent here; "" if they may come.
func (t *front) notReady() string {
	a := t.api.Load()
	switch {
	case a == nil:
		return "loading"
	case t.isDraining():
		return "draining"
	}
	return (*a).Ready()
}

// withKey lets only requests with an API key through, and what load balancers ask.
func (t *front) withKey(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		open := r.URL.Path == "/health" || r.URL.Path == "/livez" || r.URL.Path == "/readyz"
		authorization := r.Header.Get("Authorization")
		known := t.knows(authorization)
		if !known && (!open || authorization != "") { // /health shows whether a key is valid
			t.strangers.came(r)
		}
		if !open && !known {
			w.Header().Set("WWW-Authenticate", "Bearer")
			refuse(w, http.StatusUnauthorized, "invalid_api_key", apikeys.WantKey)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// knows reports whether an Authorization header has one of the API keys, or none is asked for.
func (t *front) knows(authorization string) bool {
	return t.keys.Load() == nil || t.key(authorization) != nil
}

// key is the client's whose key an Authorization header has; nil if it has none.
func (t *front) key(authorization string) *apikeys.Key {
	if keys := t.keys.Load(); keys != nil {
		return keys.Find(authorization)
	}
	return nil
}

// keyCheck is key for the API behind the front; nil if there are no keys, which stays so.
func (t *front) keyCheck() func(authorization string) *apikeys.Key {
	if t.keys.Load() == nil {
		return nil
	}
	return t.key
}

// severalKeys reports whether there is more than one API key.
func (t *front) severalKeys() bool {
	keys := t.keys.Load()
	return keys != nil && keys.Len() > 1
}

// sharedKeys reports whether several API keys share the cache: their requests have no tenant.
func (t *front) sharedKeys() bool {
	keys := t.keys.Load()
	return keys != nil && keys.Shared() > 1
}

// reload reads the API keys and the certificate again at each SIGHUP, until ctx ends. A file that is not good leaves what it said
// as it was. Without files nothing happens.
func (t *front) reload(ctx context.Context, f *listenFlags) {
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP)
	go func() {
		defer signal.Stop(hangups)
		for {
			select {
			case <-hangups:
			case <-ctx.Done():
				return
			}
			if f.apiKeyFile == "" && f.certificate.files.cert == "" {
				slog.Info("SIGHUP: there is no --api-key-file and no --tls-cert-file to read again, nothing changes")
			}
			if f.certificate.files.cert != "" {
				f.certificate.reload()
			}
			if f.apiKeyFile != "" {
				t.reloadKeys(f.apiKeyFile)
			}
		}
	}()
}

// reloadKeys reads the API keys again. A file that is not good leaves them as they were.
func (t *front) reloadKeys(file string) {
	keys, err := apikeys.Load(file)
	act := apikeys.Act{Action: "reload", Result: apikeys.ResultOf(err)}
	if err != nil {
		slog.Error("SIGHUP: the API keys stay as they are", "err", err)
		act.Log(slog.Default(), "file", file)
		return
	}
	before := t.keys.Swap(keys)
	act.Log(slog.Default(), "file", file, "keys", keys.Len(), "before", before.Len())
}
