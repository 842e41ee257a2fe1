package router

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/testkit"
)

// tooLong answers that the prompt is too long.
func tooLong(w http.ResponseWriter, _ *http.Request) {
	w.WriteHeader(http.StatusBadRequest)
	fmt.Fprint(w, `{"error":{"code":"context_length_exceeded"}}`)
}

// A prefill instance that turns requests away costs no client its answer: decode serves alone, and the log names
// instance, status and code once until the instance changes its state. So does /health.
func TestPrefillRefusesDecodeServes(t *testing.T) {
	for name, tt := range map[string]struct {
		refusal http.HandlerFunc
		want    []string
		config  Config
	}{
		"400 too long": {tooLong, []string{"status=400", "code=context_length_exceeded"}, Config{}},
		"401":          {code(401), []string{"status=401", "code=401", "it needs --upstream-api-key-file"}, Config{}},
		"401 own keys": {code(401), []string{`remedy="it needs --upstream-api-key-file"`}, Config{OwnKeys: true}},
		"403":          {code(403), []string{"status=403", "it does not take the key of --upstream-api-key-file"}, Config{UpstreamKey: "k"}},
		"404":          {code(404), []string{"status=404", "URL"}, Config{}},
		"413":          {code(413), []string{"status=413"}, Config{}},
	} {
		t.Run(name, func(t *testing.T) {
			p, d := serveInstance(t, tt.refusal), serveInstance(t, tokens)
			var log testkit.Log
			tt.config.Prefill, tt.config.Decode, tt.config.Log = urls(p), urls(d), logTo(&log)
			f := serveRouter(t, tt.config)
			for range 3 {
				resp, text := post(t, f.URL+"/v1/completions", doc)
				require.Equal(t, 200, resp.StatusCode, text)
				require.Contains(t, text, "[DONE]")
			}
			require.Eventually(t, func() bool { return f.outcomes(t, plain) == 3 }, waitLimit, waitTick)
			require.Equal(t, 3.0, testutil.ToFloat64(f.router.metrics.handoffs.WithLabelValues("none", noTicket)))
			require.Equal(t, 1, strings.Count(log.String(), "level=WARN"), log.String())
			for _, want := range append(tt.want, "instance="+p.URL) {
				require.Contains(t, log.String(), want)
			}
			require.Contains(t, f.router.pool.health().instances[0].Error, "it refused a request with HTTP ")
			f.router.pool.probed(0, refused)
			f.router.pool.probed(0, healthy)
			require.Empty(t, f.router.pool.health().instances[0].Error)
			post(t, f.URL+"/v1/completions", doc)
			require.Equal(t, 2, strings.Count(log.String(), "prefill instance refuses a request"), log.String())
		})
	}
}

// When one prefill instance refuses the router's key, another takes the request. Once an instance answers,
// /health no longer reports its refusal.
func TestAnotherPrefillTakesIt(t *testing.T) {
	bad, good, d := serveInstance(t, ticket("later"), code(401)), serveInstance(t, ticket("G")), serveInstance(t, tokens)
	f := serveRouter(t, Config{Prefill: urls(bad, good), Decode: urls(d)})
	resp, _ := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 200, resp.StatusCode)
	require.Contains(t, string(d.requests()[0].body["kv_transfer_params"]), `"G"`)
	require.NotEmpty(t, f.router.pool.health().instances[0].Error)
	post(t, f.URL+"/v1/completions", doc)
	require.Contains(t, string(d.requests()[1].body["kv_transfer_params"]), `"later"`)
	require.Empty(t, f.router.pool.health().instances[0].Error)
}

// The code of an error is text or a number, and bounded.
func TestErrorCode(t *testing.T) {
	for body, want := range map[string]string{
		`{"error":{"code":"a"}}`: "a", `{"error":{"code":404}}`: "404", `{"error":{"code":null}}`: "", `{"error":"x"}`: "", "<html>": "",
		`{"error":{"code":"` + strings.Repeat("é", maxCode) + `"}}`: strings.Repeat("é", maxCode/2),
	} {
		require.Equal(t, want, errorCode([]byte(body)), body)
	}
}
