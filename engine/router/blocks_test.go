package router

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/kvevents"
	"github.com/kvport/kvport/engine/router/policy"
	"github.com/kvport/kvport/verify/testkit"
)

// eventful is an instance that publishes events and has a token for each byte of a text.
type eventful struct {
	*httptest.Server
	events *kvevents.Publisher
	tells  bool   // in /health
	model  string // likewise, as an engine without keys does; empty: it does not
	scope  string // of its connector; empty: it has none

	mu       sync.Mutex
	tokenize http.HandlerFunc // nil: as it should
	asked    int              // at /tokenize
}

func serveSource(t *testing.T, tells bool) *eventful {
	t.Helper()
	c, err := kvevents.ParseConfig([]byte(`{"enable_kv_cache_events": true}`))
	require.NoError(t, err)
	p, err := kvevents.NewPublisher(*c, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	require.NoError(t, err)
	s := &eventful{events: p, tells: tells}
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(w http.ResponseWriter, _ *http.Request) {
		answer := map[string]any{"status": "ok"}
		if s.model != "" {
			answer["model"] = s.model
		}
		if s.tells {
			kv := map[string]any{"role": "none", "events": p.Place()}
			if s.scope != "" {
				kv["role"], kv["scope"], kv["takes"] = "kv_both", s.scope, []string{"a shared store"}
			}
			answer["kv"] = kv
		}
		_ = json.NewEncoder(w).Encode(answer)
	})
	mux.HandleFunc("/tokenize", s.tokens)
	mux.HandleFunc("/", whole200)
	s.Server = httptest.NewServer(mux)
	t.Cleanup(func() {
		s.Close()
		require.NoError(t, p.Close())
	})
	return s
}

func (s *eventful) tokens(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.mu.Lock()
	s.asked++
	instead := s.tokenize
	s.mu.Unlock()
	if instead != nil {
		instead(w, r)
		return
	}
	var q struct {
		Prompt   string `json:"prompt"`
		Messages []struct{ Content string }
	}
	_ = json.Unmarshal(body, &q)
	for _, m := range q.Messages {
		q.Prompt += m.Content
	}
	ids := []int{}
	for _, c := range []byte(q.Prompt) {
		ids = append(ids, int(c))
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"count": len(ids), "max_model_len": 100, "tokens": ids})
}

// answers says what /tokenize answers from now on; nil: what it should.
func (s *eventful) answers(h http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tokenize = h
}

// questions is how often tokens were asked for.
func (s *eventful) questions() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked
}

// has publishes that the instance has a text, in blocks of 4 tokens.
func (s *eventful) has(text string) { s.hasIn(kvevents.GPU, "", text) }

// hasIn publishes that it has a text in a medium, in a locality if that is said.
func (s *eventful) hasIn(medium, locality, text string) {
	s.hasFrom(0, medium, locality, text)
}

// hasFrom publishes that it has a text from one of its bytes on.
func (s *eventful) hasFrom(first int, medium, locality, text string) {
	ev := kvevents.Event{Kind: kvevents.Stored, BlockSize: 4, Medium: medium, Locality: locality}
	if first > 0 {
		ev.Parent = kvevents.BytesHash([]byte(text[:first]))
	}
	for i := first; i+4 <= len(text); i += 4 {
		ev.Hashes = append(ev.Hashes, kvevents.BytesHash([]byte(text[:i+4])))
		for _, c := range []byte(text[i : i+4]) {
			ev.Tokens = append(ev.Tokens, int32(c))
		}
	}
	s.events.Publish([]kvevents.Event{ev})
}

// following is a router over some instances whose events it follows.
func following(t *testing.T, c Config, instances ...*eventful) *front {
	t.Helper()
	c.Policy, c.HealthInterval = policy.PrefixAware, 10*time.Millisecond
	for _, s := range instances {
		c.Decode = append(c.Decode, s.URL)
	}
	f := serveRouter(t, c)
	f.router.pool.blocks.tokens.limit = time.Minute
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { f.router.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
		require.Zero(t, f.router.pool.blocks.index.Blocks(), "nothing is known of whom nobody follows")
	})
	return f
}

