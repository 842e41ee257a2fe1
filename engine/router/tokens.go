package router

import (
	"bytes"
	"container/list"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"math"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"
)

// The limits of asking instances for tokens.
const (
	tokenizeTime   = 250 * time.Millisecond // for an answer, which a request waits for
	ailing         = 5 * time.Second        // after a failure, in which an instance, or about a text nobody, is asked
	maxRemembered  = 4 << 20                // tokens of all texts that are remembered
	textCost       = 32                     // tokens that a text counts as in addition, for its place
	maxUnanswered  = 1 << 14                // texts that nobody is asked about for a while
	maxTokenAnswer = 16 << 20               // bytes
)

// promptTokens knows the token ids of prompts. Those of a text are asked of an instance, and remembered for a while.
type promptTokens struct {
	client  *http.Client
	metrics *metrics
	limit   time.Duration    // for an answer
	now     func() time.Time // of tests
	seed    maphash.Seed

	mu         sync.Mutex
	known      map[uint64]*list.Element
	order      list.List      // of text, what was used last at the end
	size       int            // tokens of all texts, and textCost for each
	ill        pauses[string] // of instances that failed
	unanswered pauses[uint64] // of texts, about which nobody is asked
}

// pauses are when those that are left alone for a while may be asked again.
type pauses[K comparable] map[K]time.Time

// last reports whether a pause is not over yet, and forgets one that is.
func (p pauses[K]) last(of K, now time.Time) bool {
	until, paused := p[of]
	if paused && !now.Before(until) {
		delete(p, of)
		return false
	}
	return paused
}

// text is what is remembered of one.
type text struct {
	hash   uint64
	tokens []int32
}

func newPromptTokens(client *http.Client, m *metrics) *promptTokens {
	return &promptTokens{
		client: client, metrics: m, limit: tokenizeTime, now: time.Now, seed: maphash.MakeSeed(),
		known: map[uint64]*list.Element{}, ill: pauses[string]{}, unanswered: pauses[uint64]{},
	}
}

// of is the prompt of a request in tokens; nil if they cannot be had. helper is who may be asked; without a URL nobody.
func (t *promptTokens) of(ctx context.Context, c *call, helper target) []int32 {
	question, ids := c.body.question()
	if ids != nil {
		t.metrics.tokenize.WithLabelValues("given").Inc()
		return ids
	}
	if question == nil {
		return nil
	}
	body := question.encode()
	hash := maphash.Bytes(t.seed, slices.Concat(body, c.within(c.body.scope()))) // whether somebody is asked says nothing about other tenants
	if ids = t.recall(hash); ids != nil {
		t.metrics.tokenize.WithLabelValues("remembered").Inc()
		return ids
	}
	asked := maphash.Bytes(t.seed, slices.Concat(body, []byte(c.header.Get("Authorization")))) // another key may get another answer
	if helper.url == nil || t.rests(asked) {
		return nil
	}
	ids, err := t.ask(ctx, c, helper, body)
	if err != nil {
		if ctx.Err() == nil {
			if errors.Is(err, errNotSaid) {
				t.rest(asked)
			} else {
				t.fell(placeOf(helper.url))
			}
			c.router.config.Log.Debug("an instance does not say the tokens of a prompt", "id", c.id, "instance", helper.url.String(), "err", err)
		}
		t.metrics.tokenize.WithLabelValues("failed").Inc()
		return nil
	}
	t.metrics.tokenize.WithLabelValues("asked").Inc()
	t.remember(hash, ids)
	return ids
}

