package server

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine"
	"github.com/kvport/kvport/engine/tokenizer"
	"github.com/kvport/kvport/host"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestCompletion(t *testing.T) {
	e := &script{outputs: ending(say("He", "llo"), engine.Output{Reason: connector.ReasonLength, Usage: full})}
	f := serve(t, e)
	resp, body := f.post(t, "/v1/completions", `{"prompt":"hi","max_tokens":5,"temperature":0,"seed":3,"cache_salt":"s","ignore_eos":true}`)
	require.Equal(t, 200, resp.StatusCode)
	require.Equal(t, "application/json", resp.Header.Get("Content-Type"))
	require.Equal(t, `{"id":"cmpl-ID","object":"text_completion","created":1,"model":"tiny","choices":[`+
		`{"index":0,"text":"Hello","logprobs":null,"finish_reason":"length"}],`+
		`"usage":{"prompt_tokens":2,"completion_tokens":5,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":2}}}`, masked(t, body))
	r := e.requests()[0]
	require.Equal(t, []int32{'h', 'i'}, r.Prompt)
	require.Equal(t, 5, r.MaxTokens)
	require.Equal(t, uint64(3), r.Params.Seed)
	require.Equal(t, "s", r.Salt)
	require.True(t, r.IgnoreEOS)
	require.NotEmpty(t, r.ID)
}

func TestChat(t *testing.T) {
	e := &script{outputs: ending(say("yo"), engine.Output{Tokens: []int32{tokenizer.EOS}, Reason: connector.ReasonStop, Usage: engine.Usage{Prompt: 4}})}
	f := serve(t, e)
	_, body := f.post(t, "/v1/chat/completions", `{"model":"default","messages":[{"role":"user","content":"hi"}],"return_token_ids":true,"user":"u","x":1}`)
	require.Equal(t, `{"id":"chatcmpl-ID","object":"chat.completion","created":1,"model":"tiny","choices":[`+
		`{"index":0,"message":{"role":"assistant","content":"yo"},"logprobs":null,"finish_reason":"stop","token_ids":[121,111,257]}],`+
		`"usage":{"prompt_tokens":4,"completion_tokens":3,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":0}},`+
		`"prompt_token_ids":[256,117,115,101,114,58,32,104,105,10,97,115,115,105,115,116,97,110,116,58]}`, masked(t, body))
	require.Equal(t, 100-20, e.requests()[0].MaxTokens, "chat goes on as long as the model can")
	require.Equal(t, 1.0, testutil.ToFloat64(f.server.metrics.unknownFields))
}

func TestCompletionStream(t *testing.T) {
	e := &script{outputs: ending(say("H\xc3", "\xa9", "!"), engine.Output{Reason: connector.ReasonLength, Usage: full})}
	f := serve(t, e)
	resp, body := f.post(t, "/v1/completions", `{"prompt":"hi","stream":true,"stream_options":{"include_usage":true},"return_token_ids":true}`)
	require.Equal(t, "text/event-stream; charset=utf-8", resp.Header.Get("Content-Type"))
	const head = `{"id":"cmpl-ID","object":"text_completion","created":1,"model":"tiny","choices":[`
	require.Equal(t, []string{
		head + `{"index":0,"text":"H","logprobs":null,"finish_reason":null,"token_ids":[72,195],"prompt_token_ids":[104,105]}],"usage":null}`,
		head + `{"index":0,"text":"é","logprobs":null,"finish_reason":null,"token_ids":[169]}],"usage":null}`,
		head + `{"index":0,"text":"!","logprobs":null,"finish_reason":null,"token_ids":[33]}],"usage":null}`,
		head + `{"index":0,"text":"","logprobs":null,"finish_reason":"length"}],"usage":null}`,
		head + `],"usage":{"prompt_tokens":2,"completion_tokens":4,"total_tokens":6,"prompt_tokens_details":{"cached_tokens":2}}}`,
		"[DONE]",
	}, events(t, body))
}