// knows waits until the index has that many blocks.
func (f *front) knows(t *testing.T, blocks int) {
	t.Helper()
	require.Eventually(t, func() bool { return testutil.ToFloat64(f.router.metrics.indexed) == float64(blocks) }, time.Minute, time.Millisecond)
}

// word is what instances hold of a prompt by their events.
func (f *front) word(body string) []policy.Held {
	parsed, _ := parse([]byte(body))
	c := &call{router: f.router, body: parsed, header: http.Header{"Content-Type": {"application/json"}}}
	return f.router.pool.blocks.held(context.Background(), c)
}

// owns is an instance that has tokens in its own cache, by its events.
func owns(place, tokens int) policy.Held {
	return policy.Held{Place: place, Hit: policy.Hit{Engine: tokens, Node: tokens, Shared: tokens}}
}

// Requests go where their prompt is by the instances' events, whatever form the prompt has.
func TestEventsDecide(t *testing.T) {
	a, b := serveSource(t, true), serveSource(t, true)
	f := following(t, Config{}, a, b)
	a.has("in the beginning there was nothing")
	b.has("in the end there is nothing left, or so it seems")
	f.knows(t, 8+12)
	for body, want := range map[string][]policy.Held{
		`{"prompt": "in the end there is more"}`:                       {owns(0, 4), owns(1, 20)},
		`{"prompt": ["in the beginning there was nothing"]}`:           {owns(0, 32), owns(1, 4)},
		`{"prompt": [105, 110, 32, 116, 104]}`:                         {owns(0, 4), owns(1, 4)},
		`{"prompt": [[105, 110, 32, 116, 104]]}`:                       {owns(0, 4), owns(1, 4)},
		`{"messages": [{"content": "in the "}, {"content": "end t"}]}`: {owns(0, 4), owns(1, 8)}, // its last block ends it
		`{"prompt": "in the end", "cache_salt": "s"}`:                  {{Place: 0}, {Place: 1}},
		`{"prompt": "something else"}`:                                 {{Place: 0}, {Place: 1}},
		`{"prompt": []}`:                                               nil,
		`{"prompt": [-1]}`:                                             nil,
		`{}`:                                                           nil,
	} {
		require.Equal(t, want, f.word(body), body)
	}
	for range 3 { // round robin would alternate
		got := complete(t, f, `{"prompt": "in the end there is more"}`, routeHeader, "1")
		require.Contains(t, got.Get(routeHeader), "decode="+b.URL)
		require.Contains(t, got.Get(routeHeader), "holds 20 of 24 tokens", "the prompt's length is known, too")
		got = complete(t, f, `{"prompt": "in the beginning there was nothing"}`, routeHeader, "1")
		require.Contains(t, got.Get(routeHeader), "decode="+a.URL)
	}
	asked := a.questions() + b.questions()
	f.word(`{"prompt": "in the end there is more"}`)
	require.Equal(t, asked, a.questions()+b.questions(), "the tokens of a text are remembered")

	b.events.Publish([]kvevents.Event{{Kind: kvevents.Cleared}})
	f.knows(t, 8)
	require.Equal(t, []policy.Held{owns(0, 4), {Place: 1}}, f.word(`{"prompt": "in the end there is more"}`))
	require.NoError(t, a.events.Close())
	f.knows(t, 0)
	require.Equal(t, []policy.Held{{Place: 1}}, f.word(`{"prompt": "in the end there is more"}`), "of the other one nothing is known")
}

