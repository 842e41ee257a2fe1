package router

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/router/admission"
)

// waitsFor is an instance that answers when the test says so.
func waitsFor(t *testing.T) (s *instanceServer, goOn chan struct{}) {
	t.Helper()
	goOn = make(chan struct{})
	return serveInstance(t, func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-goOn:
			tokens(w, r)
		case <-r.Context().Done():
		}
	}), goOn
}

// ask sends a request on a goroutine.
func ask(ctx context.Context, url, authorization string) <-chan *http.Response {
	answers := make(chan *http.Response, 1)
	go func() {
		defer close(answers)
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", strings.NewReader(doc))
		if err != nil {
			return
		}
		req.Header.Set("Authorization", authorization)
		if resp, err := http.DefaultClient.Do(req); err == nil {
			_, _ = io.Copy(io.Discard, resp.Body) // one who leaves before the end is counted as such
			_ = resp.Body.Close()
			answers <- resp
		}
	}()
	return answers
}

// seconds is what an answer says about when to come back.
func seconds(t *testing.T, resp *http.Response) int {
	t.Helper()
	n, err := strconv.Atoi(resp.Header.Get("Retry-After"))
	require.NoError(t, err)
	return n
}

func (f *front) waiting() int {
	f.router.gate.mu.Lock()
	defer f.router.gate.mu.Unlock()
	return f.router.gate.queue.Waiting()
}

func (f *front) awaitWaiting(t *testing.T, n int) {
	t.Helper()
	require.Eventually(t, func() bool { return f.waiting() == n }, waitLimit, waitTick)
}

// oneRunsOneWaits sends a request, which comes to run on the first instance, and then one of ctx, which comes to wait in the queue.
func (f *front) oneRunsOneWaits(ctx context.Context, t *testing.T) (runs, waits <-chan *http.Response) {
	t.Helper()
	runs = ask(t.Context(), f.URL, "")
	require.Eventually(t, func() bool { return f.router.pool.health().instances[0].InFlight == 1 }, waitLimit, waitTick)
	waits = ask(ctx, f.URL, "")
	f.awaitWaiting(t, 1)
	return runs, waits
}

// A request waits for a slot in the queue, and is served when there is one.
func TestQueuedRequestIsServed(t *testing.T) {
	d, goOn := waitsFor(t)
	f := serveRouter(t, Config{Decode: urls(d), MaxInFlight: 1, MaxQueue: 1, QueueTimeout: notSoon})
	first, second := f.oneRunsOneWaits(t.Context(), t)
	require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.queued))
	resp, text := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 429, resp.StatusCode)
	require.Contains(t, text, "1 requests are running already, and 1 wait")
	require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.refusals.WithLabelValues(string(admission.QueueFull))))
	close(goOn)
	require.Equal(t, 200, (<-first).StatusCode)
	require.Equal(t, 200, (<-second).StatusCode)
	require.Zero(t, f.waiting())
}

// A client that leaves is taken out of the queue, and its request never reaches an instance.
func TestClientLeavesTheQueue(t *testing.T) {
	d, goOn := waitsFor(t)
	f := serveRouter(t, Config{Decode: urls(d), MaxInFlight: 1, MaxQueue: 8, QueueTimeout: notSoon})
	ctx, leave := context.WithCancel(t.Context())
	first, gone := f.oneRunsOneWaits(ctx, t)
	leave()
	<-gone
	f.awaitWaiting(t, 0)
	close(goOn)
	require.Equal(t, 200, (<-first).StatusCode)
	require.Eventually(t, func() bool { return f.outcomes(t, aborted) == 1 }, waitLimit, waitTick)
	require.Len(t, d.requests(), 1)
}

// A request that has waited for too long is told when to come back.
func TestQueueTimeout(t *testing.T) {
	d, goOn := waitsFor(t)
	f := serveRouter(t, Config{Decode: urls(d), MaxInFlight: 1, MaxQueue: 8, QueueTimeout: soon})
	first := ask(t.Context(), f.URL, "")
	require.Eventually(t, func() bool { return len(d.requests()) == 1 }, waitLimit, waitTick)
	resp, text := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 429, resp.StatusCode)
	require.Contains(t, text, "has waited for 50ms")
	require.Positive(t, seconds(t, resp))
	close(goOn)
	require.Equal(t, 200, (<-first).StatusCode)
}