func TestChatStream(t *testing.T) {
	e := &script{outputs: ending(say("a", "b"), engine.Output{Reason: connector.ReasonStop})}
	f := serve(t, e)
	_, body := f.post(t, "/v1/chat/completions", `{"messages":[{"role":"user","content":"hi"}],"stream":true}`)
	const head = `{"id":"chatcmpl-ID","object":"chat.completion.chunk","created":1,"model":"tiny","choices":[`
	require.Equal(t, []string{
		head + `{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}`,
		head + `{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null}]}`,
		head + `{"index":0,"delta":{"content":"b"},"logprobs":null,"finish_reason":null}]}`,
		head + `{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}`,
		"[DONE]",
	}, events(t, body))
}

// A stop string that is spread over tokens ends the request at the engine too, and none of it shows.
func TestStopString(t *testing.T) {
	for _, stream := range []bool{false, true} {
		e := &script{outputs: say("one E", "N", "D two"), hang: true}
		f := serve(t, e)
		_, body := f.post(t, "/v1/completions", fmt.Sprintf(`{"prompt":"hi","stop":["END"],"stream":%v,"return_token_ids":true}`, stream))
		if stream {
			list := events(t, body)
			require.Equal(t, "[DONE]", list[len(list)-1])
			require.Contains(t, list[len(list)-2], `"finish_reason":"stop"`)
			require.NotContains(t, body, "E\"")
		} else {
			require.Contains(t, body, `"text":"one ","logprobs":null,"finish_reason":"stop","token_ids":[111,110,101,32,69,78,68]`)
			require.Contains(t, body, `"completion_tokens":7`)
			require.Contains(t, body, `"cached_tokens":1`)
		}
		require.Equal(t, []error{engine.ErrStop}, e.ends)
	}
}

func TestPrefillSide(t *testing.T) {
	want := `"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"P1","remote_block_ids":null,"remote_host":null,"remote_port":null,"kvport_ticket":"dGlja2V0"}`
	last := engine.Output{Reason: connector.ReasonLength, Usage: full, Ticket: []byte("ticket")}
	for _, stream := range []bool{false, true} {
		e := &script{outputs: ending(say("x"), last)}
		f := serve(t, e)
		_, body := f.post(t, "/v1/completions", fmt.Sprintf(`{"prompt":"hi","max_tokens":1,"stream":%v,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null}}`, stream))
		require.True(t, e.requests()[0].Remote)
		require.Equal(t, 1, strings.Count(body, want), body)
	}
	// A stop string in the only token must not cost the ticket.
	e := &script{outputs: say("x"), hang: true}
	_, body := serve(t, e).post(t, "/v1/completions", `{"prompt":"hi","stop":"x","kv_transfer_params":{"do_remote_decode":true}}`)
	require.Contains(t, body, want)
}

func TestDecodeSide(t *testing.T) {
	e := &script{outputs: ending(nil, engine.Output{Reason: connector.ReasonStop})}
	f := serve(t, e)
	resp, body := f.post(t, "/v1/completions", `{"prompt":"hi","kv_transfer_params":{"do_remote_prefill":true,"remote_host":"10.0.0.1","remote_port":1,"remote_block_ids":[[1]],"kvport_ticket":"dGlja2V0"}}`)
	require.Equal(t, 200, resp.StatusCode)
	require.Equal(t, []byte("ticket"), e.requests()[0].Ticket)
	require.False(t, e.requests()[0].Remote)
	require.NotContains(t, body, "kv_transfer_params")
}

// A router learns from the header what became of its ticket, whether the answer is streamed or not; who
// brought no ticket gets no header.
func TestHandoffIsTold(t *testing.T) {
	const ask = `{"prompt":"hi","max_tokens":5,"stream":%v,"kv_transfer_params":{"do_remote_prefill":true,"kvport_ticket":"dGlja2V0"}}`
	for want, h := range map[string]engine.Handoff{
		"loaded": {Result: engine.HandoffLoaded}, "refused; reason=block_size": {Result: engine.HandoffRefused, Reason: "block_size"}, "": {},
	} {
		usage := engine.Usage{Prompt: 2, Generated: 5, Handoff: h}
		outputs := say("ab", "cd")
		for i := range outputs {
			outputs[i].Usage = usage
		}
		f := serve(t, &script{outputs: ending(outputs, engine.Output{Reason: connector.ReasonLength, Usage: usage})})
		for _, stream := range []bool{false, true} {
			resp, body := f.post(t, "/v1/completions", fmt.Sprintf(ask, stream))
			require.Equal(t, 200, resp.StatusCode, body)
			require.Equal(t, want, resp.Header.Get(handoffHeader))
		}
	}
}

