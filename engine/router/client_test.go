package router

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A client that dawdles over its body is told so, cut off, and gives its slot back.
func TestSlowBody(t *testing.T) {
	d := serveInstance(t, tokens)
	f := serveRouter(t, Config{Decode: urls(d), BodyTimeout: 50 * time.Millisecond, MaxInFlight: 1})
	conn, err := net.Dial("tcp", strings.TrimPrefix(f.URL, "http://"))
	require.NoError(t, err)
	defer conn.Close()
	fmt.Fprint(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{\"pro")
	data, err := io.ReadAll(conn)
	require.NoError(t, err)
	require.Contains(t, string(data), "HTTP/1.1 408 ")
	require.Contains(t, string(data), `"request_timeout"`)
	require.Empty(t, d.requests())
	resp, _ := post(t, f.URL+"/v1/completions", doc)
	require.Equal(t, 200, resp.StatusCode)
}

// A client that does not read its answer is cut off, and so is the instance that makes it.
func TestClientDoesNotRead(t *testing.T) {
	left := make(chan struct{})
	d := serveInstance(t, func(w http.ResponseWriter, _ *http.Request) {
		defer close(left)
		w.Header().Set("Content-Type", "text/event-stream")
		piece := append(bytes.Repeat([]byte{'x'}, 1<<20), "\n\n"...)
		for {
			if _, err := w.Write(piece); err != nil {
				return
			}
		}
	})
	f := serveRouter(t, Config{Decode: urls(d), WriteTimeout: 50 * time.Millisecond})
	conn, err := net.Dial("tcp", strings.TrimPrefix(f.URL, "http://"))
	require.NoError(t, err)
	defer conn.Close()
	fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(doc), doc)
	select {
	case <-left:
	case <-time.After(time.Minute):
		require.Fail(t, "the stream goes on though nobody reads it")
	}
	require.Eventually(t, func() bool { return f.outcomes(t, aborted) == 1 }, time.Minute, time.Millisecond)
}

// The deadline of one answer does not hold for the next request on the same connection.
func TestDeadlinesEndWithTheRequest(t *testing.T) {
	f := serveRouter(t, Config{Decode: urls(serveInstance(t, whole200)), WriteTimeout: time.Second, BodyTimeout: time.Second})
	for n := range 2 {
		if n > 0 {
			<-time.After(time.Second + time.Second/10)
		}
		resp, _ := post(t, f.URL+"/v1/completions", doc)
		require.Equal(t, 200, resp.StatusCode)
	}
}

// A key that the router itself asks for is nobody else's business.
func TestOwnKeysStay(t *testing.T) {
	p, d := serveInstance(t, ticket("T")), serveInstance(t, tokens)
	f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d), OwnKeys: true})
	for _, ask := range []struct{ method, path string }{{"POST", "/v1/completions"}, {"GET", "/v1/models"}} {
		req, err := http.NewRequestWithContext(t.Context(), ask.method, f.URL+ask.path, strings.NewReader(doc))
		require.NoError(t, err)
		req.Header.Set("Authorization", "Bearer k")
		resp, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		require.Equal(t, 200, resp.StatusCode)
		require.NoError(t, resp.Body.Close())
	}
	got := append(p.requests(), d.requests()...)
	require.Len(t, got, 3)
	for _, s := range got {
		require.Empty(t, s.header.Values("Authorization"))
	}
}

// One model's entry comes from a decode instance, whatever its name is made of.
func TestOneModel(t *testing.T) {
	d := serveInstance(t, whole200)
	f := serveRouter(t, Config{Decode: urls(d)})
	for path, want := range map[string]int{
		"/v1/models/m": 200, "/v1/models/org/m": 200, "/v1/models/a%25b%3Fc": 200,
		"/v1/models/%2e%2e/%2e%2e/metrics": 404, "/v1/models/x/%2e%2e": 404,
	} {
		before := len(d.requests())
		resp, err := http.Get(f.URL + path)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, want, resp.StatusCode, path)
		if got := d.requests()[before:]; want == 200 {
			require.Len(t, got, 1)
			decoded, err := http.NewRequest(http.MethodGet, path, http.NoBody)
			require.NoError(t, err)
			require.Equal(t, decoded.URL.Path, got[0].path)
		} else {
			require.Empty(t, got)
		}
	}
	resp, err := http.Post(f.URL+"/v1/models/m", "", http.NoBody)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 405, resp.StatusCode)
}
