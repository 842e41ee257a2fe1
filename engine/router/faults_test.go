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

// Every way in which a prefill instance can fail leads to another one, and without any to a plain
// request.
func TestPrefillFaults(t *testing.T) {
	faults := map[string]http.HandlerFunc{
		"reset": reset(""), "cut": reset("HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"), "500": code(500), "503": code(503), "429": code(429),
	}
	for name, fault := range faults {
		t.Run(name, func(t *testing.T) {
			bad, good, d := serveInstance(t, fault), serveInstance(t, ticket("G")), serveInstance(t, tokens)
			f := serveRouter(t, Config{Prefill: urls(bad, good), Decode: urls(d)})
			resp, _ := post(t, f.URL+"/v1/completions", doc)
			require.Equal(t, 200, resp.StatusCode)
			require.Contains(t, string(d.requests()[0].body["kv_transfer_params"]), `"G"`)
			require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.retries.WithLabelValues("prefill")))
		})
	}
	t.Run("all refuse", func(t *testing.T) {
		d := serveInstance(t, tokens)
		f := serveRouter(t, Config{Prefill: []string{refusing(t), refusing(t)}, Decode: urls(d)})
		resp, text := post(t, f.URL+"/v1/completions", doc)
		require.Equal(t, 200, resp.StatusCode)
		require.Contains(t, text, "[DONE]")
		require.NotContains(t, d.requests()[0].body, "kv_transfer_params", "a client's own params are dropped")
		require.Equal(t, 1.0, f.outcomes(t, plain))
	})
	t.Run("nothing kept", func(t *testing.T) {
		p, d := serveInstance(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"kv_transfer_params":null}`) }), serveInstance(t, tokens)
		f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d)})
		post(t, f.URL+"/v1/completions", doc)
		require.NotContains(t, d.requests()[0].body, "kv_transfer_params")
	})
	t.Run("not JSON", func(t *testing.T) {
		p, d := serveInstance(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `<html>`) }), serveInstance(t, tokens)
		f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d)})
		resp, _ := post(t, f.URL+"/v1/completions", doc)
		require.Equal(t, 200, resp.StatusCode)
		require.NotContains(t, d.requests()[0].body, "kv_transfer_params")
	})
	t.Run("400 is the client's, as decode says", func(t *testing.T) {
		p, d := serveInstance(t, code(400)), serveInstance(t, code(400))
		var log testkit.Log
		f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d), Log: logTo(&log)})
		resp, text := post(t, f.URL+"/v1/completions", doc)
		require.Equal(t, 400, resp.StatusCode)
		require.JSONEq(t, `{"error":{"code":"400"}}`, text)
		require.Len(t, d.requests(), 1)
		require.Empty(t, log.String(), "invalid requests are not the operator's business")
		require.Eventually(t, func() bool { return f.outcomes(t, clientError) == 1 }, waitLimit, waitTick)
	})
}

// A decode instance that fails before its first byte is replaced; a ticket that it may have used is
// not given to the next.
func TestDecodeFaults(t *testing.T) {
	head := "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
	tests := []struct {
		name  string
		fault http.HandlerFunc
		again bool // a new ticket
	}{
		{"reset", reset(""), true},
		{"500", code(500), true},
		{"503", code(503), false},
		{"429", code(429), false},
		{"headers only", reset(head), true},
		{"whole answer cut", reset("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"), true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := serveInstance(t, ticket("second"), ticket("first"))
			bad, good := serveInstance(t, tt.fault), serveInstance(t, tokens)
			f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(bad, good)})
			resp, text := post(t, f.URL+"/v1/completions", doc)
			require.Equal(t, 200, resp.StatusCode)
			require.Equal(t, "data: {\"n\":1}\n\ndata: [DONE]\n\n", text)
			require.Len(t, bad.requests(), 1)
			want := `"first"`
			if tt.again {
				want = `"second"`
			}
			require.Contains(t, string(good.requests()[0].body["kv_transfer_params"]), want)
			require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.retries.WithLabelValues("decode")))
			require.Equal(t, 1.0, f.outcomes(t, disaggregated))
		})
	}
	t.Run("refused keeps the ticket", func(t *testing.T) {
		p, good := serveInstance(t, ticket("second"), ticket("first")), serveInstance(t, tokens)
		f := serveRouter(t, Config{Prefill: urls(p), Decode: []string{refusing(t), good.URL}})
		resp, _ := post(t, f.URL+"/v1/completions", doc)
		require.Equal(t, 200, resp.StatusCode)
		require.Contains(t, string(good.requests()[0].body["kv_transfer_params"]), `"first"`)
	})
	t.Run("all refuse", func(t *testing.T) {
		p := serveInstance(t, ticket("T"))
		f := serveRouter(t, Config{Prefill: urls(p), Decode: []string{refusing(t), refusing(t)}})
		resp, text := post(t, f.URL+"/v1/completions", doc)
		require.Equal(t, 503, resp.StatusCode)
		require.Equal(t, "1", resp.Header.Get("Retry-After"))
		require.Contains(t, text, `"no_decode_instance"`)
		require.Equal(t, 1.0, f.outcomes(t, unavailable))
	})
	t.Run("last refusal is passed on", func(t *testing.T) {
		f := serveRouter(t, Config{Decode: urls(serveInstance(t, code(429)), serveInstance(t, code(429)))})
		resp, text := post(t, f.URL+"/v1/completions", doc)
		require.Equal(t, 429, resp.StatusCode)
		require.JSONEq(t, `{"error":{"code":"429"}}`, text)
	})
	t.Run("cut in the middle", func(t *testing.T) {
		bad := serveInstance(t, reset(head+"e\r\ndata: {\"n\":1}\n\r\n"))
		other := serveInstance(t, tokens)
		f := serveRouter(t, Config{Decode: urls(bad, other)})
		resp, text := post(t, f.URL+"/v1/completions", doc)
		require.Equal(t, 200, resp.StatusCode)
		require.True(t, strings.HasPrefix(text, "data: {\"n\":1}\n\n\ndata: {\"error\":"), "got %q", text)
		require.NotContains(t, text, "[DONE]")
		require.Empty(t, other.requests(), "the client has seen bytes: too late for another")
		require.Equal(t, 1.0, f.outcomes(t, broken))
	})
}

// TestUnfinishedStreams: a stream that ends without [DONE] is broken, though its connection ends well. The client gets an
// error event, unless the instance has given one.
func TestUnfinishedStreams(t *testing.T) {
	const (
		failed  = "data: {\"error\": {\"message\": \"overheated\"}}"
		refused = "data: {\"error\": {\"message\": \"no such tool\", \"code\": 400}}"
		done    = "data: [DONE]\n\n"
	)
	for end, want := range map[string]struct {
		errors int
		broken float64
	}{
		"": {1, 1}, "data: {\"n\":2}\n\n": {1, 1}, "data: {\"n\":": {1, 1}, failed + "\n\n": {1, 1}, failed: {1, 1},
		failed + "\n\n" + done: {1, 1}, failed + "\r\n\r\ndata: [DONE]\r\n\r\n": {1, 1}, refused + "\n\n" + done: {1, 0}, done + ": over\n\n": {},
		done: {}, "data:[DONE]\r\n\r\n": {}, "data: [DONE]": {},
	} {
		d := serveInstance(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "data: {\"n\":1}\n\n"+end)
		})
		f := serveRouter(t, Config{Decode: urls(d)})
		_, text := post(t, f.URL+"/v1/completions", doc)
		require.True(t, strings.HasPrefix(text, "data: {\"n\":1}\n\n"+end), "%q", text)
		require.Equal(t, want.errors, strings.Count(text, "{\"error\""), "%q", text)
		require.InDelta(t, want.broken, testutil.ToFloat64(f.router.metrics.requests.WithLabelValues("broken")), 0, "%q", end)
	}
}

// TestStreamBeginsWithAnError: an instance that fails before it has said anything of the answer is replaced, though its stream has
// begun: vLLM sends a first event that says who speaks, then an error event and [DONE]. A request that is wrong stays where it is.
func TestStreamBeginsWithAnError(t *testing.T) {
	const (
		role    = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n"
		failed  = "data: {\"error\": {\"message\": \"Internal server error\", \"type\": \"InternalServerError\", \"code\": 500}}\n\n"
		refused = "data: {\"error\": {\"message\": \"no\", \"code\": 400}}\n\n"
		word    = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n"
		done    = "data: [DONE]\n\n"
		served  = "data: {\"n\":1}\n\n" + done
	)
	tests := map[string]struct {
		pieces []string
		want   string
		broken float64
	}{
		"at once":              {[]string{failed + done}, served, 0},
		"alone":                {[]string{failed}, served, 0},
		"behind the role":      {[]string{role, failed + done}, served, 0},
		"with the role":        {[]string{role + failed + done}, served, 0},
		"only the role":        {[]string{role}, served, 0},
		"in the answer":        {[]string{role, word, failed + done}, role + word + failed + done, 1},
		"the request is wrong": {[]string{role, refused + done}, role + refused + done, 0},
		"a whole answer":       {[]string{role, word + done}, role + word + done, 0},
		"a comment":            {[]string{": ping\n\n", failed + done}, ": ping\n\n" + failed + done, 1},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			bad := serveInstance(t, func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "text/event-stream")
				for _, piece := range tt.pieces {
					fmt.Fprint(w, piece)
					_ = http.NewResponseController(w).Flush()
				}
			})
			p, good := serveInstance(t, ticket("second"), ticket("first")), serveInstance(t, tokens)
			f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(bad, good)})
			resp, text := post(t, f.URL+"/v1/chat/completions", doc)
			require.Equal(t, 200, resp.StatusCode)
			require.Equal(t, tt.want, text)
			require.InDelta(t, tt.broken, f.outcomes(t, broken), 0)
			if tt.want != served {
				require.Empty(t, good.requests())
				return
			}
			require.Contains(t, string(good.requests()[0].body["kv_transfer_params"]), `"second"`)
			require.InDelta(t, 1, testutil.ToFloat64(f.router.metrics.retries.WithLabelValues("decode")), 0)
		})
	}
}

// TestManyRefuse: instances that refuse the connection do not count as attempts: the one that is up serves.
func TestManyRefuse(t *testing.T) {
	d := serveInstance(t, tokens)
	dead := []string{"http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3", "http://127.0.0.1:4", "http://127.0.0.1:5"}
	f := serveRouter(t, Config{Decode: append(dead, d.URL), Attempts: 1})
	resp, text := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, http.StatusOK, resp.StatusCode, text)
	require.Len(t, d.requests(), 1)
	require.InDelta(t, len(dead), testutil.ToFloat64(f.router.metrics.retries.WithLabelValues("decode")), 0)

	none := serveRouter(t, Config{Decode: dead})
	resp, text = post(t, none.URL+"/v1/completions", doc)
	require.Equal(t, http.StatusServiceUnavailable, resp.StatusCode, text)
}
