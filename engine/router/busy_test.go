package router

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/router/policy"
)

// from sends a request of a client with a key of its own, on a goroutine.
func from(t *testing.T, r *Router, key string, tasks *sync.WaitGroup, then func(status int)) {
	tasks.Go(func() {
		w := httptest.NewRecorder()
		req := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/completions", strings.NewReader(doc))
		req.Header.Set("Authorization", key)
		r.ServeHTTP(w, req)
		then(w.Code)
	})
}

// However many requests wait for an instance that has asked to be left alone, one of them tries it when that time is over. The
// others come when it has let that one in.
func TestBusyInstanceIsTriedByOne(t *testing.T) {
	for _, status := range []int{429, 503} {
		synctest.Test(t, func(t *testing.T) {
			const requests, times = 100, 3
			var refused, served atomic.Int64
			opens := time.Now().Add(times*time.Second - time.Second/2)
			r, err := New(Config{Decode: []string{"http://a:1"}, Transport: roundTrip(func(*http.Request) (*http.Response, error) {
				<-time.After(time.Millisecond) // of synctest
				if time.Now().Before(opens) {
					refused.Add(1)
					return saidStatus(status, "1"), nil
				}
				return saidStatus(200, ""), nil
			})})
			require.NoError(t, err)
			defer r.Close()
			r.pool.unlimited()
			began := time.Now()
			var tasks sync.WaitGroup
			for range requests {
				from(t, r, "", &tasks, func(status int) {
					if status == 200 {
						served.Add(1)
					}
				})
			}
			tasks.Wait()
			require.EqualValues(t, requests, served.Load())
			require.LessOrEqual(t, refused.Load(), int64(requests+times), "each at first, and then one each second")
			require.Less(t, time.Since(began), (times+1)*time.Second)
		})
	}
}

// A trial of which nothing is known after a second keeps no others away, and one that has ended without a word does not either.
func TestTrialWithoutAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newTestPool(t)
		defer p.close()
		require.NoError(t, p.set(byFlag, []spec{{role: decode, url: at(t, "http://a")}}))
		pick := func() (target, bool) { return p.pickDecode(map[int]bool{}) }
		refused, ok := pick()
		require.True(t, ok)
		p.rests(refused, time.Minute, false)
		p.done(refused)
		_, ok = pick()
		require.False(t, ok)
		<-time.After(time.Minute) // of synctest
		trial, ok := pick()
		require.True(t, ok)
		_, ok = pick()
		require.False(t, ok)
		p.done(trial) // its connection broke
		_, ok = pick()
		require.True(t, ok)
		<-time.After(maxBusy)
		another, ok := pick() // the prompt of the first is still being computed elsewhere
		require.True(t, ok)
		_, ok = pick()
		require.False(t, ok)
		p.sent(another)
		<-time.After(maxBusy)
		for range 3 {
			_, ok = pick()
			require.True(t, ok)
		}
	})
}

// A 429 keeps away the client whose request got it. Those of others go on as long as the instance lets them in.
func TestBusyForOneClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := map[string]int{}
		var mu sync.Mutex
		r, err := New(Config{Decode: []string{"http://a:1"}, QueueTimeout: 5 * time.Second, Transport: roundTrip(func(req *http.Request) (*http.Response, error) {
			mu.Lock()
			defer mu.Unlock()
			key := req.Header.Get("Authorization")
			if asked[key]++; strings.HasPrefix(key, "limited") {
				return saidStatus(429, "1"), nil
			}
			return saidStatus(200, ""), nil
		})})
		require.NoError(t, err)
		defer r.Close()
		r.pool.unlimited()
		began, counts := time.Now(), map[int]int{}
		var limited, others sync.WaitGroup
		count := func(status int) {
			mu.Lock()
			defer mu.Unlock()
			counts[status]++
		}
		for range 10 {
			from(t, r, "limited 1", &limited, count)
			synctest.Wait()
			from(t, r, "other", &others, count)
			synctest.Wait()
		}
		others.Wait()
		require.Zero(t, time.Since(began))
		from(t, r, "limited 2", &limited, count)
		synctest.Wait()
		from(t, r, "another", &others, count)
		others.Wait()
		require.Zero(t, time.Since(began))
		limited.Wait()
		require.Equal(t, map[int]int{200: 11, 429: 11}, counts)
		require.LessOrEqual(t, asked["limited 1"], 1+10, "one each second, and what had been waiting")
	})
}

