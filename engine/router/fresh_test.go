package router

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/internal/register"
	"github.com/kvport/kvport/verify/testkit"
)

// registrar serves a router's registrar and notes what it gets.
type registrar struct {
	*httptest.Server
	mu   sync.Mutex
	got  []*http.Request
	body []string
}

func serveRegistrar(t *testing.T, r *Router) *registrar {
	t.Helper()
	s := &registrar{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		s.mu.Lock()
		s.got, s.body = append(s.got, req), append(s.body, string(body))
		s.mu.Unlock()
		again := httptest.NewRequestWithContext(req.Context(), http.MethodPost, "/register", bytes.NewReader(body))
		again.Header = req.Header.Clone()
		r.Registrar().ServeHTTP(w, again)
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *registrar) client(t *testing.T) *register.Client {
	t.Helper()
	c := &register.Client{URL: s.URL, Sign: func(body string) string { return "key" + body }, Every: 10 * time.Second, Log: slog.New(slog.DiscardHandler)}
	t.Cleanup(c.Close)
	return c
}

// Engines of any connector register, with no address for blocks and no clock; a copy of what they said is worth nothing,
// neither while they are there nor after they have left, nor to another router.
func TestRegistrationsAreGoodOnce(t *testing.T) {
	r, err := New(Config{Register: signer(time.Minute)})
	require.NoError(t, err)
	s := serveRegistrar(t, r)
	c := s.client(t)
	as := []register.Message{{Type: "P", HTTP: "10.0.0.1:80", Engine: "e"}, {Type: "D", HTTP: "10.0.0.1:80", Engine: "e"}}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.Run(ctx, as)
	}()
	instances := func() int { return len(r.pool.health().instances) }
	require.Eventually(t, func() bool { good, _ := c.Counts(); return good == 2 }, waitLimit, waitTick) // the client has both answers
	require.Equal(t, 2, instances())
	stop()
	<-done
	replay := func(to *Router) (codes []int) {
		s.mu.Lock()
		defer s.mu.Unlock()
		for i, body := range s.body {
			w := httptest.NewRecorder()
			req := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/register", strings.NewReader(body))
			req.Header = s.got[i].Header
			to.Registrar().ServeHTTP(w, req)
			codes = append(codes, w.Code)
		}
		return codes
	}
	for _, code := range replay(r) {
		require.Equal(t, http.StatusConflict, code)
	}
	require.NoError(t, c.Leave(t.Context(), as))
	require.Zero(t, instances())
	other, err := New(Config{Register: signer(time.Minute)})
	require.NoError(t, err)
	for _, code := range append(replay(r), replay(other)...) {
		require.Equal(t, http.StatusConflict, code)
	}
	require.Zero(t, instances())
	require.Empty(t, other.pool.health().instances)
	require.NoError(t, c.Leave(t.Context(), as), "twice does no harm")
	good, failed := c.Counts()
	require.EqualValues(t, 6, good)
	require.Zero(t, failed)
}

// An engine that comes back at another address with its id takes its old place away at once; a restarted router and
// an engine that starts again find each other without waiting.
func TestEngineMoves(t *testing.T) {
	r, err := New(Config{Register: signer(time.Minute)})
	require.NoError(t, err)
	s := serveRegistrar(t, r)
	at := func(c *register.Client, port int, engine string) []string {
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		before, _ := c.Counts()
		go func() {
			defer close(done)
			c.Run(ctx, []register.Message{{Type: "D", HTTP: fmt.Sprintf("10.0.0.1:%d", port), Engine: engine}})
		}()
		require.Eventually(t, func() bool { good, _ := c.Counts(); return good > before }, waitLimit, waitTick)
		stop()
		<-done
		var list []string
		for _, in := range r.pool.health().instances {
			list = append(list, in.URL)
		}
		return list
	}
	first := s.client(t)
	require.Equal(t, []string{"http://10.0.0.1:1"}, at(first, 1, "e"))
	require.Equal(t, []string{"http://10.0.0.1:1", "http://10.0.0.1:2"}, at(s.client(t), 2, "f"))
	require.Equal(t, []string{"http://10.0.0.1:2", "http://10.0.0.1:3"}, at(s.client(t), 3, "e"))
	require.Len(t, at(s.client(t), 3, "e"), 2, "started again at the same place")
	r.pool.fresh = newFreshness(time.Now()) // as of another life of the router
	require.Len(t, at(first, 3, "e"), 2)
}

