package simulate

import (
	"fmt"
	"strings"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/kvcache"
	"github.com/kvport/kvport/engine/sched"
)

// engine is one life after another of an inference engine: the scheduler and the cache's accounts are
// the real ones, its loop is that of package engine, the model computes tags.
type engine struct {
	w     *World
	index int
	name  string
	size  int    // tokens of a block
	epoch uint64 // grows with every life
	life  uint16 // unique in the world
	gen   uint16 // resets begun in this life
	empty uint16 // the generation that began with the last successful reset
	role  connector.Role

	pool     *kvcache.Pool
	sched    *sched.Scheduler
	mem      [][]cell         // by rank and block
	landing  [][]cell         // by rank and slot, at trust level staged
	sources  [windows][]*cell // memory for source blocks
	host     *host            // nil without a connector
	streams  map[connector.RequestID]*stream
	early    map[connector.RequestID]*early   // of the step that is being computed
	arriving map[connector.RequestID]*arrival // of loads that the engine has heard of
	askAt    time.Time                        // when requests told Later are asked about again at the latest; zero: not waiting
	old      []connector.RequestID

	lurks bool    // somebody resets it as soon as the first blocks of a prompt are being saved
	again *client // whose prompt comes again after that

	forget, willBeEmpty bool // the connector's part of a reset is over, and went well
}

// stream is one request at an engine.
type stream struct {
	client *client
	id     connector.RequestID
	req    sched.Request
	tokens []int32  // prompt and what was sampled
	prefix []uint64 // of tokens
	gen    uint16   // of the engine's last successful reset when the request arrived
	aborts bool

	tainted bool                  // its blocks have what a load brought and nobody has verified
	kept    [][]connector.BlockID // its table, for a mutant
}

func (e *engine) start() {
	o := &e.w.opt
	e.epoch++
	e.w.lives++
	e.life, e.gen, e.empty, e.forget, e.lurks, e.again, e.askAt = e.w.lives, 0, 0, false, false, nil, time.Time{}
	e.pool = kvcache.New(o.Blocks)
	e.sched = sched.New(sched.Config{
		BlockTokens: e.size, Groups: o.Groups, Trailing: o.windows(), MaxBatchedTokens: o.MaxBatchedTokens, MaxSeqs: o.MaxSeqs,
		PrefixCaching: o.PrefixCaching, Role: e.role, FailLoads: o.FailLoads,
		LayerWise: o.Layers && e.role.Saves(),
	}, e.pool)
	e.mem = newMemory(o.Ranks, o.Blocks, e.size)
	e.landing = newMemory(o.Ranks, o.Slots, e.size)
	e.sources = [windows][]*cell{}
	e.streams = map[connector.RequestID]*stream{}
	e.early, e.arriving = nil, map[connector.RequestID]*arrival{}
	if e.role != 0 {
		e.host = newHost(e)
	}
}

// restart ends a life and begins the next. Nothing of the old one is left: its plugin dies with it
// and its memory is unmapped. Clients see their connections break.
func (e *engine) restart() {
	for _, id := range sortedKeys(e.streams) {
		if st := e.streams[id]; !st.req.Query {
			e.w.router.lost(st.client, e)
		}
	}
	if e.host != nil {
		e.host.vanish()
	}
	e.start()
}

// submit takes in a request of a client.
func (e *engine) submit(c *client, id connector.RequestID, n int, ticket []byte) error {
	turn := c.phase == toDecode && e.w.opt.Turns
	space := &connector.KeySpace{Salt: c.salt}
	st := &stream{client: c, id: id, tokens: append([]int32(nil), c.prompt...), gen: e.empty}
	st.prefix = prefixes(nil, st.tokens)
	st.req = sched.Request{
		ID: id, Prompt: c.prompt, Space: space, Keys: e.w.keys(space, c.prompt, e.size), MaxTokens: n, Ticket: ticket, Remote: turn || c.phase == toPrefill, Turn: turn,
	}
	err := e.add(st)
	if err == nil && e.w.opt.Queries {
		e.ask(st)
	}
	return err
}

func (e *engine) add(st *stream) error {
	if e.streams[st.id] != nil {
		return fmt.Errorf("id %s is in use", st.id)
	}
	req := st.req
	req.Keys = append([]connector.BlockKey(nil), req.Keys...)
	if err := e.sched.Add(req); err != nil {
		return err
	}
	e.streams[st.id] = st
	return nil
}

func (e *engine) abort(id connector.RequestID) {
	if st := e.streams[id]; st != nil {
		st.aborts = true
		e.sched.Abort(id, connector.ReasonAbort, nil)
	}
}

// turn is one round of the engine's loop. It takes at most events of the host's events; fast is how many questions
// the plugin answers while the loop waits for it. It reports whether anything was computed.
func (e *engine) turn(events, fast int) bool {
	if e.host != nil {
		e.host.glance()
		e.host.deliver(events)
	}
	e.finishReset()
	for _, q := range e.sched.Questions() {
		fast--
		e.sched.Answer(q.Query.Request, q.Query.Computed, e.host.match(q.Query, q.Ticket, fast >= 0))
	}
	chunks, st := e.sched.Schedule()
	slow := e.w.opt.Overlap && st != nil && len(st.Admitted) > 0 // the loop goes round again before these loads have ended
	e.tell(st)
	if len(chunks) > 0 {
		e.meanwhile(st)
		after := e.compute(chunks)
		e.computed(st)
		e.tell(after)
	}
	for _, out := range e.sched.Outputs() {
		e.output(out)
	}
	e.wait(len(chunks) > 0)
	return slow && e.turn(events, fast) || len(chunks) > 0
}

