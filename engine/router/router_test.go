package router

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// seen is a request as an instance got it.
type seen struct {
	path   string
	header http.Header
	body   fields
}

// instanceServer is an instance that records its requests and answers as the test says.
type instanceServer struct {
	*httptest.Server
	mu   sync.Mutex
	got  []seen
	next []http.HandlerFunc // for the first requests, in order; then usual
}

func serveInstance(t *testing.T, usual http.HandlerFunc, first ...http.HandlerFunc) *instanceServer {
	t.Helper()
	s := &instanceServer{next: first}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		data, _ := io.ReadAll(r.Body)
		r.Body = io.NopCloser(bytes.NewReader(data))
		body := fields{}
		_ = json.Unmarshal(data, &body)
		s.mu.Lock()
		s.got = append(s.got, seen{r.URL.Path, r.Header.Clone(), body})
		h := usual
		if len(s.next) > 0 {
			h, s.next = s.next[0], s.next[1:]
		}
		s.mu.Unlock()
		h(w, r)
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *instanceServer) requests() []seen {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]seen(nil), s.got...)
}

// ticket answers as a prefill instance.
func ticket(name string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"id":"p","kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1,2]],"kvport_ticket":%q}}`, name)
	}
}

// tokens answers as a decode instance, streaming if asked to.
func tokens(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	fmt.Fprint(w, "data: {\"n\":1}\n\n")
	_ = http.NewResponseController(w).Flush()
	fmt.Fprint(w, "data: [DONE]\n\n")
}

func whole200(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprint(w, `{"id":"d"}`)
}

func code(status int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		fmt.Fprintf(w, `{"error":{"code":"%d"}}`, status)
	}
}

// reset sends the beginning of an answer and then breaks the connection.
func reset(before string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		fmt.Fprint(conn, before)
		if tcp, ok := conn.(*net.TCPConn); ok && before == "" {
			_ = tcp.SetLinger(0)
		}
		conn.Close()
	}
}

// refusing is the URL of a port where nobody listens.
func refusing(t *testing.T) string {
	t.Helper()
	// A socket that is bound and does not listen keeps the port from others.
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	require.NoError(t, unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	name, err := unix.Getsockname(fd)
	require.NoError(t, err)
	require.IsType(t, &unix.SockaddrInet4{}, name)
	return fmt.Sprintf("http://127.0.0.1:%d", name.(*unix.SockaddrInet4).Port)
}

type front struct {
	*httptest.Server
	router  *Router
	metrics *prometheus.Registry
}

func serveRouter(t *testing.T, c Config) *front {
	t.Helper()
	reg := prometheus.NewRegistry()
	c.Metrics, c.Gatherer = reg, reg
	r, err := New(c)
	require.NoError(t, err)
	f := &front{httptest.NewServer(r), r, reg}
	t.Cleanup(func() {
		f.Close()
		r.Close()
		http.DefaultClient.CloseIdleConnections()
	})
	return f
}

// outcomes waits for the counters, since an answer arrives before its request is counted.
func (f *front) outcomes(t *testing.T, o outcome) float64 {
	t.Helper()
	return testutil.ToFloat64(f.router.metrics.requests.WithLabelValues(string(o)))
}

func post(t *testing.T, url, body string) (*http.Response, string) {
	t.Helper()
	resp, err := http.Post(url, "application/json", strings.NewReader(body))
	require.NoError(t, err)
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp, string(data)
}

func urls(servers ...*instanceServer) (list []string) {
	for _, s := range servers {
		list = append(list, s.URL)
	}
	return list
}

const doc = `{"model":"m","prompt":"hi","max_tokens":9,"min_tokens":3,"stream":true,"stream_options":{"include_usage":true},"x_unknown":[1.50,{"a":null}],"kv_transfer_params":{"forged":1}}`

func TestPrefillThenDecode(t *testing.T) {
	p, d := serveInstance(t, ticket("T1")), serveInstance(t, tokens)
	f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d)})
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.URL+"/v1/completions", strings.NewReader(doc))
	require.NoError(t, err)
	req.Header.Set("Authorization", "Bearer k")
	req.Header.Set("X-Request-Id", "client's own")
	req.Header.Set("Connection", "X-Hop")
	req.Header.Set("X-Hop", "1")
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, "data: {\"n\":1}\n\ndata: [DONE]\n\n", string(text))
	require.Equal(t, "text/event-stream", resp.Header.Get("Content-Type"))
	id := resp.Header.Get("X-Request-Id")
	require.Len(t, id, 32)

	require.Len(t, p.requests(), 1)
	require.Len(t, d.requests(), 1)
	atP, atD := p.requests()[0], d.requests()[0]
	require.JSONEq(t, `{"model":"m","prompt":"hi","max_tokens":1,"stream":false,"x_unknown":[1.50,{"a":null}],
		"kv_transfer_params":`+remoteDecode+`}`, string(atP.body.encode()))
	require.JSONEq(t, `{"model":"m","prompt":"hi","max_tokens":9,"min_tokens":3,"stream":true,"stream_options":{"include_usage":true},
		"x_unknown":[1.50,{"a":null}],"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1,2]],"kvport_ticket":"T1"}}`, string(atD.body.encode()))
	for _, s := range []seen{atP, atD} {
		require.Equal(t, "/v1/completions", s.path)
		require.Equal(t, "Bearer k", s.header.Get("Authorization"))
		require.Equal(t, id, s.header.Get("X-Request-Id"))
		require.Empty(t, s.header.Get("X-Hop"))
	}
	require.Equal(t, 1.0, f.outcomes(t, disaggregated))
	require.Equal(t, 1, testutil.CollectAndCount(f.router.metrics.ttft))
}

