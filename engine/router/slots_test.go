package router

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/router/admission"
	"github.com/kvport/kvport/engine/router/policy"
)

// A request that waits for an instance which refused one below its limit goes on as soon as another request ends there.
func TestEndBelowTheLimitWakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, err := New(Config{Decode: []string{"http://a:1"}, InstanceInFlight: 8, QueueTimeout: notSoon})
		require.NoError(t, err)
		defer r.Close()
		first, ok := r.pool.pickDecode(map[int]bool{})
		require.True(t, ok)
		refused, ok := r.pool.pickDecode(map[int]bool{})
		require.True(t, ok)
		r.pool.rests(refused, maxRest, true)
		r.pool.done(refused)
		chosen := make(chan time.Time)
		go func() {
			c := &call{router: r, started: time.Now(), failed: map[int]bool{}, request: &policy.Request{Alone: true}}
			at, ok := c.nextChoice(t.Context(), new(json.RawMessage), true)
			if ok {
				r.pool.done(at.decode)
			}
			chosen <- time.Now()
		}()
		synctest.Wait()
		began := time.Now()
		r.pool.done(first)
		require.Zero(t, (<-chosen).Sub(began))
	})
}

// A request in the queue runs as soon as there is an instance for it; no health check is awaited.
func TestNewInstanceServesTheQueue(t *testing.T) {
	full, goOn := waitsFor(t)
	f := serveRouter(t, Config{Decode: urls(full), InstanceInFlight: 1, MaxQueue: 1, QueueTimeout: notSoon})
	first, second := f.oneRunsOneWaits(t.Context(), t)
	require.NoError(t, f.router.SetInstances([]Instance{{URL: serveInstance(t, tokens).URL, Role: "decode"}}))
	require.Equal(t, 200, (<-second).StatusCode)
	close(goOn)
	require.Equal(t, 200, (<-first).StatusCode)
}

// bothParts is an instance that prefills and decodes, each when the test says so.
type bothParts struct {
	*instanceServer
	prefills, decodes atomic.Int64 // that have come
	prefill, decode   chan struct{}
}

func serveBothParts(t *testing.T) *bothParts {
	b := &bothParts{prefill: make(chan struct{}), decode: make(chan struct{})}
	b.instanceServer = serveInstance(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		came, goOn, answer := &b.decodes, b.decode, tokens
		if strings.Contains(string(body), `"do_remote_decode":true`) {
			came, goOn, answer = &b.prefills, b.prefill, ticket("T")
		}
		came.Add(1)
		select {
		case <-goOn:
			answer(w, r)
		case <-r.Context().Done():
		}
	})
	return b
}

// Instances that do both parts have one limit for both. At a limit of 1 each serves a request by itself: no prompt of another
// takes its only slot.
func TestBothPartsAtLimitOne(t *testing.T) {
	for n := 1; n <= 2; n++ {
		var list []*bothParts
		c := Config{InstanceInFlight: 1, MaxQueue: 10, QueueTimeout: notSoon}
		for range n {
			b := serveBothParts(t)
			list, c.Prefill, c.Decode = append(list, b), append(c.Prefill, b.URL), append(c.Decode, b.URL)
		}
		f := serveRouter(t, c)
		var answers []<-chan *http.Response
		for range 3 {
			answers = append(answers, ask(t.Context(), f.URL, ""))
		}
		for _, b := range list {
			require.Eventually(t, func() bool { return b.decodes.Load() == 1 }, waitLimit, waitTick)
		}
		f.awaitWaiting(t, 3-n)
		for _, b := range list {
			close(b.decode)
		}
		for _, answer := range answers {
			require.Equal(t, 200, (<-answer).StatusCode)
		}
		for _, b := range list {
			require.Zero(t, b.prefills.Load())
		}
		f.awaitIdle(t)
	}
}