// question is a request to /tokenize for the prompt, or the prompt's tokens if it has them. Both are nil if it has
// neither text nor tokens.
func (f fields) question() (question fields, ids []int32) {
	question = fields{}
	names := []string{"model", "add_special_tokens"}
	if _, chat := f["messages"]; chat {
		names = append(names, "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "mm_processor_kwargs")
	} else {
		prompt := f.single()
		switch {
		case len(prompt) == 0:
			return nil, nil
		case prompt[0] != '"':
			return nil, tokenIDs(prompt)
		}
		question["prompt"] = prompt
	}
	for _, name := range names {
		if value, ok := f[name]; ok {
			question[name] = value
		}
	}
	return question, nil
}

// tokenIDs reads a list of token ids; nil if it is none.
func tokenIDs(data []byte) []int32 {
	var ids []int32
	if json.Unmarshal(data, &ids) != nil || len(ids) == 0 {
		return nil
	}
	for _, id := range ids {
		if id < 0 {
			return nil
		}
	}
	return ids
}

// errNotSaid says that an instance did not say the tokens of a prompt for a reason that may lie with the prompt or its
// client: it refused, or it needed too long.
var errNotSaid = errors.New("the prompt's tokens are not said")

// ask asks an instance.
func (t *promptTokens) ask(ctx context.Context, c *call, helper target, body []byte) ([]int32, error) {
	short, cancel := context.WithTimeout(ctx, t.limit)
	defer cancel()
	defer c.router.pool.asks(helper.index, helper.url, tokenizing)()
	ids, err := t.send(short, c, helper.url, body)
	if err != nil && errors.Is(short.Err(), context.DeadlineExceeded) {
		return nil, fmt.Errorf("%w within %v: %w", errNotSaid, t.limit, err)
	}
	return ids, err
}

func (t *promptTokens) send(ctx context.Context, c *call, instance *url.URL, body []byte) ([]int32, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, instance.JoinPath("tokenize").String(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header = c.header.Clone()
	resp, err := t.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxTokenAnswer+1))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode >= 400 && resp.StatusCode < 500 {
		return nil, fmt.Errorf("%w: HTTP %d", errNotSaid, resp.StatusCode)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("HTTP %d", resp.StatusCode)
	}
	if len(data) > maxTokenAnswer {
		return nil, fmt.Errorf("%w: the answer has over %d bytes", errNotSaid, maxTokenAnswer)
	}
	var answer struct {
		Tokens json.RawMessage `json:"tokens"`
	}
	if err := json.Unmarshal(data, &answer); err != nil {
		return nil, err
	}
	if bytes.Equal(bytes.TrimSpace(answer.Tokens), []byte("[]")) {
		return nil, fmt.Errorf("%w: it has none", errNotSaid)
	}
	ids := tokenIDs(answer.Tokens)
	if ids == nil {
		return nil, fmt.Errorf("an answer without tokens, each 0 to %d", math.MaxInt32)
	}
	return ids, nil
}

// recall finds the tokens of a text.
func (t *promptTokens) recall(hash uint64) []int32 {
	t.mu.Lock()
	defer t.mu.Unlock()
	place := t.known[hash]
	if place == nil {
		return nil
	}
	t.order.MoveToBack(place)
	return place.Value.(text).tokens //nolint:forcetypeassert // nothing else is in the list
}

// remember keeps the tokens of a text, and forgets those that were not used for longest.
func (t *promptTokens) remember(hash uint64, ids []int32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.known[hash] != nil || len(ids) > maxRemembered {
		return
	}
	t.known[hash] = t.order.PushBack(text{hash, ids})
	t.size += len(ids) + textCost
	for t.size > maxRemembered {
		oldest := t.order.Remove(t.order.Front()).(text) //nolint:forcetypeassert // nothing else is in the list
		delete(t.known, oldest.hash)
		t.size -= len(oldest.tokens) + textCost
	}
}

// rest notes that nobody is asked about a text for a while.
func (t *promptTokens) rest(asked uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.unanswered) >= maxUnanswered {
		clear(t.unanswered)
	}
	t.unanswered[asked] = t.now().Add(ailing)
}

// rests reports whether nobody is asked about a text just now.
func (t *promptTokens) rests(asked uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.unanswered.last(asked, t.now())
}

// fell notes that an instance could not be reached or failed.
func (t *promptTokens) fell(instance string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ill[instance] = t.now().Add(ailing)
}

// mended forgets that an instance failed.
func (t *promptTokens) mended(instance string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.ill, instance)
}

// ails reports whether an instance failed a moment ago.
func (t *promptTokens) ails(instance string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.ill.last(instance, t.now())
}
