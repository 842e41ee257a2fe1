package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvport/kvport/internal/keyring"
	"github.com/kvport/kvport/internal/register"
	"github.com/kvport/kvport/internal/ticket"
	"github.com/kvport/kvport/verify/cluster"
)

// routerProbes are for a router's clients, for its instances, and for whoever would be one.
func routerProbes() []probe {
	return []probe{
		{id: "router/ssrf-params", group: "outgoing", does: "names addresses in kv_transfer_params and in the id of a request, so that engines connect there", run: ssrfParams},
		{id: "router/ssrf-paths", group: "outgoing", does: "asks a router for other hosts: absolute URLs, CONNECT, paths with two slashes or dots", run: ssrfPaths},
		{id: "router/headers", group: "other", does: "sends hop-by-hop headers, and a key, which are for the router alone; is an instance that sends clients a header for the router", run: hopHeaders},
		{id: "router/large-answers", group: "router-memory", does: "is an instance that gives 20 answers of 60 MB at a time", cost: 20, run: largeAnswers},
		{id: "router/endless-event", group: "other", does: "is an instance whose stream is one line without an end", cost: 10, run: endlessEvent},
		{id: "router/endless-header", group: "other", does: "is an instance that answers with endless headers, endless early hints, or garbage", cost: 10, run: endlessHeader},
		{id: "router/compressed", group: "other", does: "is an instance that answers with a gzip bomb", run: gzipBomb},
		{id: "router/redirects", group: "router-memory", does: "is an instance that redirects clients to another machine", run: redirects},
		{id: "router/endless-health", group: "other", does: "is an instance whose /health is endless, or lies about its limits", cost: 10, run: endlessHealth},
		{id: "router/sessions", group: "other", does: "uses 4,000 sessions and prompts, to make a router's memory grow", cost: 15, run: manySessions},
		{id: "router/register-unsigned", group: "tickets", does: "registers an instance without a signature, with a wrong one and with another deployment's key", run: unsignedRegistration},
		{id: "router/register-replay", group: "tickets", does: "copies an engine's registration from the wire, and sends it again when the engine has left", cost: 10, run: replayedRegistration},
		{id: "router/register-clock", group: "clocks", does: "registers an engine whose clock is an hour ahead, and then right", run: clockJump},
	}
}

// fake is an instance that is not one.
type fake struct {
	url string

	mu   sync.Mutex
	seen []string
}

func (f *fake) requests() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.seen...)
}

// fakeInstance is healthy, and answers requests by serve; nil: with a short completion.
func (r *rig) fakeInstance(ctx context.Context, serve http.HandlerFunc) (*fake, error) {
	f := &fake{}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		dump, _ := httputil.DumpRequest(req, true)
		f.mu.Lock()
		f.seen = append(f.seen, string(dump))
		f.mu.Unlock()
		switch {
		case serve != nil && (req.Method == http.MethodPost || strings.HasPrefix(req.URL.Path, "/x")):
			serve(w, req)
		case req.Method == http.MethodPost:
			_, _ = io.Copy(io.Discard, req.Body)
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, `{"id":"a","object":"text_completion","choices":[{"index":0,"text":"b","finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}`)
		case req.URL.Path == "/health" && serve != nil:
			serve(w, req)
		default:
			_, _ = io.WriteString(w, "{}")
		}
	}))
	_ = srv.Listener.Close()
	srv.Listener = l
	srv.Start()
	r.later(func() { srv.CloseClientConnections(); srv.Close() })
	f.url = srv.URL
	return f, nil
}

// onPost serves POSTs, and is healthy otherwise.
func onPost(serve http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		if req.Method != http.MethodPost {
			_, _ = io.WriteString(w, "{}")
			return
		}
		_, _ = io.Copy(io.Discard, req.Body)
		serve(w, req)
	}
}

// trap is a port that nobody may connect to.
func (r *rig) trap(ctx context.Context) (port string, hits func() int, err error) {
	var mu sync.Mutex
	n := 0
	address, err := r.listen(ctx, func(net.Conn) {
		mu.Lock()
		defer mu.Unlock()
		n++
	})
	if err != nil {
		return "", nil, err
	}
	_, port, err = net.SplitHostPort(address)
	return port, func() int { mu.Lock(); defer mu.Unlock(); return n }, err
}

