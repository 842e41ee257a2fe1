package router

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/router/admission"
	"github.com/kvport/kvport/verify/testkit"
)

const (
	soon    = 50 * time.Millisecond
	enough  = 3 * time.Second // for an instance that answers at once, on a busy machine
	notSoon = time.Hour
	asWhole = `{"model":"m","prompt":"hi","max_tokens":9}`
)

// silent answers nothing at all, after what is said first, until the router gives up.
func silentAfter(first string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if first != "" {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, first)
			_ = http.NewResponseController(w).Flush()
		}
		<-r.Context().Done()
	}
}

// headOnly sends the head of a stream and nothing of it.
func headOnly(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	_ = http.NewResponseController(w).Flush()
	<-r.Context().Done()
}

// A decode instance that accepts a request and never answers is replaced; if all do that, the client is told.
func TestSilentDecode(t *testing.T) {
	limits := func(body string, limit time.Duration, list ...*instanceServer) Config {
		if body == doc {
			return Config{Decode: urls(list...), FirstByteTimeout: limit, AnswerTimeout: notSoon, IdleTimeout: notSoon}
		}
		return Config{Decode: urls(list...), FirstByteTimeout: notSoon, AnswerTimeout: limit, IdleTimeout: notSoon}
	}
	for _, body := range []string{doc, asWhole} {
		for name, fault := range map[string]http.HandlerFunc{"nothing": silentAfter(""), "head": headOnly} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				stuck, good := serveInstance(t, fault), serveInstance(t, tokens)
				f := serveRouter(t, limits(body, enough, stuck, good))
				resp, text := post(t, f.URL+"/v1/completions", body)
				require.Equal(t, 200, resp.StatusCode)
				require.Contains(t, text, "[DONE]")
				require.Len(t, stuck.requests(), 1)

				f = serveRouter(t, limits(body, soon, stuck))
				resp, text = post(t, f.URL+"/v1/completions", body)
				require.Equal(t, 504, resp.StatusCode)
				require.Contains(t, text, `"upstream_timeout"`)
				require.Eventually(t, func() bool { return f.outcomes(t, upstreamError) == 1 }, waitLimit, waitTick)
			})
		}
	}
}

// A stream that stops in its middle ends with an error that the client can tell from an end.
func TestIdleStream(t *testing.T) {
	stuck := serveInstance(t, silentAfter("data: {\"n\":1}\n\n"))
	f := serveRouter(t, Config{Decode: urls(stuck), FirstByteTimeout: notSoon, IdleTimeout: soon})
	resp, text := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 200, resp.StatusCode)
	require.True(t, strings.HasPrefix(text, "data: {\"n\":1}\n\n"), text)
	require.Contains(t, text, `"code":"upstream_timeout"`)
	require.NotContains(t, text, "[DONE]")
	require.Eventually(t, func() bool { return f.outcomes(t, broken) == 1 }, waitLimit, waitTick)
}

// A stream that goes on slowly is left alone, however long it takes all together.
func TestSlowStreamIsNoIdleStream(t *testing.T) {
	const pieces = 8
	d := serveInstance(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for range pieces {
			<-time.After(time.Second / pieces)
			fmt.Fprint(w, "data: 1\n\n")
			_ = http.NewResponseController(w).Flush()
		}
		fmt.Fprint(w, "data: [DONE]\n\n")
	})
	f := serveRouter(t, Config{Decode: urls(d), FirstByteTimeout: 30 * time.Second, IdleTimeout: 30 * time.Second, AnswerTimeout: time.Second / 2})
	_, text := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, pieces, strings.Count(text, "data: 1"))
	require.Contains(t, text, "[DONE]")
}

// A prefill instance that never answers costs its limit, not the request.
func TestSilentPrefill(t *testing.T) {
	t.Parallel()
	stuck, good, d := serveInstance(t, silentAfter("")), serveInstance(t, ticket("G")), serveInstance(t, tokens)
	var log testkit.Log
	f := serveRouter(t, Config{Prefill: urls(stuck, good), Decode: urls(d), PrefillTimeout: enough, Log: logTo(&log)})
	resp, _ := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 200, resp.StatusCode)
	require.Contains(t, string(d.requests()[0].body["kv_transfer_params"]), `"G"`)
	require.Contains(t, log.String(), "instance kept silent for 3s")
}

