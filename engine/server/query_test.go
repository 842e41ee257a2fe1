package server

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine"
	"github.com/kvport/kvport/engine/apikeys"
	"github.com/kvport/kvport/engine/router/admission"
	"github.com/kvport/kvport/engine/tokenizer"
	"github.com/kvport/kvport/internal/pairid"
)

// queried is what a scripted engine says to a cache query.
func queried(ticket []byte, notHeld string) engine.Output {
	return engine.Output{
		Reason: connector.ReasonStop, Ticket: ticket, Usage: engine.Usage{Prompt: 90, Local: 32, External: 48},
		Cached: &engine.Cached{NotHeld: notHeld, Scopes: []engine.InScope{
			{Scope: connector.ScopeEngine, Tokens: 32, Blocks: []connector.BlockKey{{1}, {2}}},
			{Scope: connector.ScopeNode, Unknown: true},
			{Scope: connector.ScopeShared, Tokens: 48, Blocks: []connector.BlockKey{{3}, {4}, {5}}},
		}},
	}
}

// key is a block's key as an answer has it.
func key(n int) string { return fmt.Sprintf(`"%02d%s"`, n, strings.Repeat("0", 62)) }

func TestCacheQuery(t *testing.T) {
	const head = `"kv_transfer_params":{`
	cache := `"kvport_cache":{"cached_tokens":80,"block_size":16,"engine":{"cached_tokens":32,"block_ids":[` + key(1) + `,` + key(2) + `]},` +
		`"node":{"cached_tokens":0,"unknown":true},"shared":{"cached_tokens":48,"block_ids":[` + key(3) + `,` + key(4) + `,` + key(5) + `]}`
	const used = `"usage":{"prompt_tokens":90,"completion_tokens":0,"total_tokens":90,"prompt_tokens_details":{"cached_tokens":80}}`
	e := &script{outputs: []engine.Output{queried(nil, "")}}
	f := serve(t, e)
	resp, body := f.post(t, "/v1/completions", `{"prompt":"hi","max_tokens":99,"temperature":0,"cache_salt":"s","stop":"x","kv_transfer_params":{"cache_query":true}}`)
	require.Equal(t, 200, resp.StatusCode, body)
	require.Equal(t, `{"id":"cmpl-ID","object":"text_completion","created":1,"model":"tiny","choices":[`+
		`{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}],`+used+`,`+head+cache+`}}}`, masked(t, body))
	r := e.requests()[0]
	require.True(t, r.Query)
	require.False(t, r.Hold || r.Remote || r.Turn)
	require.Equal(t, "s", r.Salt)
	require.Equal(t, 1, r.MaxTokens, "what follows does not matter")

	_, body = f.post(t, "/v1/chat/completions", `{"messages":[{"role":"user","content":"hi"}],"kv_transfer_params":{"cache_query":true,"block_ids":false}}`)
	require.Contains(t, body, `"message":{"role":"assistant","content":""},"logprobs":null,"finish_reason":"stop"}],`+used)
	require.Contains(t, body, head+`"kvport_cache":{"cached_tokens":80,"block_size":16,"engine":{"cached_tokens":32},"node":{"cached_tokens":0,"unknown":true},"shared":{"cached_tokens":48}}}`)

	// A stream has one chunk, and the usage if it is asked for.
	_, body = f.post(t, "/v1/completions", `{"prompt":"hi","stream":true,"kv_transfer_params":{"cache_query":true}}`)
	require.Equal(t, []string{`{"id":"cmpl-ID","object":"text_completion","created":1,"model":"tiny","choices":[` +
		`{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}],` + head + cache + `}}}`, "[DONE]"}, events(t, body))
	_, body = f.post(t, "/v1/chat/completions", `{"messages":[{"role":"user","content":"hi"}],"stream":true,"stream_options":{"include_usage":true},"kv_transfer_params":{"cache_query":true}}`)
	list := events(t, body)
	require.Len(t, list, 3)
	require.Contains(t, list[0], `"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":"stop"}],"usage":null,`+head+cache)
	require.Contains(t, list[1], used)
	require.Equal(t, 4.0, testutil.ToFloat64(f.server.metrics.queries.WithLabelValues("unknown")))
}

// TestCacheQueryHolds: with a ticket the parameters are those that a decode instance takes, as they are.
func TestCacheQueryHolds(t *testing.T) {
	e := &script{outputs: []engine.Output{queried([]byte("ticket"), "")}}
	f := serve(t, e)
	_, body := f.post(t, "/v1/completions", `{"prompt":"hi","kv_transfer_params":{"cache_query":true,"hold":true,"block_ids":false}}`)
	require.Contains(t, body, `"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"P1","remote_block_ids":null,`+
		`"remote_host":null,"remote_port":null,"kvport_ticket":"dGlja2V0","kvport_cache":{"cached_tokens":80,`)
	require.True(t, e.requests()[0].Hold)
	var a struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	require.NoError(t, json.Unmarshal([]byte(body), &a))
	next, err := decodeCompletion([]byte(`{"prompt":"hi","kv_transfer_params":` + string(a.Params) + `}`))
	require.Nil(t, err)
	require.Equal(t, []byte("ticket"), next.ticket)
	require.False(t, next.query || next.remote)

	e = &script{outputs: []engine.Output{queried(nil, "this engine has no connector")}}
	_, body = serve(t, e).post(t, "/v1/completions", `{"prompt":"hi","kv_transfer_params":{"cache_query":true,"hold":true}}`)
	require.Contains(t, body, `"not_held":"this engine has no connector"}}`)
	require.NotContains(t, body, "ticket")
}