func ssrfParams(ctx context.Context, r *rig, _ bool) (string, error) {
	port, hits, err := r.trap(ctx)
	if err != nil {
		return "", err
	}
	tries := 0
	for _, f := range r.movers() {
		d, err := r.serve(ctx, sim, r.fixtureConfig(f, "kv_consumer", `{}`))
		if err != nil {
			return "", err
		}
		router, err := r.route(ctx, "", d.URL)
		if err != nil {
			return "", err
		}
		for _, params := range []string{
			`{"do_remote_prefill":true,"remote_host":"127.0.0.1","remote_port":` + port + `,"remote_engine_id":"x","remote_block_ids":[1,2,3]}`,
			`{"do_remote_prefill":true,"kvport_ticket":"` + strings.Repeat("QUFB", 60) + `","remote_host":"127.0.0.1","remote_port":"` + port + `"}`,
			`{"do_remote_decode":true,"remote_host":"127.0.0.1","remote_port":` + port + `,"tp_size":1}`,
			`{"do_remote_prefill":true,"transfer_id":"a","remote_bootstrap_addr":"http://127.0.0.1:` + port + `"}`,
		} {
			id := fmt.Sprintf("___prefill_addr_127.0.0.1:%s___decode_addr_127.0.0.1:%s_%032d", port, port, tries)
			body := strings.Replace(completion(prompt(1)), "{", `{"kv_transfer_params":`+params+",", 1)
			for _, url := range []string{d.URL, router.URL} {
				status, answer, err := r.send(ctx, "POST", url+"/v1/completions", body, map[string]string{"Content-Type": "application/json", "X-Request-Id": id})
				if err != nil || status >= 500 {
					return "", holef("status %d, %q, %v", status, cut(answer), err)
				}
				tries++
			}
		}
	}
	if n := hits(); n > 0 {
		return "", holef("an engine connected %d times to an address that a client named", n)
	}
	return fmt.Sprintf("%d requests name an address, nobody connects to it", tries), nil
}

