package router

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/router/policy"
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

// askFirst asks the first instance, as askAround does, for as long as the asker's patience lasts.
func (c *call) askFirst(ctx context.Context) (Cached, bool) {
	a, p := c.router.asker, c.router.pool
	ctx, cancel := context.WithTimeout(ctx, a.patience)
	defer cancel()
	cached, result := c.askCache(ctx, &asked{target: target{url: p.urls[0], life: p.lives[0].ctx}, places: []int{0}}, a.inquiry(c))
	c.router.metrics.queries.WithLabelValues(result).Inc()
	return cached, result == "answered" || result == "remembered"
}

const question9 = `{"prompt":"what is cached?","max_tokens":9,"stream":true,"cache_salt":"s","return_token_ids":true,"kv_transfer_params":null}`

func TestCacheQuery(t *testing.T) {
	d := serveInstance(t, has(100, 16, 32, 48))
	f := serveRouter(t, Config{Decode: urls(d)})
	f.router.asker.patience = time.Minute
	ask := func(body, key string) Cached {
		got, ok := asking(t, f.router, body, key).askFirst(t.Context())
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

// To other instances a cache query's answer says what the shared store has only if the asked one has nothing itself.
func TestCacheQueryOfSharedStore(t *testing.T) {
	require.Equal(t, policy.Hit{Engine: 16, Node: 48, Shared: 96}, (&Cached{Engine: 16, Node: 32, Shared: 48}).hit())
	require.Equal(t, policy.Hit{Node: 32, Shared: 80}, (&Cached{Node: 32, Shared: 48}).hit())
	require.Equal(t, policy.Hit{Shared: 48, Store: 48}, (&Cached{Shared: 48}).hit())
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
				got, ok := asking(t, f.router, question9, "k").askFirst(t.Context())
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
	_, ok := asking(t, f.router, question9, "k").askFirst(t.Context())
	require.False(t, ok)
	if len(d.requests()) > 0 { // it may have been given up before it was sent
		<-ended
	}
	for range mostQueries {
		f.router.asker.slots <- struct{}{}
	}
	_, ok = asking(t, f.router, strings.Replace(question9, "what", "WHAT", 1), "k").askFirst(t.Context())
	require.False(t, ok)
	require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.queries.WithLabelValues("limited")))
	// A client that leaves says nothing about the instance.
	for range mostQueries {
		<-f.router.asker.slots
	}
	left, cancel := context.WithCancel(t.Context())
	cancel()
	c := asking(t, f.router, strings.Replace(question9, "what", "WHO", 1), "k")
	_, ok = c.askFirst(left)
	require.False(t, ok)
	_, found := f.router.asker.recall(question{0, f.router.asker.inquiry(c).prompt}, time.Now())
	require.False(t, found)
}

// answering is an instance that says that it answers cache queries, does so as the test says, and serves requests.
func answering(t *testing.T, query http.HandlerFunc) *instanceServer {
	return serveInstance(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		switch {
		case r.URL.Path == "/health":
			fmt.Fprint(w, `{"kv":{"role":"kv_both","carries":true,"gives":["x"],"takes":["x"],"engine_id":"`+r.Host+`"},"cache_query":true}`)
		case strings.Contains(string(body), `"cache_query":true`):
			query(w, r)
		default:
			tokens(w, r)
		}
	})
}

// queries is how many cache queries each instance got.
func queries(list ...*instanceServer) (n []int) {
	for _, s := range list {
		asked := 0
		for _, r := range s.requests() {
			if strings.Contains(string(r.body["kv_transfer_params"]), "cache_query") {
				asked++
			}
		}
		n = append(n, asked)
	}
	return n
}

// asker is a router that knows that its instances answer cache queries.
func serveAsker(t *testing.T, c Config, list ...*instanceServer) *front {
	t.Helper()
	c.Decode = urls(list...)
	if c.QueryTimeout == 0 {
		c.QueryTimeout = time.Minute
	}
	f := serveRouter(t, c)
	for i, s := range list {
		f.router.pool.saw(i, &fit{Role: "kv_both", EngineID: s.URL, answers: true})
	}
	return f
}

// When the router knows nothing of a prompt, as after it has started again, it asks, and goes where the prompt is. From
// then on it knows; what differs from all that it knows is asked about again.
func TestAsksWhenNothingIsKnown(t *testing.T) {
	for _, c := range []Config{{Policy: policy.PrefixAware}, {Policy: policy.Session, Weights: map[string]float64{"prefix": 1}}} {
		a, b := answering(t, has(1000, 0, 0, 0)), answering(t, has(1000, 400, 200, 300))
		f := serveAsker(t, c, a, b)
		text := strings.Repeat("a conversation that began before the router did; ", 80)
		got := complete(t, f, completion(text), routeHeader, "1").Get(routeHeader)
		require.Contains(t, got, "decode="+b.URL)
		require.Contains(t, got, "holds 900 of 1000 tokens (engine 400, node 200, shared 300)")
		require.Equal(t, []int{1, 1}, queries(a, b))
		require.Equal(t, 2.0, testutil.ToFloat64(f.router.metrics.queries.WithLabelValues("answered")))

		for turn := range 3 {
			got = complete(t, f, completion(text+strings.Repeat("next ", turn)), routeHeader, "1").Get(routeHeader)
			require.Contains(t, got, "decode="+b.URL)
		}
		require.Equal(t, []int{1, 1}, queries(a, b), "the history knows")

		branch := text[:1000] + strings.Repeat("another branch of it ", 150)
		require.Contains(t, complete(t, f, completion(branch), routeHeader, "1").Get(routeHeader), "decode="+b.URL)
		require.Equal(t, []int{2, 2}, queries(a, b), "a branch of which less than half is known")
		require.NotContains(t, complete(t, f, completion("short"), routeHeader, "1").Get(routeHeader), "holds 9")
		require.Equal(t, []int{2, 2}, queries(a, b), "what is computed as soon as asked about")
		idle(t, f.router)
	}
}

