package router

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
)

// has answers cache queries with these tokens.
func has(prompt, engine, node, shared int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"usage":{"prompt_tokens":%d},"kv_transfer_params":{"kvport_cache":{"cached_tokens":0,
			"engine":{"cached_tokens":%d},"node":{"cached_tokens":%d,"unknown":true},"shared":{"cached_tokens":%d}}}}`, prompt, engine, node, shared)
	}
}

// asking is a request on its way through a router whose instances say that they answer cache queries.
func asking(t *testing.T, r *Router, body, key string) *call {
	t.Helper()
	c := &call{router: r, path: "/v1/completions", id: "x", header: http.Header{}}
	c.header.Set("Content-Type", "application/json")
	c.header.Set("Authorization", key)
	var err error
	c.body, err = parse([]byte(body))
	require.NoError(t, err)
	for i := range r.pool.known {
		r.pool.saw(i, &fit{Role: "kv_both", answers: true})
	}
	return c
}

const question9 = `{"prompt":"what is cached?","max_tokens":9,"stream":true,"cache_salt":"s","return_token_ids":true,"kv_transfer_params":null}`

func TestCacheQuery(t *testing.T) {
	d := serveInstance(t, has(100, 16, 32, 48))
	f := serveRouter(t, Config{Decode: urls(d)})
	f.router.asker.patience = time.Minute
	ask := func(body, key string) Cached {
		got, ok := asking(t, f.router, body, key).cacheQuery()(t.Context(), 0)
		require.True(t, ok)
		return got
	}
	want := Cached{Prompt: 100, Engine: 16, Node: 32, Shared: 48, Unknown: true}
	require.Equal(t, want, ask(question9, "k"))
	sent := d.requests()[0]
	require.Equal(t, "/v1/completions", sent.path)
	require.Equal(t, "k", sent.header.Get("Authorization"))
	require.JSONEq(t, `{"prompt":"what is cached?","max_tokens":1,"stream":false,"cache_salt":"s","kv_transfer_params":{"cache_query":true,"block_ids":false}}`, string(sent.body.encode()))

	require.Equal(t, want, ask(question9, "k"))
	require.Len(t, d.requests(), 1, "the answer is remembered")
	ask(question9, "another")
	ask(strings.Replace(question9, `"s"`, `"other"`, 1), "k")
	ask(strings.Replace(question9, "what", "WHAT", 1), "k")
	require.Len(t, d.requests(), 4, "another key, salt or prompt is another question")
	require.Equal(t, 4.0, testutil.ToFloat64(f.router.metrics.queries.WithLabelValues("answered")))
	require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.queries.WithLabelValues("remembered")))
}

// What is no answer is none, and the instance is not asked again at once.
func TestCacheQueryUnanswered(t *testing.T) {
	for name, usual := range map[string]http.HandlerFunc{
		"tokens":   whole200,
		"refusal":  code(http.StatusTooManyRequests),
		"failure":  code(http.StatusInternalServerError),
		"broken":   reset(""),
		"too many": has(100, 50, 50, 1),
		"negative": has(100, -1, 0, 0),
		"overflow": has(1<<62, 1<<62, 1<<62, 1<<62),
		"no numbers": func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, `{"kv_transfer_params":{"kvport_cache":7}}`)
		},
		"endless":      func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, strings.Repeat(" ", 2*maxQueryAnswer)) },
		"another kind": func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `[]`) },
	} {
		t.Run(name, func(t *testing.T) {
			d := serveInstance(t, usual)
			f := serveRouter(t, Config{Decode: urls(d)})
			f.router.asker.patience = time.Minute
			for range 2 {
				got, ok := asking(t, f.router, question9, "k").cacheQuery()(t.Context(), 0)
				require.False(t, ok)
				require.Zero(t, got)
			}
			require.Len(t, d.requests(), 1)
			require.Equal(t, 2.0, testutil.ToFloat64(f.router.metrics.queries.WithLabelValues("unanswered")))
		})
	}
}

// Nobody waits longer than a moment for an answer, and the number of queries that run is bounded.
func TestCacheQueryIsBounded(t *testing.T) {
	ended := make(chan struct{})
	d := serveInstance(t, func(_ http.ResponseWriter, r *http.Request) {
		<-r.Context().Done()
		close(ended)
	})
	f := serveRouter(t, Config{Decode: urls(d)})
	f.router.asker.patience = time.Millisecond
	_, ok := asking(t, f.router, question9, "k").cacheQuery()(t.Context(), 0)
	require.False(t, ok)
	if len(d.requests()) > 0 { // it may have been given up before it was sent
		<-ended
	}
	for range mostQueries {
		f.router.asker.slots <- struct{}{}
	}
	_, ok = asking(t, f.router, strings.Replace(question9, "what", "WHAT", 1), "k").cacheQuery()(t.Context(), 0)
	require.False(t, ok)
	require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.queries.WithLabelValues("limited")))
	// A client that leaves says nothing about the instance.
	for range mostQueries {
		<-f.router.asker.slots
	}
	left, cancel := context.WithCancel(t.Context())
	cancel()
	c := asking(t, f.router, strings.Replace(question9, "what", "WHO", 1), "k")
	_, ok = c.cacheQuery()(left, 0)
	require.False(t, ok)
	_, found := f.router.asker.recall(f.router.asker.question(c, 0), time.Now())
	require.False(t, found)
}

// Instances that do not say that they answer are never asked: they would generate.
func TestCacheQueryNeedsAnInstanceThatAnswers(t *testing.T) {
	d := serveInstance(t, has(1, 0, 0, 0))
	f := serveRouter(t, Config{Decode: urls(d)})
	for name, says := range map[string]*fit{"nothing": nil, "does not": {Role: "kv_both"}} {
		c := asking(t, f.router, question9, "k")
		f.router.pool.saw(0, says)
		_, ok := c.cacheQuery()(t.Context(), 0)
		require.False(t, ok, name)
	}
	c := asking(t, f.router, `{"prompt":["a","b"]}`, "k")
	_, ok := c.cacheQuery()(t.Context(), 0)
	require.False(t, ok, "several prompts")
	require.Empty(t, d.requests())
	require.Equal(t, 3.0, testutil.ToFloat64(f.router.metrics.queries.WithLabelValues("unsupported")))
	require.True(t, parseFit([]byte(`{"kv":{"role":"none"},"cache_query":true}`)).answers)
	require.False(t, parseFit([]byte(`{"kv":{"role":"none"}}`)).answers)
}

// Answers are remembered for a moment, and not too many.
func TestCacheQueryMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAsker()
		a.note(question{1, 7}, heard{ok: true, at: time.Now()})
		<-time.After(queryFresh - 1)
		_, found := a.recall(question{1, 7}, time.Now())
		require.True(t, found)
		_, found = a.recall(question{2, 7}, time.Now())
		require.False(t, found, "another instance")
		<-time.After(1)
		_, found = a.recall(question{1, 7}, time.Now())
		require.False(t, found)
		for i := range uint64(3 * mostAnswers) {
			a.note(question{0, i}, heard{})
			require.LessOrEqual(t, len(a.known), mostAnswers)
		}
	})
}

// A client's own cache query is refused: it would be answered with tokens.
func TestCacheQueryOfClient(t *testing.T) {
	d := serveInstance(t, whole200)
	f := serveRouter(t, Config{Decode: urls(d)})
	resp, body := post(t, f.URL+"/v1/completions", `{"prompt":"x","kv_transfer_params":{"cache_query":true}}`)
	require.Equal(t, 400, resp.StatusCode)
	require.Contains(t, body, "kv_transfer_params.cache_query: the router answers none, ask an instance")
	require.Empty(t, d.requests())
	resp, _ = post(t, f.URL+"/v1/completions", `{"prompt":"x","kv_transfer_params":{"cache_query":false}}`)
	require.Equal(t, 200, resp.StatusCode)
}

// TestCacheQueryOfServer asks a real kvport serve: what it says is what a request then gets.
func TestCacheQueryOfServer(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "kvport")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "../../cmd/kvport").CombinedOutput()
	require.NoError(t, err, string(out))
	p, err := cluster.Start(t.Context(), nil, "serve", binary, "serve", "--model", "sim", "--port", "0")
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(t, p.Stop(ctx))
	})
	f := serveRouter(t, Config{Decode: []string{p.URL}})
	f.router.asker.patience = time.Minute
	probing, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		f.router.Run(probing)
	}()
	defer func() {
		stop()
		<-done
	}()
	require.Eventually(t, func() bool {
		_, answers := f.router.pool.answersQueries(0)
		return answers
	}, time.Minute, 10*time.Millisecond)

	for path, body := range map[string]string{
		"/v1/completions":      fmt.Sprintf(`{"prompt":%q,"max_tokens":2,"ignore_eos":true}`, strings.Repeat("the quick brown fox ", 10)),
		"/v1/chat/completions": fmt.Sprintf(`{"messages":[{"role":"user","content":%q}],"max_tokens":2,"ignore_eos":true}`, strings.Repeat("a lazy dog ", 10)),
	} {
		ask := func() Cached {
			f.router.asker = newAsker() // which remembers nothing
			f.router.asker.patience = time.Minute
			c := &call{router: f.router, path: path, header: http.Header{"Content-Type": {"application/json"}}}
			c.body, err = parse([]byte(body))
			require.NoError(t, err)
			got, ok := c.cacheQuery()(t.Context(), 0)
			require.True(t, ok)
			return got
		}
		require.Zero(t, ask().Engine)
		for range 2 {
			resp, answer := post(t, f.URL+path, body)
			require.Equal(t, 200, resp.StatusCode, answer)
			var a struct {
				Usage struct {
					Prompt  int `json:"prompt_tokens"`
					Details struct {
						Cached int `json:"cached_tokens"`
					} `json:"prompt_tokens_details"`
				}
			}
			require.NoError(t, json.Unmarshal([]byte(answer), &a))
			got := ask()
			require.Equal(t, Cached{Prompt: a.Usage.Prompt, Engine: (a.Usage.Prompt - 1) / 16 * 16}, got)
			if a.Usage.Details.Cached > 0 {
				require.Equal(t, got.Engine, a.Usage.Details.Cached)
			}
		}
	}
}
