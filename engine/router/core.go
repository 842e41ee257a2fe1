package router

import (
	"context"
	"encoding/json"
	"log/slog"
	"time"

	"github.com/kvport/kvport/engine/kvevents"
	"github.com/kvport/kvport/engine/router/kvindex"
	"github.com/kvport/kvport/engine/router/policy"
	"github.com/kvport/kvport/internal/register"
)

// Core is the part of a Router that decides: which instances there are, by their registrations and health checks, what each
// holds, by history and KV events, and which of them serve a request. It is a Router without its network, its queue and its
// clock: what a simulation of many instances drives. It is not safe for concurrent use.
type Core struct {
	config CoreConfig
	pool   *pool
	reads  map[*feed]*reading // of the instances that are followed
}

// CoreConfig says what a Core is made of.
type CoreConfig struct {
	Policy      policy.Config
	IndexBlocks int              // as in Config
	TTL         time.Duration    // how long a registration is good; 15 s
	Seed        uint64           // of the hashes of prompts
	Now         func() time.Time // the time of the simulation
}

// NewCore makes a Core without instances. Errors are those of policy.New.
func NewCore(c CoreConfig) (*Core, error) {
	setDefault(&c.TTL, registrationTTL)
	chooser, err := policy.New(c.Policy)
	if err != nil {
		return nil, err
	}
	m, err := newMetrics(nil)
	if err != nil {
		return nil, err
	}
	log := slog.New(slog.DiscardHandler)
	p := newPool(nil, chooser, log, m)
	p.now, p.fresh = c.Now, newFreshness(c.Now())
	p.blocks, err = newBlocks(Config{Log: log, IndexBlocks: c.IndexBlocks}, nil, p, m)
	return &Core{config: c, pool: p, reads: map[*feed]*reading{}}, err
}

// Register takes the body of a registration whose signature is good. The nonce is for the next one of the same engine; an
// error is why the registration is refused.
func (c *Core) Register(body []byte) (nonce string, err error) {
	var m register.Message
	if err := json.Unmarshal(body, &m); err != nil {
		return "", err
	}
	part, err := partOf(&m, true)
	if err != nil {
		return "", err
	}
	nonce, _, err = c.pool.register(part, &m, "simulated")
	return nonce, err
}

// Sweep is what a Router does every second: it forgets instances whose last registration is too old.
func (c *Core) Sweep() {
	c.pool.expire(c.config.TTL)
	c.pool.recycle(func(gone) {})
}

// Place is the place of the instance of a role that registers as HOST:PORT, policy.None if it is not known.
func (c *Core) Place(r policy.Role, address string) int {
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	return c.pool.index(map[policy.Role]role{policy.Prefill: prefill, policy.Decode: decode}[r], address)
}

// Instances is how many instances there are that have not left.
func (c *Core) Instances() int {
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	return c.pool.taken()
}

// Probed takes the result of a health check of an instance: it is well and says how many requests may run there at once (0:
// any number), or its port refuses connections, or neither.
func (c *Core) Probed(place, limit int, well, refuses bool) {
	got := checked{result: silent, limit: limit}
	switch {
	case well:
		got.result = healthy
		if s := c.feed(place); s != nil {
			got.events = &s.place
		}
	case refuses:
		got.result = refused
	}
	c.pool.report(context.Background(), place, got)
}

