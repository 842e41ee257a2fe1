package router

import (
	"encoding/json"
	"net/http"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/router/policy"
)

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 11, 23, 1, 2, 3, 0, time.UTC)
	for said, want := range map[string]time.Duration{
		"": 0, "0": 0, "7": 7 * time.Second, " 7 ": 7 * time.Second, "-1": 0, "x": 0, "1.5": 0, "9999999999999": 0,
		"4000":                          maxRest,
		"Mon, 23 Nov 2026 01:02:13 GMT": 10 * time.Second,
		"Mon, 23 Nov 2026 01:01:13 GMT": 0,
		"Mon, 23 Nov 2037 01:01:13 GMT": maxRest,
	} {
		h := http.Header{"Retry-After": {said}}
		require.Equal(t, want, retryAfter(429, h, now), said)
		require.Equal(t, want, retryAfter(503, h, now), said)
		require.Zero(t, retryAfter(500, h, now))
	}
}

// busyFor refuses requests with a status and Retry-After as long as it is set.
func busyFor(status int, seconds string, busy *atomic.Bool, then http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if busy.Load() {
			w.Header().Set("Retry-After", seconds)
			code(status)(w, r)
			return
		}
		then(w, r)
	}
}

// An instance that asks to be left alone gets no request for that long, while others serve.
func TestBusyInstanceIsLeftAlone(t *testing.T) {
	var busy atomic.Bool
	busy.Store(true)
	full, good := serveInstance(t, busyFor(503, "50", &busy, tokens)), serveInstance(t, tokens)
	f := serveRouter(t, Config{Decode: urls(full, good)})
	for range 10 {
		resp, _ := post(t, f.URL+"/v1/completions", doc)
		require.Equal(t, 200, resp.StatusCode)
		f.router.pool.probed(0, healthy)
	}
	require.Len(t, full.requests(), 1)
	require.Empty(t, routerHealth(t, f, "").Instances[0].Breaker)
}

// When all instances ask to be left alone, a request waits for the first of them instead of failing.
func TestRequestWaitsForBusyInstances(t *testing.T) {
	var busy atomic.Bool
	busy.Store(true)
	d := serveInstance(t, func(w http.ResponseWriter, r *http.Request) {
		busyFor(429, "1", &busy, tokens)(w, r)
		busy.Store(false)
	})
	f := serveRouter(t, Config{Decode: urls(d), QueueTimeout: notSoon})
	began := time.Now()
	resp, _ := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 200, resp.StatusCode)
	require.GreaterOrEqual(t, time.Since(began), time.Second)
	require.Len(t, d.requests(), 2)

	busy.Store(true)
	f = serveRouter(t, Config{Decode: urls(serveInstance(t, busyFor(503, "60", &busy, tokens))), QueueTimeout: time.Second})
	resp, text := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 503, resp.StatusCode, "too long")
	require.Equal(t, "60", resp.Header.Get("Retry-After"))
	require.JSONEq(t, `{"error":{"code":"503"}}`, text)
	resp, text = post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 503, resp.StatusCode, "nobody is asked")
	require.Contains(t, text, "no_decode_instance")
	require.InDelta(t, 60, seconds(t, resp), 5)
}

// A router stays ready while its instances ask to be left alone, since requests wait for them.
func TestBusyInstancesAreAvailable(t *testing.T) {
	var busy atomic.Bool
	busy.Store(true)
	p, d := serveInstance(t, busyFor(503, "60", &busy, ticket("T"))), serveInstance(t, busyFor(503, "60", &busy, tokens))
	f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d), QueueTimeout: time.Second})
	resp, _ := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 503, resp.StatusCode)
	require.Len(t, p.requests(), 1)
	require.Len(t, d.requests(), 1)
	require.Positive(t, f.router.pool.rest(prefill, 0, nil))
	require.Positive(t, f.router.pool.rest(decode, 0, nil))
	require.Empty(t, f.router.Ready())
	require.Equal(t, "ok", routerHealth(t, f, "").Status)
	f.router.pool.probed(1, refused)
	require.NotEmpty(t, f.router.Ready())
}

// A request does not wait for an instance that it will not try again, and its client learns when others may.
func TestNoWaitForFailedInstance(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, err := New(Config{Decode: []string{"http://a:1"}, QueueTimeout: notSoon})
		require.NoError(t, err)
		defer r.Close()
		c := &call{router: r, started: time.Now(), failed: map[int]bool{}, request: &policy.Request{}}
		d, ok := r.pool.pickDecode(c.failed)
		require.True(t, ok)
		r.pool.rests(d, maxRest, false)
		_, ok = c.nextChoice(t.Context(), new(json.RawMessage), true)
		require.False(t, ok)
		require.Zero(t, time.Since(c.started))
		require.Equal(t, maxRest, r.pool.rest(decode, 0, nil))
	})
}

// A request that waits for instances keeps its ticket: the prompt is computed once.
func TestTicketIsKeptForBusyInstances(t *testing.T) {
	var busy atomic.Bool
	busy.Store(true)
	p := serveInstance(t, ticket("T"))
	d := serveInstance(t, func(w http.ResponseWriter, r *http.Request) {
		busyFor(429, "1", &busy, tokens)(w, r)
		busy.Store(false)
	})
	f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d), QueueTimeout: notSoon})
	resp, _ := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 200, resp.StatusCode)
	require.Len(t, p.requests(), 1)
	require.Len(t, d.requests(), 2)
	require.Equal(t, d.requests()[0].body["kv_transfer_params"], d.requests()[1].body["kv_transfer_params"])
	idle(t, f.router)
}

