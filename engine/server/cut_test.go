package server

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine"
)

// A request that the server gives up ends with words that its client understands: an error event where
// a stream has begun, else a 503. It does not wait for the engine.
func TestCutOff(t *testing.T) {
	for _, tt := range []struct {
		name    string
		stream  bool
		outputs int // before the cut
	}{{"stream", true, 1}, {"stream without a piece", true, 0}, {"whole", false, 1}} {
		t.Run(tt.name, func(t *testing.T) {
			base, cut := context.WithCancelCause(t.Context())
			e := &script{outputs: say("a"), hang: true, gate: make(chan struct{})}
			f := serve(t, e)
			front := httptest.NewUnstartedServer(f.server)
			front.Config.BaseContext = func(net.Listener) context.Context { return base }
			front.Start()
			defer front.Close()
			answers := make(chan *http.Response, 1)
			go func() {
				resp, err := http.Post(front.URL+"/v1/completions", "application/json", strings.NewReader(fmt.Sprintf(`{"prompt":"hi","stream":%v}`, tt.stream)))
				if err != nil {
					t.Error(err)
				}
				answers <- resp
			}()
			for range tt.outputs {
				e.gate <- struct{}{}
			}
			require.Eventually(t, func() bool { return len(e.requests()) == 1 }, patience, tick)
			var resp *http.Response
			var first string
			if tt.stream && tt.outputs > 0 {
				resp = <-answers
				lines := bufio.NewReader(resp.Body)
				first, _ = lines.ReadString('\n')
				require.Contains(t, first, `"text":"a"`)
				resp.Body = struct {
					io.Reader
					io.Closer
				}{lines, resp.Body}
			}
			cut(http.ErrServerClosed)
			if resp == nil {
				resp = <-answers
			}
			defer resp.Body.Close()
			rest, err := io.ReadAll(resp.Body)
			require.NoError(t, err, "the answer ends properly")
			require.Contains(t, string(rest), `{"error":{"message":"the server is shutting down, and the answer was not complete in time","type":"server_error","param":null,"code":"draining"}}`)
			if first != "" {
				require.Equal(t, 200, resp.StatusCode)
				require.NotContains(t, string(rest), "[DONE]")
				require.True(t, strings.HasPrefix(strings.TrimSpace(string(rest)), `data: {"error"`), "%s", rest)
			} else {
				require.Equal(t, 503, resp.StatusCode)
				require.Equal(t, "1", resp.Header.Get("Retry-After"))
			}
			require.Eventually(t, func() bool {
				return testutil.ToFloat64(f.server.metrics.requests.WithLabelValues("/v1/completions", "503")) == 1
			}, patience, tick)
		})
	}
}

// A body that comes while the server drains is too late, also if its head was in time.
func TestDrainDuringBody(t *testing.T) {
	f := serve(t, &script{outputs: ending(nil, engine.Output{Reason: connector.ReasonStop})})
	conn, err := net.Dial("tcp", strings.TrimPrefix(f.URL, "http://"))
	require.NoError(t, err)
	defer conn.Close()
	const body = `{"prompt":"hi"}`
	fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n", len(body))
	lines := bufio.NewReader(conn)
	line, err := lines.ReadString('\n')
	require.NoError(t, err)
	require.Contains(t, line, "100 Continue", "the server waits for the body")
	require.Empty(t, f.server.Ready())
	f.server.Drain()
	require.Equal(t, "draining", f.server.Ready())
	fmt.Fprint(conn, body)
	rest, err := io.ReadAll(lines)
	require.NoError(t, err)
	require.Contains(t, string(rest), "HTTP/1.1 503 ")
	require.Contains(t, string(rest), `"code":"draining"`)
}

// How long and how often a test looks for what is to come soon.
const (
	patience = time.Minute
	tick     = time.Millisecond
)