// Where clients' own keys go to the instances, their blocks may be a tenant's, so that events do not say that an instance has none
// of a prompt: then the history decides. An engine that shows its model to everybody has no keys, and so no tenants.
func TestEventsOfOtherTenants(t *testing.T) {
	for _, tt := range []struct {
		config Config
		key    string
		model  string
		want   []policy.Held
	}{
		{Config{}, "", "", []policy.Held{{Place: 0}, {Place: 1}}},
		{Config{}, "Bearer alice", "", nil},
		{Config{}, "Bearer alice", "m", []policy.Held{{Place: 0}, {Place: 1}}},
		{Config{UpstreamKey: "inner"}, "Bearer inner", "", []policy.Held{{Place: 0}, {Place: 1}}},
	} {
		a, b := serveSource(t, true), serveSource(t, true)
		a.model, b.model = tt.model, tt.model
		f := following(t, tt.config, a, b)
		a.has("in the beginning there was nothing")
		b.has("nothing")
		f.knows(t, 8+1)
		parsed, err := parse([]byte(`{"prompt": "something else"}`))
		require.NoError(t, err)
		c := &call{router: f.router, body: parsed, header: http.Header{"Content-Type": {"application/json"}}}
		if tt.key != "" {
			c.header.Set("Authorization", tt.key)
		}
		require.Equal(t, tt.want, f.router.pool.blocks.held(t.Context(), c))
		c.body, err = parse([]byte(`{"prompt": "in the beginning"}`))
		require.NoError(t, err)
		require.Equal(t, owns(0, 12), f.router.pool.blocks.held(t.Context(), c)[0], "what is not a tenant's is found")
	}
}

// Whether an instance is asked for the tokens of a text says nothing of what other tenants have sent.
func TestTokensAreRememberedForOneTenant(t *testing.T) {
	a := serveSource(t, true)
	f := following(t, Config{}, a)
	a.has("in the beginning there was nothing")
	f.knows(t, 8)
	for _, tt := range []struct {
		key, salt string
		asked     int
	}{{"", "", 1}, {"", "", 0}, {"", "s", 1}, {"", "s", 0}, {"Bearer alice", "", 1}, {"Bearer alice", "", 0}, {"Bearer bob", "", 1}, {"Bearer bob", "s", 1}} {
		body, err := parse([]byte(`{"prompt": "in the beginning", "cache_salt": "` + tt.salt + `"}`))
		require.NoError(t, err)
		c := &call{router: f.router, body: body, header: http.Header{"Content-Type": {"application/json"}}}
		if tt.key != "" {
			c.header.Set("Authorization", tt.key)
		}
		before := a.questions()
		f.router.pool.blocks.held(t.Context(), c)
		require.Equal(t, tt.asked, a.questions()-before, tt)
	}
}

// The medium and the locality of an event say in which scope a block is. What lies in a remote store by itself, from the first
// token on, counts for all that load from there.
func TestEventsSayScopes(t *testing.T) {
	a, b := serveSource(t, true), serveSource(t, true)
	a.scope, b.scope = "shared", "shared"
	f := following(t, Config{}, a, b)
	const text = "in the beginning there was nothing"
	a.has(text[:8])
	a.hasIn(kvevents.CPU, "", text[:12])
	a.hasIn(kvevents.Storage, kvevents.Remote, text[:24])
	f.knows(t, 6)
	body := `{"prompt": "` + text + `"}`
	require.Equal(t, []policy.Held{{Place: 0, Hit: policy.Hit{Engine: 8, Node: 12, Shared: 24, Store: 24}}}, f.word(body), "the other one has said nothing")
	got := complete(t, f, body, routeHeader, "1").Get(routeHeader)
	require.Contains(t, got, "decode="+a.URL)
	require.Contains(t, got, "holds 24 of 34 tokens (engine 8, node 4, shared 12)")

	f.router.pool.mu.Lock()
	f.router.pool.known[0].busy.all.until = time.Now().Add(time.Hour) // so that nothing is sent there
	f.router.pool.mu.Unlock()
	got = complete(t, f, body, routeHeader, "1").Get(routeHeader)
	require.Contains(t, got, "decode="+b.URL)
	require.Contains(t, got, "holds 24 of 34 tokens (engine 0, node 0, shared 24)")
}