// Requests that wait at a shutdown learn about it when the time is over.
func TestQueueAtShutdown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, err := newMetrics(nil)
		require.NoError(t, err)
		g := &gate{patience: time.Hour, metrics: m, slots: func() int { return 1 }, queue: admission.NewQueue(admission.Config{Slots: 1, Waiting: 1})}
		first, err := g.enter(t.Context(), "a", admission.Limits{}, 1)
		require.NoError(t, err)
		ctx, cut := context.WithCancelCause(t.Context())
		done := make(chan error)
		go func() {
			_, err := g.enter(ctx, "a", admission.Limits{}, 1)
			done <- err
		}()
		synctest.Wait()
		require.Equal(t, 1, g.queue.Waiting())
		cut(http.ErrServerClosed)
		require.ErrorIs(t, <-done, http.ErrServerClosed)
		g.leave(first, unknown)
		require.Zero(t, g.queue.Waiting()+g.queue.Running())
	})
}

// Each API key has its own limits, the tokens that an answer reports count, and an answer says which limit it was.
func TestLimitsOfKeys(t *testing.T) {
	d := serveInstance(t, func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"id":"d","choices":[{"text":"\"total_tokens\": 7"}],"usage":{"prompt_tokens":1, "total_tokens": 5000}}`)
	})
	f := serveRouter(t, Config{Decode: urls(d), OwnKeys: true, Key: anyKey, Limits: Limits{
		Each: admission.Limits{RequestsPerMinute: 1},
		Keys: map[string]admission.Limits{KeyID("rich"): {TokensPerMinute: 1000}},
	}})
	get := func(key string) *http.Response {
		resp := <-ask(t.Context(), f.URL, "Bearer "+key)
		require.NotNil(t, resp)
		return resp
	}
	require.Equal(t, 200, get("a").StatusCode)
	require.Equal(t, 429, get("a").StatusCode)
	require.Equal(t, 200, get("b").StatusCode, "another key")
	require.Equal(t, 200, get("rich").StatusCode)
	require.Eventually(t, func() bool { return f.outcomes(t, plain) == 3 }, waitLimit, waitTick)
	resp := get("rich")
	require.Equal(t, 429, resp.StatusCode)
	require.InDelta(t, 240, seconds(t, resp), 5, "4,000 tokens too many, at 1,000 a minute")
	f.router.SetLimits(Limits{})
	require.Equal(t, 200, get("a").StatusCode, "limits can change")
}

// A request that no instance has answered costs its client no tokens, so after an outage clients need not wait.
func TestUnansweredRequestsCostNothing(t *testing.T) {
	d := serveInstance(t, func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"id":"d","usage":{"total_tokens":1000}}`)
	}, reset(""), code(500), code(503))
	f := serveRouter(t, Config{Decode: urls(d), Attempts: 1, Limits: Limits{Each: admission.Limits{TokensPerMinute: 1000}}})
	for _, want := range []int{502, 500, 503, 200, 429} {
		resp, text := post(t, f.URL+"/v1/completions", `{"prompt":"x","max_tokens":900}`)
		require.Equal(t, want, resp.StatusCode, text)
		f.router.pool.probed(0, healthy)
	}
}

// Clients without limits take turns by what their answers cost and not by what they announce: one that does not say how long its
// answers may be gets no more tokens than one that does.
func TestCostsCountForTurnsWithoutLimits(t *testing.T) {
	const each = 12
	goOn := make(chan struct{})
	d := serveInstance(t, func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-goOn:
		case <-r.Context().Done():
		}
		fmt.Fprint(w, `{"id":"d","usage":{"total_tokens":8000}}`)
	})
	f := serveRouter(t, Config{Decode: urls(d), OwnKeys: true, Key: anyKey, MaxInFlight: 1, MaxQueue: 2 * each, QueueTimeout: notSoon})
	var answers sync.WaitGroup
	for key, body := range map[string]string{"silent": `{"prompt":"x"}`, "frank": `{"prompt":"x","max_tokens":8000}`} {
		for range each {
			answers.Go(func() {
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.URL+"/v1/completions", strings.NewReader(body))
				if err != nil {
					return
				}
				req.Header.Set("Authorization", "Bearer "+key)
				if resp, err := http.DefaultClient.Do(req); err == nil {
					_ = resp.Body.Close()
				}
			})
		}
	}
	f.awaitWaiting(t, 2*each-1)
	for range each {
		goOn <- struct{}{}
	}
	silent := 0
	for _, r := range d.requests()[:each] {
		if r.body["max_tokens"] == nil {
			silent++
		}
	}
	close(goOn)
	answers.Wait()
	require.InDelta(t, each/2, silent, 2)
}

