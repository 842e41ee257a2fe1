package simulate

import (
	"fmt"
	"slices"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/router"
	"github.com/kvport/kvport/engine/sched"
)

// phase is where a client's request is.
type phase uint8

const (
	toPrefill phase = iota // at the router, needs a prefill instance
	prefilling
	toDecode // at the router, needs a decode instance
	decoding
	done
)

// client is somebody with a prompt.
type client struct {
	n      int
	prompt []int32
	salt   string
	max    int
	want   []int32 // the oracle's answer, max tokens

	phase    phase
	engine   *engine // prefilling, decoding
	id       connector.RequestID
	ticket   []byte
	turn     []byte // of the answer that the prompt goes on from
	round    int    // turns before this one
	tried    map[int]bool
	attempts int
	got      []int32
	left     bool
	broken   bool
	relayed  bool // from one prefill engine to another
}

// routing is the router as package router has it: its choice of instances is the real one, the
// rest, which is HTTP there, is what its call type decides.
type routing struct {
	w      *World
	choice *router.Choice
	wants  []*client // whose next step is the router's
	live   []*client // not done
	past   []*client // done, of a workload

	workload []Prompt // what comes next, if that is given
	given    bool

	turns []turn // answers that a client may go on from
}

const attempts = 3 // at decode instances

func newRouting(w *World) *routing {
	return &routing{w: w, choice: router.NewChoice(w.opt.Prefills, w.opt.Decodes)}
}

// submit brings a client whose prompt shares a prefix with others.
func (r *routing) submit(d *rng) {
	if r.given = r.given || len(r.workload) > 0; r.given {
		if len(r.workload) > 0 {
			p := r.workload[0]
			r.workload = r.workload[1:]
			r.enter(p.Tokens, p.Salt, p.Max)
		}
		return
	}
	room := r.room()
	n := 1 + d.n(max(1, min(40, room*2/3)))
	prompt := make([]int32, n)
	for i := range prompt {
		prompt[i] = int32(i % 7)
	}
	if d.n(2) == 0 {
		prompt[d.n(n)] = int32(8 + d.n(3))
	}
	if len(r.turns) > 0 && d.n(4) > 0 && r.goOn(d, d.n(len(r.turns))) {
		return
	}
	salt := ""
	if d.n(6) == 0 {
		salt = "tenant"
	}
	r.enter(prompt, salt, 1+d.n(max(1, min(10, room-n-1))))
}

// room is how many tokens the cache of an engine has room for.
func (r *routing) room() int {
	o := &r.w.opt
	return o.Blocks / o.Groups * o.smallest()
}

func (r *routing) enter(prompt []int32, salt string, n int) {
	r.w.stats.Requests++
	c := &client{n: r.w.stats.Requests, prompt: prompt, salt: salt, max: n, want: oracle(prompt, n), tried: map[int]bool{}}
	c.phase = toDecode
	if r.w.opt.Prefills > 0 {
		c.phase = toPrefill
	}
	r.live = append(r.live, c)
	r.wants = append(r.wants, c)
	r.w.say("client %d: %d tokens %v, asks for %d", c.n, len(prompt), prompt, n)
}

// route takes the next step for one client.
func (r *routing) route(d *rng, f Fault) {
	if len(r.wants) == 0 {
		return
	}
	i := d.n(len(r.wants))
	c := r.wants[i]
	r.wants = slices.Delete(r.wants, i, i+1)
	if f != faultNone {
		r.w.stats.Faults++
	}
	if c.phase == toPrefill {
		r.prefill(c, d)
		return
	}
	r.decode(c, d, f)
}

func (r *routing) prefill(c *client, d *rng) {
	i, ok := r.choice.Prefill(c.tried)
	if !ok {
		c.phase = toDecode
		r.wants = append(r.wants, c)
		return
	}
	c.tried[i] = true
	if !r.hand(c, r.w.engines[i], 1, c.turn, d) {
		r.wants = append(r.wants, c)
		return
	}
	c.phase = prefilling
}

func (r *routing) decode(c *client, d *rng, f Fault) {
	i, ok := r.choice.Decode(c.tried)
	if !ok || c.attempts == attempts {
		r.breakOff(c, "no decode instance")
		return
	}
	c.tried[i] = true
	c.attempts++
	t := c.ticket
	c.ticket = nil
	if f == faultNone && r.w.opt.Stale && !r.w.quiet && d.n(4) == 0 {
		f = faultLater
	}
	if f == faultNone && r.w.opt.Rough > 1 && !r.w.quiet && d.n(8) == 0 { // routers and clients are not to be trusted
		f = []Fault{faultLater, faultTwice, faultWrong, faultLost}[d.n(4)]
		r.w.stats.Faults++
	}
	if r.hand(c, r.w.engines[i], c.max, r.w.tickets.tamper(r.mistaken(t, d), r.w.engines[i], d, f), d) {
		c.phase = decoding
		return
	}
	r.wants = append(r.wants, c)
}

