package router

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/testkit"
)

// becameOf answers as a decode instance that says what became of its ticket.
func becameOf(said string, answer http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(handoffHeader, said)
		answer(w, r)
	}
}

// Only a request whose decode instance loaded something is counted as disaggregated, streamed or not; the
// client hears nothing of it.
func TestHandoffsAreCounted(t *testing.T) {
	for _, tt := range []struct {
		said, result, reason string
		want                 outcome
	}{
		{"loaded", "loaded", "", disaggregated},
		{"partial; reason=load_failed", "partial", "load_failed", disaggregated},
		{"local", "local", "", local},
		{"refused; reason=block_size", "refused", "block_size", recomputed},
		{"refused; reason=foreign_key; key=89d9a6bb339bd7e2", "refused", "foreign_key", recomputed},
		{"refused; reason=made up", "refused", "other", recomputed},
		{"none; reason=gone", "none", "gone", recomputed},
		{"", "unknown", "", disaggregated},
		{"whatever; reason=gone", "unknown", "", disaggregated},
	} {
		for name, answer := range map[string]http.HandlerFunc{"stream": tokens, "whole": whole200} {
			t.Run(tt.said+" "+name, func(t *testing.T) {
				p, d := serveInstance(t, ticket("T")), serveInstance(t, becameOf(tt.said, answer))
				f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d)})
				resp, _ := post(t, f.URL+"/v1/completions", doc)
				require.Equal(t, 200, resp.StatusCode)
				require.Empty(t, resp.Header.Values(handoffHeader))
				require.Eventually(t, func() bool { return f.outcomes(t, tt.want) == 1 }, waitLimit, waitTick)
				require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.handoffs.WithLabelValues(tt.result, tt.reason)))
				require.Equal(t, 1, testutil.CollectAndCount(f.router.metrics.handoffs))
			})
		}
	}
}

// A request without a ticket is counted with the reason, but not where there is nobody to give one.
func TestMissingTicketsAreCounted(t *testing.T) {
	nothing := func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"kv_transfer_params":null}`) }
	for reason, prefills := range map[string][]string{
		noTicket: urls(serveInstance(t, nothing)), noPrefill: {refusing(t)}, "": nil,
	} {
		f := serveRouter(t, Config{Prefill: prefills, Decode: urls(serveInstance(t, tokens))})
		resp, _ := post(t, f.URL+"/v1/completions", doc)
		require.Equal(t, 200, resp.StatusCode)
		require.Eventually(t, func() bool { return f.outcomes(t, plain) == 1 }, waitLimit, waitTick)
		if reason == "" {
			require.Zero(t, testutil.CollectAndCount(f.router.metrics.handoffs))
			continue
		}
		require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.handoffs.WithLabelValues("none", reason)))
	}
}

// What an attempt went without says nothing about the next one.
func TestEachAttemptHasItsReason(t *testing.T) {
	var prompted, served atomic.Int32
	p := serveInstance(t, func(w http.ResponseWriter, r *http.Request) {
		if prompted.Add(1) > 1 {
			code(500)(w, r)
			return
		}
		fmt.Fprint(w, `{"kv_transfer_params":null}`)
	})
	_, ds := several(t, 2, func(w http.ResponseWriter, r *http.Request) {
		if served.Add(1) == 1 {
			code(500)(w, r)
			return
		}
		tokens(w, r)
	})
	f := serveRouter(t, Config{Prefill: urls(p), Decode: ds})
	got := complete(t, f, doc, routeHeader, "1").Get(routeHeader)
	require.Len(t, p.requests(), 2)
	require.NotContains(t, got, "prefill=")
	require.Contains(t, got, "without="+noPrefill)
	require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.handoffs.WithLabelValues("none", noPrefill)))
}

// The log names a pair whose hand-offs are all wasted once, and /health names it as long as that lasts.
func TestPairInVain(t *testing.T) {
	said := "loaded"
	d := serveInstance(t, func(w http.ResponseWriter, r *http.Request) { becameOf(said, tokens)(w, r) })
	p := serveInstance(t, ticket("T"))
	var log testkit.Log
	f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d), Log: logTo(&log)})
	health := func() string {
		resp, err := http.Get(f.URL + "/health")
		require.NoError(t, err)
		defer resp.Body.Close()
		data, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return string(data)
	}
	const want = `"recomputing":[{"prefill":"%s","decode":"%s","reason":"refused: key"}]`
	ask := func(n int, as string) {
		said = as
		for range n {
			post(t, f.URL+"/v1/completions", doc)
		}
	}
	ask(maxWasted-1, "none; reason=gone")
	ask(1, "local")
	ask(maxWasted-1, "none; reason=gone")
	require.Empty(t, log.String(), "not all of them")
	require.NotContains(t, health(), "recomputing")
	ask(3, "refused; reason=key")
	require.Equal(t, 1, strings.Count(log.String(), "level=WARN"), log.String())
	require.Contains(t, log.String(), `prefill=`+p.URL+` decode=`+d.URL+` requests=20 reason="refused: key"`)
	require.Contains(t, health(), fmt.Sprintf(want, p.URL, d.URL))
	ask(1, "partial")
	require.Contains(t, log.String(), "hand-offs work again")
	require.NotContains(t, health(), "recomputing")
}

func logTo(l *testkit.Log) *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// A prefill instance that keeps nothing of a prompt computes it once, however often decode instances are busy.
func TestNoTicketIsAskedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		prefills, decodes := 0, 0
		r, err := New(Config{Prefill: []string{"http://p:1"}, Decode: []string{"http://d:1"}, Transport: roundTrip(func(req *http.Request) (*http.Response, error) {
			if req.URL.Host == "p:1" {
				prefills++
				return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(`{"id":"p","kv_transfer_params":null}`))}, nil
			}
			if decodes++; decodes <= 3 {
				return saidStatus(429, "1"), nil
			}
			return saidStatus(200, ""), nil
		})})
		require.NoError(t, err)
		defer r.Close()
		w := httptest.NewRecorder()
		req := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/completions", strings.NewReader(doc))
		req.Header.Set(routeHeader, "1")
		r.ServeHTTP(w, req)
		require.Equal(t, 200, w.Code)
		require.Equal(t, []int{1, 4}, []int{prefills, decodes})
		require.Contains(t, w.Header().Get(routeHeader), "decode=http://d:1; without=no_ticket")
		require.Equal(t, 1.0, testutil.ToFloat64(r.metrics.handoffs.WithLabelValues("none", noTicket)))
		idle(t, r)
	})
}
