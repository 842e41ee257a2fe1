package server

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine"
	"github.com/kvport/kvport/engine/model/sim"
	"github.com/kvport/kvport/engine/tokenizer"
)

// serveSim serves a real engine with the sim model.
func serveSim(t *testing.T) (*fixture, *engine.Engine) {
	t.Helper()
	m, err := sim.New(sim.Options{MaxTokens: 2048})
	require.NoError(t, err)
	reg := prometheus.NewRegistry()
	e, err := engine.New(t.Context(), engine.Config{Model: m, Tokenizer: tokenizer.Bytes(), PrefixCaching: true, NumBlocks: 256, Metrics: reg})
	require.NoError(t, err)
	f := serve(t, e, func(c *Config) { c.Metrics, c.Gatherer = reg, reg })
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(t, e.Close(ctx))
		require.NoError(t, m.Close())
	})
	return f, e
}

func (f *fixture) complete(t *testing.T, body string) (c choice, u usage) {
	t.Helper()
	resp, data := f.post(t, "/v1/completions", body)
	require.Equal(t, 200, resp.StatusCode, data)
	var a answer
	require.NoError(t, json.Unmarshal([]byte(data), &a))
	require.NoError(t, json.Unmarshal(a.Usage, &u))
	return a.Choices[0], u
}

// The same tokens come whole, streamed, from a warm cache, and when many ask at once.
func TestRealEngine(t *testing.T) {
	f, _ := serveSim(t)
	prompt := strings.Repeat("the quick brown fox ", 10)
	request := fmt.Sprintf(`{"prompt":%q,"max_tokens":40,"temperature":0,"ignore_eos":true,"return_token_ids":true`, prompt)
	want, cold := f.complete(t, request+"}")
	require.Len(t, want.TokenIDs, 40)
	require.Equal(t, "length", *want.FinishReason)
	require.Equal(t, 200, cold.PromptTokens)
	require.Equal(t, 40, cold.CompletionTokens)
	require.Zero(t, cold.Details.CachedTokens)

	again, warm := f.complete(t, request+"}")
	require.Equal(t, want, again)
	require.Positive(t, warm.Details.CachedTokens)

	_, body := f.post(t, "/v1/completions", request+`,"stream":true}`)
	var tokens []int32
	var text string
	for _, event := range events(t, body) {
		var a answer
		if event != "[DONE]" {
			require.NoError(t, json.Unmarshal([]byte(event), &a))
			tokens = append(tokens, a.Choices[0].TokenIDs...)
			text += *a.Choices[0].Text
		}
	}
	require.Equal(t, want.TokenIDs, tokens)
	require.Equal(t, *want.Text, text)

	resp, _ := f.post(t, "/reset_prefix_cache", "")
	require.Equal(t, 200, resp.StatusCode)
	_, after := f.complete(t, request+"}")
	require.Zero(t, after.Details.CachedTokens)

	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			resp, err := http.Post(f.URL+"/v1/completions", "", strings.NewReader(request+"}"))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			var a answer
			if err := json.NewDecoder(resp.Body).Decode(&a); err != nil || len(a.Choices) != 1 || fmt.Sprint(a.Choices[0].TokenIDs) != fmt.Sprint(want.TokenIDs) {
				t.Errorf("another answer: %v %+v", err, a)
			}
		})
	}
	wg.Wait()
}

func TestRealEngineSeedAndStop(t *testing.T) {
	f, _ := serveSim(t)
	const request = `{"prompt":"hello","max_tokens":64,"temperature":1.5,"seed":7,"ignore_eos":true,"return_token_ids":true`
	one, _ := f.complete(t, request+"}")
	two, _ := f.complete(t, request+"}")
	require.Equal(t, one, two, "a seed fixes the answer")
	// Cut where the first two printable characters in a row stand.
	at := strings.IndexFunc(*one.Text, func(r rune) bool { return r > ' ' && r < '\x7f' })
	require.GreaterOrEqual(t, at, 0)
	stop := (*one.Text)[at : at+1]
	quoted, err := json.Marshal(stop)
	require.NoError(t, err)
	cut, u := f.complete(t, request+`,"stop":[`+string(quoted)+`]}`)
	require.Equal(t, "stop", *cut.FinishReason)
	require.Equal(t, (*one.Text)[:at], *cut.Text)
	require.Less(t, u.CompletionTokens, 64)
	require.Equal(t, one.TokenIDs[:len(cut.TokenIDs)], cut.TokenIDs)
}

// A client that goes away in mid-stream leaves nothing behind in the engine.
func TestRealEngineDisconnect(t *testing.T) {
	f, e := serveSim(t)
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.URL+"/v1/completions",
		strings.NewReader(`{"prompt":"hello","max_tokens":2000,"ignore_eos":true,"stream":true,"return_token_ids":true}`))
	require.NoError(t, err)
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	_, err = bufio.NewReader(resp.Body).ReadString('\n')
	require.NoError(t, err)
	cancel()
	_, _ = io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	require.Eventually(t, func() bool {
		h := e.Health()
		return h.Running == 0 && h.Waiting == 0 && h.Blocks.Used == 0 && h.Blocks.Pinned == 0
	}, time.Minute, 5*time.Millisecond)
}

func TestRealEngineRefuses(t *testing.T) {
	f, _ := serveSim(t)
	for body, code := range map[string]string{
		`{"prompt":"x","max_tokens":2048}`: "context_length_exceeded",
		`{"prompt":[300]}`:                 "invalid_value",
	} {
		resp, data := f.post(t, "/v1/completions", body)
		require.Equal(t, 400, resp.StatusCode)
		require.Contains(t, data, code)
	}
}

// The next turn's prompt begins with the tokens of the last one and its answer, whether the answer ended by itself or was
// cut off: so their blocks are used again. The token that ends an answer is no text.
func TestChatHistory(t *testing.T) {
	f, _ := serveSim(t)
	ended := map[string]int{}
	for n := range 6 {
		messages := []map[string]string{{"role": "user", "content": fmt.Sprintf("Question %d: ☃ and more?", n)}}
		before := []int32{}
		for range 3 {
			request, err := json.Marshal(map[string]any{"messages": messages, "max_tokens": 60, "temperature": 0, "return_token_ids": true})
			require.NoError(t, err)
			resp, data := f.post(t, "/v1/chat/completions", string(request))
			require.Equal(t, 200, resp.StatusCode, data)
			var a answer
			var u usage
			require.NoError(t, json.Unmarshal([]byte(data), &a))
			require.NoError(t, json.Unmarshal(a.Usage, &u))
			require.Equal(t, before, a.PromptTokenIDs[:len(before)])
			require.GreaterOrEqual(t, u.Details.CachedTokens, len(before)/16*16-16)
			c := a.Choices[0]
			ended[*c.FinishReason]++
			said := c.TokenIDs
			if *c.FinishReason == "stop" {
				said = said[:len(said)-1]
			}
			before = slices.Concat(a.PromptTokenIDs, said)
			messages = append(messages, map[string]string{"role": "assistant", "content": *c.Message.Content}, map[string]string{"role": "user", "content": "And then?"})
		}
	}
	require.Positive(t, ended["stop"])
	require.Positive(t, ended["length"])
}
