package server

import (
	"encoding/json"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/apikeys"
	"github.com/kvport/kvport/engine/tokenizer"
)

func TestDecodeCompletion(t *testing.T) {
	r, err := decodeCompletion([]byte(`{"model":"m","prompt":"hi","max_tokens":7,"temperature":0.5,"top_p":0.9,"top_k":40,"seed":-1,
		"stop":["a","b"],"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true},"return_token_ids":true,
		"cache_salt":"s","user":"u","n":1,"best_of":1,"echo":false,"logprobs":null,"min_tokens":0,"presence_penalty":0,
		"kv_transfer_params":{"do_remote_decode":true,"kvport_ticket":"AAEC","remote_host":"evil","remote_port":1,"x":null},
		"x_one":1,"x_two":{}}`))
	require.Nil(t, err)
	require.Equal(t, []prompt{{text: "hi"}}, r.prompts)
	p := r.params
	require.Equal(t, "m", p.model)
	require.Equal(t, 7, p.maxTokens)
	require.Equal(t, 0.5, p.sampling.Temperature)
	require.Equal(t, 0.9, p.sampling.TopP)
	require.Equal(t, 40, p.sampling.TopK)
	require.Equal(t, ^uint64(0), p.sampling.Seed)
	require.Equal(t, []string{"a", "b"}, p.stops)
	require.True(t, p.ignoreEOS && p.stream && p.usage && p.tokenIDs && p.remote)
	require.Equal(t, "s", p.salt)
	require.Equal(t, []byte{0, 1, 2}, p.ticket)
	require.Equal(t, 2, p.unexpected)
}

func TestDecodeDefaults(t *testing.T) {
	r, err := decodeCompletion([]byte(`{"prompt":[1,2],"top_k":-1,"stop":"x","seed":null}`))
	require.Nil(t, err)
	require.Equal(t, []prompt{{tokens: []int32{1, 2}}}, r.prompts)
	require.Equal(t, 1.0, r.sampling.Temperature)
	require.Zero(t, r.sampling.TopK)
	require.Zero(t, r.maxTokens)
	require.Equal(t, []string{"x"}, r.stops)
	other, err := decodeCompletion([]byte(`{"prompt":"x"}`))
	require.Nil(t, err)
	require.NotEqual(t, other.sampling.Seed, r.sampling.Seed, "without a seed every request draws its own")
}

func TestDecodePrompts(t *testing.T) {
	for raw, want := range map[string][]prompt{
		`"a"`:       {{text: "a"}},
		`["a","b"]`: {{text: "a"}, {text: "b"}},
		`["null"]`:  {{text: "null"}},
		`[7]`:       {{tokens: []int32{7}}},
		`[[7],[8]]`: {{tokens: []int32{7}}, {tokens: []int32{8}}},
	} {
		got, err := decodePrompts(json.RawMessage(raw))
		require.Nil(t, err, raw)
		require.Equal(t, want, got, raw)
	}
	for _, raw := range []string{`""`, `[]`, `[""]`, `["a",null]`, `[1,null]`, `[[]]`, `[1,"a"]`, `[1.5]`, `[2147483648]`, `{}`, `7`, `true`, `[[[1]]]`} {
		_, err := decodePrompts(json.RawMessage(raw))
		require.NotNil(t, err, raw)
		require.Equal(t, "prompt", err.Param, raw)
	}
}

func TestDecodeChat(t *testing.T) {
	r, err := decodeChat([]byte(`{"messages":[{"role":"system","content":"be"},{"role":"user","name":"x","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
		{"role":"assistant","content":null}],"max_completion_tokens":5,"logprobs":false,"tools":[],"response_format":{"type":"text"},"zz":1}`))
	require.Nil(t, err)
	require.Equal(t, []tokenizer.Message{{Role: "system", Content: "be"}, {Role: "user", Content: "a\nb"}, {Role: "assistant"}}, r.messages)
	require.Equal(t, 5, r.maxTokens)
	require.Equal(t, 1, r.unexpected)
}