// Two engines that were given one id both stay, as long as both go on registering, and the log names them once. An engine that comes
// back to an address which it has left long ago has moved again.
func TestEnginesWithOneID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log testkit.Log
		r, err := New(Config{Register: signer(15 * time.Second), Log: logTo(&log)})
		require.NoError(t, err)
		at := func(part role, ports ...int) (list []string) {
			for _, port := range ports {
				<-time.After(time.Second) // of synctest
				m := &register.Message{HTTP: fmt.Sprint("10.0.0.1:", port), Engine: "e"}
				if m.Nonce, _, err = r.pool.register(part, &register.Message{HTTP: m.HTTP, Nonce: register.NoNonce}, "key"); err != nil {
					require.ErrorIs(t, err, errNonce)
				}
				_, _, err = r.pool.register(part, m, "key")
				require.NoError(t, err)
			}
			r.pool.expire(15 * time.Second)
			for _, in := range r.pool.health().instances {
				list = append(list, strings.TrimPrefix(in.URL, "http://10.0.0.1:"))
			}
			return list
		}
		require.Equal(t, []string{"2"}, at(decode, 1, 2), "it has moved")
		require.Equal(t, []string{"1", "2"}, slices.Sorted(slices.Values(at(decode, 1))))
		for range 9 {
			require.Equal(t, []string{"1", "2"}, slices.Sorted(slices.Values(at(decode, 1, 2))))
		}
		require.Equal(t, 1, strings.Count(log.String(), "two engines register with the same engine_id"))
		require.Equal(t, 1, strings.Count(log.String(), "result=moved"))
		<-time.After(15 * time.Second) // of synctest
		require.Equal(t, []string{"2"}, at(decode, 2), "the other one has ended")

		require.Equal(t, []string{"2", "4"}, slices.Sorted(slices.Values(at(prefill, 3, 4))), "a prefill instance is another engine")
		<-time.After(settledMove) // of synctest
		require.Contains(t, at(prefill, 3), "3")
		require.NotContains(t, at(prefill), "4")
		require.Equal(t, 1, strings.Count(log.String(), "two engines register with the same engine_id"))
	})
}

// An engine of an id that two engines had is followed again when it moves, once the other one has ended.
func TestEngineIsFollowedAfterItsTwin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, err := New(Config{Register: signer(15 * time.Second), Log: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		at := func(ports ...int) (list []string) {
			for _, port := range ports {
				<-time.After(time.Second) // of synctest
				registers(t, r, &register.Message{HTTP: fmt.Sprint("10.0.0.1:", port), Engine: "e"})
			}
			for _, in := range r.pool.health().instances {
				list = append(list, strings.TrimPrefix(in.URL, "http://10.0.0.1:"))
			}
			return slices.Sorted(slices.Values(list))
		}
		require.Equal(t, []string{"1", "2"}, at(1, 2, 1, 2, 3, 1, 2, 1)[:2], "they are two, or three for a while")
		registers(t, r, &register.Message{HTTP: "10.0.0.1:3", Engine: "e", Leave: true})
		require.Equal(t, []string{"1", "2"}, at(1, 2), "two are left")
		registers(t, r, &register.Message{HTTP: "10.0.0.1:1", Engine: "e", Leave: true})
		require.Equal(t, []string{"2"}, at(2))
		<-time.After(settledMove) // of synctest
		require.Equal(t, []string{"4"}, at(4), "it has moved")
	})
}