// An engine's health says what must agree at both ends of a hand-off.
func TestHealthSaysWhatFits(t *testing.T) {
	e := &fitting{fit: host.Fit{Role: "kv_producer", EngineID: "P1", Connector: "X", Carries: true, BlockSize: 16, ShapeText: "block_size 16", TicketKey: "k"}}
	resp, err := http.Get(serve(t, e).URL + "/health")
	require.NoError(t, err)
	defer resp.Body.Close()
	var got struct {
		KV host.Fit `json:"kv"`
	}
	require.NoError(t, json.NewDecoder(resp.Body).Decode(&got))
	require.Equal(t, e.fit, got.KV)
}

// Where there are API keys, whoever has none learns the status, and how many requests may run, and nothing else.
func TestHealthForStrangers(t *testing.T) {
	e := &fitting{fit: host.Fit{Role: "kv_producer", EngineID: "P1", TicketKey: "k"}}
	f := serve(t, e, func(c *Config) { c.Key = onlyKey })
	for header, details := range map[string]bool{"": false, "Bearer x": false, "Bearer k": true} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, f.URL+"/health", nil)
		require.NoError(t, err)
		req.Header.Set("Authorization", header)
		resp, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, http.StatusOK, resp.StatusCode)
		if details {
			require.Contains(t, string(body), `"kv":{"role":"kv_producer"`)
			require.Contains(t, string(body), `"model":"tiny"`)
			continue
		}
		require.JSONEq(t, `{"status":"ok","max_in_flight":256,"tls":false}`, string(body), header)
	}
}

// fitting is an engine with a connector.
type fitting struct {
	script
	fit host.Fit
}

func (e *fitting) Info() engine.Info {
	i := e.script.Info()
	i.Fit = e.fit
	return i
}

func TestSeveralPrompts(t *testing.T) {
	e := &script{outputs: ending(say("z"), engine.Output{Reason: connector.ReasonLength, Usage: engine.Usage{Prompt: 2, Local: 1}})}
	f := serve(t, e)
	_, body := f.post(t, "/v1/completions", `{"prompt":[[1,2],[3,4],[5,6]]}`)
	var a answer
	require.NoError(t, json.Unmarshal([]byte(body), &a))
	require.Len(t, a.Choices, 3)
	for i, c := range a.Choices {
		require.Equal(t, i, c.Index)
		require.Equal(t, "z", *c.Text)
	}
	require.JSONEq(t, `{"prompt_tokens":6,"completion_tokens":3,"total_tokens":9,"prompt_tokens_details":{"cached_tokens":3}}`, string(a.Usage))
	require.Len(t, e.requests(), 3)

	_, body = f.post(t, "/v1/completions", `{"prompt":["a","b"],"stream":true}`)
	list := events(t, body)
	require.Len(t, list, 5, "a token and an end for each, and [DONE]")
	require.Equal(t, "[DONE]", list[4])
	require.Equal(t, 2, strings.Count(body, `"finish_reason":"length"`))
}

