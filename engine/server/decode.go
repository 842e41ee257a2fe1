package server

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/kvport/kvport/engine"
	"github.com/kvport/kvport/engine/apikeys"
	"github.com/kvport/kvport/engine/sample"
	"github.com/kvport/kvport/engine/tokenizer"
)

// Limits of one request, in addition to the size of its body.
const (
	maxPrompts   = 64
	maxStops     = 16
	maxStopBytes = 1024
	maxMessages  = 4096
	maxTicket    = 64 << 10 // bytes, decoded
	maxTokens    = 1 << 24  // above what any model can hold, and safe to add up
)

// params are the fields that completions and chat completions share.
type params struct {
	model      string
	sampling   sample.Params
	maxTokens  int // 0: not given
	stops      []string
	ignoreEOS  bool
	stream     bool
	usage      bool // stream_options.include_usage
	tokenIDs   bool // return_token_ids
	salt       string
	remote     bool
	turn       bool // remote, for the next turn of the conversation
	transfer   bool // there are kv_transfer_params, whatever they say
	query      bool // say what is cached, and generate nothing
	hold       bool // with query: give a ticket for it
	noBlockIDs bool // with query: say how much, and leave out of which blocks
	ticket     []byte
	unexpected int    // fields that nobody here knows
	unknown    string // the first of them in alphabetical order, shortened
}

// completionRequest is the body of /v1/completions.
type completionRequest struct {
	params
	prompts []prompt
}

// prompt is text, or tokens if text is empty and tokens is not.
type prompt struct {
	text   string
	tokens []int32
	chat   *tokenizer.Chat
}

// chatRequest is the body of /v1/chat/completions.
type chatRequest struct {
	params
	messages []tokenizer.Message
}

// object is a JSON object whose fields are taken out one by one; what is left is unknown. The first
// error sticks.
type object struct {
	fields map[string]json.RawMessage
	err    *Error
}

func parseObject(body []byte) (*object, *Error) {
	o := &object{}
	err := json.Unmarshal(body, &o.fields)
	if syntax, is := errors.AsType[*json.SyntaxError](err); is {
		return nil, invalid("", "invalid_json", "request body is not JSON: %v at byte %d", err, syntax.Offset)
	}
	if err != nil || o.fields == nil {
		return nil, invalid("", "invalid_json", "request body: want a JSON object")
	}
	return o, nil
}

// raw takes a field out; false if it is absent or null.
func (o *object) raw(name string) (json.RawMessage, bool) {
	value, ok := o.fields[name]
	delete(o.fields, name)
	value = bytes.TrimSpace(value)
	return value, ok && !bytes.Equal(value, []byte("null"))
}

// left counts the fields that nobody took and gives the first one's name, shortened.
func (o *object) left() (n int, name string) {
	const longest = 40
	for field := range o.fields {
		if n++; n == 1 || field < name {
			name = field
		}
	}
	return n, strings.ToValidUTF8(name[:min(len(name), longest)], "")
}

func (o *object) fail(err *Error) { o.err = cmp.Or(o.err, err) }

// take decodes a field into dst and reports whether it was there. want says in words what it holds.
func take[T any](o *object, name, want string, dst *T) bool {
	raw, ok := o.raw(name)
	if !ok {
		return false
	}
	if json.Unmarshal(raw, dst) != nil {
		o.fail(wrongType(name, want))
		return false
	}
	return true
}

func decodeCompletion(body []byte) (*completionRequest, *Error) {
	o, err := parseObject(body)
	if err != nil {
		return nil, err
	}
	r := &completionRequest{}
	raw, ok := o.raw("prompt")
	if !ok {
		return nil, invalid("prompt", "missing_required_parameter", "prompt: is required")
	}
	if r.prompts, err = decodePrompts(raw); err != nil {
		return nil, err
	}
	var echo bool
	if take(o, "echo", "a boolean", &echo) && echo {
		o.fail(unsupported("echo", "is not supported"))
	}
	o.onlyNumber("best_of", 1)
	if raw, ok := o.raw("logprobs"); ok && string(raw) != "false" {
		o.fail(unsupported("logprobs", "are not supported, got %s", clip(raw)))
	}
	var suffix string
	if take(o, "suffix", "a string", &suffix) && suffix != "" {
		o.fail(unsupported("suffix", "is not supported"))
	}
	o.refuse(completionWishes())
	r.params = o.params()
	if len(r.prompts) > 1 && (r.remote || r.ticket != nil || r.query) {
		o.fail(unsupported("kv_transfer_params", "describe one prompt, the request has %d", len(r.prompts)))
	}
	return r, o.err
}