// Prompts that are computed on an instance that also decodes take room from the queue until they are done.
func TestPrefillTakesRoom(t *testing.T) {
	a, b := serveBothParts(t), serveBothParts(t)
	f := serveRouter(t, Config{Prefill: urls(a.instanceServer, b.instanceServer), Decode: urls(a.instanceServer, b.instanceServer), InstanceInFlight: 2, MaxQueue: 10, QueueTimeout: notSoon})
	answers := []<-chan *http.Response{ask(t.Context(), f.URL, "")}
	require.Eventually(t, func() bool { return a.prefills.Load()+b.prefills.Load() == 1 }, waitLimit, waitTick)
	for range 3 {
		answers = append(answers, ask(t.Context(), f.URL, ""))
	}
	decodes := func(n int64) {
		t.Helper()
		require.Eventually(t, func() bool { return a.decodes.Load()+b.decodes.Load() == n }, waitLimit, waitTick)
	}
	decodes(2)
	f.awaitWaiting(t, 1)
	close(a.prefill)
	close(b.prefill)
	decodes(4)
	close(a.decode)
	close(b.decode)
	for _, answer := range answers {
		require.Equal(t, 200, (<-answer).StatusCode)
	}
	require.EqualValues(t, 1, a.prefills.Load()+b.prefills.Load())
	f.awaitIdle(t)
}

// A cache query takes room from the queue, too, on an instance that does both parts: a request runs as soon as it has ended.
func TestEndOfQueryServesTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		both := []string{"http://a:1"}
		r, err := New(Config{Prefill: both, Decode: both, InstanceInFlight: 1, MaxQueue: 1, QueueTimeout: notSoon})
		require.NoError(t, err)
		defer r.Close()
		over := r.pool.asks(0, r.pool.urls[0], cacheQuery)
		entered := make(chan time.Time)
		go func() {
			if _, err := r.gate.enter(t.Context(), "a", admission.Limits{}, 1); err != nil {
				t.Error(err)
			}
			entered <- time.Now()
		}()
		synctest.Wait()
		_, waiting := r.gate.counts()
		require.Equal(t, 1, waiting)
		began := time.Now()
		over()
		require.Zero(t, (<-entered).Sub(began))
	})
}

// awaitIdle waits until no request runs, and sees that nothing counts any.
func (f *front) awaitIdle(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool { running, _ := f.router.gate.counts(); return running == 0 }, waitLimit, waitTick)
	idle(t, f.router)
	for _, in := range routerHealth(t, f, "").Instances {
		require.Zero(t, in.InFlight)
	}
}

// unlimited is as after a health check of each instance that says no limit.
func (p *pool) unlimited() {
	for i := range p.known {
		if p.known[i].load != nil {
			p.report(context.Background(), i, checked{result: healthy})
		}
	}
	p.changed()
}

// An instance whose /health has not been read yet gets a few requests, and then as many as it says.
func TestUnprobedInstanceGetsFew(t *testing.T) {
	d, goOn := waitsFor(t)
	f := serveRouter(t, Config{Decode: urls(d), MaxQueue: 10, QueueTimeout: notSoon})
	var answers []<-chan *http.Response
	for range untilSaid + 2 {
		answers = append(answers, ask(t.Context(), f.URL, ""))
	}
	f.awaitWaiting(t, 2)
	require.Eventually(t, func() bool { return len(d.requests()) == untilSaid }, waitLimit, waitTick)
	f.router.pool.unlimited()
	require.Eventually(t, func() bool { return len(d.requests()) == untilSaid+2 }, waitLimit, waitTick)
	close(goOn)
	for _, answer := range answers {
		require.Equal(t, 200, (<-answer).StatusCode)
	}
}

// inTurn is a transport whose answers come in turn, and then a stream for each request.
func inTurn(answers ...*http.Response) http.RoundTripper {
	return roundTrip(func(*http.Request) (*http.Response, error) {
		if len(answers) == 0 {
			return saidStatus(200, ""), nil
		}
		answer := answers[0]
		answers = answers[1:]
		return answer, nil
	})
}

// saidStatus is an instance's answer; after is its Retry-After.
func saidStatus(status int, after string) *http.Response {
	h := http.Header{"Content-Type": {"text/event-stream"}}
	if after != "" {
		h.Set("Retry-After", after)
	}
	return &http.Response{StatusCode: status, Header: h, Body: io.NopCloser(strings.NewReader("data: {}\n\ndata: [DONE]\n\n"))}
}

