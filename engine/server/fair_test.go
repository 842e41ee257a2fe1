package server

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine"
	"github.com/kvport/kvport/engine/apikeys"
	"github.com/kvport/kvport/engine/router/admission"
	"github.com/kvport/kvport/engine/tokenizer"
)

// paced is an engine whose requests end when the test says so, in the order in which they came.
type paced struct {
	script

	mu      sync.Mutex
	tenants []string // of all requests, in the order in which they came
	prompts []string // likewise
	running []chan struct{}

	generates int // tokens of each prompt at most
}

func (p *paced) Info() engine.Info {
	info := p.script.Info()
	info.MaxSeqs = 16
	if p.generates > 0 {
		info.MaxModelLen = 2 * p.generates
	}
	return info
}

func textOf(prompt []int32) string {
	text := make([]byte, 0, len(prompt))
	for _, token := range prompt {
		if token < 256 {
			text = append(text, byte(token))
		}
	}
	return string(text)
}

func (p *paced) Submit(ctx context.Context, r engine.Request) (<-chan engine.Output, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	end, out := make(chan struct{}), make(chan engine.Output, 1)
	p.tenants, p.running = append(p.tenants, connector.TenantOf(r.Salt)), append(p.running, end)
	p.prompts = append(p.prompts, textOf(r.Prompt))
	go func() {
		defer close(out)
		last := engine.Output{Reason: connector.ReasonAbort}
		select {
		case <-end:
			n := min(p.generates, r.MaxTokens)
			last = engine.Output{
				Tokens: slices.Repeat([]int32{'a'}, n), Reason: connector.ReasonLength, Usage: engine.Usage{Prompt: len(r.Prompt), Generated: n},
			}
		case <-ctx.Done():
		}
		out <- last
	}()
	return out, nil
}

// end ends the oldest requests; fewer if there are not as many.
func (p *paced) end(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for range min(n, len(p.running)) {
		close(p.running[0])
		p.running = p.running[1:]
	}
}

func (p *paced) came() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.tenants)
}

// pacedServer is a server before a paced engine.
func pacedServer(t *testing.T, key func(string) *apikeys.Key) (*Server, *paced) {
	t.Helper()
	e := &paced{}
	s, err := New(Config{Engine: e, Tokenizer: tokenizer.Bytes(), ModelName: "x", Key: key})
	require.NoError(t, err)
	return s, e
}

// manyPrompts is a request with as many prompts as one may have, each as long as the model allows.
func manyPrompts(t *testing.T) string {
	t.Helper()
	prompts, err := json.Marshal(slices.Repeat([]string{strings.Repeat("a", 40)}, maxPrompts))
	require.NoError(t, err)
	return fmt.Sprintf(`{"prompt":%s,"max_tokens":59}`, prompts)
}

// A client that asks for far more than the engine can do at once does not keep another one's single request waiting: that
// is among the next two which the engine gets. Without keys nobody is told apart, and it is the last.
func TestFloodLeavesTurnsToOthers(t *testing.T) {
	for _, withKeys := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			key := tenants
			if !withKeys {
				key = nil
			}
			s, e := pacedServer(t, key)
			answers := make(chan *httptest.ResponseRecorder, 5)
			ask := func(key, body string) { go func() { answers <- postAs(t, s, key, "/v1/completions", body) }() }
			const flood = 4
			for range flood {
				ask("alice", manyPrompts(t))
			}
			synctest.Wait()
			ask("bob", `{"prompt":"hi","cache_salt":"kvport-tenant:bob:","max_tokens":59}`)
			synctest.Wait()
			if withKeys {
				require.Len(t, e.came(), 32, "the engine has what it computes at once, and as many whose blocks it loads")
				e.end(2)
				synctest.Wait()
				require.Contains(t, e.came(), "bob")
				require.LessOrEqual(t, slices.Index(e.came(), "bob"), 33)
			} else {
				require.Equal(t, flood*maxPrompts, slices.Index(e.came(), "bob"))
			}
			for range flood*maxPrompts + 1 {
				e.end(1)
				synctest.Wait()
			}
			for range flood + 1 {
				w := <-answers
				require.Equal(t, 200, w.Code, w.Body.String())
			}
			require.Len(t, e.came(), flood*maxPrompts+1)
			require.Zero(t, s.fair.turns.Running())
			requests, waiting := s.fair.counts()
			require.Zero(t, requests+waiting)
		})
	}
}