func decodeChat(body []byte) (*chatRequest, *Error) {
	o, err := parseObject(body)
	if err != nil {
		return nil, err
	}
	r := &chatRequest{}
	raw, ok := o.raw("messages")
	if !ok {
		return nil, invalid("messages", "missing_required_parameter", "messages: is required")
	}
	if r.messages, err = decodeMessages(raw); err != nil {
		return nil, err
	}
	var logprobs bool
	if take(o, "logprobs", "a boolean", &logprobs) && logprobs {
		o.fail(unsupported("logprobs", "are not supported"))
	}
	o.onlyNumber("top_logprobs", 0)
	var tools []json.RawMessage
	if take(o, "tools", "a list", &tools) && len(tools) > 0 {
		o.fail(unsupported("tools", "are not supported"))
	}
	o.refuse(chatWishes())
	r.params = o.params()
	if n := o.count("max_completion_tokens"); n != 0 { // the newer name of max_tokens
		r.maxTokens = n
	}
	r.unexpected, r.unknown = o.left()
	return r, o.err
}

// params takes the fields that all generations share.
func (o *object) params() (p params) {
	take(o, "model", "a string", &p.model)
	p.sampling = o.sampling()
	p.maxTokens = o.count("max_tokens")
	p.stops = o.stops()
	take(o, "ignore_eos", "a boolean", &p.ignoreEOS)
	take(o, "stream", "a boolean", &p.stream)
	var options struct {
		Usage bool `json:"include_usage"`
	}
	if take(o, "stream_options", "an object with the boolean include_usage", &options) {
		p.usage = options.Usage
	}
	take(o, "return_token_ids", "a boolean", &p.tokenIDs)
	if take(o, "cache_salt", "a string", &p.salt) && len(p.salt) > apikeys.MaxSalt {
		o.fail(wrongValue("cache_salt", "has %d bytes, want at most %d", len(p.salt), apikeys.MaxSalt))
	}
	o.transfer(&p)
	o.onlyNumber("n", 1)
	for _, name := range []string{"min_tokens", "presence_penalty", "frequency_penalty", "min_p"} {
		o.onlyNumber(name, 0)
	}
	o.onlyNumber("repetition_penalty", 1)
	var bias map[string]json.RawMessage
	if take(o, "logit_bias", "an object", &bias) && len(bias) > 0 {
		o.fail(unsupported("logit_bias", "is not supported"))
	}
	var format struct {
		Type string `json:"type"`
	}
	if take(o, "response_format", "an object", &format) && format.Type != "text" {
		o.fail(unsupported("response_format", "only text is supported"))
	}
	p.unexpected, p.unknown = o.left()
	return p
}

func (o *object) sampling() sample.Params {
	p := sample.Params{Temperature: 1, TopP: 1, Seed: rand.Uint64()}
	take(o, "temperature", "a number", &p.Temperature)
	if take(o, "top_p", "a number", &p.TopP) && !(p.TopP > 0 && p.TopP <= 1) {
		o.fail(wrongValue("top_p", "is %v, want above 0 and at most 1", p.TopP))
	}
	take(o, "top_k", "an integer", &p.TopK)
	if p.TopK == -1 { // vLLM's way to say all
		p.TopK = 0
	}
	var seed int64
	if take(o, "seed", "an integer from -2^63 to 2^63-1", &seed) {
		p.Seed = uint64(seed)
	}
	if err := p.Validate(); err != nil {
		field, _, _ := strings.Cut(err.Error(), " ")
		o.fail(invalid(field, "invalid_value", "%v", err))
	}
	return p
}

// count takes a positive number of tokens; 0 if it is absent.
func (o *object) count(name string) (n int) {
	if take(o, name, fmt.Sprintf("an integer from 1 to %d", maxTokens), &n) && (n < 1 || n > maxTokens) {
		o.fail(wrongValue(name, "is %d, want 1 to %d", n, maxTokens))
	}
	return n
}

// onlyNumber takes a number that may have one value only.
func (o *object) onlyNumber(name string, only float64) {
	var n float64
	if take(o, name, "a number", &n) && n != only {
		o.fail(unsupported(name, "is %v, only %v is supported", n, only))
	}
}

// stops takes a string or a list of strings.
func (o *object) stops() []string {
	raw, ok := o.raw("stop")
	if !ok {
		return nil
	}
	var one string
	list := []string{}
	if json.Unmarshal(raw, &one) == nil {
		list = append(list, one)
	} else if json.Unmarshal(raw, &list) != nil {
		o.fail(wrongType("stop", "a string or a list of strings"))
		return nil
	}
	if len(list) > maxStops {
		o.fail(wrongValue("stop", "has %d strings, at most %d are allowed", len(list), maxStops))
	}
	for _, s := range list {
		if s == "" || len(s) > maxStopBytes {
			o.fail(wrongValue("stop", "a string has %d bytes, want 1 to %d", len(s), maxStopBytes))
		}
	}
	return list
}