// wait sees to it that requests told Later are asked about again.
func (e *engine) wait(busy bool) {
	if e.role == 0 || busy {
		e.askAt = time.Time{}
		return
	}
	later := e.sched.Later()
	switch {
	case len(later) == 0:
		e.askAt = time.Time{}
	case e.askAt.IsZero():
		e.askAt = e.w.now.Add(100 * time.Millisecond)
	case !e.w.now.Before(e.askAt):
		for _, id := range later {
			e.sched.Answered(id)
		}
		e.askAt = time.Time{}
	}
}

func (e *engine) tell(st *connector.Step) {
	if st != nil {
		e.host.step(st)
	}
}

// compute is the model: it reads the KV of everything a chunk attends to and writes that of its
// tokens. Here is where wrong KV would become a wrong token.
func (e *engine) compute(chunks []sched.Chunk) *connector.Step {
	if e.host != nil {
		chunks = e.overlapped(chunks)
	}
	last := make([]uint64, len(chunks))
	for i, c := range chunks {
		st := e.streams[c.Request]
		if st == nil {
			e.w.fail('g', "%s computes %s, which it does not serve", e.name, c.Request)
			return nil
		}
		last[i] = e.forward(st, &c)
	}
	if e.host != nil {
		e.awaitLoads()
	}
	sample := make([]int32, len(chunks))
	for i, c := range chunks {
		if !c.Sample || c.Early && !e.early[c.Request].well {
			continue
		}
		st := e.streams[c.Request]
		sample[i] = sampled(last[i])
		st.tokens = append(st.tokens, sample[i])
		st.prefix = prefixes(st.prefix, st.tokens)
	}
	if e.w.tracing() {
		e.w.say("%s computes %s", e.name, describeChunks(chunks))
	}
	return e.commit(sample)
}

func (e *engine) forward(st *stream, c *sched.Chunk) uint64 {
	bt := e.size
	end := c.Start + len(c.Tokens)
	e.w.stats.Tokens += len(c.Tokens)
	tainted := e.reads(st, c)
	for rank := range e.mem {
		for g, table := range c.Blocks {
			for at := e.w.opt.first(g, c.Start, bt) * bt; at < end; at++ {
				b := &e.mem[rank][table[at/bt]]
				slot := &b.tags[at%bt]
				want := kvOf(st.prefix[at], g, rank)
				switch {
				case at >= c.Start:
					*slot, b.short = tag{e.garbled(c, want), e.life, e.gen, tainted}, 0
				case c.Early: // see readLayer
				case slot.kv != want || b.short > 0:
					e.w.fail('b', "%s: %s attends to block %d at position %d, rank %d, group %d: it holds the KV of another prefix, or none",
						e.name, st.id, table[at/bt], at, rank, g)
					return 0
				case at%bt == bt-1 && slot.life == e.life && slot.gen < st.gen:
					e.w.fail('b', "%s: %s attends to block %d at position %d, computed before a reset that was over when the request arrived",
						e.name, st.id, table[at/bt], at)
					return 0
				}
			}
		}
	}
	return e.garbled(c, st.prefix[end-1])
}

// output passes a request's news on to the router.
func (e *engine) output(o sched.Output) {
	st := e.streams[o.Request]
	if st == nil {
		e.w.fail('d', "%s has news of %s, which is over", e.name, o.Request)
		return
	}
	if st.req.Query {
		e.answered(st, &o)
		return
	}
	e.w.mix('o', uint64(e.index), hash(string(o.Request)), uint64(o.Reason), uint64(o.Generated), uint64(len(o.Tokens)))
	e.w.stats.Local += o.Local
	e.w.stats.External += o.External
	if o.Reason != 0 {
		delete(e.streams, o.Request)
		e.old = append(e.old, o.Request)
		if len(e.old) > 8 {
			e.old = e.old[1:]
		}
	}
	if o.Reason == connector.ReasonAbort && !st.aborts {
		e.w.fail('g', "%s: %s was aborted and nobody asked for it", e.name, o.Request)
	}
	if o.Reason == connector.ReasonError && !e.mayFail(st, o.Err) {
		e.w.fail('g', "%s: %s ends with an error: %v", e.name, o.Request, o.Err)
	}
	if e.w.tracing() {
		e.w.say("%s -> %s: %s", e.name, o.Request, describeOutput(&o))
	}
	e.w.router.news(st, e, &o)
}

func describeOutput(o *sched.Output) string {
	s := fmt.Sprintf("tokens %v", o.Tokens)
	if o.Reason != 0 {
		s += fmt.Sprintf(", ends: %s, %d local, %d external", reasonName(o.Reason), o.Local, o.External)
	}
	if o.Ticket != nil {
		s += ", with a ticket"
	}
	return s
}

func reasonName(r connector.Reason) string {
	return [...]string{"", "stop", "length", "abort", "error"}[min(r, 4)]
}

func describeChunks(chunks []sched.Chunk) string {
	parts := make([]string, len(chunks))
	for i, c := range chunks {
		parts[i] = fmt.Sprintf("%s[%d:%d]", c.Request, c.Start, c.Start+len(c.Tokens))
		if c.Early {
			parts[i] += " during its load"
		}
	}
	return strings.Join(parts, ", ")
}

// check compares the accounts of the cache with each other and with what the host has pinned.
func (e *engine) check() {
	if err := e.pool.Check(); err != nil {
		e.w.fail('a', "%s: %v", e.name, err)
		return
	}
	n, sum := e.pool.Counts(), 0
	for _, k := range n {
		sum += k
	}
	if sum != e.pool.Size() || e.pool.Available() != n[kvcache.Free] {
		e.w.fail('a', "%s: %v blocks in all, the cache has %d", e.name, n, e.pool.Size())
	}
	if e.host != nil {
		e.host.check()
	}
}
