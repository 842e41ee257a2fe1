package router

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/router/policy"
	"github.com/kvport/kvport/verify/testkit"
)

// complete sends a request with headers and returns its whole answer's header.
func complete(t *testing.T, f *front, body string, header ...string) http.Header {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.URL+"/v1/completions", strings.NewReader(body))
	require.NoError(t, err)
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := f.Client().Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, http.StatusOK, resp.StatusCode)
	_, err = io.Copy(io.Discard, resp.Body)
	require.NoError(t, err)
	return resp.Header
}

func completion(prompt string) string { return fmt.Sprintf(`{"prompt":%q,"stream":true}`, prompt) }

// counts is how many requests each instance got.
func counts(list []*instanceServer) (n []int) {
	for _, s := range list {
		n = append(n, len(s.requests()))
	}
	return n
}

// several instances that answer alike.
func several(t *testing.T, n int, h http.HandlerFunc) (list []*instanceServer, urls []string) {
	for range n {
		s := serveInstance(t, h)
		list, urls = append(list, s), append(urls, s.URL)
	}
	return list, urls
}

// idle is what the policy counts after all requests: nothing.
func idle(t *testing.T, r *Router) {
	t.Helper()
	r.pool.mu.Lock()
	defer r.pool.mu.Unlock()
	for i := range r.pool.urls {
		running, waiting := r.pool.policy.Busy(i)
		require.Zero(t, running)
		require.InDelta(t, 0, waiting, 1e-6)
	}
}

// TestPrefixGoesBack: of many prompts each goes to the pair that has its beginning, and round robin does not care.
func TestPrefixGoesBack(t *testing.T) {
	for name, sticks := range map[string]bool{policy.PrefixAware: true, policy.RoundRobin: false} {
		ps, pURLs := several(t, 3, ticket("t"))
		ds, dURLs := several(t, 3, tokens)
		f := serveRouter(t, Config{Prefill: pURLs, Decode: dURLs, Policy: name})
		for i := range 4 {
			before := [2][]int{counts(ps), counts(ds)}
			prompt := strings.Repeat(fmt.Sprint("prompt ", i, " "), 200)
			for turn := range 4 {
				complete(t, f, completion(prompt+strings.Repeat(" and more", turn)))
			}
			used := 0
			for role, list := range [][]*instanceServer{ps, ds} {
				for j, n := range counts(list) {
					if n > before[role][j] {
						used++
					}
				}
			}
			if sticks {
				require.LessOrEqual(t, used, 2, name)
			} else {
				require.Equal(t, 6, used, name)
			}
		}
		idle(t, f.router)
	}
}

// TestSessions: requests with one key go to one pair, wherever the key is.
func TestSessions(t *testing.T) {
	for _, tt := range []struct {
		key, body string
		header    []string
	}{
		{"", completion("hi"), []string{"X-Session-Id", "a"}},
		{"header:X-User", completion("hi"), []string{"X-User", "a"}},
		{"cookie:sid", completion("hi"), []string{"Cookie", "x=y; sid=a"}},
		{"field:user", `{"prompt":"hi","user":"a"}`, nil},
	} {
		ps, pURLs := several(t, 3, ticket("t"))
		ds, dURLs := several(t, 3, tokens)
		f := serveRouter(t, Config{Prefill: pURLs, Decode: dURLs, Policy: policy.Session, SessionKey: tt.key})
		for range 5 {
			complete(t, f, tt.body, tt.header...)
		}
		require.ElementsMatch(t, []int{0, 0, 5}, counts(ps), tt.key)
		require.ElementsMatch(t, []int{0, 0, 5}, counts(ds), tt.key)
		for range 6 {
			complete(t, f, completion("hi")) // without a session the least loaded
		}
		require.NotContains(t, counts(ds), 0, tt.key)
	}
	for _, key := range []string{"x", "header:", "query:x", "header:a b"} {
		_, err := New(Config{Decode: []string{"http://x"}, SessionKey: key})
		require.EqualError(t, err, fmt.Sprintf("--session-key is %q, want header:NAME, cookie:NAME or field:NAME, such as header:X-Session-Id", key))
	}
}

