package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine"
	"github.com/kvport/kvport/engine/tokenizer"
)

// script is an engine that says what a test wrote down, one Output after the other, and then ends as
// a real one does: with the reason of the script, or when its context ends.
type script struct {
	outputs []engine.Output
	hang    bool          // after the outputs, until the context ends
	gate    chan struct{} // if set, wait for it before each output
	refuse  error         // of Submit
	health  engine.Health

	mu   sync.Mutex
	got  []engine.Request
	ends []error // causes with which requests' contexts ended while they ran
}

func (e *script) Submit(ctx context.Context, r engine.Request) (<-chan engine.Output, error) {
	if e.refuse != nil {
		return nil, e.refuse
	}
	e.mu.Lock()
	e.got = append(e.got, r)
	e.mu.Unlock()
	out := make(chan engine.Output, len(e.outputs)+1)
	go func() {
		defer close(out)
		for _, o := range e.outputs {
			if e.gate != nil {
				select {
				case <-e.gate:
				case <-ctx.Done():
				}
			}
			if ctx.Err() != nil {
				break
			}
			out <- o
			if o.Reason != 0 {
				return
			}
		}
		if e.hang || ctx.Err() != nil {
			<-ctx.Done()
			e.mu.Lock()
			e.ends = append(e.ends, context.Cause(ctx))
			e.mu.Unlock()
			last := engine.Output{Reason: connector.ReasonAbort, Usage: engine.Usage{Prompt: len(r.Prompt), Local: 1}}
			if errors.Is(context.Cause(ctx), engine.ErrStop) {
				last.Reason = connector.ReasonStop
				if r.Remote {
					last.Ticket = []byte("ticket")
				}
			}
			out <- last
		}
	}()
	return out, nil
}

func (e *script) Health() engine.Health       { return e.health }
func (e *script) Reset(context.Context) error { return e.refuse }
func (e *script) Info() engine.Info {
	return engine.Info{Model: "script", Vocab: tokenizer.Vocab, MaxModelLen: 100, BlockSize: 16, NumBlocks: 64}
}

func (e *script) requests() []engine.Request {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]engine.Request(nil), e.got...)
}

// say makes an Output for each text, a token a byte.
func say(texts ...string) (outputs []engine.Output) {
	for _, text := range texts {
		var o engine.Output
		for _, b := range []byte(text) {
			o.Tokens = append(o.Tokens, int32(b))
		}
		outputs = append(outputs, o)
	}
	return outputs
}

// ending adds the last Output.
func ending(outputs []engine.Output, last engine.Output) []engine.Output {
	return append(outputs, last)
}

var full = engine.Usage{Prompt: 2, Generated: 5, Local: 1, External: 1}

type fixture struct {
	*httptest.Server
	server *Server
}

func serve(t *testing.T, e Engine, change ...func(*Config)) *fixture {
	t.Helper()
	reg := prometheus.NewRegistry()
	c := Config{Engine: e, Tokenizer: tokenizer.Bytes(), ModelName: "tiny", EngineID: "P1", Metrics: reg, Gatherer: reg}
	for _, f := range change {
		f(&c)
	}
	s, err := New(c)
	require.NoError(t, err)
	f := &fixture{httptest.NewServer(s), s}
	t.Cleanup(func() {
		f.Close()
		http.DefaultClient.CloseIdleConnections()
	})
	return f
}

func (f *fixture) post(t *testing.T, path, body string) (*http.Response, string) {
	t.Helper()
	resp, err := http.Post(f.URL+path, "application/json", strings.NewReader(body))
	require.NoError(t, err)
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp, string(data)
}

// masked replaces what differs from run to run.
func masked(t *testing.T, data string) string {
	t.Helper()
	var v struct {
		ID      string `json:"id"`
		Created int64  `json:"created"`
	}
	require.NoError(t, json.Unmarshal([]byte(data), &v), data)
	data = strings.ReplaceAll(data, v.ID, strings.SplitN(v.ID, "-", 2)[0]+"-ID")
	return strings.ReplaceAll(data, fmt.Sprintf(`"created":%d`, v.Created), `"created":1`)
}

// events splits a stream into its events and checks the form of each.
func events(t *testing.T, stream string) (list []string) {
	t.Helper()
	require.True(t, strings.HasSuffix(stream, "\n\n"), stream)
	for event := range strings.SplitSeq(strings.TrimSuffix(stream, "\n\n"), "\n\n") {
		data, ok := strings.CutPrefix(event, "data: ")
		require.True(t, ok, event)
		require.NotContains(t, data, "\n")
		if data != "[DONE]" && !strings.HasPrefix(data, `{"error"`) {
			data = masked(t, data)
		}
		list = append(list, data)
	}
	return list
}