// hand submits a client's request, now and then under an id that was used before.
func (r *routing) hand(c *client, e *engine, n int, ticket []byte, d *rng) bool {
	c.id = connector.RequestID(fmt.Sprintf("c%d.%d", c.n, len(c.tried)+c.attempts))
	if len(e.old) > 0 && d.n(6) == 0 {
		c.id = e.old[d.n(len(e.old))]
		r.w.stats.Reused++
	}
	err := e.submit(c, c.id, n, ticket)
	if err != nil {
		c.id = connector.RequestID(fmt.Sprintf("c%d.%d+", c.n, len(c.tried)+c.attempts))
		err = e.submit(c, c.id, n, ticket)
	}
	if err != nil {
		if e.fits(len(c.prompt) + n) {
			r.w.fail('g', "%s refuses %s: %v", e.name, c.id, err)
		}
		return false
	}
	c.engine = e
	if r.w.tracing() {
		extra := ""
		if ticket != nil {
			extra = " with a ticket"
		}
		r.w.say("client %d -> %s as %s%s", c.n, e.name, c.id, extra)
	}
	return true
}

// news is what an engine says about a request.
func (r *routing) news(st *stream, e *engine, o *sched.Output) {
	c := st.client
	if c.phase == done || c.engine != e || c.id != o.Request {
		return // the client left
	}
	if c.phase == prefilling {
		if o.Reason == 0 {
			return
		}
		c.engine = nil
		if o.Reason == connector.ReasonError {
			c.phase = toPrefill // a 500: another instance may do better
			r.choice.Failed(e.index)
			r.wants = append(r.wants, c)
			return
		}
		if r.relay(c, o.Ticket) {
			return
		}
		delete(c.tried, e.index)
		c.ticket, c.phase = o.Ticket, toDecode
		r.wants = append(r.wants, c)
		return
	}
	c.got = append(c.got, o.Tokens...)
	if len(c.got) > c.max || !slices.Equal(c.got, c.want[:len(c.got)]) {
		r.w.fail('g', "client %d has tokens %v, a single engine says %v", c.n, c.got, c.want)
		return
	}
	switch {
	case o.Reason == 0:
	case o.Reason == connector.ReasonError:
		r.choice.Failed(e.index)
		r.failed(c)
	case len(c.got) != c.max:
		r.w.fail('g', "client %d gets %d of %d tokens and a whole answer (%s)", c.n, len(c.got), c.max, reasonName(o.Reason))
	default:
		r.keepTurn(c, o.Ticket)
		r.w.stats.Answered++
		r.finish(c)
	}
}

// relay sends a prompt on to another prefill engine, which loads what the first one holds.
func (r *routing) relay(c *client, ticket []byte) bool {
	if !r.w.opt.Relays || ticket == nil || c.relayed || c.n%2 == 0 {
		return false
	}
	r.w.stats.Relayed++
	c.relayed, c.turn, c.phase = true, ticket, toPrefill
	r.wants = append(r.wants, c)
	return true
}

// lost tells that a client's connection to an engine broke: the engine died.
func (r *routing) lost(c *client, e *engine) {
	if c.phase == done || c.engine != e {
		return
	}
	r.choice.Failed(e.index)
	if c.phase == prefilling {
		c.phase, c.engine = toPrefill, nil
		r.wants = append(r.wants, c)
		return
	}
	r.failed(c)
}

// failed goes on with a client whose decode instance failed: elsewhere, as long as it has not seen a
// token.
func (r *routing) failed(c *client) {
	c.engine = nil
	if len(c.got) > 0 {
		r.breakOff(c, "the instance failed in the middle")
		return
	}
	c.phase = toDecode
	if r.w.opt.Prefills > 0 {
		c.phase = toPrefill // its ticket may be used up
	}
	r.wants = append(r.wants, c)
}

// breakOff ends a request with an error that the client sees.
func (r *routing) breakOff(c *client, why string) {
	if r.w.opt.Rough == 0 && !r.w.opt.FailLoads {
		r.w.fail('g', "client %d gets an error, and no engine has failed: %s", c.n, why)
	}
	r.w.say("client %d gets an error: %s", c.n, why)
	r.w.stats.Broken++
	c.broken = true
	r.finish(c)
}

// leave is a client going away.
func (r *routing) leave(d *rng) {
	if len(r.live) == 0 {
		return
	}
	c := r.impatient(r.live[d.n(len(r.live))], d)
	r.w.say("client %d leaves", c.n)
	r.w.stats.Gone++
	c.left = true
	if c.engine != nil {
		c.engine.abort(c.id)
	}
	r.finish(c)
}

func (r *routing) finish(c *client) {
	c.phase, c.engine = done, nil
	r.live = without(r.live, c)
	r.wants = without(r.wants, c)
	if r.given {
		r.past = append(r.past, c)
	}
	r.w.mix('c', uint64(c.n), uint64(len(c.got)))
}

func without(list []*client, c *client) []*client {
	return slices.DeleteFunc(list, func(o *client) bool { return o == c })
}

// probe is the round of health checks: instances that run are well.
func (r *routing) probe() {
	for i := range r.w.engines {
		r.choice.Probed(i, true, false)
	}
}
