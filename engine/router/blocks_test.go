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
)

// eventful is an instance that publishes events and has a token for each byte of a text.
type eventful struct {
	*httptest.Server
	events *kvevents.Publisher
	tells  bool // in /health

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
		if s.tells {
			answer["kv"] = map[string]any{"role": "none", "events": p.Place()}
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
func (s *eventful) has(text string) {
	ev := kvevents.Event{Kind: kvevents.Stored, BlockSize: 4, Medium: kvevents.GPU, LoRAID: -1}
	for i := 0; i+4 <= len(text); i += 4 {
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

// Requests go where their prompt is by the instances' events, whatever form the prompt has.
func TestEventsDecide(t *testing.T) {
	a, b := serveSource(t, true), serveSource(t, true)
	f := following(t, Config{}, a, b)
	a.has("in the beginning there was nothing")
	b.has("in the end there is nothing left, or so it seems")
	f.knows(t, 8+12)
	for body, want := range map[string][]policy.Held{
		`{"prompt": "in the end there is more"}`:                       {{Place: 0, Tokens: 4}, {Place: 1, Tokens: 20}},
		`{"prompt": ["in the beginning there was nothing"]}`:           {{Place: 0, Tokens: 32}, {Place: 1, Tokens: 4}},
		`{"prompt": [105, 110, 32, 116, 104]}`:                         {{Place: 0, Tokens: 4}, {Place: 1, Tokens: 4}},
		`{"prompt": [[105, 110, 32, 116, 104]]}`:                       {{Place: 0, Tokens: 4}, {Place: 1, Tokens: 4}},
		`{"messages": [{"content": "in the "}, {"content": "end t"}]}`: {{Place: 0, Tokens: 4}, {Place: 1, Tokens: 8}}, // its last block ends it
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
	require.Equal(t, []policy.Held{{Place: 0, Tokens: 4}, {Place: 1}}, f.word(`{"prompt": "in the end there is more"}`))
	require.NoError(t, a.events.Close())
	f.knows(t, 0)
	require.Equal(t, []policy.Held{{Place: 1}}, f.word(`{"prompt": "in the end there is more"}`), "of the other one nothing is known")
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
		b.follow(u, parseFit([]byte(says)))
	}
	require.Equal(t, 1, strings.Count(log.String(), "a port of another host than the instance's"), log.String())
	require.Empty(t, b.sources)
	b.end()
}

// Without tokens the history decides, and an instance that does not tell them is left alone for a while.
func TestTokensAreNotToBeHad(t *testing.T) {
	s := serveSource(t, true)
	f := following(t, Config{}, s)
	s.has("in the beginning")
	f.knows(t, 4)
	failed := func() float64 { return testutil.ToFloat64(f.router.metrics.tokenize.WithLabelValues("failed")) }
	s.answers(code(http.StatusBadRequest))
	require.Nil(t, f.word(`{"prompt": "1"}`))
	require.EqualValues(t, 1, failed())
	for n, h := range []http.HandlerFunc{
		code(http.StatusNotFound),
		func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "{") },
		func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"tokens": [-1]}`) },
		func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(bytes.Repeat([]byte(" "), maxTokenAnswer+2))
		},
		func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
	} {
		if n == 4 { // the one that keeps silent
			f.router.pool.blocks.tokens.limit = time.Millisecond
		}
		s.answers(h)
		require.Nil(t, f.word(`{"prompt": "in the beginning"}`))
		require.EqualValues(t, 2+n, failed())
		require.True(t, f.router.pool.blocks.tokens.ails(placeOf(f.router.pool.urls[0])))
		asked := s.questions()
		require.Nil(t, f.word(`{"prompt": "in the beginning"}`))
		require.Equal(t, asked, s.questions())
		f.router.pool.blocks.tokens.ill = map[string]time.Time{placeOf(f.router.pool.urls[0]): time.Now()} // the while is over
	}
	s.answers(nil)
	f.router.pool.blocks.tokens.limit = time.Minute
	require.Equal(t, []policy.Held{{Place: 0, Tokens: 12}}, f.word(`{"prompt": "in the beginning"}`))
}

// Only a number of tokens is remembered, those of the texts that were used last.
func TestRememberedTokens(t *testing.T) {
	k := newPromptTokens(nil, nil)
	for n := range uint64(4) {
		k.remember(n, make([]int32, maxRemembered/3))
		k.remember(n, make([]int32, maxRemembered/3))
		require.NotNil(t, k.recall(0))
	}
	require.Nil(t, k.recall(1))
	require.NotNil(t, k.recall(2))
	k.remember(9, make([]int32, maxRemembered+1))
	require.Nil(t, k.recall(9))
	require.Equal(t, maxRemembered/3*3, k.size)
	require.Len(t, k.known, k.order.Len())
}