// A client that leaves gives its turns back, those that it waits for too.
func TestLeavingClientGivesTurnsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, e := pacedServer(t, tenants)
		ctx, leave := context.WithCancel(t.Context())
		gone := make(chan struct{})
		r := httptest.NewRequestWithContext(ctx, "POST", "/v1/completions", strings.NewReader(manyPrompts(t)))
		go func() {
			defer close(gone)
			r.Header.Set("Authorization", "Bearer alice")
			s.ServeHTTP(httptest.NewRecorder(), r)
		}()
		synctest.Wait()
		require.Equal(t, 32, s.fair.turns.Running())
		require.Equal(t, 1, s.fair.turns.Waiting(), "the next one")
		require.Equal(t, maxPrompts-32, healthOf(t, s, "admin").Waiting)
		require.Equal(t, float64(maxPrompts-32), testutil.ToFloat64(s.metrics.waiting))
		leave()
		<-gone
		synctest.Wait()
		require.Zero(t, s.fair.turns.Running()+s.fair.turns.Waiting())
		require.Len(t, e.came(), 32)
		require.Zero(t, healthOf(t, s, "admin").Waiting)
	})
}

// healthOf is what a client learns from /health.
func healthOf(t *testing.T, s *Server, key string) (h engine.Health) {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), "GET", "/health", nil)
	r.Header.Set("Authorization", "Bearer "+key)
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &h))
	return h
}

// stuck is a client that takes nothing of its answer until it leaves.
type stuck struct {
	*httptest.ResponseRecorder

	ctx context.Context
}

// Write implements http.ResponseWriter.
func (s stuck) Write([]byte) (int, error) {
	<-s.ctx.Done()
	return 0, s.ctx.Err()
}

// A client that does not read what the engine has computed for it keeps nobody waiting once the engine has done that, however
// many of its prompts are behind the one socket.
func TestSlowReaderKeepsNoTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, e := pacedServer(t, tenants)
		ctx, leave := context.WithCancel(t.Context())
		gone := make(chan struct{})
		body := strings.Replace(manyPrompts(t), "{", `{"stream":true,"return_token_ids":true,`, 1)
		r := httptest.NewRequestWithContext(ctx, "POST", "/v1/completions", strings.NewReader(body))
		r.Header.Set("Authorization", "Bearer alice")
		go func() {
			defer close(gone)
			s.ServeHTTP(stuck{httptest.NewRecorder(), ctx}, r)
		}()
		for range maxPrompts {
			synctest.Wait()
			e.end(1)
		}
		synctest.Wait()
		require.Len(t, e.came(), maxPrompts)
		require.Zero(t, s.fair.turns.Running())
		answers := make(chan int, 1)
		go func() { answers <- postAs(t, s, "bob", "/v1/completions", `{"prompt":"hi"}`).Code }()
		synctest.Wait()
		e.end(1)
		require.Equal(t, 200, <-answers)
		leave()
		<-gone
	})
}

// The prompts of a request get to the engine in their order.
func TestPromptsKeepTheirOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, e := pacedServer(t, tenants)
		prompts := make([]string, maxPrompts)
		for i := range prompts {
			prompts[i] = fmt.Sprintf("%02d", i)
		}
		body, err := json.Marshal(map[string]any{"prompt": prompts})
		require.NoError(t, err)
		answer := make(chan int, 1)
		go func() { answer <- postAs(t, s, "alice", "/v1/completions", string(body)).Code }()
		for range maxPrompts {
			synctest.Wait()
			e.end(1)
		}
		require.Equal(t, 200, <-answer)
		require.Equal(t, prompts, e.prompts)
	})
}

// However many requests of one client wait, another one finds a place; a router, which speaks for many, may have all.
func TestPlacesAreShared(t *testing.T) {
	s, _ := pacedServer(t, tenants)
	fill := func(key string) (n int) {
		for {
			if _, err := s.fair.enter(tenants("Bearer " + key)); err != nil {
				require.ErrorIs(t, err, engine.ErrOverloaded)
				return n
			}
			n++
		}
	}
	require.Equal(t, 224, fill("alice"))
	require.Zero(t, fill("friend"), "who is of her tenant")
	require.Equal(t, 28, fill("bob"))
	require.Equal(t, 4, fill("router"))
	w := postAs(t, s, "alice", "/v1/completions", `{"prompt":"hi"}`)
	require.Equal(t, 429, w.Code)

	s, _ = pacedServer(t, tenants)
	require.Equal(t, 256, fill("router"))
	s, _ = pacedServer(t, tenants)
	require.Equal(t, 224, fill("alice"))
	w = postAs(t, s, "alice", "/v1/completions", `{"prompt":"hi"}`)
	require.Equal(t, 429, w.Code)
	require.Contains(t, w.Body.String(), "alice has 224 running or waiting already, and may have seven eighths of those that others leave")
	leave, err := s.fair.enter(tenants("Bearer bob"))
	require.NoError(t, err)
	leave()

	s, _ = pacedServer(t, tenants)
	require.Equal(t, 256, fill("shared"), "who has no tenant")
}