// What an instance says it holds counts for the prompts that follow, also if others served them.
func TestAnswersAreLearnt(t *testing.T) {
	a := answering(t, has(1000, 1000, 0, 0))
	f := serveAsker(t, Config{Policy: policy.PrefixAware}, a)
	text := strings.Repeat("of a conversation ", 80)
	f.router.pool.mu.Lock()
	f.router.pool.known[0].busy.all.until = time.Now().Add(time.Hour) // so that nothing is sent there
	f.router.pool.mu.Unlock()
	resp, _ := post(t, f.URL+"/v1/completions", completion(text))
	require.Equal(t, 503, resp.StatusCode)
	require.Equal(t, []int{0}, queries(a), "nobody is asked who cannot be chosen")
	f.router.pool.mu.Lock()
	f.router.pool.known[0].busy.all.until = time.Time{}
	f.router.pool.mu.Unlock()
	c := asking(t, f.router, completion(text), "")
	c.size = len(text)
	require.Equal(t, []policy.Held{owns(0, 1000)}, c.prepare(t.Context()).Held)
	require.Equal(t, []int{1}, queries(a))
	c = asking(t, f.router, completion(text+"and more"), "")
	require.Empty(t, c.prepare(t.Context()).Held)
	require.Equal(t, []int{1}, queries(a), "the history has it")
}

// Only those are asked of whom nothing is known otherwise and who answer: neither engines of other makers, which would
// generate, nor those whose events are read, nor by a policy that does not care, nor about several prompts.
func TestAsksNobodyInVain(t *testing.T) {
	long := strings.Repeat("long ", 200)
	for name, tt := range map[string]struct {
		c       Config
		body    string
		prepare func(f *front)
	}{
		"no answers":      {Config{Policy: policy.PrefixAware}, completion(long), func(f *front) { f.router.pool.saw(0, &fit{Role: "kv_both"}) }},
		"vLLM":            {Config{Policy: policy.PrefixAware}, completion(long), func(f *front) { f.router.pool.saw(0, nil) }},
		"events":          {Config{Policy: policy.PrefixAware}, completion(long), func(f *front) { f.router.holders = []holder{told{{Place: 0}}} }},
		"policy":          {Config{Policy: policy.LeastLoaded}, completion(long), func(*front) {}},
		"turned off":      {Config{Policy: policy.PrefixAware, QueryTimeout: -1}, completion(long), func(*front) {}},
		"several prompts": {Config{Policy: policy.PrefixAware}, fmt.Sprintf(`{"prompt":[%q,%q],"stream":true}`, long, long), func(*front) {}},
	} {
		t.Run(name, func(t *testing.T) {
			a := answering(t, has(1000, 900, 0, 0))
			f := serveAsker(t, tt.c, a)
			tt.prepare(f)
			complete(t, f, tt.body)
			require.Equal(t, []int{0}, queries(a))
			require.Len(t, a.requests(), 1)
		})
	}
}

// A request waits for all answers together no longer than its limit, and an instance that is often silent is left alone for
// a while. It serves all the same.
func TestAskingIsBounded(t *testing.T) {
	var speaks atomic.Bool
	a := answering(t, func(w http.ResponseWriter, r *http.Request) {
		if speaks.Load() {
			has(1000, 0, 0, 0)(w, r)
			return
		}
		<-r.Context().Done()
	})
	f := serveAsker(t, Config{Policy: policy.PrefixAware, QueryTimeout: time.Millisecond}, a)
	now := time.Now()
	f.router.asker.now = func() time.Time { return now }
	prompts := 0
	ask := func() {
		prompts++
		complete(t, f, completion(fmt.Sprint(prompts)+strings.Repeat(" long", 200)))
	}
	result := func(name string) float64 {
		return testutil.ToFloat64(f.router.metrics.queries.WithLabelValues(name))
	}
	speak := func() {
		f.router.asker.patience = notSoon
		speaks.Store(true)
		ask()
		f.router.asker.patience = time.Millisecond
		speaks.Store(false)
	}
	for range mostSilent - 1 {
		ask()
	}
	speak()
	require.Equal(t, 1.0, result("answered"), "long prompts of one client keep nobody from asking")
	for range mostSilent {
		ask()
	}
	require.Equal(t, 2.0*mostSilent-1, result("unanswered"))
	now = now.Add(queryPause - 1)
	speak() // nobody asks
	require.Equal(t, 1.0, result("answered"))
	now = now.Add(1)
	speak()
	require.Equal(t, 2.0, result("answered"), "the while is over")

	f.router.asker.patience = notSoon
	f.router.asker.budget.budget.Share = 1e-9
	f.router.asker.budget.spend()
	ask()
	require.Equal(t, 1.0, result("limited"), "there are few queries without requests")
	require.Equal(t, 2.0, result("answered"))
}

