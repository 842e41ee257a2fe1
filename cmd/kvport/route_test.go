package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Clients have the router's keys, and the router has the engines': neither sees the other's. Strangers learn
// how the router is, and not where its instances are.
func TestRouteWithKeysOnBothSides(t *testing.T) {
	dir := t.TempDir()
	keys := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	outer, inner := keys("outer", alpha+"\n"), keys("inner", " "+beta+" \n"+gamma+"\n")
	blocks := filepath.Join(dir, "blocks")
	p := start(t, "serve", "--model", "sim", "--port", "0", "--api-key-file", inner, "--kv-transfer-config", config("kv_producer", blocks))
	d := start(t, "serve", "--model", "sim", "--port", "0", "--api-key-file", inner, "--kv-transfer-config", config("kv_consumer", blocks))
	r := start(t, "route", "--port", "0", "--prefill", p.URL, "--decode", d.URL, "--api-key-file", outer, "--upstream-api-key-file", inner)
	body := `{"prompt":"` + strings.Repeat("words of a prompt ", 9) + `","max_tokens":4}`
	for header, want := range map[string]int{"Bearer " + alpha: 200, "Bearer " + beta: 401, "": 401} {
		code, text := do(t, "POST", r.URL+"/v1/completions", body, "Authorization", header)
		require.Equal(t, want, code, "%s: %s", header, text)
	}
	require.Eventually(t, func() bool { // an answer comes a little before it is counted
		_, text := do(t, "GET", r.URL+"/metrics", "", "Authorization", "Bearer "+alpha)
		return strings.Contains(text, `kvport_router_handoffs_total{reason="",result="loaded"} 1`) &&
			strings.Contains(text, `kvport_router_requests_total{outcome="disaggregated"} 1`)
	}, time.Minute, 10*time.Millisecond)

	code, text := do(t, "GET", r.URL+"/health", "")
	require.Equal(t, 200, code)
	require.JSONEq(t, `{"status":"ok","tls":false}`, text)
	_, text = do(t, "GET", r.URL+"/health", "", "Authorization", "Bearer "+alpha)
	require.Contains(t, text, p.URL)
}

// A URL without its scheme is refused with the flag that has it and the URL that is meant.
func TestRouteNamesTheURL(t *testing.T) {
	for flag, rest := range map[string][]string{"--decode": nil, "--prefill": {"--decode", "http://127.0.0.1:8001"}} {
		var errs strings.Builder
		code := run(append([]string{"route", "--port", "0", flag, "127.0.0.1:8002"}, rest...), io.Discard, &errs)
		require.Equal(t, 2, code, errs.String())
		require.Contains(t, errs.String(), flag+`: "127.0.0.1:8002" is no URL, want http://127.0.0.1:8002`)
	}
}

// A prefill instance whose key the router lacks costs nobody an answer: decode serves alone, and log and /health
// say what to do.
func TestRouteWithoutPrefillsKey(t *testing.T) {
	dir := t.TempDir()
	inner := filepath.Join(dir, "inner")
	require.NoError(t, os.WriteFile(inner, []byte(beta+"\n"), 0o600))
	blocks := filepath.Join(dir, "blocks")
	p := start(t, "serve", "--model", "sim", "--port", "0", "--api-key-file", inner, "--kv-transfer-config", config("kv_producer", blocks))
	d := start(t, "serve", "--model", "sim", "--port", "0", "--kv-transfer-config", config("kv_consumer", blocks))
	r := start(t, "route", "--port", "0", "--prefill", p.URL, "--decode", d.URL)
	for range 3 {
		code, text := do(t, "POST", r.URL+"/v1/completions", `{"prompt":"`+strings.Repeat("words of a prompt ", 9)+`","max_tokens":4}`)
		require.Equal(t, 200, code, text)
	}
	const remedy = "it needs --upstream-api-key-file"
	require.NoError(t, r.Logged(t.Context(), remedy))
	require.Equal(t, 1, strings.Count(r.Logs(), remedy), r.Logs())
	require.NoError(t, r.Logged(t.Context(), `"status":401`))
	_, text := do(t, "GET", r.URL+"/health", "")
	require.Contains(t, text, remedy)
}

// A time after which engines would be forgotten before they register again is refused.
func TestRouteRefusesShortTTL(t *testing.T) {
	for _, ttl := range []string{"1ns", "4s", "-1s"} {
		var errs strings.Builder
		require.Equal(t, 2, run([]string{"route", "--port", "0", "--register", "127.0.0.1:0", "--register-ttl", ttl}, io.Discard, &errs))
		require.Contains(t, errs.String(), "--register-ttl is "+ttl+", want at least 5s: engines register every 3s")
	}
}

// The log says that the queue is shorter than asked for.
func TestRouteSaysThatTheQueueIsShorter(t *testing.T) {
	r := start(t, "route", "--port", "0", "--decode", "http://127.0.0.1:1", "--max-connections", "64", "--max-in-flight", "40")
	require.NoError(t, r.Logged(t.Context(), `"queue_size":8`))
}