func TestMaxCompletionTokens(t *testing.T) {
	f, err := parse([]byte(`{"max_completion_tokens":50,"messages":[]}`))
	require.NoError(t, err)
	require.JSONEq(t, `{"max_completion_tokens":1,"max_tokens":1,"stream":false,"messages":[],"kv_transfer_params":`+remoteDecode+`}`,
		string(f.forPrefill().encode()))
	require.JSONEq(t, `{"max_completion_tokens":50,"messages":[]}`, string(f.forDecode(nil).encode()))
}

func TestRoundRobin(t *testing.T) {
	p1, p2 := serveInstance(t, ticket("1")), serveInstance(t, ticket("2"))
	d1, d2 := serveInstance(t, whole200), serveInstance(t, whole200)
	f := serveRouter(t, Config{Prefill: urls(p1, p2), Decode: urls(d1, d2)})
	for range 6 {
		resp, _ := post(t, f.URL+"/v1/chat/completions", `{"messages":[]}`)
		require.Equal(t, 200, resp.StatusCode)
	}
	for _, s := range []*instanceServer{p1, p2, d1, d2} {
		require.Len(t, s.requests(), 3)
	}
}

// Bytes reach the client while the instance still works on the rest.
func TestStreamIsNotBuffered(t *testing.T) {
	goOn := make(chan struct{})
	d := serveInstance(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		fmt.Fprint(w, "data: 1\n\n")
		_ = http.NewResponseController(w).Flush()
		<-goOn
		fmt.Fprint(w, "data: 2\n\ndata: [DONE]\n\n")
	})
	f := serveRouter(t, Config{Decode: urls(d)})
	resp, err := http.Post(f.URL+"/v1/completions", "", strings.NewReader(doc))
	require.NoError(t, err)
	defer resp.Body.Close()
	lines := bufio.NewReader(resp.Body)
	line, err := lines.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "data: 1\n", line)
	close(goOn)
	rest, err := io.ReadAll(lines)
	require.NoError(t, err)
	require.Equal(t, "\ndata: 2\n\ndata: [DONE]\n\n", string(rest))
}

