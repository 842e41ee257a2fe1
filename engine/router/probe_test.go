package router

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/testkit"
)

// An instance that is down is a warning with the reason, which /health has too; one that loads or drains says so.
func TestReasonOfAState(t *testing.T) {
	unready := func(body, retryAfter string) *instanceServer {
		return serveInstance(t, func(w http.ResponseWriter, _ *http.Request) {
			if retryAfter != "" {
				w.Header().Set("Retry-After", retryAfter)
			}
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprint(w, body)
		})
	}
	for name, tt := range map[string]struct {
		url, state, err string
		config          Config
	}{
		"refused":     {refusing(t), "down", "connection refused: nobody listens there", Config{}},
		"hangs":       {serveInstance(t, silentAfter("")).URL, "down", "no answer at /health within 50ms", Config{HealthTimeout: soon}},
		"404":         {serveInstance(t, code(404)).URL, "down", "HTTP 404 at /health", Config{}},
		"401":         {serveInstance(t, code(401)).URL, "down", "HTTP 401 at /health: it needs --upstream-api-key-file", Config{OwnKeys: true}},
		"no HTTP":     {serveInstance(t, reset("what?\r\n\r\n")).URL, "down", "malformed HTTP", Config{}},
		"dead engine": {unready("", "").URL, "down", "HTTP 503 at /health, which says neither that it is loading nor that it is draining", Config{}}, // as vLLM says it
		"loading":     {unready(`{"status":"loading"}`, "1").URL, "loading", "", Config{}},
		"draining":    {unready(`{"status":"draining"}`, "").URL, "draining", "", Config{}},
		"comes back":  {unready("", "5").URL, "draining", "", Config{}},
	} {
		t.Run(name, func(t *testing.T) {
			var log testkit.Log
			tt.config.Decode, tt.config.Log, tt.config.HealthInterval = []string{tt.url}, logTo(&log), time.Millisecond
			f := serveRouter(t, tt.config)
			stop := running(t, f.router)
			require.Eventually(t, func() bool { return f.router.pool.health().instances[0].State == tt.state }, waitLimit, waitTick)
			stop()
			require.NotContains(t, log.String(), "state=up")
			if tt.state == "down" {
				require.Contains(t, log.String(), "level=WARN msg=\"instance changed state\" instance="+tt.url+" role=decode state=down err=")
				require.Contains(t, f.router.pool.health().instances[0].Error, tt.err)
				return
			}
			require.Empty(t, f.router.pool.health().instances[0].Error)
			require.Contains(t, log.String(), "level=INFO msg=\"instance changed state\" instance="+tt.url+" role=decode state="+tt.state)
		})
	}
}

// An instance that stops answering, as one that was stopped by a signal, is down within 10 s.
func TestHangingInstanceIsDownWithinTenSeconds(t *testing.T) {
	for range 20 { // the intervals vary
		synctest.Test(t, func(t *testing.T) {
			config := withDefaults(Config{})
			asked := 0
			c := checker{interval: config.HealthInterval, timeout: config.HealthTimeout, client: &http.Client{Transport: roundTrip(func(r *http.Request) (*http.Response, error) {
				if asked++; asked == 1 {
					return status(200)
				}
				<-r.Context().Done()
				return nil, r.Context().Err()
			})}}
			u, err := url.Parse("http://x")
			require.NoError(t, err)
			tb := &table{instances: []instance{{role: decode}}}
			ctx, cancel := context.WithCancel(t.Context())
			start := time.Now()
			c.watch(ctx, u, func(got checked) {
				if tb.probed(0, got.result); tb.instances[0].state == down {
					cancel()
				}
			})
			require.Less(t, time.Since(start), 10*time.Second, "from the last answer on")
		})
	}
}
