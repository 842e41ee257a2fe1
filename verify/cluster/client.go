package cluster

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"
)

// Completion is the answer to one prompt.
type Completion struct {
	Tokens   []int32
	Text     string
	Reason   string
	Prompt   int           // prompt tokens
	Cached   int           // prompt tokens that were not computed: local cache and external
	TTFT     time.Duration // request sent to first token received
	Total    time.Duration
	Finished bool // a finish reason and the end of the stream arrived
}

// Request is the part of a completion request that tests and demo vary.
type Request struct {
	Prompt      string   `json:"-"`
	Tokens      []int32  `json:"-"` // instead of Prompt, unless it is empty
	MaxTokens   int      `json:"max_tokens"`
	Temperature float64  `json:"temperature"`
	Seed        int64    `json:"seed,omitempty"`
	IgnoreEOS   bool     `json:"ignore_eos,omitempty"`
	Salt        string   `json:"cache_salt,omitempty"`
	Stop        []string `json:"stop,omitempty"`
}

// body adds what every streamed request of this package asks for.
type body struct {
	Request
	Prompt        any           `json:"prompt"` // string or token ids
	Stream        bool          `json:"stream"`
	StreamOptions streamOptions `json:"stream_options"`
	ReturnTokens  bool          `json:"return_token_ids"`
}

type streamOptions struct {
	IncludeUsage bool `json:"include_usage"`
}

// event is one server-sent event of /v1/completions.
type event struct {
	Choices []struct {
		Text   string  `json:"text"`
		Tokens []int32 `json:"token_ids"`
		Reason *string `json:"finish_reason"`
	} `json:"choices"`
	Usage *struct {
		Prompt  int `json:"prompt_tokens"`
		Details *struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
	Error *struct {
		Message string `json:"message"`
	} `json:"error"`
}

// Client talks to one engine or router. The zero value is ready to use.
type Client struct {
	HTTP http.Client
}

// Complete streams one completion from the engine or router at url.
func (c *Client) Complete(ctx context.Context, url string, r Request) (*Completion, error) {
	var prompt any = r.Prompt
	if len(r.Tokens) > 0 {
		prompt = r.Tokens
	}
	data, err := json.Marshal(body{Request: r, Prompt: prompt, Stream: true, StreamOptions: streamOptions{true}, ReturnTokens: true})
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	start := time.Now()
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return nil, fmt.Errorf("complete: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		return nil, fmt.Errorf("complete: %s: %s", resp.Status, bytes.TrimSpace(text))
	}
	out := &Completion{}
	err = out.read(resp.Body, start)
	out.Total = time.Since(start)
	if err == nil && !out.Finished {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return out, fmt.Errorf("complete: %w", err)
	}
	return out, nil
}

func (c *Completion) read(r io.Reader, start time.Time) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 16<<20)
	lines.Split(wholeLines)
	for lines.Scan() {
		data, found := strings.CutPrefix(lines.Text(), "data: ")
		if !found {
			continue
		}
		if data == "[DONE]" {
			c.Finished = c.Reason != ""
			return nil
		}
		var e event
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			return fmt.Errorf("event %q: %w", data, err)
		}
		if e.Error != nil {
			return fmt.Errorf("server: %s", e.Error.Message)
		}
		c.add(&e, start)
	}
	return lines.Err()
}

// wholeLines is bufio.ScanLines without a last line that has no end: where a deadline or a peer cuts a body, that
// line is part of an event, and the error of the body says what happened.
func wholeLines(data []byte, atEOF bool) (advance int, line []byte, err error) {
	if atEOF && bytes.IndexByte(data, '\n') < 0 {
		return len(data), nil, nil
	}
	return bufio.ScanLines(data, atEOF)
}

func (c *Completion) add(e *event, start time.Time) {
	for _, choice := range e.Choices {
		if len(choice.Tokens) > 0 && len(c.Tokens) == 0 {
			c.TTFT = time.Since(start)
		}
		c.Tokens = append(c.Tokens, choice.Tokens...)
		c.Text += choice.Text
		if choice.Reason != nil {
			c.Reason = *choice.Reason
		}
	}
	if e.Usage != nil {
		c.Prompt = e.Usage.Prompt
		if e.Usage.Details != nil {
			c.Cached = e.Usage.Details.Cached
		}
	}
}

// Equal reports whether both completions hold the same tokens.
func (c *Completion) Equal(o *Completion) bool { return slices.Equal(c.Tokens, o.Tokens) }

// Get fetches a path and gives its body; any status but 200 is an error.
func (c *Client) Get(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", url, resp.Status, bytes.TrimSpace(data))
	}
	return data, err
}
