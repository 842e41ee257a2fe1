package server

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/kvport/kvport/engine"
)

// answer is the body of a completion, a chat completion, or a chunk of either.
type answer struct {
	ID             string          `json:"id"`
	Object         string          `json:"object"`
	Created        int64           `json:"created"`
	Model          string          `json:"model"`
	Choices        []choice        `json:"choices"`
	Usage          json.RawMessage `json:"usage,omitempty"` // null in chunks before the last
	PromptTokenIDs []int32         `json:"prompt_token_ids,omitempty"`
	TransferParams any             `json:"kv_transfer_params,omitempty"` // a transferParams or what a cache query gets
}

// choice is one of an answer's choices. Text is of completions, Message of chat, Delta of its chunks.
type choice struct {
	Index          int       `json:"index"`
	Text           *string   `json:"text,omitempty"`
	Message        *message  `json:"message,omitempty"`
	Delta          *message  `json:"delta,omitempty"`
	Logprobs       *struct{} `json:"logprobs"` // always null
	FinishReason   *string   `json:"finish_reason"`
	TokenIDs       []int32   `json:"token_ids,omitempty"`
	PromptTokenIDs []int32   `json:"prompt_token_ids,omitempty"`
}

type message struct {
	Role    string  `json:"role,omitempty"`
	Content *string `json:"content,omitempty"`
}

type usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`
	TotalTokens      int `json:"total_tokens"`
	Details          struct {
		CachedTokens int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// transferParams tell a router what a decode instance needs, in vLLM's words. Only the ticket says where
// the KV is.
type transferParams struct {
	DoRemotePrefill bool      `json:"do_remote_prefill"`
	DoRemoteDecode  bool      `json:"do_remote_decode"`
	RemoteEngineID  *string   `json:"remote_engine_id"`
	RemoteBlockIDs  *struct{} `json:"remote_block_ids"`
	RemoteHost      *struct{} `json:"remote_host"`
	RemotePort      *struct{} `json:"remote_port"`
	Ticket          string    `json:"kvport_ticket"`
}

// writer puts the pieces of one request into the words of its endpoint.
type writer struct {
	server *Server
	x      *exchange
	ctx    context.Context //nolint:containedctx // of the request
	w      http.ResponseWriter
	chat   bool
	params *params
	jobs   []job
	base   answer // id, model, time
	total  engine.Usage
	ticket []byte
	begun  []bool // choices of which something was streamed
	open   int    // choices whose last piece has not come
	wrote  bool   // a part of a stream
}

func (s *Server) newWriter(ctx context.Context, w http.ResponseWriter, x *exchange) *writer {
	prefix := "cmpl-"
	if x.chat {
		prefix = "chatcmpl-"
	}
	return &writer{
		server: s, x: x, ctx: ctx, w: w, chat: x.chat, params: &x.params, jobs: x.jobs, begun: make([]bool, len(x.jobs)), open: len(x.jobs),
		base: answer{ID: prefix + x.id, Created: time.Now().Unix(), Model: s.config.ModelName},
	}
}

// next is the next piece; none after the last one, or once the request's context has ended.
func (a *writer) next(pieces <-chan piece) (p piece, more bool) {
	select {
	case p, more = <-pieces:
		return p, more && (p.err == nil || a.ctx.Err() == nil) // the engine's word for that end is an error
	case <-a.ctx.Done():
		return piece{}, false
	}
}

// cut says that the server ends before the answer does. No [DONE] follows: a client that overlooks the
// event still sees a stream cut short. It does not wait for the engine, which may be in a long step.
func (a *writer) cut() error {
	e := &Error{http.StatusServiceUnavailable, "server_error", "", "draining", "the server is shutting down, and the answer was not complete in time"}
	if a.wrote {
		_ = a.event(e) // a client that left needs no answer
		return errCutOff
	}
	control := http.NewResponseController(a.w)
	_ = control.SetWriteDeadline(time.Now().Add(a.server.config.WriteTimeout)) // a recorder in a test has none
	e.Write(a.w)
	_ = control.Flush()
	return errCutOff
}

// note adds the numbers of a last piece.
func (a *writer) note(p *piece) {
	if !p.last() {
		return
	}
	a.open--
	a.total.Prompt += p.usage.Prompt
	a.total.Generated += p.usage.Generated
	a.total.Local += p.usage.Local
	a.total.External += p.usage.External
	a.total.Handoff = p.usage.Handoff
	if p.ticket != nil {
		a.ticket = p.ticket
	}
	if p.cached != nil {
		a.x.cached = p.cached
	}
}

func (a *writer) usage() json.RawMessage {
	u := usage{PromptTokens: a.total.Prompt, CompletionTokens: a.total.Generated, TotalTokens: a.total.Prompt + a.total.Generated}
	u.Details.CachedTokens = a.total.Local + a.total.External
	data, _ := json.Marshal(u) // four integers cannot fail
	return data
}

// transferParams are kv_transfer_params of the answer, nil if there is nothing to say.
func (a *writer) transferParams() any {
	t := a.ticketParams()
	switch {
	case a.x.cached != nil:
		return a.cacheAnswer(t)
	case t != nil:
		return t
	}
	return nil
}

func (a *writer) ticketParams() *transferParams {
	if a.ticket == nil {
		return nil
	}
	turn := a.params.turn // for the prefill instance that gets the next turn
	t := &transferParams{DoRemotePrefill: !turn, DoRemoteDecode: turn, Ticket: base64.StdEncoding.EncodeToString(a.ticket)}
	if id := a.server.config.EngineID; id != "" {
		t.RemoteEngineID = &id
	}
	return t
}

// whole gathers all pieces and answers once.
func (a *writer) whole(pieces <-chan piece) error {
	texts := make([]strings.Builder, len(a.jobs))
	tokens := make([][]int32, len(a.jobs))
	finish := make([]string, len(a.jobs))
	for {
		p, more := a.next(pieces)
		if !more {
			break
		}
		if p.err != nil {
			return p.err
		}
		a.note(&p)
		texts[p.index].WriteString(p.text)
		tokens[p.index] = append(tokens[p.index], p.tokens...)
		finish[p.index] = p.finish
	}
	if a.open > 0 {
		return errLeft
	}
	body := a.base
	body.Object, body.Usage, body.TransferParams = "text_completion", a.usage(), a.transferParams()
	if a.chat {
		body.Object = "chat.completion"
	}
	for i := range a.jobs {
		text := texts[i].String()
		c := choice{Index: i, FinishReason: &finish[i]}
		if a.chat {
			c.Message = &message{"assistant", &text}
		} else {
			c.Text = &text
		}
		if a.params.tokenIDs {
			c.TokenIDs = tokens[i]
			a.setPrompt(&body, &c)
		}
		body.Choices = append(body.Choices, c)
	}
	a.tellHandoff(a.total.Handoff)
	return a.server.sendJSON(a.w, http.StatusOK, body)
}

// handoffHeader tells a router what became of the ticket that it brought: a result and, after a semicolon,
// a reason. They are known before the first token, so streams have the header too.
const handoffHeader = "X-Kvport-Handoff"

func (a *writer) tellHandoff(h engine.Handoff) {
	if h.Result == "" || len(a.jobs) > 1 { // a ticket is for one prompt
		return
	}
	value := h.Result
	if h.Reason != "" {
		value += "; reason=" + h.Reason
	}
	a.w.Header().Set(handoffHeader, value)
}

// setPrompt puts the prompt's tokens where vLLM has them.
func (a *writer) setPrompt(body *answer, c *choice) {
	if a.chat {
		body.PromptTokenIDs = a.jobs[c.Index].prompt
	} else {
		c.PromptTokenIDs = a.jobs[c.Index].prompt
	}
}

// stream sends every piece as a server-sent event. The status line waits for the first piece, so that
// a request which fails before it still gets a proper error.
func (a *writer) stream(pieces <-chan piece) error {
	for {
		p, more := a.next(pieces)
		if !more {
			break
		}
		if p.err != nil && !a.wrote {
			return p.err
		}
		if !a.wrote {
			a.wrote = true
			h := a.w.Header()
			h.Set("Content-Type", "text/event-stream; charset=utf-8")
			h.Set("Cache-Control", "no-cache")
			h.Set("X-Accel-Buffering", "no")
			a.tellHandoff(p.usage.Handoff)
		}
		a.note(&p)
		for _, chunk := range a.chunks(&p) {
			if err := a.event(chunk); err != nil {
				return errLeft
			}
		}
		if p.err != nil {
			_ = a.event(asError(p.err)) // a client that left needs no answer
		}
	}
	if a.open > 0 {
		return errLeft
	}
	if a.params.usage {
		last := a.base
		last.Object, last.Choices, last.Usage = a.chunkObject(), []choice{}, a.usage()
		if a.event(last) != nil {
			return errLeft
		}
	}
	_ = a.send("data: [DONE]\n\n") // a client that left needs no answer
	return nil
}

func (a *writer) chunkObject() string {
	if a.chat {
		return "chat.completion.chunk"
	}
	return "text_completion"
}

// chunks are the events of one piece: for chat, the first of a choice says the role and the last
// has nothing but the finish reason.
func (a *writer) chunks(p *piece) []answer {
	first := !a.begun[p.index]
	a.begun[p.index] = true
	list := a.choices(p, first)
	out := make([]answer, len(list))
	for i, c := range list {
		out[i] = a.base
		out[i].Object = a.chunkObject()
		if a.params.usage {
			out[i].Usage = json.RawMessage("null")
		}
		c.Index = p.index
		if a.params.tokenIDs && first && i == 0 {
			a.setPrompt(&out[i], &c)
		}
		if p.last() && i == len(list)-1 {
			c.FinishReason = p.reason()
			out[i].TransferParams = a.transferParams()
		}
		out[i].Choices = []choice{c}
	}
	return out
}

// choices are what the events of one piece hold.
func (a *writer) choices(p *piece, first bool) (list []choice) {
	if a.chat && first {
		empty := ""
		list = append(list, choice{Delta: &message{"assistant", &empty}})
		if a.params.query { // nothing follows
			return list
		}
	}
	shown := a.params.tokenIDs && len(p.tokens) > 0
	if p.text != "" || shown || (!a.chat && p.last()) {
		list = append(list, a.content(p))
	}
	if a.chat && p.last() {
		list = append(list, choice{Delta: &message{}})
	}
	return list
}

func (a *writer) content(p *piece) (c choice) {
	if a.chat {
		c.Delta = &message{Content: &p.text}
	} else {
		c.Text = &p.text
	}
	if a.params.tokenIDs {
		c.TokenIDs = p.tokens
	}
	return c
}

func (a *writer) event(v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return a.send("data: " + string(data) + "\n\n")
}

// send writes and flushes, giving a slow client WriteTimeout.
func (a *writer) send(text string) error {
	control := http.NewResponseController(a.w)
	_ = control.SetWriteDeadline(time.Now().Add(a.server.config.WriteTimeout)) // a recorder in a test has none
	if _, err := a.w.Write([]byte(text)); err != nil {
		return err
	}
	return control.Flush()
}

// sendJSON answers with a JSON body of known length.
func (s *Server) sendJSON(w http.ResponseWriter, status int, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(s.config.WriteTimeout)) // a recorder in a test has none
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(data)))
	w.WriteHeader(status)
	_, _ = w.Write(data) // a client that left needs no answer
	return nil
}