// transfer takes kv_transfer_params. Only our own ticket says where KV is: hosts and ports in a
// client's JSON are never used, and a wish that nobody here knows is refused. A request that asks to load and to be kept is one of a decode instance
// whose answer the next turn may want.
func (o *object) transfer(p *params) {
	raw, ok := o.raw("kv_transfer_params")
	if !ok {
		return
	}
	p.transfer = true
	t := &object{}
	if json.Unmarshal(raw, &t.fields) != nil {
		o.fail(wrongType("kv_transfer_params", "an object"))
		return
	}
	take(t, "do_remote_decode", "a boolean", &p.remote)
	var load bool
	take(t, "do_remote_prefill", "a boolean", &load)
	var ticket string
	take(t, "kvport_ticket", "a base64 string", &ticket)
	t.cacheQuery(p)
	if p.query && (p.remote || load || ticket != "") {
		t.fail(unsupported("cache_query", "goes without do_remote_decode, do_remote_prefill and kvport_ticket"))
	}
	t.refuseParams()
	p.turn = p.remote && load
	if t.err != nil {
		o.fail(&Error{t.err.Status, t.err.Kind, "kv_transfer_params." + t.err.Param, t.err.Code, "kv_transfer_params." + t.err.Message})
		return
	}
	const name = "kv_transfer_params.kvport_ticket"
	if ticket == "" {
		return
	}
	if len(ticket) > base64.StdEncoding.EncodedLen(maxTicket) {
		o.fail(wrongValue(name, "is over %d bytes", maxTicket))
		return
	}
	var err error
	if p.ticket, err = base64.StdEncoding.DecodeString(ticket); err != nil {
		o.fail(wrongValue(name, "%v", err))
	}
}

// cacheQuery takes the fields of a cache query from kv_transfer_params.
func (o *object) cacheQuery(p *params) {
	if !take(o, "cache_query", "a boolean", &p.query) || !p.query {
		return
	}
	take(o, "hold", "a boolean", &p.hold)
	blockIDs := true
	take(o, "block_ids", "a boolean", &blockIDs)
	p.noBlockIDs = !blockIDs
}

// decodePrompts reads a string, a list of strings, a list of token ids, or a list of such lists.
func decodePrompts(raw json.RawMessage) ([]prompt, *Error) {
	var text string
	var texts []string
	var tokens []int32
	var lists [][]int32
	prompts := []prompt{}
	switch {
	case json.Unmarshal(raw, &text) == nil:
		prompts = append(prompts, prompt{text: text})
	case json.Unmarshal(raw, &texts) == nil:
		for _, t := range texts {
			prompts = append(prompts, prompt{text: t})
		}
	case bytes.Contains(raw, []byte("null")): // decodes into anything, a token id too
		return nil, wrongType("prompt", promptTypes)
	case json.Unmarshal(raw, &tokens) == nil:
		prompts = append(prompts, prompt{tokens: tokens})
	case json.Unmarshal(raw, &lists) == nil:
		for _, t := range lists {
			prompts = append(prompts, prompt{tokens: t})
		}
	default:
		return nil, wrongType("prompt", promptTypes)
	}
	if len(prompts) > maxPrompts {
		return nil, wrongValue("prompt", "has %d prompts, at most %d are allowed", len(prompts), maxPrompts)
	}
	empty := func(p prompt) bool { return p.text == "" && len(p.tokens) == 0 }
	if len(prompts) == 0 || slices.ContainsFunc(prompts, empty) {
		return nil, wrongValue("prompt", "is empty")
	}
	return prompts, nil
}

const promptTypes = "a string, a list of strings, a list of token ids, or a list of lists of token ids"

