package serve

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// said is what the server of a test has been sent.
type said struct {
	path, session, key string
	body               map[string]json.RawMessage
}

// server answers every request with a text.
func server(t *testing.T, status int, text string) (*Client, *said) {
	t.Helper()
	got := &said{}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got.path, got.session, got.key = r.URL.Path, r.Header.Get("X-Session-Id"), r.Header.Get("Authorization")
		data, _ := io.ReadAll(r.Body)
		_ = json.Unmarshal(data, &got.body)
		w.WriteHeader(status)
		_, _ = io.WriteString(w, text)
	}))
	t.Cleanup(s.Close)
	c := &Client{URL: s.URL, Model: "m", Form: Tokens, Own: true}
	t.Cleanup(c.HTTP.CloseIdleConnections)
	return c, got
}

func piece(token int, reason string) string {
	if reason != "" {
		reason = fmt.Sprintf(`,"finish_reason":%q`, reason)
	}
	return fmt.Sprintf("data: {\"choices\":[{\"text\":\"a\",\"token_ids\":[%d]%s}]}\n\n", token, reason)
}

func usage(prompt, completion int) string {
	return fmt.Sprintf("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":%d}}\n\n", prompt, completion)
}

const done = "data: [DONE]\n\n"

func asked() *Request {
	return &Request{Conversation: 4, Parts: [][]int32{{1, 2}, {3}}, MaxTokens: 2, Want: []int32{7, 8}}
}

// Every way in which an answer can be wrong is a kind of its own.
func TestKinds(t *testing.T) {
	whole := piece(7, "") + piece(8, "length")
	for name, test := range map[string]struct {
		status int
		text   string
		kind   string
		pieces int
	}{
		"right":                 {200, whole + usage(3, 2) + done, "", 2},
		"refused":               {429, `{"error":{"message":"full"}}`, "status 429", 0},
		"ends amid the answer":  {200, piece(7, ""), "cut", 1},
		"ends amid an event":    {200, piece(7, "") + `data: {"choi`, "cut", 1},
		"no end":                {200, whole + usage(3, 2), "cut", 2},
		"no reason":             {200, piece(7, "") + piece(8, "") + usage(3, 2) + done, "cut", 2},
		"an error in it":        {200, piece(7, "") + "data: {\"error\":{\"message\":\"x\"}}\n\n" + done, "error event", 1},
		"no JSON":               {200, "data: hello\n\n" + done, "error event", 0},
		"no usage":              {200, whole + done, "usage", 2},
		"usage counts others":   {200, whole + usage(3, 3) + done, "usage", 2},
		"another prompt":        {200, whole + usage(4, 2) + done, "usage", 2},
		"fewer tokens":          {200, piece(7, "stop") + usage(3, 1) + done, "short", 1},
		"wrong tokens":          {200, piece(7, "") + piece(9, "length") + usage(3, 2) + done, "tokens", 2},
		"no token ids":          {200, strings.ReplaceAll(whole, "token_ids", "x") + usage(3, 2) + done, "tokens", 2},
		"comments, no space":    {200, ": ping\n\n" + strings.ReplaceAll(whole, "data: ", "data:") + usage(3, 2) + done, "", 2},
		"error that is nothing": {200, strings.Replace(whole, `{"choices"`, `{"error":null,"choices"`, 1) + usage(3, 2) + done, "", 2},
	} {
		t.Run(name, func(t *testing.T) {
			c, _ := server(t, test.status, test.text)
			pieces := 0
			_, err := c.Send(t.Context(), asked(), func() { pieces++ })
			require.Equal(t, test.pieces, pieces)
			if test.kind == "" {
				require.NoError(t, err)
				return
			}
			var f *RequestError
			require.ErrorAs(t, err, &f)
			require.Equal(t, test.kind, f.Kind, "%v", err)
		})
	}
	c, _ := server(t, 200, "")
	c.URL = "http://127.0.0.1:1"
	_, err := c.Send(t.Context(), asked(), func() {})
	var f *RequestError
	require.ErrorAs(t, err, &f)
	require.Equal(t, "connect", f.Kind)
}

// What somebody else's server gets has only OpenAI's fields, unless they are asked for.
func TestForms(t *testing.T) {
	right := piece(7, "") + piece(8, "length") + usage(3, 2) + done
	send := func(form Form, own bool, r *Request) *said {
		c, got := server(t, 200, right)
		c.Form, c.Own, c.Key = form, own, "secret"
		_, err := c.Send(t.Context(), r, func() {})
		require.NoError(t, err)
		require.Equal(t, "conversation-4", got.session)
		require.Equal(t, "Bearer secret", got.key)
		return got
	}
	got := send(Tokens, true, asked())
	require.Equal(t, "/v1/completions", got.path)
	require.JSONEq(t, `[1,2,3]`, string(got.body["prompt"]))
	require.JSONEq(t, `true`, string(got.body["ignore_eos"]))
	require.JSONEq(t, `true`, string(got.body["return_token_ids"]))

	got = send(Text, false, asked())
	require.JSONEq(t, fmt.Sprintf("%q", words([]int32{1, 2, 3})), string(got.body["prompt"]))
	require.NotContains(t, got.body, "ignore_eos")
	require.NotContains(t, got.body, "return_token_ids")

	turn := asked()
	turn.Parts = [][]int32{nil, {1}, {2}, {3}}
	got = send(Chat, false, turn)
	require.Equal(t, "/v1/chat/completions", got.path)
	require.NotContains(t, got.body, "prompt")
	require.JSONEq(t, `[{"role":"user","content":"bed "},{"role":"assistant","content":"bif "},{"role":"user","content":"bog "}]`, string(got.body["messages"]))

	traced := &Request{Conversation: 4, Text: "once", MaxTokens: 2}
	require.JSONEq(t, `"once"`, string(send(Tokens, true, traced).body["prompt"]))
	require.JSONEq(t, `[{"role":"user","content":"once"}]`, string(send(Chat, false, traced).body["messages"]))

	seen := map[string]bool{}
	for i := range int32(vocabulary) {
		seen[words([]int32{i})] = true
	}
	require.Len(t, seen, vocabulary, "each token is a word of its own")
}

// A chat's stream has its text in deltas, and begins with one that only says who speaks.
func TestChatStream(t *testing.T) {
	const head = `data: {"choices":[{"delta":{"role":"assistant","content":""}}]}` + "\n\n"
	const text = `data: {"choices":[{"delta":{"content":"a"}}]}` + "\n\n"
	const end = `data: {"choices":[{"delta":{},"finish_reason":"stop"}]}` + "\n\n"
	c, _ := server(t, 200, head+text+text+end+usage(9, 2)+done)
	c.Form, c.Own = Chat, false
	pieces := 0
	a, err := c.Send(t.Context(), &Request{Parts: [][]int32{{1}, {2}}, MaxTokens: 50}, func() { pieces++ })
	require.NoError(t, err)
	require.Equal(t, 2, pieces)
	require.Equal(t, Answer{Prompt: 9, Completed: 2}, a)
}

func TestName(t *testing.T) {
	c, got := server(t, 200, `{"data":[{"id":"first"},{"id":"second"}]}`)
	name, err := c.Name(t.Context())
	require.NoError(t, err)
	require.Equal(t, "first", name)
	require.Equal(t, "/v1/models", got.path)
	for _, text := range []string{`{"data":[]}`, `x`} {
		c, _ = server(t, 200, text)
		_, err = c.Name(t.Context())
		require.Error(t, err)
	}
	c, _ = server(t, 500, "")
	_, err = c.Name(t.Context())
	require.ErrorContains(t, err, "500")
}