// A query that an instance refuses for its prompt, model, key or salt is nothing to be held against it. One that it fails is.
func TestAskingAboutAWrongPrompt(t *testing.T) {
	for status, want := range map[int]int{400: 2, 401: 2, 403: 2, 404: 2, 413: 2, 422: 2, 429: 1, 500: 1, 503: 1} {
		a := answering(t, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			fmt.Fprint(w, strings.Repeat("what was wrong ", maxQueryAnswer/10))
		})
		f := serveAsker(t, Config{Policy: policy.PrefixAware}, a)
		for i := range 2 {
			complete(t, f, completion(fmt.Sprint(i)+strings.Repeat(" long", 200)))
		}
		require.Equal(t, []int{want}, queries(a), status)
	}
}

// Of many instances a request asks some, each once, though it does both parts.
func TestAsksSome(t *testing.T) {
	f := serveRouter(t, Config{Policy: policy.PrefixAware, Register: signer(time.Minute)})
	p := f.router.pool
	var list []spec
	for i := range 3 * mostAsked {
		for _, r := range []role{prefill, decode} {
			list = append(list, spec{role: r, url: at(t, fmt.Sprintf("http://10.0.0.1:%d", 1+i))})
		}
	}
	require.NoError(t, p.set(byFile, list))
	for i := range p.urls {
		p.saw(i, &fit{Role: "kv_both", EngineID: fmt.Sprint(i / 2), answers: true})
	}
	seen := map[string]bool{}
	for _, in := range p.toAsk(&policy.Request{Tokens: 9}, time.Now()) {
		require.False(t, seen[in.url.String()])
		seen[in.url.String()] = true
		require.Len(t, in.places, 2)
	}
	require.Len(t, seen, mostAsked)
}

// Answers are remembered for a moment, and not too many.
func TestCacheQueryMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAsker(0)
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

// answering waits until a router knows that its instances answer cache queries.
func (f *front) answering(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		f.router.pool.mu.Lock()
		defer f.router.pool.mu.Unlock()
		return !slices.ContainsFunc(f.router.pool.known, func(k registered) bool { return k.fit == nil || !k.fit.answers })
	}, time.Minute, 10*time.Millisecond)
}

// TestCacheQueryOfServer asks a real kvport serve: what it says is what a request then gets, and a router that has just
// started sends requests where their prompts are.
func TestCacheQueryOfServer(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "kvport")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "../../cmd/kvport").CombinedOutput()
	require.NoError(t, err, string(out))
	serve := func() *cluster.Process {
		p, err := cluster.Start(t.Context(), nil, "serve", binary, "serve", "--model", "sim", "--port", "0")
		require.NoError(t, err)
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			require.NoError(t, p.Stop(ctx))
		})
		return p
	}
	p, q := serve(), serve()
	f := serveRouter(t, Config{Decode: []string{p.URL}})
	running(t, f.router)
	f.answering(t)
	routed := func(text string) string {
		f := serveRouter(t, Config{Decode: []string{p.URL, q.URL}, Policy: policy.PrefixAware, QueryTimeout: time.Minute})
		stop := running(t, f.router)
		defer stop()
		f.answering(t)
		return complete(t, f, fmt.Sprintf(`{"prompt":%q,"max_tokens":2}`, text), routeHeader, "1").Get(routeHeader)
	}
	for i, at := range []*cluster.Process{p, q, p, q} {
		text := fmt.Sprint(i) + strings.Repeat(" of a long text", 60)
		resp, answer := post(t, at.URL+"/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":2}`, text))
		require.Equal(t, 200, resp.StatusCode, answer)
		got := routed(text)
		require.Contains(t, got, "decode="+at.URL)
		require.NotContains(t, got, "holds 0 of")
	}

	for path, body := range map[string]string{
		"/v1/completions":      fmt.Sprintf(`{"prompt":%q,"max_tokens":2,"ignore_eos":true}`, strings.Repeat("the quick brown fox ", 10)),
		"/v1/chat/completions": fmt.Sprintf(`{"messages":[{"role":"user","content":%q}],"max_tokens":2,"ignore_eos":true}`, strings.Repeat("a lazy dog ", 10)),
	} {
		ask := func() Cached {
			f.router.asker = newAsker(time.Minute) // which remembers nothing
			c := &call{router: f.router, path: path, header: http.Header{"Content-Type": {"application/json"}}}
			c.body, err = parse([]byte(body))
			require.NoError(t, err)
			c.size = len(body)
			got, ok := c.askFirst(t.Context())
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
