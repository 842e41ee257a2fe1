package router

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/zeebo/xxh3"

	"github.com/kvport/kvport/engine/router/internal/fairlru"
)

// turns remembers for conversations which decode instance holds an answer: its ticket, for the prefill
// instances that get the turns that follow. A conversation is known by the bytes that its prompt begins with. It may
// be mistaken for another, and the ticket may be worth nothing: then the prefill instance computes.
type turns struct {
	mu      sync.Mutex
	seed    uint64 // of the marks and clients; it changes only before the first is made
	marked  *fairlru.Table
	held    []turn // by slot of marked
	uses    uint64
	changed bool // since it was written to its file
}

// turn is one of a conversation.
type turn struct {
	client   uint64 // modulo fairlru.Clients: what is written says no more about whose it is
	instance string // a decode instance, by its place in one spelling; it may not be there yet, after a restart
	params   json.RawMessage
	used     uint64 // the greater, the later
}

// once reports whether the params serve one follow-up only: those of engines without a ticket of kvport's, which says
// itself how many it serves and whose blocks are verified, name blocks that are given to others after the first.
func (t *turn) once() bool {
	return !bytes.Contains(t.params, []byte(`"kvport_ticket":"`))
}

// maxTurnParams bounds what is remembered of an answer, in bytes.
const maxTurnParams = 16 << 10

// step is the length, in bytes, in which prompts are told apart.
const step = 64

func newTurns(most int) *turns {
	var seed [8]byte
	_, _ = rand.Read(seed[:]) // never fails, says its documentation
	return &turns{seed: binary.LittleEndian.Uint64(seed[:]), marked: fairlru.New(most)}
}

// client is the number of a client.
func (t *turns) client(name string) uint64 {
	return xxh3.HashStringSeed(name, t.seed) % fairlru.Clients
}

// marks are the hashes of a prompt's beginnings, a step longer each.
func (t *turns) marks(scope, prompt []byte) []uint64 {
	h := xxh3.NewSeed(t.seed)
	_, _ = h.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(scope)))) // never fails
	_, _ = h.Write(scope)
	list := make([]uint64, 0, len(prompt)/step)
	for ; len(prompt) >= step; prompt = prompt[step:] {
		_, _ = h.Write(prompt[:step])
		list = append(list, h.Sum64())
	}
	return list
}

// find gives what is known of the last turn of which a prompt is the continuation, of those on instances that are usable.
// What serves once is forgotten.
func (t *turns) find(marks []uint64, usable func(instance string) bool) json.RawMessage {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, mark := range slices.Backward(marks) {
		slot, known := t.marked.Find(mark)
		if !known {
			continue
		}
		last := t.held[slot]
		switch {
		case !usable(last.instance):
			continue
		case last.once():
			t.drop(mark, slot)
		default:
			t.use(mark, &last)
		}
		return last.params
	}
	return nil
}

// keep remembers where the answer to a prompt of a client is held. When there are too many, that one is forgotten which the
// client that has most has not used for longest. It reports whether the answer is remembered.
func (t *turns) keep(marks []uint64, client uint64, instance string, params json.RawMessage) bool {
	if len(marks) == 0 || len(params) > maxTurnParams {
		return false
	}
	mark := marks[len(marks)-1]
	t.mu.Lock()
	defer t.mu.Unlock()
	t.use(mark, &turn{client: client, instance: instance, params: params})
	t.changed = true
	return true
}

// use makes a turn the one that was used last. The caller holds mu.
func (t *turns) use(mark uint64, last *turn) {
	slot, _ := t.marked.Use(mark, last.client)
	if slot == len(t.held) {
		t.held = append(t.held, turn{})
	}
	t.uses++
	t.held[slot] = *last
	t.held[slot].used = t.uses
}

// drop forgets a turn. The caller holds mu.
func (t *turns) drop(mark uint64, slot int) {
	t.marked.Remove(mark)
	t.held[slot] = turn{}
	t.changed = true
}

// prompt is what a request's conversation is known by: messages or prompt, without what closes them, so that
// the next turn begins with it. scope is what else makes conversations differ.
func (f fields) prompt() (scope, text []byte) {
	scope = f.scope()
	if messages := elements(f["messages"], maxMessages); len(messages) > 0 {
		for _, m := range messages {
			text = append(append(text, canonical(m)...), 0)
		}
		return scope, text
	}
	prompt := f.single()
	var one string
	if json.Unmarshal(prompt, &one) == nil {
		return scope, []byte(one)
	}
	for _, id := range tokenIDs(prompt) {
		text = append(strconv.AppendInt(text, int64(id), 10), 0)
	}
	return scope, text
}

// maxMessages bounds the messages that a conversation is known by.
const maxMessages = 4096

// single is the prompt without the list around it, if it is a list of one: text or token ids. What is in lists within
// lists stays there, since nobody serves it.
func (f fields) single() json.RawMessage {
	if list := elements(f["prompt"], 2); len(list) == 1 && isPrompt(list[0]) {
		return list[0]
	}
	return f["prompt"]
}

// isPrompt tells a prompt in a list of prompts from a token id.
func isPrompt(element json.RawMessage) bool { return element[0] == '"' || element[0] == '[' }

