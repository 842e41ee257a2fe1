package router

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/router/admission"
	"github.com/kvport/kvport/engine/router/policy"
)

// limited is an instance that says how many requests it serves at once, and refuses those beyond.
type limited struct {
	*instanceServer
	running, refused, probes atomic.Int64
	goOn                     chan struct{} // what is sent lets one request end
}

func serveLimited(t *testing.T, most int64) *limited {
	l := &limited{goOn: make(chan struct{})}
	l.instanceServer = serveInstance(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/health":
			l.probes.Add(1)
			fmt.Fprintf(w, `{"status":"ok","max_in_flight":%d}`, most)
			return
		case "/v1/models":
			whole200(w, r)
			return
		}
		defer l.running.Add(-1)
		if l.running.Add(1) > most {
			l.refused.Add(1)
			w.Header().Set("Retry-After", "1")
			code(429)(w, r)
			return
		}
		select {
		case <-l.goOn:
			tokens(w, r)
		case <-r.Context().Done():
		}
	})
	return l
}

// routeLimited is a router that knows how many requests the instances serve at once.
func routeLimited(t *testing.T, c Config, list ...*limited) *front {
	for _, l := range list {
		c.Decode = append(c.Decode, l.URL)
	}
	c.MaxInFlight, c.MaxQueue, c.HealthInterval = 100, 100, 5*time.Millisecond
	f := serveRouter(t, c)
	running(t, f.router)
	for _, l := range list { // the second health check is made when the first is known
		require.Eventually(t, func() bool { return l.probes.Load() > 1 }, waitLimit, waitTick)
	}
	return f
}

// Instances get as many requests as they say that they serve. Those beyond wait in the queue, and none is refused.
func TestFullInstancesAreLeftOut(t *testing.T) {
	one, three := serveLimited(t, 1), serveLimited(t, 3)
	f := routeLimited(t, Config{QueueTimeout: notSoon}, one, three)
	var answers []<-chan *http.Response
	for range 10 {
		answers = append(answers, ask(t.Context(), f.URL, ""))
	}
	f.awaitWaiting(t, 6)
	require.Eventually(t, func() bool { return one.running.Load() == 1 && three.running.Load() == 3 }, waitLimit, waitTick)
	close(one.goOn)
	close(three.goOn)
	for _, answer := range answers {
		resp := <-answer
		require.NotNil(t, resp)
		require.Equal(t, 200, resp.StatusCode)
	}
	require.Zero(t, one.refused.Load()+three.refused.Load())
	require.Equal(t, 3, routerHealth(t, f, "").Instances[1].Limit)
}

// An instance that says nothing gets as many requests as the flag says, and one that says less gets less. What costs it
// nothing it gets in any case.
func TestLimitOfEachInstance(t *testing.T) {
	d, goOn := waitsFor(t)
	f := serveRouter(t, Config{Decode: urls(d), InstanceInFlight: 2, MaxQueue: 1, QueueTimeout: notSoon})
	var answers []<-chan *http.Response
	for range 3 {
		answers = append(answers, ask(t.Context(), f.URL, ""))
	}
	f.awaitWaiting(t, 1)
	resp, text := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 429, resp.StatusCode)
	require.Contains(t, text, "2 requests are running already, and 1 wait")
	close(goOn)
	for _, answer := range answers {
		require.Equal(t, 200, (<-answer).StatusCode)
	}
	require.Len(t, d.requests(), 3)

	l := serveLimited(t, 1)
	f = routeLimited(t, Config{InstanceInFlight: 5, QueueTimeout: notSoon}, l)
	first, second := f.oneRunsOneWaits(t.Context(), t)
	resp, err := http.Get(f.URL + "/v1/models")
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 200, resp.StatusCode)
	close(l.goOn)
	require.Equal(t, 200, (<-first).StatusCode)
	require.Equal(t, 200, (<-second).StatusCode)
}