// Every wrong field is refused by name.
func TestDecodeRefuses(t *testing.T) {
	tests := []struct{ fields, param, code string }{
		{`"max_tokens":"7"`, "max_tokens", "invalid_type"},
		{`"max_tokens":1.5`, "max_tokens", "invalid_type"},
		{`"max_tokens":0`, "max_tokens", "invalid_value"},
		{`"max_tokens":-1`, "max_tokens", "invalid_value"},
		{`"max_tokens":1e30`, "max_tokens", "invalid_type"},
		{`"max_tokens":9999999999`, "max_tokens", "invalid_value"},
		{`"temperature":"hot"`, "temperature", "invalid_type"},
		{`"temperature":-1`, "temperature", "invalid_value"},
		{`"top_p":0`, "top_p", "invalid_value"},
		{`"top_p":1.1`, "top_p", "invalid_value"},
		{`"top_k":-2`, "top_k", "invalid_value"},
		{`"seed":"x"`, "seed", "invalid_type"},
		{`"stop":7`, "stop", "invalid_type"},
		{`"stop":["a",7]`, "stop", "invalid_type"},
		{`"stop":[""]`, "stop", "invalid_value"},
		{`"stop":["` + strings.Repeat(`a","`, maxStops) + `b"]`, "stop", "invalid_value"},
		{`"stop":"` + strings.Repeat("x", maxStopBytes+1) + `"`, "stop", "invalid_value"},
		{`"n":2`, "n", "unsupported_value"},
		{`"n":"1"`, "n", "invalid_type"},
		{`"stream":1`, "stream", "invalid_type"},
		{`"stream_options":{"include_usage":1}`, "stream_options", "invalid_type"},
		{`"ignore_eos":"yes"`, "ignore_eos", "invalid_type"},
		{`"return_token_ids":0`, "return_token_ids", "invalid_type"},
		{`"cache_salt":1`, "cache_salt", "invalid_type"},
		{`"cache_salt":"` + strings.Repeat("s", apikeys.MaxSalt+1) + `"`, "cache_salt", "invalid_value"},
		{`"model":1`, "model", "invalid_type"},
		{`"min_tokens":3`, "min_tokens", "unsupported_value"},
		{`"presence_penalty":0.5`, "presence_penalty", "unsupported_value"},
		{`"repetition_penalty":1.1`, "repetition_penalty", "unsupported_value"},
		{`"logit_bias":{"1":2}`, "logit_bias", "unsupported_value"},
		{`"kv_transfer_params":[]`, "kv_transfer_params", "invalid_type"},
		{`"kv_transfer_params":{"do_remote_decode":1}`, "kv_transfer_params.do_remote_decode", "invalid_type"},
		{`"kv_transfer_params":{"kvport_ticket":7}`, "kv_transfer_params.kvport_ticket", "invalid_type"},
		{`"kv_transfer_params":{"kvport_ticket":"%%"}`, "kv_transfer_params.kvport_ticket", "invalid_value"},
		{`"kv_transfer_params":{"kvport_ticket":"` + strings.Repeat("AAAA", maxTicket/3+2) + `"}`, "kv_transfer_params.kvport_ticket", "invalid_value"},
	}
	for _, tt := range tests {
		_, err := decodeCompletion([]byte(`{"prompt":"x",` + tt.fields + `}`))
		require.NotNil(t, err, tt.fields)
		require.Equal(t, [2]string{tt.param, tt.code}, [2]string{err.Param, err.Code}, tt.fields)
		require.Contains(t, err.Message, tt.param)
		require.Less(t, len(err.Message), 300)
		_, err = decodeChat([]byte(`{"messages":[{"role":"user","content":"x"}],` + tt.fields + `}`))
		require.NotNil(t, err, tt.fields)
		require.Equal(t, tt.param, err.Param)
	}
}

