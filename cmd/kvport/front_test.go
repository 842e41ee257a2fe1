package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
)

// stub is an API whose POSTs to /hold run until the test lets them go.
type stub struct{ came, goOn chan struct{} }

func (s *stub) Ready() string { return "" }
func (s *stub) Drain()        {}
func (s *stub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, err := io.ReadAll(r.Body)
	if r.URL.Path == "/hold" && err == nil {
		s.came <- struct{}{}
		<-s.goOn
	}
	_, _ = io.WriteString(w, "served")
}

// openFront is a front on loopback with a stub behind it.
func openFront(t *testing.T, change func(*listenFlags)) (*front, *stub) {
	t.Helper()
	f := &listenFlags{host: "127.0.0.1"}
	if change != nil {
		change(f)
	}
	l, keys, err := f.listen()
	require.NoError(t, err)
	front := newFront(l, f, keys, prometheus.NewRegistry())
	s := &stub{came: make(chan struct{}, 100), goOn: make(chan struct{})}
	var a api = s
	front.api.Store(&a)
	t.Cleanup(func() {
		front.close()
		<-front.ended
	})
	return front, s
}

// dial opens a connection and sends text.
func dial(t *testing.T, front *front, text string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(front.url, "http://"))
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(time.Minute)))
	_, err = io.WriteString(c, text)
	require.NoError(t, err)
	return c
}

// answerTo sends one request over a connection of its own.
func answerTo(t *testing.T, front *front, head string) (status int, body string) {
	t.Helper()
	c := dial(t, front, head)
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(data)
}

const (
	good   = "GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n"
	begins = "POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
)