// What is on a disk beside an engine, which says nothing of itself as vLLM does, counts for no other instance; and of a remote
// store only what begins with the first token does.
func TestDiskOfOneNode(t *testing.T) {
	const text = "in the beginning there was nothing"
	for _, tt := range []struct {
		locality string
		remote   int // the first token that is in a remote store
		want     policy.Hit
		others   int
	}{
		{"", 34, policy.Hit{Node: 24, Shared: 24}, 0},
		{kvevents.Local, 34, policy.Hit{Node: 24, Shared: 24}, 0},
		{kvevents.Local, 0, policy.Hit{Node: 24, Shared: 32, Store: 32}, 32},
		{kvevents.Local, 16, policy.Hit{Node: 24, Shared: 32}, 0},
	} {
		a, b := serveSource(t, false), serveSource(t, false)
		f := following(t, Config{Events: map[string]kvevents.Place{a.URL: a.events.Place()}}, a, b)
		a.hasIn(kvevents.Storage, tt.locality, text[:24])
		known := 6
		if tt.remote < len(text) {
			a.hasFrom(tt.remote, kvevents.Storage, kvevents.Remote, text)
			known = 8
		}
		f.knows(t, known)
		body := `{"prompt": "` + text + `"}`
		require.Equal(t, []policy.Held{{Place: 0, Hit: tt.want}}, f.word(body))
		got := complete(t, f, body, routeHeader, "1").Get(routeHeader)
		require.Contains(t, got, "decode="+a.URL)
		f.router.pool.rests(target{index: 0}, maxRest, false)
		got = complete(t, f, body, routeHeader, "1").Get(routeHeader)
		require.Contains(t, got, "decode="+b.URL)
		require.Contains(t, got, fmt.Sprintf("holds %d of 34 tokens", tt.others), "%+v", tt)
	}
}

// When the index is full, the instance that has most makes room for one that has less. Of it nothing is known any more.
func TestFullIndex(t *testing.T) {
	a, b := serveSource(t, true), serveSource(t, true)
	f := following(t, Config{IndexBlocks: 10}, a, b)
	a.has("in the beginning there was nothing")
	b.has("in t")
	f.knows(t, 9)
	require.Equal(t, []policy.Held{owns(0, 4), owns(1, 4)}, f.word(`{"prompt": "in the end"}`))
	b.has("in the end there is")
	f.knows(t, 4)
	require.Equal(t, []policy.Held{owns(1, 8)}, f.word(`{"prompt": "in the end"}`))
	require.Equal(t, 8.0, testutil.ToFloat64(f.router.metrics.blocks.WithLabelValues("evicted")))
}

// The operator says where the events of instances are that do not tell it.
func TestEventsByConfig(t *testing.T) {
	s := serveSource(t, false)
	f := following(t, Config{Events: map[string]kvevents.Place{s.URL: s.events.Place()}}, s)
	s.has("in the beginning")
	f.knows(t, 4)
	for list, message := range map[string]Config{
		"is no endpoint": {Events: map[string]kvevents.Place{"http://a:1": {Endpoint: "a"}}},
		"is no URL":      {Events: map[string]kvevents.Place{"a:b:c": {Endpoint: "tcp://a:1"}}},
	} {
		message.Decode, message.Policy = []string{"http://a:1"}, policy.PrefixAware
		_, err := New(message)
		require.ErrorContains(t, err, "--kv-events: ")
		require.ErrorContains(t, err, list)
	}
	_, err := New(Config{Decode: []string{"http://a:1"}, Events: map[string]kvevents.Place{"http://a:1": {Endpoint: "tcp://a:1"}}})
	require.ErrorContains(t, err, "--kv-events: policy round_robin does not ask what instances hold")
}

// A place for a URL that is no instance's has no effect, and the log says so, unless instances may come that nobody knows yet.
func TestEventsOfNobody(t *testing.T) {
	events := map[string]kvevents.Place{"http://A:1/": {Endpoint: "tcp://a:1"}, "http://b:1": {Endpoint: "tcp://b:1"}, "http://c:1": {Endpoint: "tcp://c:1"}}
	for name, tt := range map[string]struct {
		config  Config
		strange int
	}{
		"a typing error": {Config{Prefill: []string{"http://a:1"}, Decode: []string{"http://b:1"}}, 1},
		"names":          {Config{Decode: []string{"http://b:1", "dns://a:1"}}, 0},
		"registration":   {Config{Decode: []string{"http://b:1"}, Register: signer(0)}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			var log testkit.Log
			tt.config.Events, tt.config.Policy, tt.config.Log = events, policy.PrefixAware, logTo(&log)
			r, err := New(tt.config)
			require.NoError(t, err)
			r.Close()
			require.Equal(t, tt.strange, strings.Count(log.String(), "--kv-events names no instance"))
			require.Equal(t, tt.strange, strings.Count(log.String(), "instance=http://c:1"))
		})
	}
}