// An instance that closes one connection for another is asked again, and no other way of failing is.
func TestOneClosedConnection(t *testing.T) {
	for name, tt := range map[string]struct {
		fault  http.HandlerFunc
		status int
	}{
		"reset": {reset(""), 200}, "cut": {reset("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"), 502}, "500": {code(500), 500},
	} {
		t.Run(name, func(t *testing.T) {
			d := serveInstance(t, tokens, tt.fault)
			f := serveRouter(t, Config{Decode: urls(d)})
			resp, text := post(t, f.URL+"/v1/completions", doc)
			require.Equal(t, tt.status, resp.StatusCode, text)
			if tt.status == 200 {
				require.Len(t, d.requests(), 2)
				require.Equal(t, string(d.requests()[0].body["prompt"]), string(d.requests()[1].body["prompt"]))
			} else {
				require.Len(t, d.requests(), 1)
			}
		})
	}
}

// Instances that break before they answer are told from those that are not there.
func TestBrokenDecode(t *testing.T) {
	broken := serveInstance(t, reset(""))
	f := serveRouter(t, Config{Decode: urls(broken)})
	resp, text := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 502, resp.StatusCode)
	require.Contains(t, text, `"upstream_error"`)
	require.Len(t, broken.requests(), 2)
	f = serveRouter(t, Config{Decode: []string{refusing(t)}})
	resp, _ = post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 503, resp.StatusCode)
}

// Headers of instances are held for each request: they have a limit, too.
func TestLongHeaders(t *testing.T) {
	long := serveInstance(t, func(w http.ResponseWriter, _ *http.Request) {
		for i := range 8 {
			w.Header().Set(fmt.Sprintf("X-Long-%d", i), strings.Repeat("x", 60<<10))
		}
	})
	f := serveRouter(t, Config{Decode: urls(long)})
	resp, _ := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 502, resp.StatusCode)
	require.Empty(t, resp.Header.Get("X-Long-0"))
}

// Bodies of running requests have a limit together, since each is held until its request ends, and one client cannot fill it.
func TestBodiesTogether(t *testing.T) {
	held := make(chan struct{})
	letGo := sync.OnceFunc(func() { close(held) })
	came := make(chan struct{}, 64) // the instance has a body, or its request is over
	d := serveInstance(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		came <- struct{}{}
		<-held
		tokens(w, r)
	})
	f := serveRouter(t, Config{Decode: urls(d), OwnKeys: true, Key: anyKey, FirstByteTimeout: notSoon, BodyTimeout: notSoon, WriteTimeout: notSoon})
	f.router.pool.unlimited()
	t.Cleanup(letGo) // before router and instance close, which wait for their requests
	large := `{"stream":true,"prompt":"` + strings.Repeat("a", 7<<20) + `"}`
	var refused atomic.Int64
	var tasks sync.WaitGroup
	send := func(key string) {
		tasks.Go(func() {
			defer func() { came <- struct{}{} }()
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.URL+"/v1/completions", strings.NewReader(large))
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set("Authorization", "Bearer "+key)
			resp, err := http.DefaultClient.Do(req)
			switch {
			case err != nil:
				t.Error(err)
				return
			case resp.StatusCode == http.StatusTooManyRequests:
				refused.Add(1)
			case resp.StatusCode != http.StatusOK:
				t.Errorf("status %d", resp.StatusCode)
			}
			resp.Body.Close()
		})
		<-came
	}
	most := maxBodies / 8 * 7 / len(large)
	for range most + 1 {
		send("hog")
	}
	require.EqualValues(t, 1, refused.Load())
	require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.refusals.WithLabelValues(string(admission.Bodies))))
	for range 2 {
		send("other")
	}
	require.EqualValues(t, 1, refused.Load(), "another client has room")
	letGo()
	tasks.Wait()
	require.Eventually(t, func() bool {
		f.router.gate.mu.Lock()
		defer f.router.gate.mu.Unlock()
		return f.router.gate.room.Take("any", maxBodies/8*7) == nil
	}, waitLimit, waitTick, "nothing is held any more")
}

// A refusal names the bytes that clients share, which grow with the largest body.
func TestBodiesRefusal(t *testing.T) {
	f := serveRouter(t, Config{Decode: urls(serveInstance(t, tokens)), MaxBody: 100 << 20})
	require.NoError(t, f.router.gate.hold("127.0.0.1", 175<<20))
	resp, text := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 429, resp.StatusCode)
	require.Contains(t, text, "seven eighths of what others leave of 200 MiB")
	f.router.gate.drop("127.0.0.1", 175<<20)
	resp, _ = post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 200, resp.StatusCode)
}