func decodeMessages(raw json.RawMessage) ([]tokenizer.Message, *Error) {
	var list []map[string]json.RawMessage
	if json.Unmarshal(raw, &list) != nil {
		return nil, wrongType("messages", "a list of objects")
	}
	if len(list) == 0 || len(list) > maxMessages {
		return nil, wrongValue("messages", "has %d messages, want 1 to %d", len(list), maxMessages)
	}
	messages := make([]tokenizer.Message, len(list))
	for i, fields := range list {
		at := fmt.Sprintf("messages[%d]", i)
		m := &object{fields: fields}
		if !take(m, "role", "a string", &messages[i].Role) || messages[i].Role == "" {
			return nil, wrongType(at+".role", "a string that is not empty")
		}
		if role := messages[i].Role; !slices.Contains(tokenizer.Roles(), role) {
			return nil, wrongValue(at+".role", "is %q, want one of %s", clip([]byte(role)), strings.Join(tokenizer.Roles(), ", "))
		}
		var err *Error
		if messages[i].Content, err = decodeContent(m, at+".content"); err != nil {
			return nil, err
		}
	}
	return messages, nil
}

// decodeContent reads a string, or a list of text parts.
func decodeContent(m *object, at string) (string, *Error) {
	raw, ok := m.raw("content")
	if !ok {
		return "", nil
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return text, nil
	}
	var parts []struct {
		Type string  `json:"type"`
		Text *string `json:"text"`
	}
	if json.Unmarshal(raw, &parts) != nil {
		return "", wrongType(at, "a string or a list of text parts")
	}
	texts := make([]string, len(parts))
	for i, p := range parts {
		if p.Type != "text" || p.Text == nil {
			return "", unsupported(fmt.Sprintf("%s[%d]", at, i), "only parts of type text are supported")
		}
		texts[i] = *p.Text
	}
	return strings.Join(texts, "\n"), nil
}

// clip shortens a value for an error message.
func clip(raw json.RawMessage) string {
	if len(raw) > 40 {
		return string(raw[:40]) + "..."
	}
	return string(raw)
}

// wish is a field of OpenAI or vLLM that changes the answer and that this engine does not know. null, "", [] and {}
// ask for nothing, and neither do its neutral values.
type wish struct {
	name    string
	neutral []string // JSON
}

// wishes are those that both endpoints have.
func wishes() []wish {
	return []wish{
		{"stop_token_ids", nil},
		{"include_stop_str_in_output", []string{"false"}},
		{"bad_words", nil},
		{"allowed_token_ids", nil},
		{"logits_processors", nil},
		{"use_beam_search", []string{"false"}},
		{"length_penalty", []string{"1"}},
		{"skip_special_tokens", []string{"true"}},
		{"spaces_between_special_tokens", []string{"true"}},
		{"prompt_logprobs", []string{"false"}},
		{"truncate_prompt_tokens", nil},
		{"structured_outputs", nil},
		{"guided_json", nil},
		{"guided_regex", nil},
		{"guided_choice", nil},
		{"guided_grammar", nil},
		{"guided_whitespace_pattern", nil},
		{"structural_tag", nil},
		{"thinking_token_budget", nil},
		{"priority", []string{"0"}},
		{"vllm_xargs", nil},
	}
}

// completionWishes are those of completions.
func completionWishes() []wish {
	return append(wishes(), wish{"prompt_embeds", nil}, wish{"add_special_tokens", []string{"true"}})
}

// chatWishes are those of chat completions.
func chatWishes() []wish {
	return append(wishes(),
		wish{"add_special_tokens", []string{"false"}},
		wish{"add_generation_prompt", []string{"true"}},
		wish{"continue_final_message", []string{"false"}},
		wish{"chat_template", nil},
		wish{"chat_template_kwargs", nil},
		wish{"documents", nil},
		wish{"mm_processor_kwargs", nil},
		wish{"media_io_kwargs", nil},
		wish{"echo", []string{"false"}},
		wish{"tool_choice", []string{`"none"`, `"auto"`}},
		wish{"functions", nil},
		wish{"function_call", []string{`"none"`, `"auto"`}},
		wish{"modalities", []string{`["text"]`}},
		wish{"audio", nil},
		wish{"web_search_options", nil},
	)
}

// harmless are fields that clients send and that change no token of the answer.
func harmless() []string {
	return []string{
		"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "request_id",
		"parallel_tool_calls", "return_tokens_as_token_ids", "guided_decoding_backend",
	}
}

// refuse takes out what changes no answer and fails on a wish that cannot be granted.
func (o *object) refuse(wishes []wish) {
	for _, name := range harmless() {
		o.raw(name)
	}
	for _, w := range wishes {
		if raw, ok := o.raw(w.name); ok && !w.asksForNothing(raw) {
			o.fail(unsupported(w.name, "is not supported, got %s", clip(raw)))
		}
	}
}