// An instance can send the router to no other host, and says so only once in the log.
func TestEventsElsewhere(t *testing.T) {
	var log bytes.Buffer
	says := `{"kv": {"role": "none", "events": {"endpoint": "tcp://10.1.2.3:5557"}}}`
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, says) }))
	defer s.Close()
	b, err := newBlocks(withDefaults(Config{Log: slog.New(slog.NewTextHandler(&log, nil))}), nil, nil, nil)
	require.NoError(t, err)
	b.begin(t.Context())
	u, err := url.Parse(s.URL)
	require.NoError(t, err)
	for range 2 {
		require.Nil(t, b.where(u, parseFit([]byte(says))))
	}
	require.Equal(t, 1, strings.Count(log.String(), "a port of another host than the instance's"), log.String())
	b.end()
}

// An instance whose events have moved to where the router does not go is not followed any more.
func TestEventsMoveElsewhere(t *testing.T) {
	s := serveSource(t, true)
	f := serveRouter(t, Config{Policy: policy.PrefixAware, Decode: []string{s.URL}})
	b, u, place := f.router.pool.blocks, f.router.pool.urls[0], s.events.Place()
	b.begin(t.Context())
	b.follow(u, b.where(u, &fit{Events: &place}))
	s.has("in the beginning")
	f.knows(t, 4)
	b.follow(u, b.where(u, &fit{Events: &kvevents.Place{Endpoint: "tcp://10.1.2.3:5557"}}))
	f.knows(t, 0)
	b.end()
}

// While the router looks at a file that an instance names, nobody waits for it.
func TestEventsAtSlowPath(t *testing.T) {
	s := serveSource(t, true)
	c := Config{Policy: policy.PrefixAware, Decode: []string{s.URL}, HealthInterval: time.Millisecond}
	f := serveRouter(t, c)
	asked, answer := make(chan struct{}), make(chan struct{})
	f.router.pool.blocks.resolve = func(p *kvevents.Place, _ string) (kvevents.Place, error) {
		asked <- struct{}{}
		<-answer
		return *p, nil
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { f.router.Run(ctx) })
	<-asked
	require.Equal(t, s.URL, f.router.pool.urls[0].String())
	cancel()
	close(answer)
	running.Wait()
}

// Without tokens the history decides, and an instance that fails is left alone for a while.
func TestTokensAreNotToBeHad(t *testing.T) {
	s := serveSource(t, true)
	f := following(t, Config{}, s)
	s.has("in the beginning")
	f.knows(t, 4)
	tokens, now := f.router.pool.blocks.tokens, time.Now()
	tokens.now = func() time.Time { return now }
	for n, h := range []http.HandlerFunc{
		code(http.StatusInternalServerError),
		reset(""),
		func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "{") },
		func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"tokens": [-1]}`) },
	} {
		s.answers(h)
		require.Nil(t, f.word(`{"prompt": "in the beginning"}`))
		require.EqualValues(t, n+1, testutil.ToFloat64(f.router.metrics.tokenize.WithLabelValues("failed")))
		require.True(t, tokens.ails(placeOf(f.router.pool.urls[0])), n)
		asked := s.questions()
		require.Nil(t, f.word(`{"prompt": "something else"}`))
		require.Equal(t, asked, s.questions())
		now = now.Add(ailing)
	}
	s.answers(nil)
	require.Equal(t, []policy.Held{owns(0, 12)}, f.word(`{"prompt": "in the beginning"}`))
}

// What may be the fault of a prompt or of its client keeps nobody else from being answered, and the same is not asked again
// for a while.
func TestTokensOfAPromptAreNotToBeHad(t *testing.T) {
	s := serveSource(t, true)
	f := following(t, Config{}, s)
	s.has("in the beginning")
	f.knows(t, 4)
	tokens, now := f.router.pool.blocks.tokens, time.Now()
	tokens.now = func() time.Time { return now }
	for name, h := range map[string]http.HandlerFunc{
		"wrong":    code(http.StatusBadRequest),
		"no key":   code(http.StatusUnauthorized),
		"no model": code(http.StatusNotFound),
		"too many": code(http.StatusTooManyRequests),
		"empty":    func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"tokens": []}`) },
		"long": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(bytes.Repeat([]byte(" "), maxTokenAnswer+2))
		},
	} {
		s.answers(h)
		body := fmt.Sprintf(`{"prompt": %q}`, name)
		require.Nil(t, f.word(body), name)
		s.answers(nil)
		asked := s.questions()
		require.Nil(t, f.word(body), name)
		require.Equal(t, asked, s.questions(), name)
		require.NotNil(t, f.word(fmt.Sprintf(`{"prompt": "after %s"}`, name)), name)
		now = now.Add(ailing)
		require.NotNil(t, f.word(body), name)
	}
}