// Two clients that are refused in a row say that the instance is busy for all: one request of one of them tries it. A client that
// was not refused before does so first, and what it finds counts for all.
func TestBusyForAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newTestPool(t)
		defer p.close()
		require.NoError(t, p.set(byFlag, []spec{{role: decode, url: at(t, "http://a")}}))
		p.unlimited()
		pick := func(client uint64) (target, bool) {
			at, ok := p.choose(&policy.Request{Alone: true, Client: client}, map[int]bool{}, policy.None)
			return at.decode, ok
		}
		may := func(client uint64) bool {
			d, ok := pick(client)
			if ok {
				p.done(d)
			}
			return ok
		}
		refuse := func(client uint64) {
			d, ok := pick(client)
			require.True(t, ok)
			p.rests(d, time.Second, true)
			p.done(d)
		}
		refuse(1)
		require.False(t, may(1))
		refuse(2)
		require.False(t, may(3))
		<-time.After(time.Second) // of synctest
		require.False(t, may(2), "others come first")
		trial, ok := pick(3)
		require.True(t, ok)
		require.False(t, may(4), "one at a time")
		p.admitted(trial)
		require.True(t, may(4))
		<-time.After(settle)
		require.True(t, may(2))

		refuse(5) // right after an end, so that the rest is short
		refuse(2)
		w := p.line(&policy.Request{Client: 2}, map[int]bool{})
		<-time.After(10 * settle)
		require.Len(t, w.woken, 1, "it is woken when its own rest is over")
	})
}

// A 429 that comes when the request has waited for long is no reason to leave an idle instance out, which is asked once.
func TestLateRefusal(t *testing.T) {
	for _, idle := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			asked := 0
			r, err := New(Config{Decode: []string{"http://a:1", "http://b:1"}, QueueTimeout: 5 * time.Second, Transport: roundTrip(func(*http.Request) (*http.Response, error) {
				if asked++; asked > 1 && idle {
					return saidStatus(200, ""), nil
				}
				<-time.After(10 * time.Second) // of synctest
				return saidStatus(429, "1"), nil
			})})
			require.NoError(t, err)
			defer r.Close()
			got, took := serveOnce(t, r)
			require.Equal(t, map[bool]int{true: 200, false: 429}[idle], got)
			require.Equal(t, 2, asked)
			require.Equal(t, map[bool]time.Duration{true: 10 * time.Second, false: 20 * time.Second}[idle], took)
		})
	}
}

// countedWaits counts how often somebody waits for the end of a context: nextChoice does so once after each choice that found
// nothing.
type countedWaits struct {
	context.Context
	n *atomic.Int64
}

func (c countedWaits) Done() <-chan struct{} {
	c.n.Add(1)
	return c.Context.Done()
}

// Each end lets one request choose, in the order in which they came, and none of the others. Whichever leaves, no end is lost.
func TestEndWakesOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const requests = 50
		r, err := New(Config{Decode: []string{"http://a:1"}, InstanceInFlight: 1, QueueTimeout: notSoon})
		require.NoError(t, err)
		defer r.Close()
		d, ok := r.pool.pickDecode(map[int]bool{})
		require.True(t, ok)
		var waits atomic.Int64
		ctx, cancel := context.WithCancel(t.Context())
		got, order := make(chan target, requests), make([]int, 0, requests)
		for n := range requests {
			of := t.Context()
			if n%5 == 4 {
				of = ctx
			}
			go func() {
				c := &call{router: r, started: time.Now(), failed: map[int]bool{}, request: &policy.Request{Alone: true}}
				if at, ok := c.nextChoice(countedWaits{of, &waits}, new(json.RawMessage), true); ok {
					order = append(order, n) // one at a time has the place
					got <- at.decode
				}
			}()
			synctest.Wait()
		}
		require.EqualValues(t, requests, waits.Load())
		r.pool.done(d)
		cancel() // some leave at the same moment
		for range requests - requests/5 - 1 {
			r.pool.done(<-got)
			synctest.Wait()
		}
		r.pool.done(<-got)
		require.IsIncreasing(t, order)
		require.LessOrEqual(t, waits.Load(), int64(requests+requests/5+1), "those that wait are not woken for nothing")
		require.Empty(t, r.pool.waiting)
	})
}

// What one request that waits cannot use another may: the end at an instance that the first has tried wakes the second.
func TestEndWakesWhomItServes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, err := New(Config{Decode: []string{"http://a:1", "http://b:1"}, InstanceInFlight: 1, QueueTimeout: notSoon})
		require.NoError(t, err)
		defer r.Close()
		var running []target
		for range 2 {
			d, ok := r.pool.pickDecode(map[int]bool{})
			require.True(t, ok)
			running = append(running, d)
		}
		first := r.pool.line(&policy.Request{}, map[int]bool{running[0].index: true})
		second := r.pool.line(&policy.Request{}, map[int]bool{})
		third := r.pool.line(&policy.Request{}, map[int]bool{})
		r.pool.done(running[0])
		require.Equal(t, []int{0, 1, 0}, []int{len(first.woken), len(second.woken), len(third.woken)})
		r.pool.leaveLine(second) // its client has left
		require.Equal(t, []int{0, 1}, []int{len(first.woken), len(third.woken)})
		r.pool.done(running[1])
		require.Len(t, first.woken, 1)
	})
}