// An engine tells its router how many requests it serves at once. More of them wait at the router.
func TestRouterKeepsToTheLimitOfAnEngine(t *testing.T) {
	engine := start(t, "serve", "--model", "sim", "--port", "0", "--max-connections", "16")
	router := start(t, "route", "--decode", engine.URL, "--port", "0", "--health-interval", "20ms", "--queue-timeout", "10m")
	require.Eventually(t, func() bool {
		_, health := do(t, "GET", router.URL+"/health", "")
		return strings.Contains(health, `"max_in_flight":12`)
	}, time.Minute, 10*time.Millisecond)
	const clients = 200
	codes := make(chan int, clients)
	for range clients {
		go func() {
			resp, err := http.Post(router.URL+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"hi","max_tokens":16}`))
			if err != nil {
				codes <- 0
				return
			}
			_, err = io.Copy(io.Discard, resp.Body) // a client that leaves earlier ends its request
			resp.Body.Close()
			if err != nil {
				codes <- 0
				return
			}
			codes <- resp.StatusCode
		}()
	}
	for range clients {
		require.Equal(t, http.StatusOK, <-codes)
	}
	_, metrics := do(t, "GET", engine.URL+"/metrics", "")
	require.Contains(t, metrics, fmt.Sprintf("kvport_http_requests_total{code=\"200\",path=\"/v1/completions\"} %d", clients))
	require.NotContains(t, metrics, `code="429"`)
}

// A socket for registrations takes the place of one that nobody listens at, and of nothing else.
func TestListenUnix(t *testing.T) {
	dir, err := os.MkdirTemp("/tmp", "kvport") //nolint:usetesting // short: unix sockets lie below it
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	at := func(name string) string { return filepath.Join(dir, name) }
	listen := func(path string) (*net.UnixListener, error) {
		l, err := listenUnix(t.Context(), path)
		own, _ := l.(*net.UnixListener)
		return own, err
	}
	longest := at(strings.Repeat("s", 107-len(at(""))-1))
	require.Len(t, longest, 107)
	for _, path := range []string{at("register"), at("register"), longest} { // the second time a dead one is there
		l, err := listen(path)
		require.NoError(t, err)
		info, err := os.Lstat(path)
		require.NoError(t, err)
		require.Equal(t, os.ModeSocket|0o600, info.Mode())
		_, err = listen(path)
		require.ErrorContains(t, err, "another process listens there")
		c, err := net.Dial("unix", path)
		require.NoError(t, err, "and still does")
		require.NoError(t, errors.Join(c.Close(), l.Close()))
	}

	require.NoError(t, os.WriteFile(at("file"), []byte("keys"), 0o600))
	require.NoError(t, os.Mkdir(at("folder"), 0o700))
	require.NoError(t, syscall.Mkfifo(at("fifo"), 0o600))
	require.NoError(t, os.Symlink(at("register"), at("link")))
	for _, name := range []string{"file", "folder", "fifo", "link"} {
		before, err := os.Lstat(at(name))
		require.NoError(t, err)
		_, err = listen(at(name))
		require.ErrorContains(t, err, at(name)+": there is something that is no socket")
		after, err := os.Lstat(at(name))
		require.NoError(t, err)
		require.True(t, os.SameFile(before, after))
	}
	_, err = listen("register")
	require.ErrorContains(t, err, "want unix:///PATH")

	full, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	require.NoError(t, err)
	defer syscall.Close(full)
	require.NoError(t, syscall.Bind(full, &syscall.SockaddrUnix{Name: at("full")}))
	require.NoError(t, syscall.Listen(full, 0))
	for err == nil {
		var c net.Conn
		if c, err = net.Dial("unix", at("full")); err == nil {
			defer c.Close()
		}
	}
	require.ErrorIs(t, err, syscall.EAGAIN)
	_, err = listen(at("full"))
	require.ErrorContains(t, err, "another process may listen there", "though it is too busy to answer")
	_, err = os.Lstat(at("full"))
	require.NoError(t, err)
}

// Of routers that start at once in place of a dead one, one listens, and the others know.
func TestListenUnixAtOnce(t *testing.T) {
	dir, err := os.MkdirTemp("/tmp", "kvport") //nolint:usetesting // short: unix sockets lie below it
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	path := filepath.Join(dir, "register")
	for range 200 {
		ls, errs := make([]net.Listener, 4), make([]error, 4)
		var wg sync.WaitGroup
		for i := range ls {
			wg.Go(func() { ls[i], errs[i] = listenUnix(t.Context(), path) })
		}
		wg.Wait()
		listening := 0
		for i := range ls {
			if errs[i] != nil {
				require.ErrorContains(t, errs[i], "another process listens there")
				continue
			}
			listening++
		}
		require.Equal(t, 1, listening)
		c, err := net.Dial("unix", path)
		require.NoError(t, err)
		require.NoError(t, c.Close())
		for _, l := range ls {
			if l != nil {
				require.NoError(t, l.Close())
			}
		}
	}
}