func TestEngineErrors(t *testing.T) {
	boom := engine.Output{Reason: connector.ReasonError, Err: engine.ErrLoadFailed}
	tests := []struct {
		name   string
		engine *script
		status int
		code   string
	}{
		{"overloaded", &script{refuse: engine.ErrOverloaded}, 429, "overloaded"},
		{"closed", &script{refuse: engine.ErrClosed}, 503, "draining"},
		{"too long", &script{refuse: fmt.Errorf("%w: by far", engine.ErrTooLong)}, 400, "context_length_exceeded"},
		{"invalid", &script{refuse: engine.ErrInvalid}, 400, "invalid_value"},
		{"load failed", &script{outputs: []engine.Output{boom}}, 500, "kv_load_failed"},
		{"shutdown", &script{outputs: []engine.Output{{Reason: connector.ReasonAbort}}}, 503, "draining"},
		{"no last word", &script{}, 503, "draining"},
	}
	for _, tt := range tests {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s stream=%v", tt.name, stream), func(t *testing.T) {
				f := serve(t, tt.engine)
				resp, body := f.post(t, "/v1/completions", fmt.Sprintf(`{"prompt":"hi","stream":%v}`, stream))
				require.Equal(t, tt.status, resp.StatusCode, body)
				require.Contains(t, body, `"code":"`+tt.code+`"`)
				if tt.status == 429 || tt.status == 503 {
					require.Equal(t, "1", resp.Header.Get("Retry-After"))
				}
			})
		}
	}
	t.Run("in mid-stream", func(t *testing.T) {
		f := serve(t, &script{outputs: ending(say("a"), boom)})
		resp, body := f.post(t, "/v1/completions", `{"prompt":"hi","stream":true}`)
		require.Equal(t, 200, resp.StatusCode)
		list := events(t, body)
		require.Len(t, list, 4)
		require.Contains(t, list[1], `"finish_reason":"error"`)
		require.Equal(t, `{"error":{"message":"`+engine.ErrLoadFailed.Error()+`","type":"server_error","param":null,"code":"kv_load_failed"}}`, list[2])
		require.Equal(t, "[DONE]", list[3])
	})
}

func TestRefusals(t *testing.T) {
	e := &script{outputs: ending(nil, engine.Output{Reason: connector.ReasonStop})}
	f := serve(t, e, func(c *Config) { c.MaxBody = 30000 })
	tests := []struct {
		method, path, body string
		status             int
		code, param        string
	}{
		{"POST", "/v1/completions", `{"prompt":"x","model":"other"}`, 404, "model_not_found", "model"},
		{"GET", "/v1/models/other", ``, 404, "model_not_found", "model"},
		{"POST", "/v1/completions", `{"prompt":"x","max_tokens":100}`, 400, "context_length_exceeded", "prompt"},
		{"POST", "/v1/completions", `{"prompt":"` + strings.Repeat("x", 100) + `"}`, 400, "context_length_exceeded", "prompt"},
		{"POST", "/v1/completions", `{"prompt":"` + strings.Repeat("x", 26000) + `"}`, 400, "context_length_exceeded", "prompt"},
		{"POST", "/v1/chat/completions", `{"messages":[{"role":"user","content":"` + strings.Repeat("x", 100) + `"}]}`, 400, "context_length_exceeded", "messages"},
		{"POST", "/v1/completions", `{"prompt":[1,259]}`, 400, "invalid_value", "prompt"},
		{"POST", "/v1/completions", `{"prompt":[-1]}`, 400, "invalid_value", "prompt"},
		{"POST", "/v1/completions", `{"prompt":"` + strings.Repeat("x", 30000) + `"}`, 413, "request_too_large", ""},
		{"POST", "/v1/completions", `{"prompt"`, 400, "invalid_json", ""},
		{"GET", "/v1/completions", ``, 405, "method_not_allowed", ""},
		{"DELETE", "/health", ``, 405, "method_not_allowed", ""},
		{"GET", "/reset_prefix_cache", ``, 405, "method_not_allowed", ""},
		{"GET", "/", ``, 404, "not_found", ""},
		{"POST", "/v1/embeddings", `{}`, 404, "not_found", ""},
	}
	for _, tt := range tests {
		req, err := http.NewRequestWithContext(t.Context(), tt.method, f.URL+tt.path, strings.NewReader(tt.body))
		require.NoError(t, err)
		resp, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		var got struct {
			Error struct{ Message, Type, Param, Code string }
		}
		require.NoError(t, json.NewDecoder(resp.Body).Decode(&got))
		resp.Body.Close()
		require.Equal(t, tt.status, resp.StatusCode, tt.path)
		require.Equal(t, tt.code, got.Error.Code, tt.path)
		require.Equal(t, tt.param, got.Error.Param)
		require.Equal(t, "invalid_request_error", got.Error.Type)
		require.NotEmpty(t, got.Error.Message)
	}
	require.Empty(t, e.requests())
}