// What the engine itself counts as running there counts, and nothing else does: see kind.
func TestWhatCounts(t *testing.T) {
	entered, goOn, failed := make(chan string), make(chan struct{}), make(chan struct{})
	s := serveInstance(t, func(w http.ResponseWriter, r *http.Request) {
		select {
		case entered <- r.URL.Path:
			<-goOn
		case <-failed:
		}
		whole200(w, r)
	})
	f := serveRouter(t, Config{Decode: urls(s), InstanceInFlight: 1, QueryTimeout: time.Minute})
	t.Cleanup(func() { // before router and instance close, which wait for their requests
		close(failed)
		close(goOn)
	})
	p := f.router.pool
	p.blocks.tokens.limit = time.Minute
	counted := func() (n int, policy int) {
		p.mu.Lock()
		defer p.mu.Unlock()
		policy, _ = p.policy.Busy(0)
		return p.known[0].load.running(), policy
	}
	query := asking(t, f.router, question9, "k")
	helper := func() *url.URL { return p.blocks.helper(map[string]*feed{placeOf(p.urls[0]): {}}).url }
	for _, tt := range []struct {
		path            string
		running, policy int
		do              func()
	}{
		{"/v1/completions", 1, 1, func() { <-ask(context.Background(), f.URL, "") }},
		{"/v1/models", 0, 0, func() {
			if resp, err := http.Get(f.URL + "/v1/models"); err == nil {
				_ = resp.Body.Close()
			}
		}},
		{"/v1/completions", 1, 0, func() { query.askFirst(context.Background()) }},
		{"/tokenize", 1, 0, func() {
			c := &call{router: f.router, header: http.Header{}, body: fields{"prompt": []byte(`"a text"`)}}
			p.blocks.tokens.of(context.Background(), c, target{url: p.urls[0]})
		}},
	} {
		over := make(chan struct{})
		go func() {
			defer close(over)
			tt.do()
		}()
		await := func(want string) { // a request at the instance, or "" for the end
			t.Helper()
			path := ""
			select {
			case path = <-entered:
			case <-over:
			}
			require.Equal(t, want, path)
		}
		await(tt.path)
		running, policy := counted()
		require.Equal(t, []int{tt.running, tt.policy}, []int{running, policy}, tt.path)
		require.Equal(t, tt.running == 1, helper() == nil, "a full instance is not asked")
		goOn <- struct{}{}
		await("")
		require.Eventually(t, func() bool {
			running, policy := counted()
			return running+policy == 0 && helper() != nil
		}, waitLimit, waitTick)
	}
}

// TestFullPrefill: a request that goes without a prefill instance since all are full is told and counted as that.
func TestFullPrefill(t *testing.T) {
	entered, goOn := make(chan struct{}), make(chan struct{})
	p := serveInstance(t, func(w http.ResponseWriter, r *http.Request) {
		close(entered)
		<-goOn
		ticket("T")(w, r)
	})
	d := serveInstance(t, tokens)
	f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d)})
	release := sync.OnceFunc(func() { close(goOn) })
	t.Cleanup(release)
	f.router.pool.known[0].load.said = 1
	first := ask(t.Context(), f.URL, "")
	<-entered
	require.Contains(t, complete(t, f, completion("hi"), routeHeader, "1").Get(routeHeader), "without=full")
	require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.handoffs.WithLabelValues("none", "full")))
	require.Zero(t, testutil.ToFloat64(f.router.metrics.handoffs.WithLabelValues("none", "no_prefill")))
	release()
	require.Equal(t, 200, (<-first).StatusCode)
}

// A request that has failed elsewhere waits for an instance that is full.
func TestRetryWaitsForFullInstance(t *testing.T) {
	bad := serveInstance(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/health" {
			code(500)(w, r)
		}
	})
	l := serveLimited(t, 1)
	f := routeLimited(t, Config{QueueTimeout: notSoon}, l)
	require.NoError(t, f.router.SetInstances([]Instance{{URL: bad.URL, Role: "decode"}}))
	first := ask(t.Context(), f.URL, "")
	require.Eventually(t, func() bool { return l.running.Load() == 1 }, waitLimit, waitTick)
	second := ask(t.Context(), f.URL, "")
	require.Eventually(t, func() bool { return f.router.pool.tried(bad.URL) }, waitLimit, waitTick)
	l.goOn <- struct{}{}
	require.Equal(t, 200, (<-first).StatusCode)
	l.goOn <- struct{}{}
	require.Equal(t, 200, (<-second).StatusCode)
	require.Zero(t, l.refused.Load())
}