// mute is a transport over which no answer comes.
type mute struct{ asked int }

func (s *mute) RoundTrip(r *http.Request) (*http.Response, error) {
	s.asked++
	<-r.Context().Done()
	return nil, r.Context().Err()
}

// A prompt that takes too long is not asked about again for a while, and others are.
func TestTokensTakeTooLong(t *testing.T) {
	f := serveRouter(t, Config{Decode: []string{"http://127.0.0.1:1"}})
	s := &mute{}
	tokens, now := newPromptTokens(&http.Client{Transport: s}, f.router.metrics), time.Now()
	tokens.limit, tokens.now = time.Millisecond, func() time.Time { return now }
	ask := func(prompt string) {
		body, err := parse([]byte(`{"prompt": "` + prompt + `"}`))
		require.NoError(t, err)
		require.Nil(t, tokens.of(t.Context(), &call{router: f.router, body: body, header: http.Header{}}, target{url: f.router.pool.urls[0]}))
	}
	for n, prompt := range []string{"a", "a", "b", "b"} {
		ask(prompt)
		require.Equal(t, 1+n/2, s.asked)
	}
	require.Empty(t, tokens.ill)
	now = now.Add(ailing)
	ask("a")
	require.Equal(t, 3, s.asked)
}

// The instances are asked for tokens in turn.
func TestTokensInTurn(t *testing.T) {
	a, b := serveSource(t, true), serveSource(t, true)
	f := following(t, Config{}, a, b)
	a.has("in the beginning")
	b.has("in the end")
	f.knows(t, 4+2)
	for n := range 6 {
		f.word(fmt.Sprintf(`{"prompt": "%d"}`, n))
	}
	require.Equal(t, 3, a.questions())
	require.Equal(t, 3, b.questions())
}

// Only a number of tokens is remembered, those of the texts that were used last.
func TestRememberedTokens(t *testing.T) {
	k := newPromptTokens(nil, nil)
	for n := range uint64(4) {
		k.remember(n, make([]int32, maxRemembered/3-textCost))
		k.remember(n, make([]int32, maxRemembered/3-textCost))
		require.NotNil(t, k.recall(0))
	}
	require.Nil(t, k.recall(1))
	require.NotNil(t, k.recall(2))
	k.remember(9, make([]int32, maxRemembered+1))
	require.Nil(t, k.recall(9))
	require.Equal(t, maxRemembered/3*3, k.size)
	require.Len(t, k.known, k.order.Len())
	for n := range uint64(2 * maxRemembered / textCost) { // short texts take memory, too
		k.remember(n, []int32{1})
	}
	require.Len(t, k.known, maxRemembered/(textCost+1))
	for n := range uint64(2 * maxUnanswered) {
		k.rest(n)
	}
	require.LessOrEqual(t, len(k.unanswered), maxUnanswered)
}
