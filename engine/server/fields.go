package server

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
)

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
	for _, name := range sortedNames(o.fields) {
		known := strings.HasPrefix(name, "remote_") || strings.HasPrefix(name, "kvport_") || name == "tp_size"
		w := wish{name, []string{"false", "0"}}
		if raw, ok := o.raw(name); ok && !known && !w.asksForNothing(raw) {
			o.fail(unsupported(clip(json.RawMessage(name)), "is not supported, got %s", clip(raw)))
		}
	}
}

func sortedNames(fields map[string]json.RawMessage) []string {
	names := make([]string, 0, len(fields))
	for name := range fields {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}