// serveOnce lets a router serve a request in the time of synctest, and says how long that took.
func serveOnce(t *testing.T, r *Router) (status int, took time.Duration) {
	t.Helper()
	w, began := httptest.NewRecorder(), time.Now()
	r.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/completions", strings.NewReader(doc)))
	return w.Code, time.Since(began)
}

// An instance that says when to come back has not failed: neither attempts nor retries are used up, only time.
func TestBusyIsNoAttempt(t *testing.T) {
	for _, status := range []int{429, 503} {
		synctest.Test(t, func(t *testing.T) {
			var busy []*http.Response
			for range 8 {
				busy = append(busy, saidStatus(status, "1"))
			}
			r, err := New(Config{Decode: []string{"http://a:1"}, Attempts: 1, RetryShare: 1e-9, Transport: inTurn(busy...)})
			require.NoError(t, err)
			defer r.Close()
			for r.retries[decode].allow() { // until the budget is spent
			}
			got, took := serveOnce(t, r)
			require.Equal(t, 200, got)
			require.Greater(t, took, 8*time.Second)
			require.Less(t, took, 9*time.Second)
			h := r.pool.health().instances[0]
			require.Equal(t, "up", h.State)
			require.Empty(t, h.Breaker)
		})
	}
}

// Time bounds how often a request comes back, also where each instance asks for no more than a moment.
func TestBusyForTooLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		r, err := New(Config{Decode: []string{"http://a:1", "http://b:1"}, QueueTimeout: 5 * time.Second, Transport: roundTrip(func(*http.Request) (*http.Response, error) {
			asked++
			return saidStatus(429, "1"), nil
		})})
		require.NoError(t, err)
		defer r.Close()
		got, took := serveOnce(t, r)
		require.Equal(t, 429, got)
		require.Less(t, took, 6*time.Second)
		require.GreaterOrEqual(t, took, 4*time.Second)
		require.LessOrEqual(t, asked, 12)
	})
}

// A 429 right after a request has ended says only that the instance has not counted that end yet.
func TestComeBackAtOnce(t *testing.T) {
	for _, most := range []int{0, 2} { // 0: the instance has no limit that is known
		synctest.Test(t, func(t *testing.T) {
			r, err := New(Config{Decode: []string{"http://a:1"}, InstanceInFlight: most, Transport: inTurn(saidStatus(200, ""), saidStatus(429, "1"))})
			require.NoError(t, err)
			defer r.Close()
			if most == 0 {
				r.pool.unlimited()
			}
			got, _ := serveOnce(t, r)
			require.Equal(t, 200, got)
			got, took := serveOnce(t, r)
			require.Equal(t, 200, got)
			require.Less(t, took, 4*settle)

			<-time.After(time.Minute) // of synctest
			r.client.Transport = inTurn(saidStatus(429, "1"))
			got, took = serveOnce(t, r)
			require.Equal(t, 200, got)
			require.GreaterOrEqual(t, took, time.Second, "nothing has ended there for long")
		})
	}
}

// An instance counts a request until it has ended the body of its answer, which may be after the client has left with [DONE].
func TestSlotIsHeldUntilTheEnd(t *testing.T) {
	end := make(chan struct{})
	d := serveInstance(t, func(w http.ResponseWriter, r *http.Request) {
		tokens(w, r)
		_ = http.NewResponseController(w).Flush()
		<-end
	})
	f := serveRouter(t, Config{Decode: urls(d), InstanceInFlight: 1, MaxQueue: 1, QueueTimeout: notSoon})
	f.router.ending = notSoon
	contexts := make(chan context.Context, 1)
	before := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		contexts <- r.Context()
		f.router.ServeHTTP(w, r)
	}))
	defer before.Close()
	resp, err := http.Post(before.URL+"/v1/completions", "application/json", strings.NewReader(doc))
	require.NoError(t, err)
	letEnd := sync.OnceFunc(func() { close(end) })
	t.Cleanup(letEnd) // before router and instance close, which wait for their requests
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() && lines.Text() != "data: [DONE]" {
	}
	require.Equal(t, "data: [DONE]", lines.Text())
	require.NoError(t, resp.Body.Close())
	<-(<-contexts).Done() // the client has left
	next := ask(t.Context(), f.URL, "")
	f.awaitWaiting(t, 1)
	require.Len(t, d.requests(), 1)
	require.Equal(t, 1, routerHealth(t, f, "").Instances[0].InFlight)
	letEnd()
	require.Equal(t, 200, (<-next).StatusCode)
	f.awaitIdle(t)
	require.Eventually(t, func() bool { return f.outcomes(t, plain) == 2 }, notSoon, time.Millisecond) // it is counted after the slot is free
}

