package router

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
)

// A request that the router gives up ends with words that its client understands: an error event where
// a stream has begun, else a 503. The instance is not blamed.
func TestCutOff(t *testing.T) {
	for name, begins := range map[string]bool{"stream": true, "nothing yet": false} {
		t.Run(name, func(t *testing.T) {
			asked := make(chan struct{})
			d := serveInstance(t, func(w http.ResponseWriter, r *http.Request) {
				if begins {
					w.Header().Set("Content-Type", "text/event-stream")
					_, _ = io.WriteString(w, "data: {\"n\":1}\n\n")
					_ = http.NewResponseController(w).Flush()
				}
				close(asked)
				<-r.Context().Done()
			})
			f := serveRouter(t, Config{Decode: urls(d)})
			base, cut := context.WithCancelCause(t.Context())
			front := httptest.NewUnstartedServer(f.router)
			front.Config.BaseContext = func(net.Listener) context.Context { return base }
			front.Start()
			defer front.Close()
			answers := make(chan *http.Response, 1)
			go func() {
				resp, err := http.Post(front.URL+"/v1/completions", "application/json", strings.NewReader(doc))
				if err != nil {
					t.Error(err)
				}
				answers <- resp
			}()
			<-asked
			var resp *http.Response
			var first string
			if begins {
				resp = <-answers
				lines := bufio.NewReader(resp.Body)
				first, _ = lines.ReadString('\n')
				require.Equal(t, "data: {\"n\":1}\n", first)
				resp.Body = struct {
					io.Reader
					io.Closer
				}{lines, resp.Body}
			}
			cut(http.ErrServerClosed)
			want := unavailable
			if begins {
				want = broken
			} else {
				resp = <-answers
				require.Equal(t, 503, resp.StatusCode)
			}
			defer resp.Body.Close()
			rest, err := io.ReadAll(resp.Body)
			require.NoError(t, err, "the answer ends properly")
			require.Contains(t, string(rest), `{"error":{"message":"the router is shutting down, and the answer was not complete in time","type":"server_error","param":null,"code":"draining"}}`)
			require.NotContains(t, string(rest), "[DONE]")
			front.Close() // waits for the handler
			require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.requests.WithLabelValues(string(want))))
			require.Empty(t, f.router.Ready(), "the instance is as good as before")
		})
	}
}

// Headers in which a browser names a page's origin are for the router alone.
func TestOriginStaysHere(t *testing.T) {
	d := serveInstance(t, whole200)
	f := serveRouter(t, Config{Decode: urls(d)})
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.URL+"/v1/completions", strings.NewReader(doc))
	require.NoError(t, err)
	req.Header.Set("Origin", f.URL)
	req.Header.Set("Sec-Fetch-Site", "same-origin")
	req.Header.Set("X-Other", "kept")
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	resp.Body.Close()
	header := d.requests()[0].header
	require.Empty(t, header.Get("Origin"))
	require.Empty(t, header.Get("Sec-Fetch-Site"))
	require.Equal(t, "kept", header.Get("X-Other"))
}

// A router without a decode instance says that it is not ready.
func TestReady(t *testing.T) {
	r, err := New(Config{Decode: []string{refusing(t)}})
	require.NoError(t, err)
	require.Empty(t, r.Ready(), "not probed yet")
	r.pool.probed(0, leaving)
	require.Equal(t, "no decode instance is available", r.Ready())
	r.Drain()
	require.Equal(t, "draining", r.Ready())
}