// elements are the first ones of a list, up to a number; nil if the value is not a list. A client may send millions.
func elements(value json.RawMessage, most int) (list []json.RawMessage) {
	if !bytes.HasPrefix(value, []byte("[")) {
		return nil
	}
	d := json.NewDecoder(bytes.NewReader(value))
	_, err := d.Token()
	for err == nil && len(list) < most && d.More() {
		var one json.RawMessage
		if err = d.Decode(&one); err == nil {
			list = append(list, one)
		}
	}
	return list
}

// canonical is a message in one spelling: clients differ from turn to turn in spaces and order.
func canonical(message json.RawMessage) []byte {
	var m map[string]json.RawMessage
	if json.Unmarshal(message, &m) != nil {
		return message
	}
	data, err := json.Marshal(m)
	if err != nil {
		return message
	}
	return data
}

// asksFor gives kv_transfer_params with both wishes set as said, whatever else is in them.
func asksFor(params json.RawMessage, prefill, decode bool) json.RawMessage {
	p := fields{}
	if params != nil && json.Unmarshal(params, &p) != nil {
		p = fields{}
	}
	for name, wish := range map[string]bool{"do_remote_prefill": prefill, "do_remote_decode": decode} {
		p[name] = json.RawMessage("false")
		if wish {
			p[name] = json.RawMessage("true")
		}
	}
	return p.encode()
}

// forPrefill is the request as a prefill instance gets it, with what it may load of the conversation's last turn. Each
// attempt needs its own: what one may load another may not, and what serves once is used up.
func (c *call) forPrefill(p target) fields {
	request := c.body.forPrefill()
	if last := c.lastTurn(p); last != nil {
		request["kv_transfer_params"] = last
	}
	return request
}

// lastTurn is what a prefill instance is to know of the conversation's last turn; nil: nothing.
func (c *call) lastTurn(p target) json.RawMessage {
	if len(c.marks) == 0 {
		return nil
	}
	pool := c.router.pool
	params := c.router.turns.find(c.marks, func(d string) bool {
		pool.mu.Lock()
		defer pool.mu.Unlock()
		i, known := pool.places[identity{decode, d}]
		return known && pool.goesBack(i, p.index)
	})
	if params == nil {
		return nil
	}
	c.router.metrics.turns.WithLabelValues("handed").Inc()
	return asksFor(params, false, true)
}

// wishes adds to a decode instance's parameters the request to hold its answer for the next turn.
func (c *call) wishes(d target, params json.RawMessage) json.RawMessage {
	if len(c.marks) == 0 || c.router.config.TurnsWhereKnown && !c.router.pool.bothWays(d.index) {
		return params
	}
	return asksFor(params, true, true)
}

// keepTurn remembers what a decode instance said of its answer, if it said anything, and gives the answer without it: it
// is for instances, and the client has not asked for it.
func (c *call) keepTurn(d target, answer []byte) []byte {
	if len(c.marks) == 0 {
		return answer
	}
	params, err := transferParams(answer)
	if err != nil || params == nil {
		return answer
	}
	if t := c.router.turns; t.keep(c.marks, t.client(c.client), placeOf(d.url), params) {
		c.router.metrics.turns.WithLabelValues("kept").Inc()
	}
	return withoutParams(answer)
}

// withoutParams is an answer, a JSON object, that has null instead of its kv_transfer_params. It is the same byte for byte
// otherwise.
func withoutParams(answer []byte) (out []byte) {
	d := json.NewDecoder(bytes.NewReader(answer))
	_, err := d.Token() // the brace
	copied := 0
	for err == nil && d.More() {
		var name json.Token
		var value json.RawMessage
		if name, err = d.Token(); err == nil {
			err = d.Decode(&value)
		}
		if text, _ := name.(string); err == nil && strings.EqualFold(text, paramsName) { // as transferParams compares it
			end := int(d.InputOffset())
			out = append(append(out, answer[copied:end-len(value)]...), "null"...)
			copied = end
		}
	}
	return append(out, answer[copied:]...)
}

const paramsName = "kv_transfer_params"

// filter changes the events of a stream that have kv_transfer_params.
type filter struct {
	change func(event []byte) []byte
	off    bool
	line   []byte // it has begun and is kept back
	long   bool   // it is longer than maxEvent, and passed on as it comes
}

// maxEvent bounds an event that is looked into, in bytes.
const maxEvent = 256 << 10

// write takes the next piece of a stream and gives what may be passed on.
func (s *filter) write(b []byte) (out []byte) {
	if s.off {
		return b
	}
	for len(b) > 0 {
		end := bytes.IndexByte(b, '\n') + 1
		whole := end > 0
		if !whole {
			end = len(b)
		}
		s.line, b = append(s.line, b[:end]...), b[end:]
		switch {
		case s.long || len(s.line) > maxEvent:
			s.long = !whole
		case whole:
			s.line = s.changed()
		default:
			return out
		}
		out, s.line = append(out, s.line...), s.line[:0]
	}
	return out
}

// changed is the line as it is passed on.
func (s *filter) changed() []byte {
	event, isData := bytes.CutPrefix(s.line, []byte("data:"))
	if !isData || !bytes.Contains(event, []byte(`"`+paramsName+`"`)) { // in a text its quotes would have backslashes
		return s.line
	}
	return append([]byte("data:"), s.change(event)...)
}