// A query computes nothing, and costs its client none of the tokens that it has a minute.
func TestQueriesCostNoTokens(t *testing.T) {
	limited := func(string) *apikeys.Key {
		return &apikeys.Key{Name: "alice", Tenant: "alice", Limits: admission.Limits{TokensPerMinute: 20}}
	}
	s, err := New(Config{Engine: &script{outputs: []engine.Output{queried(nil, "")}}, Tokenizer: tokenizer.Bytes(), ModelName: "x", Key: limited})
	require.NoError(t, err)
	for range 8 {
		w := postAs(t, s, "alice", "/v1/completions", `{"prompt":"`+strings.Repeat("p", 90)+`","kv_transfer_params":{"cache_query":true}}`)
		require.Equal(t, 200, w.Code, w.Body.String())
	}
}

// Each wrong query is refused by name before the engine has it.
func TestCacheQueryRefused(t *testing.T) {
	e := &script{}
	f := serve(t, e)
	for params, want := range map[string]string{
		`"cache_query":1`:                               "kv_transfer_params.cache_query",
		`"cache_query":true,"hold":"weak"`:              "kv_transfer_params.hold",
		`"cache_query":true,"block_ids":7`:              "kv_transfer_params.block_ids",
		`"cache_query":true,"do_remote_decode":true`:    "kv_transfer_params.cache_query",
		`"cache_query":true,"do_remote_prefill":true`:   "kv_transfer_params.cache_query",
		`"cache_query":true,"kvport_ticket":"dGlja2V0"`: "kv_transfer_params.cache_query",
		`"cache_query":true,"other":true`:               "kv_transfer_params.other",
		`"hold":true`:                                   "kv_transfer_params.hold",
		`"cache_query":false,"block_ids":true`:          "kv_transfer_params.block_ids",
	} {
		resp, body := f.post(t, "/v1/completions", `{"prompt":"x","kv_transfer_params":{`+params+`}}`)
		require.Equal(t, 400, resp.StatusCode, params)
		require.Contains(t, body, `"param":"`+want+`"`, params)
	}
	resp, body := f.post(t, "/v1/completions", `{"prompt":["x","y"],"kv_transfer_params":{"cache_query":true}}`)
	require.Equal(t, 400, resp.StatusCode)
	require.Contains(t, body, "describe one prompt, the request has 2")
	off := serve(t, e, func(c *Config) { c.CacheQueryRate = -1 })
	resp, body = off.post(t, "/v1/completions", `{"prompt":"x","kv_transfer_params":{"cache_query":true}}`)
	require.Equal(t, 400, resp.StatusCode)
	require.Contains(t, body, "turned off on this server")
	require.Empty(t, e.requests())
	require.Equal(t, 1.0, testutil.ToFloat64(off.server.metrics.queries.WithLabelValues("failed")))
}

// Where several API keys share the cache of prompts without a salt, none of them learns by a query what others have asked.
func TestCacheQueryOfSharedKeys(t *testing.T) {
	e := &script{outputs: []engine.Output{queried(nil, "")}}
	several := true
	f := serve(t, e, func(c *Config) { c.SharedKeys = func() bool { return several } })
	for _, salt := range []string{"null", `""`} {
		resp, body := f.post(t, "/v1/completions", `{"prompt":"x","cache_salt":`+salt+`,"kv_transfer_params":{"cache_query":true}}`)
		require.Equal(t, 403, resp.StatusCode)
		require.Contains(t, body, "cache_salt: a cache query needs one")
		require.NotContains(t, body, "\n\n")
	}
	require.Empty(t, e.requests())
	resp, body := f.post(t, "/v1/completions", `{"prompt":"x","cache_salt":"s","kv_transfer_params":{"cache_query":true}}`)
	require.Equal(t, 200, resp.StatusCode, body)
	resp, body = f.post(t, "/v1/completions", `{"prompt":"x"}`)
	require.Equal(t, 200, resp.StatusCode, body)
	several = false
	resp, body = f.post(t, "/v1/completions", `{"prompt":"x","kv_transfer_params":{"cache_query":true}}`)
	require.Equal(t, 200, resp.StatusCode, body)
}