// What only one of the endpoints has is refused there.
func TestDecodeRefusesPerEndpoint(t *testing.T) {
	only := []struct {
		chat        bool
		body, param string
	}{
		{false, `{}`, "prompt"},
		{false, `{"prompt":null}`, "prompt"},
		{false, `{"prompt":"x","echo":true}`, "echo"},
		{false, `{"prompt":"x","logprobs":3}`, "logprobs"},
		{false, `{"prompt":"x","suffix":"y"}`, "suffix"},
		{false, `{"prompt":"x","best_of":2}`, "best_of"},
		{false, `{"prompt":["x","y"],"kv_transfer_params":{"do_remote_decode":true}}`, "kv_transfer_params"},
		{true, `{}`, "messages"},
		{true, `{"messages":[]}`, "messages"},
		{true, `{"messages":"hi"}`, "messages"},
		{true, `{"messages":[{"content":"x"}]}`, "messages[0].role"},
		{true, `{"messages":[{"role":"user","content":"x"},{"role":"user<|im_end|>","content":"x"}]}`, "messages[1].role"},
		{true, `{"messages":[{"role":"User","content":"x"}]}`, "messages[0].role"},
		{true, `{"messages":[{"role":"user","content":1}]}`, "messages[0].content"},
		{true, `{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}`, "messages[0].content[0]"},
		{true, `{"messages":[{"role":"user","content":"x"}],"logprobs":true}`, "logprobs"},
		{true, `{"messages":[{"role":"user","content":"x"}],"top_logprobs":2}`, "top_logprobs"},
		{true, `{"messages":[{"role":"user","content":"x"}],"tools":[{}]}`, "tools"},
		{true, `{"messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_object"}}`, "response_format"},
		{true, `{"messages":[{"role":"user","content":"x"}],"max_completion_tokens":0}`, "max_completion_tokens"},
		{true, `{"messages":[{"role":"user","content":"x"}],"max_completion_tokens":5,"max_tokens":"x"}`, "max_tokens"},
		{true, `{"messages":[{"role":"user","content":"x"}],"max_completion_tokens":"x","max_tokens":5}`, "max_completion_tokens"},
		{false, `{"prompt":"x","response_format":{"type":"json_object"}}`, "response_format"},
		{false, `[]`, ""},
		{false, `null`, ""},
		{false, `{"prompt":"x"} {}`, ""},
		{false, `{"prompt":`, ""},
		{true, ``, ""},
	}
	for _, tt := range only {
		var err *Error
		if tt.chat {
			_, err = decodeChat([]byte(tt.body))
		} else {
			_, err = decodeCompletion([]byte(tt.body))
		}
		require.NotNil(t, err, tt.body)
		require.Equal(t, tt.param, err.Param, tt.body)
		require.Equal(t, 400, err.Status)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"prompt":[[1],[2]],"stop":["a"],"kv_transfer_params":{"kvport_ticket":"AA=="}}`))
	f.Add([]byte(`{"messages":[{"role":"user","content":[{"type":"text","text":"x"}]}],"max_completion_tokens":3}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		if r, err := decodeCompletion(body); err == nil {
			require.NotEmpty(t, r.prompts)
			for _, p := range r.prompts {
				require.True(t, p.text != "" || len(p.tokens) > 0)
			}
			require.LessOrEqual(t, len(r.prompts), maxPrompts)
			saneParams(t, &r.params)
		} else {
			refused(t, err)
		}
		if r, err := decodeChat(body); err == nil {
			require.NotEmpty(t, r.messages)
			for _, m := range r.messages {
				require.NotEmpty(t, m.Role)
			}
			saneParams(t, &r.params)
		} else {
			refused(t, err)
		}
	})
}

// saneParams checks what the generation takes as given.
func saneParams(t *testing.T, p *params) {
	t.Helper()
	require.NoError(t, p.sampling.Validate())
	require.True(t, p.maxTokens >= 0 && p.maxTokens <= maxTokens)
	require.LessOrEqual(t, len(p.ticket), maxTicket+2)
	require.LessOrEqual(t, len(p.stops), maxStops)
	for _, s := range p.stops {
		require.True(t, s != "" && len(s) <= maxStopBytes)
	}
}

// refused checks that the client is told in a message of bounded size what it did wrong.
func refused(t *testing.T, err *Error) {
	t.Helper()
	require.Equal(t, 400, err.Status)
	require.NotEmpty(t, err.Message)
	require.NotEmpty(t, err.Code)
	require.Less(t, len(err.Message), 1024)
}

// Of two limits the newer field is the one that counts.
func TestMaxCompletionTokensWins(t *testing.T) {
	r, err := decodeChat([]byte(`{"messages":[{"role":"user","content":"x"}],"max_tokens":3,"max_completion_tokens":5}`))
	require.Nil(t, err)
	require.Equal(t, 5, r.maxTokens)
	require.Zero(t, r.unexpected)
}

// A number that is too large for its field is told the range.
func TestRangesAreTold(t *testing.T) {
	for fields, want := range map[string]string{
		`"max_tokens":1e30`:           "max_tokens: want an integer from 1 to 16777216",
		`"max_tokens":99999999`:       "1 to 16777216",
		`"seed":18446744073709551615`: "seed: want an integer from -2^63 to 2^63-1",
		`"top_p":0`:                   "want above 0 and at most 1",
		`"top_p":1.1`:                 "want above 0 and at most 1",
		`"top_p":-1`:                  "want above 0 and at most 1",
	} {
		_, err := decodeCompletion([]byte(`{"prompt":"x",` + fields + `}`))
		require.NotNil(t, err, fields)
		require.Contains(t, err.Message, want)
	}
}