func ssrfPaths(ctx context.Context, r *rig, _ bool) (string, error) {
	port, hits, err := r.trap(ctx)
	if err != nil {
		return "", err
	}
	u, err := r.fakeInstance(ctx, nil)
	if err != nil {
		return "", err
	}
	router, err := r.route(ctx, "", u.url)
	if err != nil {
		return "", err
	}
	target := "127.0.0.1:" + port
	lines := []string{
		"GET http://" + target + "/x HTTP/1.1", "POST http://" + target + "/v1/completions HTTP/1.1", "CONNECT " + target + " HTTP/1.1", "GET //" + target + "/x HTTP/1.1",
		"GET /\\" + target + "/x HTTP/1.1", "GET /v1/../../" + target + " HTTP/1.1", "GET /v1/models?url=http://" + target + " HTTP/1.1", "POST @" + target + "/v1/completions HTTP/1.1",
		"GET /@" + target + " HTTP/1.1", "OPTIONS * HTTP/1.1",
	}
	for _, line := range lines {
		body := completion("a")
		answer, err := r.raw(ctx, hostOf(router.URL), fmt.Sprintf("%s\r\nHost: localhost\r\nX-Forwarded-Host: %s\r\nForwarded: host=%s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", line, target, target, len(body), body), 2*time.Second)
		if err != nil {
			return "", err
		}
		_, to, _ := strings.Cut(answer, "Location: ") // to a path of its own it may send them
		if to = firstLine(to); strings.Contains(to, "://") || strings.HasPrefix(to, "//") || strings.HasPrefix(to, `/\`) {
			return "", holef("%s: it sends clients there: %s", line, to)
		}
	}
	if n := hits(); n > 0 {
		return "", holef("the router connected there %d times", n)
	}
	return fmt.Sprintf("%d forms, the router connects to its instances alone", len(lines)), r.alive(ctx, router)
}

func hopHeaders(ctx context.Context, r *rig, _ bool) (string, error) {
	u, err := r.fakeInstance(ctx, onPost(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Kvport-Handoff", "loaded; reason=forged")
		w.Header().Set("Set-Cookie", "session=forged")
		_, _ = io.WriteString(w, `{"id":"a","choices":[{"index":0,"text":"b","finish_reason":"stop"}]}`)
	}))
	if err != nil {
		return "", err
	}
	router, err := r.route(ctx, "", u.url, "--api-key-file", r.apiKey)
	if err != nil {
		return "", err
	}
	text := completion("a")
	answer, err := r.raw(ctx, hostOf(router.URL), fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nConnection: close, X-Drop, Content-Type\r\n"+
		"X-Drop: 1\r\nTE: trailers\r\nUpgrade: x\r\nKeep-Alive: 1\r\nContent-Length: %d\r\n\r\n%s", r.key, len(text), text), 3*time.Second)
	if err != nil {
		return "", err
	}
	if strings.Contains(answer, "X-Kvport-Handoff") {
		return "", holef("a client sees what is for the router: %s", cut(answer))
	}
	for _, got := range u.requests() {
		if !strings.HasPrefix(got, "POST") {
			continue
		}
		for _, bad := range []string{"X-Drop", "Upgrade:", "Keep-Alive", r.key} {
			if strings.Contains(got, bad) {
				return "", holef("the instance gets %q", bad)
			}
		}
	}
	return "the instance gets neither the headers nor the client's key, the client nothing that is the router's", nil
}

// badInstance sends requests through a router to an instance that answers badly, and then to a good one.
func (r *rig) badInstance(ctx context.Context, parallel, limitMB int, stream bool, serve http.HandlerFunc) (string, error) {
	u, err := r.fakeInstance(ctx, serve)
	if err != nil {
		return "", err
	}
	router, err := r.route(ctx, "", u.url, "--answer-timeout", "8s", "--first-byte-timeout", "8s", "--idle-timeout", "8s")
	if err != nil {
		return "", err
	}
	before, most := resident(router.PID()), 0
	body := completion("a")
	if stream {
		body = strings.Replace(body, "{", `{"stream":true,`, 1)
	}
	limited, cancel := context.WithTimeout(ctx, 25*time.Second)
	defer cancel()
	ended := make(chan struct{})
	var all sync.WaitGroup
	for range parallel {
		all.Go(func() { r.drain(limited, router.URL+"/v1/completions", body) })
	}
	go func() { all.Wait(); close(ended) }()
	for running := true; running; {
		select {
		case <-ended:
			running = false
		case <-time.After(20 * time.Millisecond):
		}
		most = max(most, resident(router.PID())-before)
	}
	if most > limitMB {
		return "", holef("the router grew by %d MB, at most %d are right", most, limitMB)
	}
	return fmt.Sprintf("the router grew by %d MB", most), r.alive(ctx, router)
}

// drain reads an answer and keeps nothing.
func (r *rig) drain(ctx context.Context, url, body string) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
}

func largeAnswers(ctx context.Context, r *rig, _ bool) (string, error) {
	return r.badInstance(ctx, 20, 700, false, onPost(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"choices":[{"text":"`)
		_, _ = io.Copy(w, zeros(60<<20))
		_, _ = io.WriteString(w, `"}]}`)
	}))
}

func endlessEvent(ctx context.Context, r *rig, _ bool) (string, error) {
	return r.badInstance(ctx, 4, 300, true, onPost(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: ")
		_, _ = io.Copy(w, zeros(256<<20))
	}))
}

func gzipBomb(ctx context.Context, r *rig, _ bool) (string, error) {
	bomb, err := bombOf(400 << 20)
	if err != nil {
		return "", err
	}
	return r.badInstance(ctx, 4, 300, false, onPost(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Encoding", "gzip")
		_, _ = w.Write(bomb)
	}))
}