// TestReplicas: prefill and decode instance of a request are in one group, whatever the policy, and when the prefill
// instances of a group are gone another group takes the requests.
func TestReplicas(t *testing.T) {
	for _, name := range policy.Names() {
		named := func(group string) http.HandlerFunc { return ticket(group) }
		var c Config
		var decodes []*instanceServer
		for _, group := range []string{"a", "b"} {
			_, pURLs := several(t, 2, named(group))
			ds, dURLs := several(t, 2, tokens)
			c.Replicas = append(c.Replicas, Replica{group, pURLs, dURLs})
			decodes = append(decodes, ds...)
		}
		c.Policy = name
		f := serveRouter(t, c)
		long := strings.Repeat("long ", 400)
		for i := range 12 {
			complete(t, f, completion(fmt.Sprint(i, long)))
		}
		tickets := 0
		for i, d := range decodes {
			for _, s := range d.requests() {
				var params struct {
					Ticket string `json:"kvport_ticket"`
				}
				if s.body["kv_transfer_params"] != nil {
					require.NoError(t, json.Unmarshal(s.body["kv_transfer_params"], &params))
					require.Equal(t, [...]string{"a", "b"}[i/2], params.Ticket)
					tickets++
				}
			}
		}
		if name == policy.PDAware { // which finds out that these instances compute nothing
			require.Positive(t, tickets)
		} else {
			require.Equal(t, 12, tickets, name)
		}
		h := f.router.pool.health()
		require.Equal(t, "a", h.instances[0].Group)
		require.True(t, h.paired)
		idle(t, f.router)
	}
	refused := refusing(t)
	d, other := serveInstance(t, tokens), serveInstance(t, tokens)
	p := serveInstance(t, ticket("b"))
	f := serveRouter(t, Config{Policy: policy.LeastLoaded, Replicas: []Replica{
		{"a", []string{refused}, []string{d.URL}}, {"b", []string{p.URL}, []string{other.URL}},
	}})
	for range 8 {
		complete(t, f, completion("hi"))
	}
	require.Len(t, p.requests(), 7)
	require.Len(t, other.requests(), 7)
}

func TestReplicaConfig(t *testing.T) {
	one := []string{"http://a:1"}
	for want, list := range map[string][]Replica{
		`--replica: the name "x" appears twice`:                                    {{"x", nil, one}, {"x", nil, []string{"http://b:1"}}},
		`--replica: x has no decode instance`:                                      {{"x", one, nil}},
		`--replica: "http://a:1" appears in two replicas`:                          {{"x", nil, one}, {"y", nil, one}},
		`--replica: "" is not a name, want visible ASCII without spaces or quotes`: {{"", nil, one}},
		`--replica: "b:1" is no URL, want http://b:1`:                              {{"x", nil, []string{"b:1"}}},
	} {
		_, err := New(Config{Replicas: list})
		require.EqualError(t, err, want)
	}
	_, err := New(Config{Replicas: []Replica{{"x", one, one}}})
	require.NoError(t, err)
	_, err = New(Config{Decode: one, Policy: "sesion"})
	require.EqualError(t, err, `--policy: unknown policy "sesion", did you mean "session"?`)
}

// TestRouteHeader: a client that asks learns why its instances were chosen, if it has a key where there are keys. No
// instance sees the question, and what an instance says is not passed on.
func TestRouteHeader(t *testing.T) {
	p := serveInstance(t, ticket("t"))
	d := serveInstance(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Kvport-Route", "of an instance")
		tokens(w, r)
	})
	several := false
	f := serveRouter(t, Config{
		Prefill: []string{p.URL}, Decode: []string{d.URL}, Policy: policy.PrefixAware,
		OwnKeys:    true,
		Key:        onlyKey,
		SharedKeys: func() bool { return several },
	})
	long := completion(strings.Repeat("long ", 100))
	for range 2 {
		require.Empty(t, complete(t, f, long, "Authorization", "Bearer k").Values("X-Kvport-Route"))
	}
	got := complete(t, f, long, "X-Kvport-Route", "1", "Authorization", "Bearer k").Values("X-Kvport-Route")
	require.Len(t, got, 1)
	require.Equal(t, fmt.Sprintf("policy=prefix_aware; prefill=%s; decode=%s; why=prefill load 1: 0 running, 0 tokens waiting, 153 lately, prefix 1: holds 95 of 125 tokens, "+
		"decode load 1: 0 running, 0 tokens waiting, 0 lately, prefix 1: holds 95 of 125 tokens", p.URL, d.URL), got[0])
	several = true // what others have asked is nobody's business
	require.Equal(t, fmt.Sprintf("policy=prefix_aware; prefill=%s; decode=%s", p.URL, d.URL),
		complete(t, f, long, "X-Kvport-Route", "1", "Authorization", "Bearer k").Get("X-Kvport-Route"))
	for _, s := range append(p.requests(), d.requests()...) {
		require.NotContains(t, s.header, "X-Kvport-Route")
	}
}

