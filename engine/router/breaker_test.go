package router

import (
	"context"
	"encoding/json"
	"net/http"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
)

// health is a router's /health as its readers see it.
type health struct {
	Status       string
	Instances    []InstanceHealth
	Incompatible []Misfit
}

func routerHealth(t *testing.T, f *front, authorization string) (h health) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, f.URL+"/health", http.NoBody)
	require.NoError(t, err)
	if authorization != "" {
		req.Header.Set("Authorization", authorization)
	}
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	require.NoError(t, json.NewDecoder(resp.Body).Decode(&h))
	return h
}

// running runs a router's probes until the test or stop ends them.
func running(t *testing.T, r *Router) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx)
	}()
	stop = func() {
		cancel()
		<-done
	}
	t.Cleanup(stop)
	return stop
}

// After failures in a row an instance is left out; one request at a time tries it again, and each that fails
// doubles the pause.
func TestBreaker(t *testing.T) {
	now := time.Now()
	b := &breaker{}
	for range breakAfter - 1 {
		require.True(t, b.admits(now))
		b.picked()
		require.False(t, b.failed(now))
	}
	b.worked()
	for range breakAfter - 1 {
		require.False(t, b.failed(now), "only failures in a row count")
	}
	require.True(t, b.failed(now))
	require.False(t, b.failed(now), "it began before")
	for pause := firstPause; pause < 2*longestPause; pause *= 2 {
		now = now.Add(min(pause, longestPause) - 1)
		require.False(t, b.admits(now))
		now = now.Add(1)
		require.True(t, b.admits(now))
		b.picked()
		require.False(t, b.admits(now), "one at a time")
		b.released()
		require.True(t, b.admits(now), "without a verdict another may")
		b.picked()
		require.True(t, b.failed(now))
	}
	now = now.Add(longestPause)
	b.picked()
	require.True(t, b.worked())
	require.True(t, b.admits(now))
}

// An instance that is healthy and fails every request is left out, of either role, and good probes do
// not bring it back: an answer to a request does.
func TestFailingInstanceIsLeftOut(t *testing.T) {
	for _, where := range []role{prefill, decode} {
		t.Run(where.String(), func(t *testing.T) {
			p, d := ticket("T"), http.HandlerFunc(tokens)
			list := []*instanceServer{serveInstance(t, code(500)), serveInstance(t, p), serveInstance(t, d)}
			c := Config{Prefill: urls(list[:2]...), Decode: urls(list[2])}
			if where == decode {
				list[1] = serveInstance(t, d)
				c = Config{Decode: urls(list[:2]...)}
			}
			bad := list[0]
			f := serveRouter(t, c)
			for range 40 {
				f.router.pool.probed(0, healthy)
				f.router.pool.probed(1, healthy)
				resp, _ := post(t, f.URL+"/v1/completions", doc)
				require.Equal(t, 200, resp.StatusCode)
			}
			require.GreaterOrEqual(t, len(bad.requests()), breakAfter)
			require.Less(t, len(bad.requests()), 20, "half of the requests would go there")
			require.Equal(t, "open", routerHealth(t, f, "").Instances[0].Breaker)
			require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.broken.WithLabelValues(bad.URL, where.String())))

			bad.mu.Lock()
			bad.next = nil
			for range 1000 {
				bad.next = append(bad.next, map[role]http.HandlerFunc{prefill: p, decode: d}[where])
			}
			bad.mu.Unlock()
			require.Eventually(t, func() bool {
				post(t, f.URL+"/v1/completions", doc)
				return routerHealth(t, f, "").Instances[0].Breaker == ""
			}, 2*longestPause, 50*time.Millisecond)
			require.Zero(t, testutil.ToFloat64(f.router.metrics.broken.WithLabelValues(bad.URL, where.String())))
		})
	}
}

// An instance that only has too much to do is not broken.
func TestOverloadIsNoFailure(t *testing.T) {
	busy := serveInstance(t, code(429))
	f := serveRouter(t, Config{Decode: urls(busy)})
	for range 2 * breakAfter {
		resp, _ := post(t, f.URL+"/v1/completions", doc)
		require.Equal(t, 429, resp.StatusCode)
	}
	require.Len(t, busy.requests(), 2*breakAfter)
}

// A prefill instance that is left out and too busy for the request that tries it again is tried by another one.
func TestBusyTrialIsNoVerdict(t *testing.T) {
	busy := serveInstance(t, code(429))
	f := serveRouter(t, Config{Prefill: urls(busy), Decode: urls(serveInstance(t, http.HandlerFunc(tokens)))})
	p := f.router.pool
	p.mu.Lock()
	p.known[0].breaker = breaker{failures: breakAfter, pause: firstPause} // whose pause is over
	p.mu.Unlock()
	for range 2 {
		resp, _ := post(t, f.URL+"/v1/completions", doc)
		require.Equal(t, 200, resp.StatusCode)
	}
	require.Len(t, busy.requests(), 2)
}

// A router is unwell when all of its prefill instances are down, also if they registered by themselves.
func TestHealthOfRegistered(t *testing.T) {
	f := serveRouter(t, Config{Register: signer(time.Minute)})
	for part, at := range map[string]string{"P": "127.0.0.1:7001", "D": "127.0.0.1:7002"} {
		code, text := say(t, f.router, true, old(part, at, "127.0.0.1:9", time.Now().UnixNano()))
		require.Equal(t, http.StatusOK, code, text)
	}
	require.Equal(t, "ok", routerHealth(t, f, "").Status)
	at := f.router.pool.index(prefill, "127.0.0.1:7001")
	f.router.pool.probed(at, refused)
	require.Equal(t, "degraded", routerHealth(t, f, "").Status)
	f.router.pool.probed(at, healthy)
	require.Equal(t, "ok", routerHealth(t, f, "").Status)
	f.router.pool.expire(0)
	require.Equal(t, "unavailable", routerHealth(t, f, "").Status)
}

// Where clients need a key, strangers do not learn where the instances are.
func TestHealthForStrangers(t *testing.T) {
	f := serveRouter(t, Config{
		Prefill: []string{"http://10.0.0.1:1"}, Decode: []string{"http://10.0.0.1:1"},
		Key: onlyKey,
	})
	require.Equal(t, health{Status: "degraded"}, routerHealth(t, f, ""))
	require.Equal(t, health{Status: "degraded"}, routerHealth(t, f, "Bearer x"))
	h := routerHealth(t, f, "Bearer k")
	require.Len(t, h.Instances, 2)
	require.Len(t, h.Incompatible, 1)
}

// An engine whose clock was ahead registers again once its clock is right and its entry is forgotten.
func TestRegisterAfterClockJump(t *testing.T) {
	f := serveRouter(t, Config{Register: signer(time.Minute)})
	register := func(at time.Time) int {
		code, _ := say(t, f.router, true, old("D", "127.0.0.1:7002", "127.0.0.1:9", at.UnixNano()))
		return code
	}
	require.Equal(t, http.StatusConflict, register(time.Now().Add(time.Hour)), "too far ahead")
	require.Equal(t, http.StatusOK, register(time.Now().Add(clockError-time.Minute)))
	require.Equal(t, http.StatusConflict, register(time.Now()))
	f.router.pool.expire(0)
	require.Equal(t, http.StatusOK, register(time.Now()))
	require.Equal(t, http.StatusConflict, register(time.Now().Add(-time.Hour)), "a replay")
}