// endlessHeader is a server of its own: net/http would not say such things.
func endlessHeader(ctx context.Context, r *rig, _ bool) (string, error) {
	garbage := make([]byte, 1<<20)
	_, _ = rand.Read(garbage) // never fails
	kinds := []func(w io.Writer){
		func(w io.Writer) {
			_, _ = io.WriteString(w, "HTTP/1.1 200 OK\r\n")
			_, _ = io.Copy(w, &repeated{text: "X-Header: " + strings.Repeat("h", 1000) + "\r\n", n: 400_000})
		},
		func(w io.Writer) {
			_, _ = io.Copy(w, &repeated{text: "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", n: 10_000_000})
		},
		func(w io.Writer) { _, _ = w.Write(garbage) },
		func(w io.Writer) {
			_, _ = io.WriteString(w, "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n{")
		},
		func(w io.Writer) { _, _ = io.WriteString(w, "HTTP/1.1 999 \x1b[2J\r\nContent-Length: 0\r\n\r\n") },
	}
	var seen []string
	for n, answer := range kinds {
		address, err := r.listen(ctx, func(conn net.Conn) {
			_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
			head := make([]byte, 4096)
			got, _ := conn.Read(head)
			if bytes.HasPrefix(head[:got], []byte("POST")) {
				answer(conn)
				return
			}
			_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
		})
		if err != nil {
			return "", err
		}
		router, err := r.route(ctx, "", "http://"+address, "--answer-timeout", "3s", "--idle-timeout", "3s")
		if err != nil {
			return "", err
		}
		before := resident(router.PID())
		limited, cancel := context.WithTimeout(ctx, 15*time.Second)
		status, _, err := r.post(limited, router.URL+"/v1/completions", "", completion("a"))
		late := limited.Err() != nil
		cancel()
		if late || err == nil && status < 500 && n != 3 {
			return "", holef("answer %d: status %d, %v", n, status, err)
		}
		if grown := resident(router.PID()) - before; grown > 200 {
			return "", holef("answer %d: the router grew by %d MB", n, grown)
		}
		if err := r.alive(ctx, router); err != nil {
			return "", err
		}
		seen = append(seen, strconv.Itoa(status))
	}
	return "clients get " + strings.Join(seen, ", "), nil
}

// repeated is a text n times.
type repeated struct {
	text string
	n    int
	left string
}

// Read implements io.Reader.
func (r *repeated) Read(p []byte) (int, error) {
	if r.left == "" {
		if r.n == 0 {
			return 0, io.EOF
		}
		r.n--
		r.left = r.text
	}
	n := copy(p, r.left)
	r.left = r.left[n:]
	return n, nil
}

func redirects(ctx context.Context, r *rig, _ bool) (string, error) {
	port, hits, err := r.trap(ctx)
	if err != nil {
		return "", err
	}
	for _, code := range []int{301, 302, 303, 307, 308} {
		u, err := r.fakeInstance(ctx, onPost(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "http://127.0.0.1:"+port+"/stolen")
			w.WriteHeader(code)
		}))
		if err != nil {
			return "", err
		}
		router, err := r.route(ctx, "", u.url)
		if err != nil {
			return "", err
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, router.URL+"/v1/completions", strings.NewReader(completion("a")))
		if err != nil {
			return "", err
		}
		req.Header.Set("Content-Type", "application/json")
		client := http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
		resp, err := client.Do(req)
		if err != nil {
			return "", err
		}
		_ = resp.Body.Close()
		if resp.StatusCode < 500 || resp.Header.Get("Location") != "" {
			return "", holef("%d reaches the client: %d, Location %q", code, resp.StatusCode, resp.Header.Get("Location"))
		}
	}
	if n := hits(); n > 0 {
		return "", holef("the router followed %d of them", n)
	}
	return "five kinds of redirects are neither followed nor passed on", nil
}

func endlessHealth(ctx context.Context, r *rig, _ bool) (string, error) {
	good, err := r.serve(ctx, sim, "")
	if err != nil {
		return "", err
	}
	var seen []string
	for name, health := range map[string]http.HandlerFunc{
		"endless": func(w http.ResponseWriter, _ *http.Request) { _, _ = io.Copy(w, zeros(4<<30)) },
		"lies": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"status":"ready","max_in_flight":-9223372036854775808,"in_flight":9223372036854775807,"kv":{"block_size":-1,"ranks":1e18}}`)
		},
		"nested": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"kv":`+strings.Repeat("[", 1<<20))
		},
	} {
		u, err := r.fakeInstance(ctx, func(w http.ResponseWriter, req *http.Request) {
			if req.URL.Path == "/health" {
				health(w, req)
				return
			}
			w.WriteHeader(http.StatusInternalServerError)
		})
		if err != nil {
			return "", err
		}
		router, err := r.route(ctx, "", u.url+","+good.URL, "--health-interval", "100ms")
		if err != nil {
			return "", err
		}
		before := resident(router.PID())
		pause(ctx, 3*time.Second)
		if err := r.same(ctx, sim, router.URL, prompt(1), prompt(2)); err != nil {
			return "", fmt.Errorf("%s: %w", name, err)
		}
		grown := resident(router.PID()) - before
		if grown > 200 {
			return "", holef("%s: the router grew by %d MB", name, grown)
		}
		seen = append(seen, fmt.Sprintf("%s: %d MB more", name, grown))
	}
	return strings.Join(seen, "; ") + "; the other instance serves", nil
}

