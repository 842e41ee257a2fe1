package router

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strings"
)

// fields is a request body of which only some fields are known; the others pass through unread.
type fields map[string]json.RawMessage

// remoteDecode asks a prefill instance to keep the KV for a consumer, in the words of vLLM's proxies.
const remoteDecode = `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,` +
	`"remote_block_ids":null,"remote_host":null,"remote_port":null}`

// parse reads a request body: one JSON object and nothing else.
func parse(body []byte) (fields, error) {
	var f fields
	if err := json.Unmarshal(body, &f); err != nil {
		return nil, fmt.Errorf("request body is not a JSON object: %w", err)
	}
	if f == nil {
		return nil, errors.New("request body is null, want a JSON object")
	}
	return f, nil
}

// forPrefill is the request as a prefill instance gets it: one token, not streamed, KV kept.
func (f fields) forPrefill() fields {
	p := maps.Clone(f)
	for _, name := range []string{"stream_options", "min_tokens", "return_token_ids", "max_completion_tokens"} {
		delete(p, name)
	}
	if _, ok := f["max_completion_tokens"]; ok {
		p["max_completion_tokens"] = json.RawMessage("1")
	}
	p["max_tokens"] = json.RawMessage("1")
	p["stream"] = json.RawMessage("false")
	p["kv_transfer_params"] = json.RawMessage(remoteDecode)
	return p
}

// forDecode is the request as a decode instance gets it, with what the prefill instance answered.
// Without params it is a plain request: what a client put there itself is dropped, since only a
// prefill instance can say where KV is.
func (f fields) forDecode(params json.RawMessage) fields {
	d := maps.Clone(f)
	delete(d, "kv_transfer_params")
	if params != nil {
		d["kv_transfer_params"] = params
	}
	return d
}

// several reports whether the request has more than one prompt. kv_transfer_params describe one.
func (f fields) several() bool {
	var list []json.RawMessage
	if json.Unmarshal(f["prompt"], &list) != nil || len(list) < 2 {
		return false
	}
	first := bytes.TrimSpace(list[0])
	return len(first) > 0 && (first[0] == '"' || first[0] == '[')
}

func (f fields) encode() []byte {
	// Strings and raw messages that were decoded before cannot fail to encode.
	data, _ := json.Marshal(f)
	return data
}

// transferParams takes kv_transfer_params out of a prefill instance's answer; nil if it kept nothing.
func transferParams(answer []byte) (json.RawMessage, error) {
	var a struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	if err := json.Unmarshal(answer, &a); err != nil {
		return nil, fmt.Errorf("prefill answer: %w", err)
	}
	if len(a.Params) == 0 || a.Params[0] != '{' {
		return nil, nil
	}
	return a.Params, nil
}

// forwarded are the headers of from that concern the other end: neither those of one hop, nor
// those that the transport sets itself.
func forwarded(from http.Header) http.Header {
	to := from.Clone()
	for _, list := range from.Values("Connection") {
		for name := range strings.SplitSeq(list, ",") {
			to.Del(strings.TrimSpace(name))
		}
	}
	for _, name := range []string{
		"Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection",
		"Te", "Trailer", "Transfer-Encoding", "Upgrade", "Content-Length", "Accept-Encoding", "Expect",
		"Origin", "Sec-Fetch-Site", // the front has looked at them: to an instance the router is no web page
	} {
		to.Del(name)
	}
	return to
}

// apiError is an error as OpenAI's clients expect it.
type apiError struct {
	Error struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    string  `json:"code"`
	} `json:"error"`
}

func encodeError(kind, code, message string) []byte {
	var e apiError
	e.Error.Message, e.Error.Type, e.Error.Code = message, kind, code
	data, _ := json.Marshal(e) // strings cannot fail
	return data
}

// refuse answers with an error of the router's own.
func refuse(w http.ResponseWriter, status int, code, message string) {
	kind := "server_error"
	if status < http.StatusInternalServerError {
		kind = "invalid_request_error"
	}
	if status == http.StatusServiceUnavailable || status == http.StatusTooManyRequests {
		w.Header().Set("Retry-After", "1")
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(encodeError(kind, code, message), '\n')) // a client that left needs no answer
}