// Nobody locks others out with connections: of those that wait for their clients the oldest goes, in
// whatever state it is. One whose request runs stays.
func TestConnectionsMakeRoom(t *testing.T) {
	for name, text := range map[string]string{"idle": "", "half a head": "POST /x HT", "half a body": begins, "after an answer": good} {
		t.Run(name, func(t *testing.T) {
			front, api := openFront(t, func(f *listenFlags) { f.maxConnections = 8 })
			running := dial(t, front, "POST /hold HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
			<-api.came
			var others []net.Conn
			for range 50 {
				c := dial(t, front, text)
				if text == good {
					_, err := http.ReadResponse(bufio.NewReader(c), nil)
					require.NoError(t, err)
				}
				others = append(others, c)
			}
			code, body := answerTo(t, front, good)
			require.Equal(t, 200, code)
			require.Equal(t, "served", body)
			_, err := io.Copy(io.Discard, others[0])
			if err != nil { // closed with something unread
				require.ErrorContains(t, err, "reset")
			}
			close(api.goOn)
			resp, err := http.ReadResponse(bufio.NewReader(running), nil)
			require.NoError(t, err)
			require.Equal(t, 200, resp.StatusCode)
		})
	}
}

// Bodies that come slowly cannot fill the memory: the oldest of them go.
func TestSlowBodiesShareRoom(t *testing.T) {
	front, _ := openFront(t, nil)
	front.gate.mu.Lock()
	front.gate.mostComing = 1000
	front.gate.mu.Unlock()
	first := dial(t, front, begins+strings.Repeat(" ", 50))
	require.Eventually(t, func() bool {
		front.gate.mu.Lock()
		defer front.gate.mu.Unlock()
		return front.gate.coming > 0
	}, time.Minute, time.Millisecond, "it is older than the next one once it counts")
	head := fmt.Sprintf("POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", 970)
	code, _ := answerTo(t, front, head+strings.Repeat(" ", 970))
	require.Equal(t, 200, code)
	_, err := io.Copy(io.Discard, first)
	if err != nil {
		require.ErrorContains(t, err, "reset")
	}
	front.gate.mu.Lock()
	defer front.gate.mu.Unlock()
	require.Zero(t, front.gate.coming, "what has come whole, or was cut, does not count")
}

// Web pages cannot use the API through a browser on this machine, neither under a name that leads here
// nor from another origin; and bodies are JSON.
func TestBrowsers(t *testing.T) {
	front, _ := openFront(t, func(f *listenFlags) { f.allowedHosts = []string{"Engine.Example"} })
	own := strings.TrimPrefix(front.url, "http://")
	for _, tt := range []struct {
		name, method, host, headers, body string
		want                              int
		code                              string
	}{
		{"own address", "GET", own, "", "", 200, ""},
		{"localhost", "GET", "LocalHost:1234", "", "", 200, ""},
		{"another loopback address", "GET", "127.8.8.8", "", "", 200, ""},
		{"IPv6", "GET", "[::1]:8000", "", "", 200, ""},
		{"allowed name", "GET", "engine.example.:80", "", "", 200, ""},
		{"another name", "GET", "evil.example", "", "", 403, "host_not_allowed"},
		{"a name like ours", "GET", "localhost.evil.example:8000", "", "", 403, "host_not_allowed"},
		{"another address", "GET", "192.0.2.1", "", "", 403, "host_not_allowed"},
		{"another name, POST", "POST", "evil.example", "Origin: http://evil.example\r\n", "", 403, "host_not_allowed"},
		{"own origin", "POST", "localhost:8000", "Origin: http://localhost:8000\r\nContent-Type: application/json\r\n", "{}", 200, ""},
		{"another origin", "POST", own, "Origin: http://evil.example\r\nContent-Type: application/json\r\n", "{}", 403, "cross_origin"},
		{"another port", "POST", "localhost:8000", "Origin: http://localhost:3000\r\nContent-Type: application/json\r\n", "{}", 403, "cross_origin"},
		{"a sandboxed page", "POST", own, "Origin: null\r\n", "", 403, "cross_origin"},
		{"cross-site", "POST", own, "Sec-Fetch-Site: cross-site\r\n", "", 403, "cross_origin"},
		{"same-site", "POST", own, "Sec-Fetch-Site: same-site\r\n", "", 403, "cross_origin"},
		{"no body, no marker", "POST", own, "", "", 200, ""},
		{"a form", "POST", own, "Content-Type: application/x-www-form-urlencoded\r\n", "{}", 415, "unsupported_media_type"},
		{"a form without fields", "POST", own, "Content-Type: application/x-www-form-urlencoded\r\n", "", 415, "unsupported_media_type"},
		{"text", "POST", own, "Content-Type: text/plain; charset=utf-8\r\n", "{}", 415, "unsupported_media_type"},
		{"no type", "POST", own, "", "{}", 415, "unsupported_media_type"},
		{"JSON", "POST", own, "Content-Type: Application/JSON; charset=utf-8\r\n", "{}", 200, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			code, body := answerTo(t, front, fmt.Sprintf("%s /x HTTP/1.1\r\nHost: %s\r\n%sContent-Length: %d\r\n\r\n%s", tt.method, tt.host, tt.headers, len(tt.body), tt.body))
			require.Equal(t, tt.want, code, body)
			require.Contains(t, body, tt.code)
			require.LessOrEqual(t, strings.Count(body, "\n"), 1)
		})
	}
}

// Beyond loopback nobody here knows the names, unless some are given.
func TestNamesBeyondLoopback(t *testing.T) {
	beyond := &net.TCPAddr{IP: net.IPv4zero}
	n := hostNames(beyond, "0.0.0.0", nil)
	require.True(t, n.has("engine.svc.cluster.local:8000"))
	n = hostNames(beyond, "0.0.0.0", []string{"engine.example"})
	for host, want := range map[string]bool{
		"engine.example:8000": true, "10.0.0.7:8000": true, "[2001:db8::1]": true, "localhost": true, "": true, "evil.example": false,
	} {
		require.Equal(t, want, n.has(host), host)
	}
}

// A refused request whose body does not come does not keep its connection: the limit of time holds for
// all requests.
func TestRefusedBodyIsNotAwaited(t *testing.T) {
	front, _ := openFront(t, nil)
	code, body := answerTo(t, front, "POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
	require.Equal(t, 415, code, body)
}

func TestLimitsOfListening(t *testing.T) {
	for want, f := range map[string]*listenFlags{
		"--drain-timeout is -1s":  {drainTimeout: -time.Second},
		"--max-connections is 7,": {maxConnections: 7},
		"--max-connections is -1": {maxConnections: -1},
	} {
		require.ErrorContains(t, f.checkLimits(), want)
	}
	f := listenFlags{maxConnections: 8}
	require.Equal(t, 6, f.inFlight(256), "room for a health check is left")
	f.maxConnections = 0
	require.LessOrEqual(t, f.connections(), descriptors()/4)
}