// A client that goes away ends its request at the engine, streaming or not.
func TestDisconnect(t *testing.T) {
	for _, stream := range []bool{false, true} {
		t.Run(fmt.Sprint(stream), func(t *testing.T) {
			e := &script{outputs: say("a"), hang: true, gate: make(chan struct{})}
			f := serve(t, e)
			ctx, cancel := context.WithCancel(t.Context())
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.URL+"/v1/completions", strings.NewReader(fmt.Sprintf(`{"prompt":"hi","stream":%v}`, stream)))
			require.NoError(t, err)
			done := make(chan struct{})
			go func() {
				defer close(done)
				resp, err := http.DefaultClient.Do(req)
				if err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
			}()
			e.gate <- struct{}{} // the request runs
			cancel()
			<-done
			f.Close() // waits for the handler, which waits for the engine
			require.Len(t, e.ends, 1)
			require.ErrorIs(t, e.ends[0], context.Canceled)
			require.Equal(t, 1.0, testutil.ToFloat64(f.server.metrics.requests.WithLabelValues("/v1/completions", "499")))
			require.Zero(t, testutil.ToFloat64(f.server.metrics.inFlight))
		})
	}
}

// Pieces reach the client while the engine works on the rest.
func TestStreamIsNotBuffered(t *testing.T) {
	e := &script{outputs: ending(say("a", "b"), engine.Output{Reason: connector.ReasonStop}), gate: make(chan struct{})}
	f := serve(t, e)
	go func() { e.gate <- struct{}{} }()
	resp, err := http.Post(f.URL+"/v1/completions", "", strings.NewReader(`{"prompt":"hi","stream":true}`))
	require.NoError(t, err)
	defer resp.Body.Close()
	lines := bufio.NewReader(resp.Body)
	for _, want := range []string{`"text":"a"`, `"text":"b"`} {
		line, err := lines.ReadString('\n')
		require.NoError(t, err)
		require.Contains(t, line, want)
		_, err = lines.ReadString('\n')
		require.NoError(t, err)
		e.gate <- struct{}{}
	}
	rest, err := io.ReadAll(lines)
	require.NoError(t, err)
	require.True(t, bytes.HasSuffix(rest, []byte("data: [DONE]\n\n")))
}

func TestInFlightCap(t *testing.T) {
	e := &script{outputs: ending(nil, engine.Output{Reason: connector.ReasonStop}), gate: make(chan struct{})}
	f := serve(t, e, func(c *Config) { c.MaxInFlight = 1 })
	done := make(chan struct{})
	go func() {
		defer close(done)
		resp, err := http.Post(f.URL+"/v1/completions", "", strings.NewReader(`{"prompt":"hi"}`))
		if err == nil {
			resp.Body.Close()
		}
	}()
	require.Eventually(t, func() bool { return len(e.requests()) == 1 }, time.Minute, time.Millisecond)
	resp, body := f.post(t, "/v1/completions", `{"prompt":"hi"}`)
	require.Equal(t, 429, resp.StatusCode)
	require.Equal(t, "1", resp.Header.Get("Retry-After"))
	require.Contains(t, body, `"type":"rate_limit_error"`)
	health, err := http.Get(f.URL + "/health")
	require.NoError(t, err)
	defer health.Body.Close()
	text, err := io.ReadAll(health.Body)
	require.NoError(t, err)
	require.Contains(t, string(text), `"in_flight":1`)
	require.Contains(t, string(text), `"max_in_flight":1`)
	e.gate <- struct{}{}
	<-done
}