// An instance that does not end the body after [DONE] holds its slot for no longer than a moment, whatever it goes on to send, and
// the answer is whole.
func TestEndlessBodyFreesTheSlot(t *testing.T) {
	for name, after := range map[string]string{"silent": "", "comments": ": still here\n\n"} {
		t.Run(name, func(t *testing.T) {
			left, stop := make(chan struct{}), make(chan struct{})
			d := serveInstance(t, tokens, func(w http.ResponseWriter, r *http.Request) {
				tokens(w, r)
				for {
					_, _ = io.WriteString(w, after)
					_ = http.NewResponseController(w).Flush()
					select {
					case <-r.Context().Done():
						close(left)
						return
					case <-stop:
						return
					case <-time.After(waitTick):
					}
				}
			})
			f := serveRouter(t, Config{Decode: urls(d), InstanceInFlight: 1, MaxQueue: 1, QueueTimeout: notSoon, IdleTimeout: notSoon})
			t.Cleanup(func() { close(stop) }) // before router and instance close, which wait for their requests
			f.router.ending = soon
			ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
			defer cancel()
			for range 2 {
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.URL+"/v1/completions", strings.NewReader(doc))
				require.NoError(t, err)
				resp, err := http.DefaultClient.Do(req)
				require.NoError(t, err)
				text, err := io.ReadAll(resp.Body)
				require.NoError(t, err)
				require.NoError(t, resp.Body.Close())
				require.Contains(t, string(text), "[DONE]")
			}
			<-left // its connection is closed
			f.awaitIdle(t)
			require.Equal(t, 2.0, f.outcomes(t, plain))
			require.Empty(t, routerHealth(t, f, "").Instances[0].Breaker)
			require.Equal(t, "up", routerHealth(t, f, "").Instances[0].State)
		})
	}
}

// The router's /health says how many requests run on each instance.
func TestHealthCountsRequests(t *testing.T) {
	d, goOn := waitsFor(t)
	f := serveRouter(t, Config{Decode: urls(d), InstanceInFlight: 5})
	answers := []<-chan *http.Response{ask(t.Context(), f.URL, ""), ask(t.Context(), f.URL, "")}
	require.Eventually(t, func() bool { return routerHealth(t, f, "").Instances[0].InFlight == 2 }, waitLimit, waitTick)
	require.Equal(t, 5, routerHealth(t, f, "").Instances[0].Limit)
	close(goOn)
	for _, answer := range answers {
		require.Equal(t, 200, (<-answer).StatusCode)
	}
	require.Eventually(t, func() bool { return routerHealth(t, f, "").Instances[0].InFlight == 0 }, waitLimit, waitTick)
}

// An instance closes a connection that was idle just when the next request is sent there: it gets the request on another one.
func TestClosedConnection(t *testing.T) {
	d := serveInstance(t, tokens, tokens, reset(""))
	f := serveRouter(t, Config{Decode: urls(d), Transport: &http.Transport{MaxConnsPerHost: 1}}) // so the second goes to the first one's
	for range 2 {
		resp := <-ask(t.Context(), f.URL, "")
		require.NotNil(t, resp)
		require.Equal(t, http.StatusOK, resp.StatusCode)
		f.awaitIdle(t)
	}
	require.Len(t, d.requests(), 3)
}
