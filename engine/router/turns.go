package router

import (
	"bytes"
	"container/list"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"slices"
	"sync"

	"github.com/zeebo/xxh3"
)

// turns remembers for conversations which decode instance holds an answer: its ticket, for the prefill
// instances that get the turns that follow. A conversation is known by the bytes that its prompt begins with. It may
// be mistaken for another, and the ticket may be worth nothing: then the prefill instance computes.
type turns struct {
	most int

	mu      sync.Mutex
	seed    uint64 // of the marks; it changes only before the first is made
	known   map[uint64]*list.Element
	order   list.List // of turn, the one that was not used for longest first
	changed bool      // since it was written to its file
}

// turn is one of a conversation.
type turn struct {
	mark     uint64
	instance int // of the pool
	params   json.RawMessage
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
	return &turns{seed: binary.LittleEndian.Uint64(seed[:]), most: most, known: map[uint64]*list.Element{}}
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
func (t *turns) find(marks []uint64, usable func(instance int) bool) json.RawMessage {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, mark := range slices.Backward(marks) {
		place := t.known[mark]
		if place == nil {
			continue
		}
		last, _ := place.Value.(turn)
		switch {
		case !usable(last.instance):
			continue
		case last.once():
			t.drop(place)
		default:
			t.order.MoveToBack(place)
		}
		return last.params
	}
	return nil
}

// keep remembers where the answer to a prompt is held. When there are too many, the one is forgotten that was not used
// for longest. It reports whether the answer is remembered.
func (t *turns) keep(marks []uint64, instance int, params json.RawMessage) bool {
	if len(marks) == 0 || len(params) > maxTurnParams {
		return false
	}
	mark := marks[len(marks)-1]
	t.mu.Lock()
	defer t.mu.Unlock()
	t.drop(t.known[mark])
	if len(t.known) >= t.most {
		t.drop(t.order.Front())
	}
	t.known[mark] = t.order.PushBack(turn{mark, instance, params})
	t.changed = true
	return true
}

// drop forgets a turn, if there is one. The caller holds mu.
func (t *turns) drop(place *list.Element) {
	if place != nil {
		last, _ := t.order.Remove(place).(turn)
		delete(t.known, last.mark)
		t.changed = true
	}
}

// prompt is what a request's conversation is known by: messages or prompt, without what closes them, so that
// the next turn begins with it. scope is what else makes conversations differ.
func (f fields) prompt() (scope, text []byte) {
	for _, name := range []string{"model", "cache_salt", "tools"} {
		scope = append(append(scope, f[name]...), 0)
	}
	var messages []json.RawMessage
	if json.Unmarshal(f["messages"], &messages) == nil && len(messages) > 0 {
		for _, m := range messages {
			text = append(append(text, canonical(m)...), 0)
		}
		return scope, text
	}
	var one string
	if json.Unmarshal(f["prompt"], &one) == nil {
		return scope, []byte(one)
	}
	var list []json.RawMessage
	if json.Unmarshal(f["prompt"], &list) != nil {
		return scope, nil
	}
	if len(list) == 1 {
		_, text = fields{"prompt": list[0]}.prompt()
		return scope, text
	}
	for _, token := range list {
		text = append(append(text, token...), 0)
	}
	return scope, text
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
	params := c.router.turns.find(c.marks, func(d int) bool {
		pool.mu.Lock()
		defer pool.mu.Unlock()
		return pool.goesBack(d, p.index)
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

// keepTurn remembers what a decode instance said of its answer, if it said anything.
func (c *call) keepTurn(d target, answer []byte) {
	if len(c.marks) == 0 {
		return
	}
	params, err := transferParams(answer)
	if err == nil && params != nil && c.router.turns.keep(c.marks, d.index, params) {
		c.router.metrics.turns.WithLabelValues("kept").Inc()
	}
}

// scanner finds the event of a stream that has kv_transfer_params.
type scanner struct {
	found func(event []byte)
	off   bool
	line  []byte
}

// maxEvent bounds an event that is looked into, in bytes.
const maxEvent = 256 << 10

func (s *scanner) write(b []byte) {
	if s.off {
		return
	}
	for len(b) > 0 {
		part, rest, whole := bytes.Cut(b, []byte("\n"))
		if len(s.line)+len(part) <= maxEvent {
			s.line = append(s.line, part...)
		}
		b = rest
		if !whole {
			return
		}
		if event, isData := bytes.CutPrefix(s.line, []byte("data: ")); isData && bytes.Contains(event, []byte(`"kv_transfer_params":{`)) {
			s.found(event)
		}
		s.line = s.line[:0]
	}
}