// A prompt that has to make room for another client's does not go to the engine.
func TestPromptThatMakesRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFairness(1, 3, prometheus.NewGauge(prometheus.GaugeOpts{Name: "waiting"}))
		turns := make(chan error, 6)
		wait := func(key string) {
			go func() {
				done, err := f.turn(t.Context(), tenants("Bearer "+key), 1)
				if err == nil {
					done(1)
				}
				turns <- err
			}()
			synctest.Wait()
		}
		var running []func(int)
		for range 2 {
			done, err := f.turn(t.Context(), tenants("Bearer alice"), 1)
			require.NoError(t, err)
			running = append(running, done)
		}
		for range 3 {
			wait("alice")
		}
		wait("bob")
		require.ErrorIs(t, <-turns, engine.ErrOverloaded)
		for _, done := range running {
			done(1)
		}
		for range 3 {
			require.NoError(t, <-turns)
		}
		require.Zero(t, f.turns.Running()+f.turns.Waiting())
	})
}

// Clients that always have something waiting get as many tokens of the engine each, whether they ask for few or many, and whether they
// say how many or not.
func TestTurnsGoByTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &paced{generates: 4000}
		s, err := New(Config{Engine: e, Tokenizer: tokenizer.Bytes(), ModelName: "x", Key: tenants})
		require.NoError(t, err)
		bodies := map[string]string{
			"alice": `{"messages":[{"role":"user","content":"hi"}]}`,
			"bob":   `{"messages":[{"role":"user","content":"hi"}],"max_tokens":4000}`,
			"admin": `{"messages":[{"role":"user","content":"hi"}],"max_tokens":1000}`,
		}
		ctx, leave := context.WithCancel(t.Context())
		var clients sync.WaitGroup
		for key, body := range bodies {
			for range 60 {
				clients.Go(func() {
					for ctx.Err() == nil {
						r := httptest.NewRequestWithContext(ctx, "POST", "/v1/chat/completions", strings.NewReader(body))
						r.Header.Set("Authorization", "Bearer "+key)
						w := httptest.NewRecorder()
						s.ServeHTTP(w, r)
						if w.Code != 200 {
							t.Error(w.Body.String())
							return
						}
					}
				})
			}
		}
		const most, first = 900, 250
		for range most {
			synctest.Wait()
			e.end(1)
		}
		synctest.Wait()
		tokens := map[string]int{}
		// Of the first ones nobody knows yet what alice's cost: hers may take all 32 slots, and the others then get 160 to make up for it.
		for _, tenant := range e.came()[first:] {
			tokens[tenant] += map[string]int{"alice": 4000, "bob": 4000, "admin": 1000}[tenant]
		}
		leave()
		clients.Wait()
		for name, n := range tokens {
			require.InEpsilon(t, tokens["bob"], n, 0.2, "%s: %v", name, tokens)
		}
		require.Len(t, tokens, 3)
	})
}

// What a client may not do now is not even decoded. To have a prompt tokenized is a request like others.
func TestLimitsComeFirst(t *testing.T) {
	for name, limits := range map[string]admission.Limits{"requests": {RequestsPerMinute: 1}, "at once": {InFlight: 1}} {
		s, _ := pacedServer(t, func(string) *apikeys.Key {
			return &apikeys.Key{Name: "alice", Tenant: "alice", Limits: limits}
		})
		if limits.InFlight > 0 {
			_, err := s.fair.request(s.config.Key(""))
			require.NoError(t, err)
		} else {
			require.Equal(t, 200, postAs(t, s, "alice", "/tokenize", `{"prompt":"hi"}`).Code)
		}
		for _, path := range []string{"/tokenize", "/v1/completions", "/v1/chat/completions"} {
			w := postAs(t, s, "alice", path, `not even JSON`)
			require.Equal(t, 429, w.Code, "%s %s %s", name, path, w.Body.String())
			require.Contains(t, w.Body.String(), `"code":"rate_limit_exceeded"`)
			require.NotEmpty(t, w.Header().Get("Retry-After"))
		}
	}
}

