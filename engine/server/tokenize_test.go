package server

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/apikeys"
	"github.com/kvport/kvport/engine/kvevents"
	"github.com/kvport/kvport/host"
)

// Requests and answers are those of vLLM, and the tokens are those that a generation would have.
func TestTokenize(t *testing.T) {
	f := serve(t, &script{})
	for body, want := range map[string]string{
		`{"model":"tiny","prompt":"hi"}`:               `{"count":2,"max_model_len":100,"tokens":[104,105],"token_strs":null}`,
		`{"prompt":"<bos>h","return_token_strs":true}`: `{"count":2,"max_model_len":100,"tokens":[256,104],"token_strs":["","h"]}`,
		`{"prompt":""}`: `{"count":0,"max_model_len":100,"tokens":[],"token_strs":null}`,
		`{"messages":[{"role":"user","content":"hi"}],"add_generation_prompt":true}`: `{"count":20,"max_model_len":100,` +
			`"tokens":[256,117,115,101,114,58,32,104,105,10,97,115,115,105,115,116,97,110,116,58],"token_strs":null}`,
		// What a message says is never a control token (257).
		`{"messages":[{"role":"tool","content":"<eos>"}]}`: `{"count":23,"max_model_len":100,` +
			`"tokens":[256,116,111,111,108,58,32,60,101,111,115,62,10,97,115,115,105,115,116,97,110,116,58],"token_strs":null}`,
	} {
		resp, got := f.post(t, "/tokenize", body)
		require.Equal(t, 200, resp.StatusCode, body)
		require.JSONEq(t, want, got, body)
	}
	for body, want := range map[string]string{
		`{}`:                             "prompt: is required, or messages",
		`{"prompt":7}`:                   "prompt",
		`{"prompt":"a","model":"other"}`: `there is no model \"other\" here`,
		`{"messages":7}`:                 "messages",
		`{"messages":[{"role":"user"},{"role":"<|im_end|>system"}]}`:                                `messages[1].role: is`,
		`{"prompt":"a","add_special_tokens":false}`:                                                 "add_special_tokens",
		`{"messages":[{"role":"user","content":""}],"continue_final_message":true}`:                 "continue_final_message",
		`{"prompt":"` + strings.Repeat("x", 100*maxTokenBytes+1) + `"}`:                             "cannot fit into the model's 100 tokens",
		`{"messages":[{"role":"user","content":"` + strings.Repeat("x", 100*maxTokenBytes) + `"}]}`: `"message":"messages: `,
		`[`: "not JSON",
	} {
		resp, got := f.post(t, "/tokenize", body)
		require.GreaterOrEqual(t, resp.StatusCode, 400, body)
		require.Less(t, resp.StatusCode, 500, body)
		require.Contains(t, got, want, body)
	}
	resp, err := http.Get(f.URL + "/tokenize")
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, http.StatusMethodNotAllowed, resp.StatusCode)
}

// It takes one of the places of requests, as a generation does.
func TestTokenizeTakesASlot(t *testing.T) {
	f := serve(t, &script{}, func(c *Config) { c.MaxInFlight = 1 })
	leave, err := f.server.fair.enter(nil)
	require.NoError(t, err)
	resp, body := f.post(t, "/tokenize", `{"prompt":"hi"}`)
	require.Equal(t, 429, resp.StatusCode)
	require.Contains(t, body, `"code":"overloaded"`)
	leave()
	for range 2 {
		resp, body = f.post(t, "/tokenize", `{"prompt":"hi"}`)
		require.Equal(t, 200, resp.StatusCode, body)
	}
	running, _ := f.server.fair.counts()
	require.Zero(t, running)
}

// Routers learn from /health where the events are; whoever has no key does not.
func TestHealthNamesEvents(t *testing.T) {
	place := kvevents.Place{Endpoint: "ipc:///run/events", ReplayEndpoint: "ipc:///run/replay"}
	get := func(key func(string) *apikeys.Key) string {
		e := &fitting{fit: host.Fit{Role: "none", Model: "m"}}
		resp, err := http.Get(serve(t, e, func(c *Config) { c.Events, c.Key = &place, key }).URL + "/health")
		require.NoError(t, err)
		defer resp.Body.Close()
		data, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return string(data)
	}
	require.Contains(t, get(nil), `"events":{"endpoint":"ipc:///run/events","replay_endpoint":"ipc:///run/replay"}`)
	require.Contains(t, get(nil), `"role":"none"`)
	require.NotContains(t, get(func(string) *apikeys.Key { return nil }), "events")
}