// TestCacheQueryNamesNobody: a label that names two engines, by which blocks would be sent, has no effect.
func TestCacheQueryNamesNobody(t *testing.T) {
	e := &script{outputs: []engine.Output{queried(nil, "")}}
	f := serve(t, e)
	for _, params := range []string{`{"cache_query":true}`, "null"} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.URL+"/v1/completions", strings.NewReader(`{"prompt":"x","kv_transfer_params":`+params+`}`))
		require.NoError(t, err)
		req.Header.Set("X-Request-Id", pairid.Prefix+"a___decode_addr_b_c")
		resp, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		resp.Body.Close()
	}
	require.NotContains(t, e.requests()[0].ID, pairid.Prefix)
	require.Contains(t, e.requests()[1].ID, pairid.Prefix)
}

// The rate of each API key is its own, and it limits nothing but cache queries.
func TestCacheQueryRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := New(Config{
			Engine: &script{outputs: []engine.Output{queried(nil, "")}}, Tokenizer: tokenizer.Bytes(), ModelName: "x", CacheQueryRate: 3,
			Key: func(authorization string) *apikeys.Key { return &apikeys.Key{Name: authorization} },
		})
		require.NoError(t, err)
		ask := func(key, params string) *httptest.ResponseRecorder {
			r := httptest.NewRequestWithContext(t.Context(), "POST", "/v1/completions", strings.NewReader(`{"prompt":"x","kv_transfer_params":`+params+`}`))
			r.Header.Set("Authorization", key)
			w := httptest.NewRecorder()
			s.ServeHTTP(w, r)
			return w
		}
		const query = `{"cache_query":true}`
		for range 3 {
			require.Equal(t, 200, ask("a", query).Code)
		}
		refused := ask("a", query)
		require.Equal(t, 429, refused.Code)
		require.Equal(t, "1", refused.Header().Get("Retry-After"))
		require.Contains(t, refused.Body.String(), "more than 3 cache queries a second")
		require.Contains(t, refused.Body.String(), `"code":"cache_query_rate"`)
		require.Equal(t, 200, ask("b", query).Code, "another key")
		require.Equal(t, 200, ask("a", "{}").Code, "no cache query")
		<-time.After(time.Second / 2)
		require.Equal(t, 200, ask("a", query).Code)
		require.Equal(t, 429, ask("a", query).Code)
		require.Equal(t, 2.0, testutil.ToFloat64(s.metrics.queries.WithLabelValues("limited")))
	})
}

// The keys that are remembered are bounded.
func TestCacheQueryKeysAreBounded(t *testing.T) {
	l := newQueryLimit(1)
	for i := range 3 * maxQueryKeys {
		require.True(t, l.allow(fmt.Sprint(i)))
		require.LessOrEqual(t, len(l.keys), maxQueryKeys)
	}
}

// TestRealEngineCacheQuery: a query says what the next answer's usage says, for the asker's salt alone.
func TestRealEngineCacheQuery(t *testing.T) {
	f, e := serveSim(t)
	prompt := strings.Repeat("the quick brown fox ", 10)
	query := func(salt string) (usage, map[string]any) {
		resp, body := f.post(t, "/v1/completions", fmt.Sprintf(`{"prompt":%q,"cache_salt":%q,"kv_transfer_params":{"cache_query":true}}`, prompt, salt))
		require.Equal(t, 200, resp.StatusCode, body)
		var a struct {
			Choices []choice
			Usage   usage
			Params  struct {
				Cache map[string]any `json:"kvport_cache"`
			} `json:"kv_transfer_params"`
		}
		require.NoError(t, json.Unmarshal([]byte(body), &a))
		require.Empty(t, *a.Choices[0].Text)
		require.Equal(t, "stop", *a.Choices[0].FinishReason)
		require.Zero(t, a.Usage.CompletionTokens)
		return a.Usage, a.Params.Cache
	}
	u, _ := query("s")
	require.Equal(t, 200, u.PromptTokens)
	require.Zero(t, u.Details.CachedTokens)
	request := fmt.Sprintf(`{"prompt":%q,"cache_salt":"s","max_tokens":4,"ignore_eos":true}`, prompt)
	f.complete(t, request)
	u, cache := query("s")
	require.Equal(t, 192, u.Details.CachedTokens)
	require.Equal(t, 192.0, cache["cached_tokens"])
	require.Len(t, cache["engine"].(map[string]any)["block_ids"], 12)
	_, next := f.complete(t, request)
	require.Equal(t, u.Details.CachedTokens, next.Details.CachedTokens)
	u, _ = query("another")
	require.Zero(t, u.Details.CachedTokens)
	require.Equal(t, 3.0, testutil.ToFloat64(f.server.metrics.queries.WithLabelValues("answered")))
	require.Zero(t, e.Health().Blocks.Used)
	resp, err := http.Get(f.URL + "/health")
	require.NoError(t, err)
	defer resp.Body.Close()
	health, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Contains(t, string(health), `"cache_query":true`)
}