func (w *wish) asksForNothing(raw json.RawMessage) bool {
	value := string(raw)
	var compact bytes.Buffer
	if json.Compact(&compact, raw) == nil {
		value = compact.String()
	}
	if slices.Contains([]string{`""`, "[]", "{}"}, value) || slices.Contains(w.neutral, value) {
		return true
	}
	number, err := strconv.ParseFloat(value, 64)
	return err == nil && slices.ContainsFunc(w.neutral, func(n string) bool {
		neutral, err := strconv.ParseFloat(n, 64)
		return err == nil && number == neutral
	})
}

// refuseParams fails on what kv_transfer_params ask for and nobody here knows. What vLLM's connectors and proxies
// say there of the other side, and what later versions of kvport may say, is no wish.
func (o *object) refuseParams() {
	for _, name := range slices.Sorted(maps.Keys(o.fields)) {
		known := strings.HasPrefix(name, "remote_") || strings.HasPrefix(name, "kvport_") || name == "tp_size"
		w := wish{name, []string{"false", "0"}}
		if raw, ok := o.raw(name); ok && !known && !w.asksForNothing(raw) {
			o.fail(unsupported(clip(json.RawMessage(name)), "is not supported, got %s", clip(raw)))
		}
	}
}

// Error is an error as OpenAI's clients expect it.
type Error struct {
	Status  int    // of HTTP
	Kind    string // invalid_request_error, rate_limit_error or server_error
	Param   string // the field that is wrong; empty: none in particular
	Code    string
	Message string
}

// Error implements error.
func (e *Error) Error() string { return e.Message }

// MarshalJSON gives the body that OpenAI's clients read.
func (e *Error) MarshalJSON() ([]byte, error) {
	var body struct {
		Error struct {
			Message string  `json:"message"`
			Type    string  `json:"type"`
			Param   *string `json:"param"`
			Code    string  `json:"code"`
		} `json:"error"`
	}
	body.Error.Message, body.Error.Type, body.Error.Code = e.Message, e.Kind, e.Code
	if e.Param != "" {
		body.Error.Param = &e.Param
	}
	return json.Marshal(body)
}

// Write sends the error as the whole answer.
func (e *Error) Write(w http.ResponseWriter) {
	data, err := json.Marshal(e)
	if err != nil {
		data = []byte(`{"error":{"message":"error cannot be encoded","type":"server_error","param":null,"code":"internal"}}`)
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(data)+1))
	if again := e.Status == http.StatusTooManyRequests || e.Status == http.StatusServiceUnavailable; again && h.Get("Retry-After") == "" {
		h.Set("Retry-After", "1")
	}
	w.WriteHeader(e.Status)
	_, _ = w.Write(append(data, '\n')) // a client that left needs no answer
}

func invalid(param, code, format string, args ...any) *Error {
	return &Error{http.StatusBadRequest, "invalid_request_error", param, code, fmt.Sprintf(format, args...)}
}

// wrongType says that a field holds the wrong kind of JSON value.
func wrongType(param, want string) *Error {
	return invalid(param, "invalid_type", "%s: want %s", param, want)
}

// wrongValue says that a field's value is out of range.
func wrongValue(param, format string, args ...any) *Error {
	return invalid(param, "invalid_value", param+": "+format, args...)
}

// unsupported says that a field asks for what this engine cannot do. Silently leaving it out would
// change the answer.
func unsupported(param, format string, args ...any) *Error {
	return invalid(param, "unsupported_value", param+": "+format, args...)
}

// errDraining refuses new requests at shutdown.
func errDraining() *Error {
	return &Error{http.StatusServiceUnavailable, "server_error", "", "draining", "the server is shutting down"}
}

// asError turns what the engine said into an answer.
func asError(err error) *Error {
	if e, is := errors.AsType[*Error](err); is {
		return e
	}
	switch {
	case errors.Is(err, engine.ErrTooLong):
		return invalid("", "context_length_exceeded", "%v", err)
	case errors.Is(err, engine.ErrInvalid):
		return invalid("", "invalid_value", "%v", err)
	case errors.Is(err, engine.ErrOverloaded):
		return &Error{http.StatusTooManyRequests, "rate_limit_error", "", "overloaded", err.Error()}
	case errors.Is(err, engine.ErrClosed):
		return errDraining()
	case errors.Is(err, engine.ErrLoadFailed):
		return &Error{http.StatusInternalServerError, "server_error", "", "kv_load_failed", err.Error()}
	case errors.Is(err, engine.ErrNotReset):
		return &Error{http.StatusNotImplemented, "server_error", "", "reset_not_supported", err.Error()}
	case errors.Is(err, engine.ErrKept):
		return &Error{http.StatusConflict, "invalid_request_error", "", "blocks_kept", err.Error()}
	}
	return &Error{http.StatusInternalServerError, "server_error", "", "internal", err.Error()}
}