// tried reports whether a request has failed on an instance.
func (p *pool) tried(url string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, u := range p.urls {
		if u != nil && u.String() == url {
			return p.known[i].breaker.failures > 0
		}
	}
	return false
}

// A request that has waited for full instances as long as it may is told so.
func TestFullForTooLong(t *testing.T) {
	l := serveLimited(t, 1)
	f := routeLimited(t, Config{QueueTimeout: time.Second}, l)
	d := serveInstance(t, tokens)
	require.NoError(t, f.router.SetInstances([]Instance{{URL: d.URL, Role: "decode"}}))
	first := ask(t.Context(), f.URL, "")
	require.Eventually(t, func() bool { return l.running.Load() == 1 }, waitLimit, waitTick)
	f.router.pool.rests(target{index: 1}, maxRest, false)
	resp, text := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 429, resp.StatusCode)
	require.Contains(t, text, "the request has waited for 1s, and other requests still run")
	require.Equal(t, "1", resp.Header.Get("Retry-After"))
	require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.refusals.WithLabelValues(string(admission.QueueTimeout))))
	close(l.goOn)
	require.Equal(t, 200, (<-first).StatusCode)
}

// An instance that answers 429 while it serves others gets the next request when one of these has ended, and a second later
// at the latest. One that answers 503 is left alone for as long as it asks.
func TestBusyInstanceServesOthers(t *testing.T) {
	for _, busy := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			p := newTestPool(t)
			defer p.close()
			require.NoError(t, p.set(byFlag, []spec{{role: decode, url: at(t, "http://a")}}))
			pick := func() target {
				d, ok := p.pickDecode(map[int]bool{})
				require.True(t, ok)
				return d
			}
			free := func() bool {
				d, ok := p.pickDecode(map[int]bool{})
				if ok {
					p.done(d)
				}
				return ok
			}
			refuse := func() {
				d := pick()
				p.rests(d, maxRest, busy)
				p.done(d)
			}
			first := pick()
			refuse()
			require.False(t, free())
			p.done(first)
			require.Equal(t, busy, free())
			<-time.After(maxRest) // of synctest
			require.True(t, free())

			refuse()
			require.False(t, free(), "nothing else runs there")
			<-time.After(maxBusy)
			require.Equal(t, busy, free())
		})
	}
}

// As many requests run as the instances take together that may be chosen, and those go on that run on others.
func TestRoom(t *testing.T) {
	p := newTestPool(t)
	defer p.close()
	says := func(i, limit int) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.saysLimit(i, limit)
	}
	require.Equal(t, 100, p.room(100), "there is none")
	require.NoError(t, p.set(byFlag, []spec{
		{role: decode, url: at(t, "http://a")}, {role: decode, url: at(t, "http://b")}, {role: prefill, url: at(t, "http://a")}, {role: prefill, url: at(t, "http://c")},
	}))
	require.Equal(t, 2*untilSaid, p.room(100), "none of them has been asked")
	says(0, 0)
	require.Equal(t, 100, p.room(100), "one says nothing")
	says(0, 3)
	says(1, math.MaxInt)
	require.Equal(t, 100, p.room(100))
	says(1, 5)
	require.Equal(t, 8, p.room(100))
	require.Equal(t, 4, p.room(4))
	var picked []target
	for range 8 {
		d, ok := p.pickDecode(map[int]bool{})
		require.True(t, ok)
		picked = append(picked, d)
	}
	_, ok := p.pickDecode(map[int]bool{})
	require.False(t, ok)
	require.True(t, p.full(decode, nil))
	require.True(t, p.full(prefill, nil), "one instance does both parts")
	require.False(t, p.full(prefill, map[int]bool{2: true}), "the other one says nothing")
	p.probed(1, leaving)
	require.Equal(t, 3+5, p.room(100), "its requests go on")
	w := p.line(&policy.Request{}, map[int]bool{})
	for _, d := range picked {
		p.done(d)
	}
	<-w.woken
	require.Equal(t, 3, p.room(100))
	p.probed(0, refused)
	require.Equal(t, 100, p.room(100))
}