// Clients that dawdle over their bodies take no slot from one that does not.
func TestSlowBodyTakesNoSlot(t *testing.T) {
	e := &script{outputs: ending(nil, engine.Output{Reason: connector.ReasonStop})}
	f := serve(t, e, func(c *Config) { c.MaxInFlight = 2 })
	for range 8 {
		conn, err := net.Dial("tcp", strings.TrimPrefix(f.URL, "http://"))
		require.NoError(t, err)
		defer conn.Close()
		fmt.Fprint(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 100\r\n\r\n")
		line, err := bufio.NewReader(conn).ReadString('\n')
		require.NoError(t, err)
		require.Contains(t, line, "100 Continue", "the server waits for the body")
		fmt.Fprint(conn, "{")
	}
	resp, body := f.post(t, "/v1/completions", `{"prompt":"hi"}`)
	require.Equal(t, 200, resp.StatusCode, body)
}

// A client that dawdles over its body is told so and cut off.
func TestSlowBody(t *testing.T) {
	f := serve(t, &script{}, func(c *Config) { c.BodyTimeout = 50 * time.Millisecond })
	conn, err := net.Dial("tcp", strings.TrimPrefix(f.URL, "http://"))
	require.NoError(t, err)
	defer conn.Close()
	fmt.Fprint(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{\"pro")
	data, err := io.ReadAll(conn)
	require.NoError(t, err)
	require.Contains(t, string(data), "HTTP/1.1 408 ")
	require.Contains(t, string(data), `"request_timeout"`)
}

func TestHealth(t *testing.T) {
	e := &script{health: engine.Health{Running: 1, Waiting: 2, Blocks: engine.Blocks{Free: 3}, Host: &host.Health{Connector: "X", State: "ready", PID: 7}}}
	f := serve(t, e)
	get := func(path string) (int, string) {
		resp, err := http.Get(f.URL + path)
		require.NoError(t, err)
		defer resp.Body.Close()
		data, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return resp.StatusCode, string(data)
	}
	code, body := get("/health")
	require.Equal(t, 200, code)
	require.JSONEq(t, `{"status":"ok","model":"tiny","cache_query":true,"max_in_flight":256,"tls":false,"in_flight":0,"running":1,"waiting":2,"blocks":{"free":3,"used":0,"pinned":0,"held":0},
		"connector":{"connector":"X","state":"ready","trust":"","pid":7,"restarts":0,"since_ns":0,"pending":0,"loading":0,"held":0}}`, body)
	e.health.Host.State = "restarting"
	code, body = get("/health")
	require.Equal(t, 200, code)
	require.Contains(t, body, `"status":"degraded"`)
	code, body = get("/v1/models")
	require.Equal(t, 200, code)
	require.Contains(t, body, `{"object":"list","data":[{"id":"tiny","object":"model","created":`)
	code, body = get("/v1/models/tiny")
	require.Equal(t, 200, code)
	require.Contains(t, body, `"max_model_len":100`)
	code, body = get("/metrics")
	require.Equal(t, 200, code)
	require.Contains(t, body, "kvport_http_requests_in_flight 0")
	resp, body := f.post(t, "/reset_prefix_cache", "")
	require.Equal(t, 200, resp.StatusCode)
	require.JSONEq(t, `{"reset":true}`, body)
	for status, refuse := range map[int]error{501: engine.ErrNotReset, 409: engine.ErrKept} {
		e.refuse = fmt.Errorf("%w: X holds 3", refuse)
		resp, body = f.post(t, "/reset_prefix_cache", "")
		require.Equal(t, status, resp.StatusCode)
		require.Contains(t, body, "the prefix cache is empty, the connector ")
		require.Contains(t, body, "X holds 3")
	}
	f.server.Drain()
	code, body = get("/health")
	require.Equal(t, 503, code)
	require.Contains(t, body, `"status":"draining"`)
	resp, _ = f.post(t, "/v1/completions", `{"prompt":"hi"}`)
	require.Equal(t, 503, resp.StatusCode)
}

func TestRequestID(t *testing.T) {
	e := &script{outputs: ending(nil, engine.Output{Reason: connector.ReasonStop})}
	f := serve(t, e)
	for given, echoed := range map[string]bool{"abc-1": true, "": false, "a b": false, strings.Repeat("x", 129): false} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.URL+"/v1/completions", strings.NewReader(`{"prompt":"hi"}`))
		require.NoError(t, err)
		req.Header.Set("X-Request-Id", given)
		resp, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		resp.Body.Close()
		if got := resp.Header.Get("X-Request-Id"); echoed {
			require.Equal(t, given, got)
		} else {
			require.Len(t, got, 32)
		}
	}
	for _, r := range e.requests() {
		require.NotContains(t, string(r.ID), "abc-1", "a client's id is a label only")
	}
}

func TestNewRefuses(t *testing.T) {
	_, err := New(Config{})
	require.Error(t, err)
	reg := prometheus.NewRegistry()
	c := Config{Engine: &script{}, Tokenizer: tokenizer.Bytes(), ModelName: "x", Metrics: reg}
	_, err = New(c)
	require.NoError(t, err)
	_, err = New(c)
	require.Error(t, err, "metrics are registered already")
}