// Follow gives the sink for the KV events of an instance. begun reports whether it was not followed before: then nothing of it
// is known. The sink is nil if nobody lives there, or if the policy does not look at prompts. It takes nothing any more once the instance
// has been forgotten.
func (c *Core) Follow(place int) (sink kvevents.Sink, begun bool) {
	b := c.pool.blocks
	if !c.pool.usesPrompts() || place < 0 || c.pool.known[place].at == "" {
		return nil, false
	}
	if s := c.feed(place); s != nil {
		return c.reads[s], false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.enter(c.pool.known[place].at, kvevents.Place{Endpoint: c.pool.known[place].at})
	if s == nil {
		return nil, false
	}
	s.stop = func() { // by leave, which holds mu
		s.Lost()
		c.reads[s].ended = true
		delete(c.reads, s)
		b.numbers[s.number] = false
	}
	c.reads[s] = &reading{feed: s}
	return c.reads[s], true
}

// reading is a subscription to the KV events of an instance. Its number in the index belongs to another once it has ended.
type reading struct {
	feed  *feed
	ended bool
}

// From implements kvevents.Sink.
func (r *reading) From(seq uint64) {
	if !r.ended {
		r.feed.From(seq)
	}
}

// Lost implements kvevents.Sink.
func (r *reading) Lost() {
	if !r.ended {
		r.feed.Lost()
	}
}

// Apply implements kvevents.Sink.
func (r *reading) Apply(events []kvevents.Event) {
	if !r.ended {
		r.feed.Apply(events)
	}
}

// Count counts what becomes of the KV events of instances.
func (c *Core) Count(what kvevents.Counted, n int) { c.pool.blocks.count(what, n) }

// feed is what is followed of an instance; nil if it is not.
func (c *Core) feed(place int) *feed {
	b := c.pool.blocks
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.sources[c.pool.known[place].at]
}

// Indexed is how many blocks of an instance the index of KV events has.
func (c *Core) Indexed(place int) int {
	s := c.feed(place)
	if s == nil {
		return 0
	}
	return s.of.index.BlocksOf(s.number)
}

// Index is how many blocks the index of KV events has, each counted for each instance that has it, and how many bytes that takes.
func (c *Core) Index() (blocks, bytes int) {
	x := c.pool.blocks.index
	return x.Blocks(), x.Bytes()
}

// Prompt is a prompt as policies tell it from others, if they look at prompts.
func (c *Core) Prompt(text []byte) policy.Prompt {
	if !c.UsesPrompts() {
		return policy.Prompt{}
	}
	return policy.NewPrompt(c.config.Seed, nil, text)
}

// UsesPrompts reports whether choices depend on what prompts say.
func (c *Core) UsesPrompts() bool { return c.pool.usesPrompts() }

// Held is what instances hold of a prompt, at least one token, by their KV events.
func (c *Core) Held(tokens []int32) []policy.Held {
	b := c.pool.blocks
	b.mu.Lock()
	sources := b.sources
	b.mu.Unlock()
	if len(sources) == 0 {
		return nil
	}
	return b.holding(kvindex.Prompt{Tokens: tokens}, sources, false)
}

// Sending is what one instance gets of a request.
type Sending struct{ target }

// Place is the place of the instance.
func (s *Sending) Place() int { return s.index }

// Leg is what the policy counts.
func (s *Sending) Leg() *policy.Leg { return s.leg }

// Choose picks the instances for an attempt at a request, and adds them to tried. from is the place of the prefill instance that
// has computed the prompt, or policy.None. prefill is nil if no other is needed, or the decode instance serves alone. ok is
// false if no decode instance can be had. Each Sending must end with Done, and the request with Leave.
func (c *Core) Choose(r *policy.Request, tried map[int]bool, from int) (prefill, decode *Sending, ok bool) {
	at, ok := c.pool.choose(r, tried, from)
	if !ok {
		return nil, nil, false
	}
	if at.prefill.leg != nil {
		prefill = &Sending{at.prefill}
	}
	return prefill, &Sending{at.decode}, true
}

// Full reports whether a decode instance that is not in tried could be had if fewer requests ran there, so that waiting helps.
func (c *Core) Full(tried map[int]bool) bool { return c.pool.full(decode, tried) }

// ChoosePrefill picks another prefill instance for a decode instance that was chosen, and adds it to tried; nil: there is none.
func (c *Core) ChoosePrefill(r *policy.Request, decode *Sending, tried map[int]bool) *Sending {
	t, _, ok := c.pool.chooseFor(decode.target, r, tried)
	if !ok {
		return nil
	}
	return &Sending{t}
}

// Sent takes note that an instance gets its part now.
func (c *Core) Sent(s *Sending) { c.pool.sent(s.target) }

// Answered takes note of the first byte of an answer, and of what the instance says about the prompt.
func (c *Core) Answered(s *Sending, u policy.Usage) { c.pool.heard(s.target, u, true) }

// Failed takes note that the connection to an instance broke.
func (c *Core) Failed(s *Sending) { c.pool.failed(s.target, false) }

// Worked takes note that an instance has answered a request to its end.
func (c *Core) Worked(s *Sending) { c.pool.worked(s.target) }

// Unaided takes note that a decode instance gets no ticket, since its prefill instance has failed.
func (c *Core) Unaided(s *Sending) { c.pool.unaided(s.target) }

// Done takes note that an instance has nothing to do with a request any more.
func (c *Core) Done(s *Sending) { c.pool.done(s.target) }

// Leave takes note that a request has ended that had picked these places.
func (c *Core) Leave(picked []int) { c.pool.leave(picked) }

// Busy is how many requests an instance has by the policy's count, and how many tokens of prompts wait there.
func (c *Core) Busy(place int) (running int, waiting float64) {
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	return c.pool.policy.Busy(place)
}