func TestClientOf(t *testing.T) {
	each := admission.Limits{InFlight: 3}
	own, err := New(Config{Decode: []string{"http://x"}, OwnKeys: true, Key: anyKey, Limits: Limits{Each: each, Keys: map[string]admission.Limits{KeyID("k"): {}}}})
	require.NoError(t, err)
	open, err := New(Config{Decode: []string{"http://x"}, Limits: Limits{Each: each}})
	require.NoError(t, err)
	for _, tt := range []struct {
		r         *Router
		from, key string
		name      string
		limits    admission.Limits
	}{
		{r: own, from: "1.2.3.4:5", key: "Bearer k", name: KeyID("k")},
		{r: own, from: "1.2.3.4:5", key: "Bearer j", name: KeyID("j"), limits: each},
		{r: open, from: "1.2.3.4:5", key: "Bearer k", name: "1.2.3.4", limits: each},
		{r: open, from: "[::ffff:1.2.3.4]:5", name: "1.2.3.4", limits: each},
		{r: open, from: "[2001:db8::1:2]:5", name: "2001:db8::/64", limits: each},
		{r: open, from: "[fe80::1%eth0]:5", name: "fe80::/64", limits: each},
		{r: open, from: "nonsense", name: "", limits: each},
	} {
		req := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", http.NoBody)
		req.RemoteAddr = tt.from
		req.Header.Set("Authorization", tt.key)
		key, known := tt.r.keyOf(req)
		require.True(t, known)
		name, limits := tt.r.clientOf(req, key)
		require.Equal(t, tt.name, name)
		require.Equal(t, tt.limits, limits)
	}
}

func TestEstimate(t *testing.T) {
	for text, want := range map[string][2]int{
		`{}`:                                    {0, admission.AssumedTokens},
		`{"prompt":"twelve bytes"}`:             {3, admission.AssumedTokens},
		`{"prompt":[1, 2,3],"max_tokens":7}`:    {3, 7},
		`{"prompt":[[1,2],[3]],"max_tokens":7}`: {3, 7},
		`{"messages":[{"role":"user","content":"abcdefgh"}],"n":2}`:  {9, 2 * admission.AssumedTokens},
		`{"prompt":"abcd","max_tokens":1,"max_completion_tokens":5}`: {1, 5},
		`{"prompt":"abcd","max_tokens":-1,"n":0}`:                    {1, admission.AssumedTokens},
		`{"prompt":"abcd","max_tokens":999999999999999}`:             {1, maxEstimate},
		`{"prompt":null,"max_tokens":"x"}`:                           {1, admission.AssumedTokens},
	} {
		f, err := parse([]byte(text))
		require.NoError(t, err)
		prompt, answer := f.estimate()
		require.Equal(t, want, [2]int{prompt, answer}, text)
	}
}

// What an answer cost is in its usage, else about in its events, wherever the pieces are cut.
func TestConsumption(t *testing.T) {
	for text, want := range map[string]int{
		"":                                     unknown,
		`{"usage":{"total_tokens":12}}`:        12,
		`{"usage":{"total_tokens":16777216}}`:  maxTokens,
		`{"usage":{"total_tokens":999999999}}`: unknown, // nobody is believed
		"data: {\"a\":1}\n\ndata: {\"a\":2}\n\ndata: [DONE]\n\n":                                    103,
		"data: {\"a\":1}\n\ndata: {\"usage\":{\"total_tokens\" : 44 }}\n\ndata: [DONE]\n\n":         44,
		`{"text":"\"total_tokens\":99999"}` + strings.Repeat(" ", 2*maxLast) + `{"total_tokens":3}`: 3,
		`{"text":"\"total_tokens\":99999"}`:                                                         unknown,
	} {
		for cut := range min(len(text), 60) + 1 {
			u := consumption{prompt: 100}
			u.write([]byte(text[:cut]))
			u.write([]byte(text[cut:]))
			if want != 103 { // a cut in the middle of an event loses it
				require.Equal(t, want, u.tokens(), "%q", text)
			} else {
				require.InDelta(t, want, u.tokens(), 1)
			}
		}
	}
}

func FuzzConsumption(f *testing.F) {
	f.Add([]byte(`data: {"usage":{"total_tokens":12}}`), []byte("x"))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		u := consumption{}
		u.write(a)
		u.write(b)
		require.LessOrEqual(t, len(u.last), maxLast)
		require.LessOrEqual(t, u.tokens(), maxTokens)
		require.GreaterOrEqual(t, u.tokens(), unknown)
	})
}