// Instances that fail under load do not get more requests than clients send, except a share: the rest fails at once.
// Connections that break are none of that.
func TestRetryBudget(t *testing.T) {
	failing := []*instanceServer{serveInstance(t, code(500)), serveInstance(t, code(500)), serveInstance(t, code(500))}
	f := serveRouter(t, Config{Decode: urls(failing...), Backoff: time.Nanosecond, RetryShare: 1e-9})
	retries := &f.router.retries[decode]
	retries.mu.Lock()
	retries.budget.Request(time.Now())
	for retries.budget.Retry(time.Now().Add(-time.Hour)) {
	}
	retries.mu.Unlock()
	began := time.Now()
	for range 20 {
		for i := range failing {
			f.router.pool.probed(i, healthy)
			f.router.pool.mu.Lock()
			f.router.pool.known[i].breaker = breaker{}
			f.router.pool.mu.Unlock()
		}
		resp, _ := post(t, f.URL+"/v1/completions", doc)
		require.Equal(t, 500, resp.StatusCode)
	}
	asked := 0
	for _, s := range failing {
		asked += len(s.requests())
	}
	granted := 1 + int(10*time.Since(began).Seconds())
	require.LessOrEqual(t, asked, 20+granted)
	require.Positive(t, testutil.ToFloat64(f.router.metrics.exhausted))

	broken, good := serveInstance(t, reset("")), serveInstance(t, tokens)
	f = serveRouter(t, Config{Decode: urls(broken, good), RetryShare: 1e-9})
	retries = &f.router.retries[decode]
	retries.mu.Lock()
	for retries.budget.Retry(time.Now()) {
	}
	retries.mu.Unlock()
	for range 3 {
		resp, _ := post(t, f.URL+"/v1/completions", doc)
		require.Equal(t, 200, resp.StatusCode)
	}
}

// spend uses a budget up, and what time will add to it for an hour.
func (a *allowance) spend() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for a.budget.Retry(time.Now().Add(time.Hour)) {
	}
}

// Prefill instances that keep silent are retried as decode instances are: after pauses that grow, and within the budget.
// What is not retried costs neither.
func TestSilentPrefillIsRetriedWithinLimits(t *testing.T) {
	silent := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	ps, pURLs := several(t, 3, silent)
	d := serveInstance(t, tokens)
	f := serveRouter(t, Config{Prefill: pURLs, Decode: urls(d), PrefillTimeout: time.Millisecond, Backoff: 200 * time.Millisecond})
	began := time.Now()
	resp, _ := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 200, resp.StatusCode)
	require.GreaterOrEqual(t, time.Since(began), 300*time.Millisecond, "half of 200 ms and of 400 ms at least")
	require.Equal(t, 2.0, testutil.ToFloat64(f.router.metrics.retries.WithLabelValues("prefill")))
	idle(t, f.router)

	f = serveRouter(t, Config{Prefill: pURLs, Decode: urls(d), PrefillTimeout: time.Millisecond, Backoff: notSoon, RetryShare: 1e-9})
	f.router.retries[prefill].spend()
	resp, _ = post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 200, resp.StatusCode)
	require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.exhausted))
	require.Zero(t, testutil.ToFloat64(f.router.metrics.retries.WithLabelValues("prefill")))
	require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.handoffs.WithLabelValues("none", noPrefill)))
	idle(t, f.router)

	f = serveRouter(t, Config{Prefill: urls(ps[0]), Decode: []string{serveInstance(t, reset("")).URL, d.URL}, PrefillTimeout: time.Millisecond, Backoff: notSoon, RetryShare: 1e-9})
	f.router.retries[prefill].spend()
	resp, _ = post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 200, resp.StatusCode, "neither the prefill instance nor the connection that broke has another turn to wait for")
	require.Zero(t, testutil.ToFloat64(f.router.metrics.exhausted))
}

// Prefill instances that are busy use up no retry that a decode instance needs.
func TestBusyPrefillLeavesRetries(t *testing.T) {
	_, busy := several(t, 3, code(429))
	var failed atomic.Bool
	_, once := several(t, 2, func(w http.ResponseWriter, r *http.Request) {
		if failed.CompareAndSwap(false, true) {
			code(500)(w, r)
			return
		}
		tokens(w, r)
	})
	f := serveRouter(t, Config{Prefill: busy, Decode: once, Backoff: time.Nanosecond, RetryShare: 1e-9})
	left := &f.router.retries[decode]
	left.spend()
	left.mu.Lock()
	left.budget.Share = 1
	left.budget.Request(time.Now()) // one retry
	left.budget.Share = 1e-9
	left.mu.Unlock()
	resp, _ := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 200, resp.StatusCode)
	require.Equal(t, 2.0, testutil.ToFloat64(f.router.metrics.retries.WithLabelValues("prefill")))
	require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.retries.WithLabelValues("decode")))
	require.False(t, left.allow())
}
