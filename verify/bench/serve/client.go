package serve

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// Form is how prompts are sent.
type Form string

// The forms of prompts.
const (
	Tokens Form = "tokens" // token ids, to /v1/completions
	Text   Form = "text"   // words, to /v1/completions
	Chat   Form = "chat"   // words, as the messages of a conversation, to /v1/chat/completions
)

// Client sends requests to a server or router that speaks OpenAI's API.
type Client struct {
	URL   string // base URL, without a trailing slash
	Model string // its name there; empty: the field is left out
	Key   string // API key; empty: none
	Form  Form
	// Own sends fields of vLLM and kvport, too: ignore_eos, so that every answer has all its tokens, and return_token_ids, so that they can be
	// compared with those that are expected.
	Own  bool
	HTTP http.Client
}

// message is one of a chat.
type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// body is a request as it is sent.
type body struct {
	Model         string          `json:"model,omitempty"`
	Prompt        any             `json:"prompt,omitempty"` // string or token ids
	Messages      []message       `json:"messages,omitempty"`
	MaxTokens     int             `json:"max_tokens"`
	Temperature   int             `json:"temperature"`
	Stream        bool            `json:"stream"`
	StreamOptions map[string]bool `json:"stream_options"`
	IgnoreEOS     bool            `json:"ignore_eos,omitempty"`
	ReturnTokens  bool            `json:"return_token_ids,omitempty"`
}

func (c *Client) body(r *Request) (path string, data []byte, err error) {
	b := body{
		Model: c.Model, MaxTokens: r.MaxTokens, Stream: true, StreamOptions: map[string]bool{"include_usage": true},
		IgnoreEOS: c.Own, ReturnTokens: c.Own,
	}
	path = "/v1/completions"
	switch {
	case c.Form == Chat:
		path, b.Messages = "/v1/chat/completions", messages(r)
	case r.Text != "":
		b.Prompt = r.Text
	case c.Form == Text:
		b.Prompt = words(r.Prompt())
	default:
		b.Prompt = r.Prompt()
	}
	data, err = json.Marshal(b)
	return path, data, err
}

func messages(r *Request) []message {
	if r.Text != "" {
		return []message{{"user", r.Text}}
	}
	var list []message
	for i, part := range r.Parts {
		role := "assistant"
		if i%2 == 1 {
			role = "user"
		} else if i == 0 {
			role = "system"
		}
		if len(part) > 0 {
			list = append(list, message{role, words(part)})
		}
	}
	return list
}

// words writes each token as a word of its own.
func words(tokens []int32) string {
	const first, second = "bdfghklmnprstvwz", "aeiouaeiouaeioua"
	var b strings.Builder
	for _, t := range tokens {
		high, low := t>>4&15, t&15
		b.WriteByte(first[high])
		b.WriteByte(second[low])
		b.WriteByte(first[low])
		b.WriteByte(' ')
	}
	return b.String()
}

// event is one server-sent event of a stream of either path.
type event struct {
	Choices []struct {
		Text   string  `json:"text"`
		Tokens []int32 `json:"token_ids"`
		Delta  struct {
			Content   string `json:"content"`
			Reasoning string `json:"reasoning_content"`
		} `json:"delta"`
		Reason *string `json:"finish_reason"`
	} `json:"choices"`
	Usage *struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
	} `json:"usage"`
	Error json.RawMessage `json:"error"`
}

// Send implements Sender.
func (c *Client) Send(ctx context.Context, r *Request, piece func()) (Answer, error) {
	path, data, err := c.body(r)
	if err != nil {
		return Answer{}, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.URL+path, bytes.NewReader(data))
	if err != nil {
		return Answer{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Session-Id", "conversation-"+strconv.Itoa(r.Conversation))
	if c.Key != "" {
		req.Header.Set("Authorization", "Bearer "+c.Key)
	}
	resp, err := c.HTTP.Do(req)
	if err != nil {
		kind := "cut"
		if e, ok := errors.AsType[*net.OpError](err); ok && e.Op == "dial" {
			kind = "connect"
		}
		return Answer{}, &RequestError{kind, err}
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1024))
		return Answer{}, &RequestError{fmt.Sprintf("status %d", resp.StatusCode), errors.New(string(bytes.TrimSpace(text)))}
	}
	s := &stream{piece: piece}
	if err := s.read(resp.Body); err != nil {
		return s.answer, err
	}
	return s.answer, c.check(r, s)
}

// stream is an answer that is being read.
type stream struct {
	piece    func()
	answer   Answer
	finished bool // it has a finish reason
	counted  bool // it has usage
}

func (s *stream) read(r io.Reader) error {
	lines := bufio.NewReaderSize(r, 64<<10)
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return &RequestError{"cut", fmt.Errorf("the stream ended without [DONE]: %w", err)}
		}
		data, found := strings.CutPrefix(strings.TrimSpace(line), "data:")
		if !found {
			continue
		}
		if data = strings.TrimSpace(data); data == "[DONE]" {
			return nil
		}
		var e event
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			return &RequestError{"error event", fmt.Errorf("%q: %w", data[:min(len(data), 200)], err)}
		}
		if len(e.Error) > 0 && string(e.Error) != "null" {
			return &RequestError{"error event", errors.New(string(e.Error))}
		}
		s.add(&e)
	}
}

func (s *stream) add(e *event) {
	came := false
	for _, choice := range e.Choices {
		came = came || len(choice.Tokens) > 0 || cmp.Or(choice.Text, choice.Delta.Content, choice.Delta.Reasoning) != ""
		s.answer.Tokens = append(s.answer.Tokens, choice.Tokens...)
		s.finished = s.finished || choice.Reason != nil
	}
	if came {
		s.piece()
	}
	if e.Usage != nil {
		s.counted = true
		s.answer.Prompt, s.answer.Completed = e.Usage.Prompt, e.Usage.Completion
	}
}

// check compares an answer with what was asked for.
func (c *Client) check(r *Request, s *stream) error {
	a := &s.answer
	switch {
	case !s.finished:
		return &RequestError{"cut", errors.New("no choice has a finish_reason")}
	case !s.counted:
		return &RequestError{"usage", errors.New("the stream has no usage")}
	case a.Tokens != nil && len(a.Tokens) != a.Completed:
		return &RequestError{"usage", fmt.Errorf("%d token ids, and usage counts %d", len(a.Tokens), a.Completed)}
	case c.Form == Tokens && r.Text == "" && a.Prompt != len(r.Prompt()):
		return &RequestError{"usage", fmt.Errorf("%d prompt tokens were sent, and usage counts %d", len(r.Prompt()), a.Prompt)}
	case c.Own && a.Completed != r.MaxTokens:
		return &RequestError{"short", fmt.Errorf("%d tokens were asked for, and %d came", r.MaxTokens, a.Completed)}
	case r.Want != nil && !slices.Equal(a.Tokens, r.Want):
		return &RequestError{"tokens", errors.New("the tokens are not those of a single engine")}
	}
	return nil
}

// Name asks the server for the name of its first model.
func (c *Client) Name(ctx context.Context) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL+"/v1/models", nil)
	if err != nil {
		return "", err
	}
	if c.Key != "" {
		req.Header.Set("Authorization", "Bearer "+c.Key)
	}
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	var models struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s/v1/models: %s", c.URL, resp.Status)
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 16<<20)).Decode(&models); err != nil {
		return "", fmt.Errorf("%s/v1/models: %w", c.URL, err)
	}
	if len(models.Data) == 0 {
		return "", fmt.Errorf("%s/v1/models lists no model", c.URL)
	}
	return models.Data[0].ID, nil
}