// A client that leaves ends its request at the instance that works on it, prefill or decode.
func TestAbortIsPassedOn(t *testing.T) {
	for _, where := range []role{prefill, decode} {
		t.Run(where.String(), func(t *testing.T) {
			begun, ended := make(chan struct{}), make(chan struct{})
			hang := func(_ http.ResponseWriter, r *http.Request) {
				close(begun)
				<-r.Context().Done()
				close(ended)
			}
			p, d := serveInstance(t, ticket("T")), serveInstance(t, tokens)
			if where == prefill {
				p = serveInstance(t, hang)
			} else {
				d = serveInstance(t, hang)
			}
			f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d)})
			ctx, cancel := context.WithCancel(t.Context())
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.URL+"/v1/completions", strings.NewReader(doc))
			require.NoError(t, err)
			failed := make(chan error, 1)
			go func() {
				resp, err := http.DefaultClient.Do(req)
				if err == nil {
					resp.Body.Close()
				}
				failed <- err
			}()
			<-begun
			cancel()
			require.ErrorIs(t, <-failed, context.Canceled)
			<-ended
			f.Close() // waits for the handler
			require.Equal(t, 1.0, f.outcomes(t, aborted))
			list := f.router.pool.health().instances
			for _, in := range list {
				require.Equal(t, "up", in.State, "a client that leaves is no instance's fault")
			}
		})
	}
}

// A request that hangs on an instance goes elsewhere once probes find the instance gone.
func TestLostWhileWaiting(t *testing.T) {
	begun := make(chan struct{})
	stuck := serveInstance(t, func(_ http.ResponseWriter, r *http.Request) {
		close(begun)
		<-r.Context().Done()
	})
	good := serveInstance(t, tokens)
	f := serveRouter(t, Config{Decode: urls(stuck, good)})
	go func() {
		<-begun
		for range silences {
			f.router.pool.probed(0, silent)
		}
	}()
	resp, text := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 200, resp.StatusCode)
	require.Contains(t, text, "[DONE]")
	require.Len(t, good.requests(), 1)
}

func TestSeveralPromptsAreServedPlain(t *testing.T) {
	for body, want := range map[string]int{
		`{"prompt":["a","b"]}`: 0, `{"prompt":[[1],[2]]}`: 0, `{"prompt":["a"]}`: 1, `{"prompt":[1,2]}`: 1, `{"prompt":"a"}`: 1,
	} {
		p, d := serveInstance(t, ticket("T")), serveInstance(t, whole200)
		f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d)})
		resp, _ := post(t, f.URL+"/v1/completions", body)
		require.Equal(t, 200, resp.StatusCode)
		require.Len(t, p.requests(), want, body)
	}
}

func TestRefusals(t *testing.T) {
	d := serveInstance(t, whole200)
	f := serveRouter(t, Config{Decode: urls(d), MaxBody: 64})
	tests := []struct {
		method, path, body string
		status             int
		code               string
	}{
		{"POST", "/v1/completions", `[1]`, 400, "bad_request"},
		{"POST", "/v1/completions", `null`, 400, "bad_request"},
		{"POST", "/v1/completions", `{"a":1} x`, 400, "bad_request"},
		{"POST", "/v1/completions", `{"prompt":"` + strings.Repeat("x", 64) + `"}`, 413, "request_too_large"},
		{"GET", "/v1/completions", ``, 405, "method_not_allowed"},
		{"POST", "/health", ``, 405, "method_not_allowed"},
		{"GET", "/admin", ``, 404, "not_found"},
	}
	for _, tt := range tests {
		req, err := http.NewRequestWithContext(t.Context(), tt.method, f.URL+tt.path, strings.NewReader(tt.body))
		require.NoError(t, err)
		resp, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		var e apiError
		require.NoError(t, json.NewDecoder(resp.Body).Decode(&e))
		resp.Body.Close()
		require.Equal(t, tt.status, resp.StatusCode, tt.path)
		require.Equal(t, tt.code, e.Error.Code)
		require.NotEmpty(t, e.Error.Message)
	}
	require.Empty(t, d.requests())
}

func TestInFlightCap(t *testing.T) {
	begun, goOn := make(chan struct{}), make(chan struct{})
	d := serveInstance(t, func(w http.ResponseWriter, r *http.Request) {
		close(begun)
		<-goOn
		whole200(w, r)
	})
	f := serveRouter(t, Config{Decode: urls(d), MaxInFlight: 1})
	first := make(chan int)
	go func() {
		resp, _ := http.Post(f.URL+"/v1/completions", "", strings.NewReader(doc))
		resp.Body.Close()
		first <- resp.StatusCode
	}()
	<-begun
	resp, text := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 429, resp.StatusCode)
	require.Equal(t, "1", resp.Header.Get("Retry-After"))
	require.Contains(t, text, `"overloaded"`)
	close(goOn)
	require.Equal(t, 200, <-first)
}

