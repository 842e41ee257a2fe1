package server

import (
	"net/http"

	"github.com/kvport/kvport/engine/tokenizer"
)

// tokenizeRequest is the body of /tokenize, as vLLM has it: prompt or messages.
type tokenizeRequest struct {
	model   string
	prompt  prompt
	field   string // of the prompt
	strings bool   // return_token_strs: the text of each token too
}

// decodeTokenize reads the body of /tokenize. Messages are rendered by the model's template.
func (s *Server) decodeTokenize(body []byte) (*tokenizeRequest, error) {
	o, err := parseObject(body)
	if err != nil {
		return nil, err
	}
	r := &tokenizeRequest{field: "prompt"}
	take(o, "model", "a string", &r.model)
	take(o, "return_token_strs", "a boolean", &r.strings)
	raw, chat := o.raw("messages")
	if chat {
		r.field = "messages"
		var messages []tokenizer.Message
		if messages, err = decodeMessages(raw); err != nil {
			return nil, err
		}
		var chatErr error
		if r.prompt.chat, chatErr = s.config.Tokenizer.Chat(messages); chatErr != nil {
			return nil, invalid("messages", "invalid_value", "messages: %v", chatErr)
		}
	} else if !take(o, "prompt", "a string", &r.prompt.text) && o.err == nil {
		return nil, invalid("prompt", "missing_required_parameter", "prompt: is required, or messages")
	}
	for name, only := range map[string]bool{"add_special_tokens": !chat, "add_generation_prompt": true, "continue_final_message": false} {
		given := only
		if take(o, name, "a boolean", &given) && given != only {
			o.fail(unsupported(name, "is not supported to be %v", given))
		}
	}
	if o.err != nil {
		return nil, o.err
	}
	return r, s.knownModel(r.model)
}

// tokenize answers with the tokens of a prompt as a generation would have them.
func (s *Server) tokenize(w http.ResponseWriter, r *http.Request) {
	err := s.tokenizeBody(w, r)
	if err != nil {
		asError(err).Write(w)
	}
}

func (s *Server) tokenizeBody(w http.ResponseWriter, r *http.Request) error {
	body, err := s.readBody(w, r)
	if err != nil {
		return err
	}
	key, err := s.keyOf(r)
	if err != nil {
		return err
	}
	leave, err := s.fair.enter(key)
	if err != nil {
		return err
	}
	defer leave()
	admitted, err := s.admit(w, key)
	if err != nil {
		return err
	}
	defer s.fair.end(admitted, 0)
	q, err := s.decodeTokenize(body)
	if err != nil {
		return err
	}
	tokens, err := s.encode(q.prompt, q.field)
	if err != nil {
		return err
	}
	answer := struct {
		Count       int      `json:"count"`
		MaxModelLen int      `json:"max_model_len"`
		Tokens      []int32  `json:"tokens"`
		Strings     []string `json:"token_strs"`
	}{len(tokens), s.info.MaxModelLen, tokens, nil}
	if tokens == nil {
		answer.Tokens = []int32{}
	}
	if q.strings {
		answer.Strings = make([]string, len(tokens))
		for i, t := range tokens {
			answer.Strings[i] = string(s.config.Tokenizer.Bytes(t))
		}
	}
	return s.sendJSON(w, http.StatusOK, answer)
}