// registrar is a router with a port for registrations, and the ring of its deployment.
func (r *rig) registrar(ctx context.Context) (router *cluster.Process, at, ring string, err error) {
	folder, err := r.folder()
	if err != nil {
		return nil, "", "", err
	}
	ring = filepath.Join(folder, "ring")
	if out, code, err := r.ends(ctx, "keys", "init", "--file", ring); err != nil || code != 0 {
		return nil, "", "", fmt.Errorf("kvport keys init: %d, %s, %w", code, out, err)
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, "", "", err
	}
	address := l.Addr().String()
	_ = l.Close()
	router, err = r.start(ctx, "route", "--port", "0", "--register", address, "--ticket-key-file", ring)
	return router, "http://" + address, ring, err
}

// knows says whether a router lists an instance.
func (r *rig) knows(ctx context.Context, router *cluster.Process, instance string) bool {
	_, answer, err := r.send(ctx, "GET", router.URL+"/health", "", nil)
	return err == nil && strings.Contains(answer, instance)
}

func signer(path string) (func(string) string, error) {
	ring, err := keyring.Load(path)
	if err != nil {
		return nil, err
	}
	return func(text string) string {
		signature, err := ticket.SignForRouter(ring, ticket.RegisterText, text)
		if err != nil {
			return ""
		}
		return signature
	}, nil
}

func manySessions(ctx context.Context, r *rig, _ bool) (string, error) {
	u, err := r.fakeInstance(ctx, nil)
	if err != nil {
		return "", err
	}
	router, err := r.route(ctx, u.url, u.url, "--policy", "prefix_aware")
	if err != nil {
		return "", err
	}
	before := resident(router.PID())
	jobs := make(chan int)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for n := range jobs {
				_, _, _ = r.send(ctx, "POST", router.URL+"/v1/completions", completion(strings.Repeat(fmt.Sprintf("%d ", n), 500)),
					map[string]string{"Content-Type": "application/json", "X-Session-Id": strings.Repeat(fmt.Sprint(n), 1000)})
			}
		})
	}
	for n := range 4000 {
		jobs <- n
	}
	close(jobs)
	all.Wait()
	grown := resident(router.PID()) - before
	if grown > 250 {
		return "", holef("the router grew by %d MB", grown)
	}
	return fmt.Sprintf("the router grew by %d MB", grown), r.alive(ctx, router)
}

func unsignedRegistration(ctx context.Context, r *rig, _ bool) (string, error) {
	router, at, _, err := r.registrar(ctx)
	if err != nil {
		return "", err
	}
	folder, err := r.folder()
	if err != nil {
		return "", err
	}
	other := filepath.Join(folder, "other")
	if _, _, err := r.ends(ctx, "keys", "init", "--file", other); err != nil {
		return "", err
	}
	sign, err := signer(other)
	if err != nil {
		return "", err
	}
	n := 0
	for _, mac := range []func(string) string{func(string) string { return "" }, func(string) string { return strings.Repeat("0", 64) }, func(string) string { return "x\ty" }, sign} {
		for _, nonce := range []string{"none", ""} {
			body, err := json.Marshal(register.Message{Type: "D", HTTP: "127.0.0.1:9", Nonce: nonce, At: time.Now().UnixNano()})
			if err != nil {
				return "", err
			}
			status, answer, err := r.send(ctx, "POST", at+"/register", string(body), map[string]string{"Content-Type": "application/json", register.MacHeader: mac(string(body))})
			if err != nil || status < 400 {
				return "", holef("status %d, %q, %v", status, cut(answer), err)
			}
			n++
		}
	}
	if r.knows(ctx, router, "127.0.0.1:9") {
		return "", holef("the router lists it")
	}
	return fmt.Sprintf("%d registrations are refused", n), nil
}