// Clients that dawdle over their bodies take no slot from one that does not.
func TestSlowBodyTakesNoSlot(t *testing.T) {
	f := serveRouter(t, Config{Decode: urls(serveInstance(t, whole200)), MaxInFlight: 2})
	for range 8 {
		conn, err := net.Dial("tcp", strings.TrimPrefix(f.URL, "http://"))
		require.NoError(t, err)
		defer conn.Close()
		fmt.Fprint(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 100\r\n\r\n")
		line, err := bufio.NewReader(conn).ReadString('\n')
		require.NoError(t, err)
		require.Contains(t, line, "100 Continue", "the router waits for the body")
		fmt.Fprint(conn, "{")
	}
	resp, text := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 200, resp.StatusCode, text)
}

func TestHealthModelsMetrics(t *testing.T) {
	d := serveInstance(t, whole200)
	p := serveInstance(t, whole200)
	f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d)})
	get := func(path string) (int, string) {
		resp, err := http.Get(f.URL + path)
		require.NoError(t, err)
		defer resp.Body.Close()
		data, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return resp.StatusCode, string(data)
	}
	status, text := get("/health")
	require.Equal(t, 200, status)
	require.Contains(t, text, `"status":"ok"`)
	status, text = get("/v1/models")
	require.Equal(t, 200, status)
	require.JSONEq(t, `{"id":"d"}`, text)
	require.Equal(t, "/v1/models", d.requests()[0].path)

	f.router.pool.probed(0, refused)
	status, text = get("/health")
	require.Equal(t, 200, status)
	require.Contains(t, text, `"status":"degraded"`)
	f.router.pool.probed(1, refused)
	status, text = get("/health")
	require.Equal(t, 503, status)
	require.Contains(t, text, `"status":"unavailable"`)
	_, text = get("/metrics")
	require.Contains(t, text, fmt.Sprintf("kvport_router_instance_up{instance=%q,role=\"decode\"} 0", d.URL))

	f.router.pool.probed(1, healthy)
	f.router.Drain()
	status, _ = get("/health")
	require.Equal(t, 503, status)
	resp, _ := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 503, resp.StatusCode)
}

// Run finds a dead instance and one that came back.
func TestRun(t *testing.T) {
	d := serveInstance(t, whole200, code(503))
	dead := refusing(t)
	changes := make(chan struct{}, 16)
	ctx, cancel := context.WithCancel(t.Context())
	f := serveRouter(t, Config{Prefill: []string{dead}, Decode: urls(d), HealthInterval: 1e6, Transport: roundTrip(func(r *http.Request) (*http.Response, error) {
		select {
		case changes <- struct{}{}:
		default:
		}
		return http.DefaultTransport.RoundTrip(r)
	})})
	done := make(chan struct{})
	go func() {
		f.router.Run(ctx)
		close(done)
	}()
	for seen := 0; ; seen++ {
		<-changes
		available := f.router.pool.health().available
		if seen > 8 && available == [roles]int{prefill: 0, decode: 1} {
			break
		}
		require.Less(t, seen, 10000)
	}
	cancel()
	<-done
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(doc))
	f.Add([]byte(`{"prompt":[ [1] , 2],"max_tokens":1e999}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		body, err := parse(data)
		if err != nil {
			require.ErrorContains(t, err, "request body")
			require.Nil(t, body)
			return
		}
		p, err := parse(body.forPrefill().encode())
		require.NoError(t, err)
		require.Equal(t, "1", string(p["max_tokens"]))
		require.Equal(t, "false", string(p["stream"]))
		require.Equal(t, remoteDecode, string(p["kv_transfer_params"]), "never the client's")
		if body.several() {
			require.Contains(t, body, "prompt")
		}
		plain, err := parse(body.forDecode(nil).encode())
		require.NoError(t, err)
		require.NotContains(t, plain, "kv_transfer_params", "never the client's")
		require.Equal(t, body.forDecode(nil), plain, "every other value is as it was read")
	})
}