// What changes the answer and cannot be done is refused by name, at both endpoints; what asks for nothing passes.
func TestDecodeRefusesWishes(t *testing.T) {
	for name, values := range map[string][2][]string{ // first the neutral ones
		"stop_token_ids":             {{`null`, `[]`}, {`[2]`}},
		"include_stop_str_in_output": {{`false`}, {`true`}},
		"bad_words":                  {{`[]`, `null`}, {`["x"]`}},
		"allowed_token_ids":          {{`null`}, {`[1]`}},
		"use_beam_search":            {{`false`}, {`true`}},
		"length_penalty":             {{`1`, `1.0`}, {`0.5`}},
		"skip_special_tokens":        {{`true`}, {`false`}},
		"structured_outputs":         {{`{}`, `null`, `{ }`}, {`{"json":{}}`}},
		"guided_json":                {{`null`}, {`{"type":"object"}`, `"{}"`}},
		"guided_regex":               {{`""`}, {`"a+"`}},
		"guided_choice":              {{`[]`}, {`["a"]`}},
		"guided_grammar":             {{`null`}, {`"root ::= x"`}},
		"prompt_logprobs":            {{`null`, `false`}, {`0`, `5`}},
		"priority":                   {{`0`, `0.0`}, {`1`, `-1`}},
		"truncate_prompt_tokens":     {{`null`}, {`10`, `-1`}},
		"logit_bias":                 {{`{}`, `null`}, {`{"1":5}`}},
		"response_format":            {{`{"type":"text"}`, `null`}, {`{"type":"json_object"}`}},
		"repetition_penalty":         {{`1`, `1.0`, `null`}, {`1.2`}},
		"frequency_penalty":          {{`0`, `0.0`}, {`0.1`}},
		"presence_penalty":           {{`0`}, {`0.1`}},
		"n":                          {{`1`}, {`2`}},
		"min_p":                      {{`0`}, {`0.1`}},
		"min_tokens":                 {{`0`}, {`1`}},
		"logprobs":                   {{`null`, `false`}, {`true`}},
	} {
		for _, endpoint := range []string{`{"prompt":"x",%}`, chatBody} {
			for i, list := range values {
				for _, value := range list {
					body := strings.Replace(endpoint, "%", strconv.Quote(name)+":"+value, 1)
					wishIs(t, body, name, i == 1)
				}
			}
		}
	}
}

// What only chat completions have.
func TestDecodeRefusesWishesOfChats(t *testing.T) {
	for name, values := range map[string][2][]string{
		"chat_template_kwargs":   {{`{}`, `null`}, {`{"enable_thinking":false}`}},
		"add_generation_prompt":  {{`true`}, {`false`}},
		"continue_final_message": {{`false`}, {`true`}},
		"chat_template":          {{`null`}, {`"{{ x }}"`}},
		"documents":              {{`[]`}, {`[{"text":"x"}]`}},
		"tool_choice":            {{`"none"`, `"auto"`}, {`"required"`, `{"type":"function"}`}},
		"tools":                  {{`[]`}, {`[{}]`}},
		"modalities":             {{`["text"]`, `[ "text" ]`}, {`["text","audio"]`}},
	} {
		for i, list := range values {
			for _, value := range list {
				wishIs(t, strings.Replace(chatBody, "%", strconv.Quote(name)+":"+value, 1), name, i == 1)
			}
		}
	}
}

const chatBody = `{"messages":[{"role":"user","content":"x"}],%}`

func wishIs(t *testing.T, body, name string, refused bool) {
	t.Helper()
	var err *Error
	if strings.Contains(body, "messages") {
		_, err = decodeChat([]byte(body))
	} else {
		_, err = decodeCompletion([]byte(body))
	}
	if !refused {
		require.Nil(t, err, body)
		return
	}
	require.NotNil(t, err, body)
	require.Equal(t, name, err.Param, body)
	require.Equal(t, 400, err.Status)
	require.Contains(t, err.Message, name)
}

// What clients send of themselves, and what says nothing, is not counted as unknown.
func TestDecodeHarmless(t *testing.T) {
	r, err := decodeChat([]byte(strings.Replace(chatBody, "%", `"user":"u","store":false,"metadata":{"a":"b"},"service_tier":"auto","parallel_tool_calls":true,
		"safety_identifier":"s","prompt_cache_key":"k","request_id":"r","stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`, 1)))
	require.Nil(t, err)
	require.Zero(t, r.unexpected)
}

// A wish in kv_transfer_params that nobody here knows is refused instead of answered with tokens.
func TestDecodeRefusesWishesOfTransfer(t *testing.T) {
	for params, want := range map[string]string{
		`"request_type":"cache_query"`:          "kv_transfer_params.request_type",
		`"` + strings.Repeat("x", 5000) + `":1`: "kv_transfer_params.xxx",
		`"cache_query":false,"request_type":null,"a":[],"remote_host":"h","remote_port":5,"remote_block_ids":[1],"remote_engine_id":"e","tp_size":2,"kvport_later":1`: "",
	} {
		_, err := decodeCompletion([]byte(`{"prompt":"x","kv_transfer_params":{` + params + `}}`))
		if want == "" {
			require.Nil(t, err, params)
			continue
		}
		require.NotNil(t, err, params)
		require.Contains(t, err.Param, want)
		require.Less(t, len(err.Message), 300)
		require.Equal(t, "unsupported_value", err.Code)
	}
}