// An instance's redirect never reaches a client: another instance is asked, and without one the answer is an
// error.
func TestRedirects(t *testing.T) {
	elsewhere := func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "http://10.0.0.1/secret", http.StatusTemporaryRedirect)
	}
	bad := serveInstance(t, elsewhere)
	f := serveRouter(t, Config{Decode: urls(bad)})
	for _, ask := range []struct{ method, path string }{{"POST", "/v1/completions"}, {"GET", "/v1/models"}} {
		req, err := http.NewRequestWithContext(t.Context(), ask.method, f.URL+ask.path, strings.NewReader(doc))
		require.NoError(t, err)
		resp, err := http.DefaultTransport.RoundTrip(req)
		require.NoError(t, err)
		text, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, 502, resp.StatusCode)
		require.Empty(t, resp.Header.Get("Location"))
		require.NotContains(t, string(text), "secret")
	}
	p, d := serveInstance(t, elsewhere), serveInstance(t, tokens)
	f = serveRouter(t, Config{Prefill: urls(p), Decode: urls(bad, d)})
	resp, text := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 200, resp.StatusCode)
	require.Contains(t, text, "[DONE]")
	require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.handoffs.WithLabelValues("none", noPrefill)))
}

// A long answer passes through; nothing that an instance sends has to fit into the router.
func TestLongAnswers(t *testing.T) {
	const size = 8 << 20
	piece := strings.Repeat("x", 1<<16)
	goOn := make(chan struct{})
	long := func(length bool, cut bool) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			if length {
				w.Header().Set("Content-Length", fmt.Sprint(size))
			}
			for i := range size / len(piece) {
				if i == size/len(piece)/2 {
					_ = http.NewResponseController(w).Flush()
					<-goOn // the first half must have come by then
					if cut {
						panic(http.ErrAbortHandler)
					}
				}
				_, _ = io.WriteString(w, piece)
			}
		}
	}
	for _, length := range []bool{false, true} {
		for _, cut := range []bool{false, true} {
			t.Run(fmt.Sprintf("length %v cut %v", length, cut), func(t *testing.T) {
				d := serveInstance(t, long(length, cut))
				f := serveRouter(t, Config{Decode: urls(d)})
				resp, err := http.Post(f.URL+"/v1/completions", "", strings.NewReader(asWhole))
				require.NoError(t, err)
				defer resp.Body.Close()
				require.Equal(t, 200, resp.StatusCode)
				_, err = io.ReadFull(resp.Body, make([]byte, size/4))
				require.NoError(t, err, "before the instance has said the rest")
				goOn <- struct{}{}
				rest, err := io.ReadAll(resp.Body)
				if cut {
					require.ErrorIs(t, err, io.ErrUnexpectedEOF)
					require.Eventually(t, func() bool { return f.outcomes(t, broken) == 1 }, waitLimit, waitTick)
					return
				}
				require.NoError(t, err)
				require.Len(t, rest, size-size/4)
				require.Eventually(t, func() bool { return f.outcomes(t, plain) == 1 }, waitLimit, waitTick)
			})
		}
	}
}

// A prefill instance that says too much is not used, and not blamed: the request may have asked for it.
func TestLongPrefillAnswer(t *testing.T) {
	p := serveInstance(t, func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"text":%q,"kv_transfer_params":{"kvport_ticket":"T"}}`, strings.Repeat("x", maxPrefillAnswer))
	})
	d := serveInstance(t, tokens)
	f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d)})
	resp, _ := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 200, resp.StatusCode)
	require.NotContains(t, d.requests()[0].body, "kv_transfer_params")
	require.Equal(t, "up", routerHealth(t, f, "").Instances[0].State)
}

// Instances get the router's key for them, whatever the client's is.
func TestUpstreamKey(t *testing.T) {
	p, d := serveInstance(t, ticket("T")), serveInstance(t, tokens)
	f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d), OwnKeys: true, UpstreamKey: "inner"})
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.URL+"/v1/completions", strings.NewReader(doc))
	require.NoError(t, err)
	req.Header.Set("Authorization", "Bearer outer")
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	for _, s := range append(p.requests(), d.requests()...) {
		require.Equal(t, []string{"Bearer inner"}, s.header.Values("Authorization"))
	}
}

// An instance that falls silent when it has only said who speaks is replaced, too: nothing of the answer has come.
func TestSilentBehindTheRole(t *testing.T) {
	stuck := serveInstance(t, silentAfter("data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n"))
	good := serveInstance(t, tokens)
	f := serveRouter(t, Config{Decode: urls(stuck, good), FirstByteTimeout: notSoon, IdleTimeout: time.Second}) // more than a good one needs on a busy machine
	resp, text := post(t, f.URL+"/v1/chat/completions", doc)
	require.Equal(t, 200, resp.StatusCode)
	require.Equal(t, "data: {\"n\":1}\n\ndata: [DONE]\n\n", text)
}