// chatty is an engine that generates a few tokens, and then none.
type chatty struct {
	script

	err error // of every request, instead
}

func (c *chatty) Submit(ctx context.Context, r engine.Request) (<-chan engine.Output, error) {
	out := make(chan engine.Output, 1)
	if c.err != nil {
		out <- engine.Output{Reason: connector.ReasonError, Err: c.err}
		close(out)
		return out, nil //nolint:nilerr // the output has it
	}
	out <- engine.Output{Tokens: slices.Repeat([]int32{'a'}, 30), Usage: engine.Usage{Prompt: len(r.Prompt), Generated: 30}}
	go func() {
		<-ctx.Done()
		close(out)
	}()
	return out, nil
}

// A stream whose client leaves before its end costs what was generated; what the server does not answer costs nothing.
func TestCostOfWhatDoesNotEnd(t *testing.T) {
	for name, tt := range map[string]struct {
		engine  *chatty
		body    string
		allowed int // of requests of 3 tokens, out of 100
	}{
		"left":          {&chatty{}, `{"prompt":"hi","stream":true,"max_tokens":50}`, (100 - 33) / 3},
		"left, in full": {&chatty{}, `{"prompt":"hi","max_tokens":50}`, (100 - 33) / 3},
		"not answered":  {&chatty{err: engine.ErrClosed}, `{"prompt":"hi","max_tokens":50}`, 100 / 3},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				limited := func(string) *apikeys.Key {
					return &apikeys.Key{Name: "alice", Tenant: "alice", Limits: admission.Limits{TokensPerMinute: 100}}
				}
				s, err := New(Config{Engine: tt.engine, Tokenizer: tokenizer.Bytes(), ModelName: "x", Key: limited})
				require.NoError(t, err)
				ctx, leave := context.WithCancel(t.Context())
				gone := make(chan struct{})
				go func() {
					defer close(gone)
					s.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, "POST", "/v1/completions", strings.NewReader(tt.body)))
				}()
				synctest.Wait()
				leave()
				<-gone
				n := 0
				for ; ; n++ {
					r, err := s.fair.request(limited(""))
					require.NoError(t, err)
					if s.fair.estimate(r, 3) != nil {
						break
					}
				}
				require.Equal(t, tt.allowed, n)
			})
		})
	}
}

// What a client may not do now is a 429 that names its limit and says when it may; other clients do not notice.
func TestLimitsOfAKey(t *testing.T) {
	for name, tt := range map[string]struct {
		limits  admission.Limits
		allowed int
		want    string
		after   string
	}{
		"requests": {admission.Limits{RequestsPerMinute: 3}, 3, "alice may send 3 requests a minute (requests_per_minute)", "20"},
		"tokens":   {admission.Limits{TokensPerMinute: 25}, 2, "alice may use 25 tokens a minute (tokens_per_minute)", "12"},
		"at once":  {admission.Limits{InFlight: 2}, 2, "alice may have 2 requests running (max_in_flight)", "1"},
		"none":     {admission.Limits{}, 8, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, e := pacedServer(t, func(authorization string) *apikeys.Key {
					k := tenants(authorization)
					if k.Name == "alice" {
						k.Limits = tt.limits
					}
					return k
				})
				answers := make(chan *httptest.ResponseRecorder, 100)
				ask := func(key string) {
					go func() { answers <- postAs(t, s, key, "/v1/completions", `{"prompt":"hi","max_tokens":8}`) }()
				}
				for range 8 {
					ask("alice")
					synctest.Wait()
				}
				require.Len(t, e.came(), tt.allowed)
				for range 8 - tt.allowed {
					w := <-answers
					require.Equal(t, 429, w.Code)
					require.Contains(t, w.Body.String(), tt.want)
					require.Contains(t, w.Body.String(), `"code":"rate_limit_exceeded"`)
					require.Equal(t, tt.after, w.Header().Get("Retry-After"))
				}
				ask("bob")
				synctest.Wait()
				e.end(tt.allowed + 1)
				for range tt.allowed + 1 {
					require.Equal(t, 200, (<-answers).Code)
				}
				<-time.After(time.Minute)
				ask("alice")
				synctest.Wait()
				e.end(1)
				require.Equal(t, 200, (<-answers).Code)
			})
		})
	}
}