// sniffer is a proxy that keeps the registrations that pass.
func (r *rig) sniffer(ctx context.Context, at string) (through string, copies func() []*http.Request, err error) {
	target, err := url.Parse(at)
	if err != nil {
		return "", nil, err
	}
	var mu sync.Mutex
	var kept []*http.Request
	proxy := &httputil.ReverseProxy{Rewrite: func(p *httputil.ProxyRequest) { p.SetURL(target) }}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	srv := &http.Server{ReadHeaderTimeout: 5 * time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		again, err := http.NewRequestWithContext(ctx, req.Method, target.JoinPath(req.URL.Path).String(), bytes.NewReader(body))
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		again.Header = req.Header.Clone()
		mu.Lock()
		kept = append(kept, again)
		mu.Unlock()
		req.Body = io.NopCloser(bytes.NewReader(body))
		proxy.ServeHTTP(w, req)
	})}
	go func() { _ = srv.Serve(l) }()
	r.later(func() { _ = srv.Close() })
	return "http://" + l.Addr().String(), func() []*http.Request { mu.Lock(); defer mu.Unlock(); return kept }, nil
}

// sendAll sends registrations and counts those that are accepted. The others must be refused because they are old.
func sendAll(all []*http.Request) (accepted int, err error) {
	for _, req := range all {
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return 0, err
		}
		said, err := io.ReadAll(io.LimitReader(resp.Body, 4096))
		if err := errors.Join(err, resp.Body.Close()); err != nil {
			return 0, err
		}
		switch resp.StatusCode {
		case http.StatusOK:
			accepted++
		case http.StatusConflict: // it was signed, and is old
		default:
			return 0, fmt.Errorf("a copy is not understood: status %d, %s", resp.StatusCode, cut(string(said)))
		}
	}
	return accepted, nil
}

func replayedRegistration(ctx context.Context, r *rig, _ bool) (string, error) {
	router, at, ring, err := r.registrar(ctx)
	if err != nil {
		return "", err
	}
	through, copies, err := r.sniffer(ctx, at)
	if err != nil {
		return "", err
	}
	folder, err := r.folder()
	if err != nil {
		return "", err
	}
	p, err := r.serve(ctx, sim, r.storeConfig("kv_both", folder, fmt.Sprintf(`{"ticket_key_file":%q}`, ring)), "--register", through)
	if err != nil {
		return "", err
	}
	if !wait(ctx, time.Minute, func() bool { return r.knows(ctx, router, hostOf(p.URL)) }) {
		return "", fmt.Errorf("the engine does not register: %s", p.Logs())
	}
	if err := r.stop(ctx, p); err != nil {
		return "", err
	}
	if !wait(ctx, time.Minute, func() bool { return !r.knows(ctx, router, hostOf(p.URL)) }) {
		return "", fmt.Errorf("the engine does not leave")
	}
	all := copies()
	accepted, err := sendAll(all)
	if err != nil {
		return "", err
	}
	if accepted > 0 || r.knows(ctx, router, hostOf(p.URL)) {
		return "", holef("%d copies of %d registrations are accepted", accepted, len(all))
	}
	return fmt.Sprintf("%d copies are refused", len(all)), nil
}

func clockJump(ctx context.Context, r *rig, _ bool) (string, error) {
	router, at, ring, err := r.registrar(ctx)
	if err != nil {
		return "", err
	}
	sign, err := signer(ring)
	if err != nil {
		return "", err
	}
	nonce := "none"
	say := func(at1 time.Time) (int, error) {
		body, err := json.Marshal(register.Message{Type: "D", HTTP: "127.0.0.1:9", Nonce: nonce, At: at1.UnixNano()})
		if err != nil {
			return 0, err
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, at+"/register", bytes.NewReader(body))
		if err != nil {
			return 0, err
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set(register.MacHeader, sign(string(body)))
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return 0, err
		}
		nonce = resp.Header.Get(register.NonceHeader)
		return resp.StatusCode, resp.Body.Close()
	}
	if _, err := say(time.Now()); err != nil { // it gets a nonce
		return "", err
	}
	for _, ahead := range []time.Duration{time.Hour, 0, -time.Hour, 24 * time.Hour, 0} {
		status, err := say(time.Now().Add(ahead))
		if err != nil {
			return "", err
		}
		if status >= 300 {
			return "", holef("a clock that is %s ahead: status %d", ahead, status)
		}
	}
	if !r.knows(ctx, router, "127.0.0.1:9") {
		return "", holef("the router does not list it")
	}
	return "clocks do not matter", nil
}