// Nonces of engines that never come back do not pile up, and those of others go on to work.
func TestNoncesAreBounded(t *testing.T) {
	now := time.Now()
	f := newFreshness(now)
	for i := range 3 * maxFresh {
		_, err := f.check(fmt.Sprint(i), &register.Message{Nonce: "none"}, now)
		require.Error(t, err)
		_, _ = f.check(fmt.Sprint(i), &register.Message{At: now.UnixNano()}, now)
	}
	require.Len(t, f.nonces, maxFresh)
	require.Len(t, f.times, maxFresh)
	nonce, err := f.check("x", &register.Message{Nonce: "none"}, now)
	require.Error(t, err)
	_, err = f.check("x", &register.Message{Nonce: nonce}, now)
	require.NoError(t, err)
	_, err = f.check("x", &register.Message{Nonce: nonce}, now)
	require.Error(t, err)
}

// Registrations of earlier versions, without a nonce, are good for one life of the router, and not for long.
func TestOldRegistrationsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		life := func() *Router {
			r, err := New(Config{Register: signer(time.Minute)})
			require.NoError(t, err)
			return r
		}
		first := life()
		<-time.After(time.Second)
		copied := old("D", "10.0.0.1:80", "10.0.0.1:81", time.Now().UnixNano())
		code, text := say(t, first, true, copied)
		require.Equal(t, http.StatusOK, code, text)
		<-time.After(time.Second)
		second := life()
		code, text = say(t, second, true, copied)
		require.Equal(t, http.StatusConflict, code)
		require.Contains(t, text, "is before the start of the router or over 5m0s off")
		require.Empty(t, second.pool.health().instances)
		<-time.After(2 * clockError)
		for off, want := range map[time.Duration]int{
			-clockError - 1: http.StatusConflict, clockError + 1: http.StatusConflict, math.MaxInt64 - time.Duration(time.Now().UnixNano()): http.StatusConflict,
			-clockError: http.StatusOK, clockError: http.StatusOK,
		} {
			code, text = say(t, life(), true, old("D", "10.0.0.1:80", "", time.Now().UnixNano()))
			require.Equal(t, http.StatusOK, code, text)
			code, text = say(t, second, true, old("D", fmt.Sprintf("10.0.0.1:%d", 100+want), "10.0.0.1:81", time.Now().Add(off).UnixNano()))
			require.Equal(t, want, code, "%v: %s", off, text)
			second.pool.expire(0)
			second.pool.fresh.times = map[string]int64{}
		}
	})
}

// An engine may say to which replica it belongs where replicas count.
func TestRegisteredGroup(t *testing.T) {
	by := signer(time.Minute)
	by.Groups = true
	r, err := New(Config{Register: by})
	require.NoError(t, err)
	s := serveRegistrar(t, r)
	c := s.client(t)
	c.Every = time.Millisecond
	paired := func(group string) bool {
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			c.Run(ctx, []register.Message{{Type: "P", HTTP: "10.0.0.1:80", Group: "a"}, {Type: "D", HTTP: "10.0.0.2:80", Group: group}})
		}()
		groups := func() map[string]string {
			by := map[string]string{}
			for _, in := range r.pool.health().instances {
				by[in.Role] = in.Group
			}
			return by
		}
		require.Eventually(t, func() bool { return maps.Equal(groups(), map[string]string{"prefill": "a", "decode": group}) }, waitLimit, waitTick)
		stop()
		<-done
		h := r.pool.health()
		return h.paired
	}
	require.True(t, paired("a"))
	require.False(t, paired("b"))
	require.True(t, paired("a"), "it may change")
	require.False(t, paired(""))
	for bad, text := range map[string]string{"a b": "without spaces or quotes", `\"`: "without spaces or quotes"} {
		code, answer := say(t, r, true, register.Message{Type: "D", HTTP: "10.0.0.2:80", Group: bad, Nonce: "none"})
		require.Equal(t, http.StatusBadRequest, code)
		require.Contains(t, answer, text)
	}
}