// TestRouteHeaderAfterRetry: the reasons name the prefill instance that served in the end, or that none did.
func TestRouteHeaderAfterRetry(t *testing.T) {
	var failing atomic.Bool
	failing.Store(true)
	var ps []*instanceServer
	for i := range 2 {
		ps = append(ps, serveInstance(t, func(w http.ResponseWriter, r *http.Request) {
			if failing.CompareAndSwap(true, false) {
				code(500)(w, r)
				return
			}
			ticket(fmt.Sprint("of ", i))(w, r)
		}))
	}
	d := serveInstance(t, tokens)
	var log testkit.Log
	f := serveRouter(t, Config{
		Prefill: urls(ps...), Decode: urls(d), Policy: policy.PrefixAware,
		Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	got := complete(t, f, completion("hi"), "X-Kvport-Route", "1").Get("X-Kvport-Route")
	served := 0
	if strings.Contains(string(d.requests()[0].body["kv_transfer_params"]), "of 1") {
		served = 1
	}
	require.Equal(t, []int{1, 1}, counts(ps))
	require.Contains(t, got, fmt.Sprintf("prefill=%s; decode=%s; why=prefill load 1", ps[served].URL, d.URL))
	require.Contains(t, log.String(), fmt.Sprintf(`msg="instances chosen" id=%s decode=%s prefill=%s`, d.requests()[0].header.Get("X-Request-Id"), d.URL, ps[served].URL))

	f = serveRouter(t, Config{Prefill: urls(serveInstance(t, code(500)), serveInstance(t, code(500))), Decode: urls(d), Policy: policy.PrefixAware})
	got = complete(t, f, completion("hi"), "X-Kvport-Route", "1").Get("X-Kvport-Route")
	require.Contains(t, got, fmt.Sprintf("policy=prefix_aware; decode=%s; without=no_prefill; why=", d.URL))
}

// TestTicketFits: a ticket goes to no decode instance that does not fit the one that gave it, and in that case a
// prefill instance that fits is asked again.
func TestTicketFits(t *testing.T) {
	p, q := serveInstance(t, ticket("of p")), serveInstance(t, ticket("of q"))
	busy := serveInstance(t, code(http.StatusTooManyRequests)) // and its ticket is not used up
	d := serveInstance(t, tokens)
	f := serveRouter(t, Config{Prefill: []string{p.URL, q.URL}, Decode: []string{busy.URL, d.URL}})
	f.router.pool.mu.Lock()
	f.router.pool.misfits[pair{0, 3}] = "made up"
	f.router.pool.misfits[pair{1, 2}] = "made up"
	f.router.pool.mu.Unlock()
	complete(t, f, completion("hi"))
	require.Len(t, p.requests(), 1)
	require.Len(t, q.requests(), 1)
	require.Contains(t, string(d.requests()[0].body["kv_transfer_params"]), "of q")
	idle(t, f.router)
}

// TestSkipsPrefill: pd_aware gives a short prompt to a decode instance alone, and this is counted as what it is.
func TestSkipsPrefill(t *testing.T) {
	p, d := serveInstance(t, ticket("t")), serveInstance(t, tokens)
	f := serveRouter(t, Config{Prefill: []string{p.URL}, Decode: []string{d.URL}, Policy: policy.PDAware})
	complete(t, f, completion("hi"))
	require.Empty(t, p.requests())
	require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.handoffs.WithLabelValues("none", policy.Skipped)))
	complete(t, f, completion(strings.Repeat("long ", 400)))
	require.Len(t, p.requests(), 1)
	idle(t, f.router)
}

// told is what instances say by their own word.
type told []policy.Held

func (h told) held(context.Context, *call) []policy.Held { return h }

// TestOwnWord: what instances say about themselves counts more than the history, and what they computed is counted.
func TestOwnWord(t *testing.T) {
	says := func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"kv_transfer_params":{"kvport_ticket":"t"},"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":64}}}`)
	}
	ps, pURLs := several(t, 3, says)
	_, dURLs := several(t, 1, tokens)
	f := serveRouter(t, Config{Prefill: pURLs, Decode: dURLs, Policy: policy.PrefixAware})
	f.router.holders = []holder{told{{Place: 0}, {Place: 1}}, told{{Place: 2, Hit: policy.Hit{Engine: 60}}}}
	ids := "[" + strings.Repeat("7,", 99) + "7]"
	for range 3 {
		complete(t, f, `{"prompt":`+ids+`}`)
	}
	require.Equal(t, []int{0, 0, 3}, counts(ps))
	for kind, want := range map[string]float64{"prompt": 300, "expected": 180, "cached": 192} {
		require.Equal(t, want, testutil.ToFloat64(f.router.metrics.prefix.WithLabelValues(kind)), kind)
	}
}

// TestSharedStore: what an instance that saves to a shared store has answered counts for those that load from there, by what
// their /health says, and by what it said before an instance came into another group.
func TestSharedStore(t *testing.T) {
	ds, dURLs := several(t, 3, tokens)
	f := serveRouter(t, Config{Decode: dURLs, Policy: policy.PrefixAware})
	p := f.router.pool
	for i, ways := range [][]string{{sharedStore}, {sharedStore}, {"X"}} {
		p.saw(i, engineFit("kv_both", gives(ways...), takes("X", ways...)))
	}
	ask := func(only int) string {
		p.mu.Lock()
		for i := range ds {
			p.known[i].busy.all.until = time.Time{}
			if i != only {
				p.known[i].busy.all.until = time.Now().Add(time.Hour) // nothing is sent there
			}
		}
		p.mu.Unlock()
		got := complete(t, f, completion(strings.Repeat("long ", 100)), routeHeader, "1").Get(routeHeader)
		require.Contains(t, got, "decode="+dURLs[only])
		return got
	}
	p.mu.Lock()
	p.regroup(2, byFile, []string{"another"})
	p.mu.Unlock()
	require.Contains(t, ask(0), "holds 0 of 125 tokens")
	require.Contains(t, ask(1), "holds 95 of 125 tokens (engine 0, node 0, shared 95)")
	require.Contains(t, ask(2), "holds 0 of 125 tokens")
	idle(t, f.router)
}

// TestBeginning: the next turn begins with the last one, whatever the spaces, and other conversations do not.
func TestBeginning(t *testing.T) {
	for _, tt := range [][2]string{
		{`{"messages": [ {"role": "user", "content": "a \\\" b\\\\" } ] }`, `{"messages":[{"role":"user","content":"a \\\" b\\\\"},{"role":"assistant","content":" c"}]}`},
		{`{"prompt":"a b"}`, `{"prompt":"a b c"}`},
		{`{"prompt":["a b"]}`, `{"prompt":["a b c"]}`},
		{`{"prompt":[1, 2,3]}`, `{"prompt":[1,2, 3,4]}`},
		{`{"prompt":[1,2,3]}`, `{"prompt":[1,2,3]}`},
	} {
		var first, next fields
		require.NoError(t, json.Unmarshal([]byte(tt[0]), &first))
		require.NoError(t, json.Unmarshal([]byte(tt[1]), &next))
		_, before := first.beginning()
		_, after := next.beginning()
		require.NotEmpty(t, before)
		require.True(t, strings.HasPrefix(string(after), string(before)), "%s, %s", before, after)
		next["cache_salt"] = json.RawMessage(`"s"`)
		scope, _ := next.beginning()
		other, _ := first.beginning()
		require.NotEqual(t, other, scope)
	}
}

// FuzzWithoutSpaces compares with encoding/json.
func FuzzWithoutSpaces(f *testing.F) {
	for _, seed := range []string{`{"a" : "b \\" , "c":["\"", 1 , null]}`, `"`, `" \`, `[1, 2]`, "", `"x"y" z`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, value []byte) {
		got := withoutSpaces(value)
		var want bytes.Buffer
		if json.Compact(&want, value) == nil {
			require.Equal(t, want.String(), string(got))
		}
	})
}

func TestUsage(t *testing.T) {
	for _, body := range []string{"", "x", "{}", `{"usage":{"prompt_tokens":-1}}`, `{"usage":{"prompt_tokens":1e9}}`, `{"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":6}}}`} {
		require.Zero(t, usage([]byte(body)), body)
	}
	require.Equal(t, policy.Usage{Prompt: 5, Cached: 4}, usage([]byte(`{"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}}`)))
	require.Equal(t, policy.Usage{Prompt: 5}, usage([]byte(`{"usage":{"prompt_tokens":5,"prompt_tokens_details":null}}`)))
}

func TestTokenIDs(t *testing.T) {
	for prompt, want := range map[string]int{`"text"`: 0, `[]`: 0, `["a","b"]`: 0, `[[1]]`: 0, ` [1, 2,3]`: 3, `[`: 0, `[ `: 0, ``: 0} {
		require.Equal(t, want, fields{"prompt": json.RawMessage(prompt)}.tokenIDs(), prompt)
	}
}
