package sched

import (
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"slices"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/kvcache"
)

// world is everything around a scheduler in a simulation: clients, a model and a host, all driven
// from one seed. The cache holds a tag in each slot: the hash of the tokens up to there. The model
// refuses to read a slot whose tag is not that of its own prefix, the host one that changed while it
// was pinned, so that any block that is reused, published or run too early shows.
type world struct {
	rng     *rand.Rand
	cfg     Config
	faults  bool
	pool    *kvcache.Pool
	s       *Scheduler
	tags    [][]uint64 // of each block, each slot
	dirty   [][]bool   // likewise: nobody has verified what it holds, or what that is computed from
	store   map[stored]bool
	clients map[connector.RequestID]*client
	past    []*client // whose id is in use again
	ops     []*op
	next    int
	log     uint64 // hash of all outputs
	steps   int
	seen    map[string]int // how often what happened
}

type client struct {
	req      Request
	tokens   []int32 // prompt and what came back
	final    []Output
	arrived  int
	ended    int
	aborted  bool
	ticketed bool
	barred   bool         // a load left nothing: there must be no other
	dirty    bool         // it has loaded what nobody has verified
	unclean  map[int]bool // positions of its tokens whose slots are dirty in some group
	hasClean bool         // it has ended, and had clean tokens for a consumer
}

// stored names what a connector can have: a block of a group.
type stored struct {
	group uint16
	key   connector.BlockKey
}

const (
	prime   = 1099511628211
	garbage = 0xbad
)

func chain(h uint64, t int32) uint64 { return (h ^ uint64(t+1)) * prime }

func tagOf(tokens []int32) uint64 {
	h := uint64(14695981039346656037)
	for _, t := range tokens {
		h = chain(h, t)
	}
	return h
}

// sampled is what the model would say after tokens: a few values, so that prefixes repeat.
func sampled(tokens []int32) int32 { return int32(tagOf(tokens) >> 40 % 50) }

func newWorld(seed uint64) *world {
	rng := rand.New(rand.NewPCG(seed, 77))
	w := &world{
		rng: rng, faults: true,
		cfg: Config{
			BlockTokens: 1 + rng.IntN(5), Groups: 1 + rng.IntN(2), MaxBatchedTokens: 1 + rng.IntN(24), MaxSeqs: 1 + rng.IntN(5),
			PrefixCaching: rng.IntN(4) > 0, Role: connector.Role(rng.IntN(4)), FailLoads: rng.IntN(8) == 0,
		},
		store: map[stored]bool{}, clients: map[connector.RequestID]*client{}, seen: map[string]int{},
	}
	for range w.cfg.Groups {
		w.cfg.Trailing = append(w.cfg.Trailing, max(0, rng.IntN(5)-1)) // 0: all
	}
	w.pool = kvcache.New(w.cfg.Groups * (2 + rng.IntN(31)))
	w.tags, w.dirty = make([][]uint64, w.pool.Size()), make([][]bool, w.pool.Size())
	for i := range w.tags {
		w.tags[i], w.dirty[i] = make([]uint64, w.cfg.BlockTokens), make([]bool, w.cfg.BlockTokens)
	}
	w.s = New(w.cfg, w.pool)
	return w
}

// submit adds a client whose prompt shares a prefix with others.
func (w *world) submit() error {
	w.next++
	room := w.pool.Size() / w.cfg.Groups * w.cfg.BlockTokens
	c := &client{unclean: map[int]bool{}}
	n := 1 + w.rng.IntN(max(1, room*2/3))
	for i := range n {
		c.req.Prompt = append(c.req.Prompt, int32(i%7))
	}
	if at := w.rng.IntN(n); w.rng.IntN(2) == 0 {
		c.req.Prompt[at] = 8 + w.rng.Int32N(3)
	}
	c.req.ID = connector.RequestID(fmt.Sprintf("r%d", w.next))
	old := w.clients[connector.RequestID(fmt.Sprintf("r%d", 1+w.rng.IntN(w.next)))]
	if old != nil && len(old.final) > 0 && old.ended == old.arrived { // its transfers may still run
		w.seen["id used again"]++
		c.req.ID = old.req.ID
	}
	c.req.MaxTokens = 1 + w.rng.IntN(max(1, min(12, room-n)))
	c.req.Remote = w.rng.IntN(4) == 0
	c.req.Space = &connector.KeySpace{}
	c.req.Keys = c.req.Space.Keys(c.req.Prompt, w.cfg.BlockTokens)
	if w.rng.IntN(3) == 0 {
		c.req.Stops = []int32{3, 4, 5, 6}
	}
	if c.ticketed = w.rng.IntN(4) == 0; c.ticketed {
		c.req.Ticket = []byte("t")
	}
	if w.rng.IntN(6) == 0 {
		c.req.Query, c.req.Turn, c.req.MaxTokens, c.req.Ticket, c.ticketed = true, true, 1, nil, false
	}
	c.tokens = slices.Clone(c.req.Prompt)
	err := w.s.Add(c.req)
	if n+c.req.MaxTokens > room {
		if err == nil {
			return fmt.Errorf("%s does not fit but was taken", c.req.ID)
		}
		return nil
	}
	if w.clients[c.req.ID] != nil {
		w.past = append(w.past, old)
	}
	w.clients[c.req.ID] = c
	return err
}

// turn is one round of the engine's loop, after random events. It reports whether anything is left.
func (w *world) turn() (busy bool, err error) {
	w.steps++
	if err := w.disturb(); err != nil {
		return false, err
	}
	for _, q := range append(w.s.Questions(), w.s.Tickets(w.rng.IntN(4) == 0)...) {
		w.s.Answer(q.Query.Request, q.Query.Computed, w.match(q))
	}
	chunks, st := w.s.Schedule()
	err = w.take(st)
	if err == nil && len(chunks) > 0 {
		err = w.compute(chunks)
	}
	if err == nil {
		err = w.outputs()
	}
	if err != nil {
		return false, err
	}
	idle := len(chunks) == 0 && len(w.s.Questions()) == 0
	busy = !idle || len(w.ops) > 0 || w.s.Live() > 0
	if idle && busy {
		if len(w.ops) == 0 {
			return false, fmt.Errorf("stuck: %d requests live, nothing to compute and nothing to wait for", w.s.Live())
		}
		if err := w.report(w.rng.IntN(len(w.ops))); err != nil {
			return false, err
		}
	}
	return busy, w.account()
}

// disturb lets the host end some of its operations, a client go away, or the cache be reset.
func (w *world) disturb() error {
	for len(w.ops) > 0 && w.rng.IntN(3) > 0 {
		if err := w.report(w.rng.IntN(len(w.ops))); err != nil {
			return err
		}
	}
	if w.faults && w.rng.IntN(12) == 0 {
		w.abort()
	}
	if w.faults && w.rng.IntN(60) == 0 {
		w.s.Forget()
	}
	return nil
}

func (w *world) abort() {
	var ids []connector.RequestID
	for id := range w.s.live {
		ids = append(ids, id)
	}
	if slices.Sort(ids); len(ids) > 0 {
		id := ids[w.rng.IntN(len(ids))]
		w.seen[fmt.Sprintf("abort in state %d", w.s.live[id].state)]++
		w.clients[id].aborted = true
		w.s.Abort(id, connector.ReasonAbort, nil)
	}
}

// compute is the model: it reads all KV a chunk attends to and writes that of its tokens.
func (w *world) compute(chunks []Chunk) error {
	total, tokens, seen := 0, []int32{}, map[connector.RequestID]bool{}
	for _, c := range chunks {
		if seen[c.Request] {
			return fmt.Errorf("%s: two chunks", c.Request)
		}
		seen[c.Request] = true
		total += len(c.Tokens)
		if err := w.forward(&c); err != nil {
			return err
		}
		tokens = append(tokens, sampled(w.clients[c.Request].tokens))
	}
	if total > w.cfg.MaxBatchedTokens || len(chunks) > w.cfg.MaxSeqs {
		return fmt.Errorf("step of %d tokens and %d requests", total, len(chunks))
	}
	if w.faults && w.rng.IntN(80) == 0 {
		w.seen["compute failed"]++
		for _, c := range chunks {
			w.clients[c.Request].aborted = true
		}
		return w.take(w.s.Fail(fmt.Errorf("broken")))
	}
	// The host checks blocks against the clients' tokens, which have the sampled one by then.
	for i, c := range chunks {
		if cl := w.clients[c.Request]; c.Sample {
			cl.tokens = append(cl.tokens, tokens[i])
		}
	}
	return w.take(w.s.Commit(tokens))
}

func (w *world) forward(c *Chunk) error {
	if w.clients[c.Request].req.Query {
		return fmt.Errorf("%s: a cache query is computed", c.Request)
	}
	all, end := w.clients[c.Request].tokens, c.Start+len(c.Tokens)
	if len(c.Tokens) == 0 || !slices.Equal(c.Tokens, all[c.Start:end]) || c.Sample != (end == len(all)) {
		return fmt.Errorf("%s: wrong chunk at %d", c.Request, c.Start)
	}
	dirty, err := w.reads(c)
	if err != nil {
		return err
	}
	for g, table := range c.Blocks {
		for at := w.reach(g, c.Start) * w.cfg.BlockTokens; at < end; at++ {
			slot := &w.tags[table[at/w.cfg.BlockTokens]][at%w.cfg.BlockTokens]
			want := tagOf(all[:at+1])
			if at >= c.Start {
				*slot = want
				w.dirty[table[at/w.cfg.BlockTokens]][at%w.cfg.BlockTokens] = dirty
				w.clients[c.Request].unclean[at] = dirty
			} else if *slot != want {
				return fmt.Errorf("%s attends to a wrong block at position %d", c.Request, at)
			}
		}
	}
	return nil
}

// reach is the first block that a group attends to behind some tokens.
func (w *world) reach(group, tokens int) int {
	if n := w.cfg.Trailing[group]; n > 0 {
		return max(0, tokens/w.cfg.BlockTokens-n)
	}
	return 0
}

// outputs checks the news: each request's tokens, exactly one end, and nothing after it.
func (w *world) outputs() error {
	for _, o := range w.s.Outputs() {
		c := w.clients[o.Request]
		if len(c.final) > 0 {
			return fmt.Errorf("%s: output after the end", o.Request)
		}
		h := fnv.New64a()
		fmt.Fprint(h, w.log, o.Request, o.Tokens, o.Reason)
		w.log = h.Sum64()
		if o.Reason == 0 {
			continue
		}
		c.final = append(c.final, o)
		w.noteQuery(c, o)
		w.seen[fmt.Sprintf("reason %d", o.Reason)]++
		n := len(c.tokens) - len(c.req.Prompt)
		if o.Generated != n || o.Local+o.External >= len(c.req.Prompt) || !w.mayEnd(c, o) || !w.ticketFits(c, o) {
			return fmt.Errorf("%s: wrong end %+v after %d tokens", o.Request, o, n)
		}
	}
	return nil
}

// noteQuery counts what cache queries found.
func (w *world) noteQuery(c *client, o Output) {
	switch {
	case !c.req.Query || o.Reason != connector.ReasonStop:
	case c.req.Remote && o.Local > 0 && w.cfg.Role != 0:
		w.seen["query that holds"]++
	case o.External > 0:
		w.seen["query that finds more"]++
	case o.Local > 0:
		w.seen["query that finds"]++
	}
}

// mayEnd reports whether a request has reason to end as it did.
func (w *world) mayEnd(c *client, o Output) bool {
	switch o.Reason {
	case connector.ReasonLength:
		return o.Generated == c.req.MaxTokens
	case connector.ReasonStop:
		return c.req.Query || slices.Contains(c.req.Stops, c.tokens[len(c.tokens)-1])
	case connector.ReasonAbort:
		return c.aborted
	case connector.ReasonError:
		return c.aborted || w.cfg.FailLoads
	}
	return false
}

// ticketFits reports whether a request that has a consumer, and only that, has a ticket, after the
// last of its saves.
func (w *world) ticketFits(c *client, o Output) bool {
	normal := o.Reason == connector.ReasonLength || o.Reason == connector.ReasonStop
	nothing := c.req.Query && o.Local == 0 || !c.hasClean
	if !normal || !c.req.Remote || w.cfg.Role == 0 || nothing {
		return o.Ticket == nil
	}
	saving := slices.ContainsFunc(w.ops, func(x *op) bool { return x.kind == 's' && x.client == c })
	return string(o.Ticket) == "ticket of "+string(o.Request) && !saving
}

// account compares the pool with what requests and host own.
func (w *world) account() error {
	if err := w.pool.Check(); err != nil {
		return err
	}
	owned := map[connector.BlockID]bool{}
	for _, r := range w.s.live {
		for _, table := range r.table {
			for _, id := range table {
				if id != none {
					owned[id] = true
				}
			}
		}
	}
	for _, h := range w.s.handed {
		for _, b := range h.blocks {
			owned[b.ID] = true
		}
	}
	if w.pool.Available()+len(owned) != w.pool.Size() {
		return fmt.Errorf("%d blocks free, %d owned, %d in all", w.pool.Available(), len(owned), w.pool.Size())
	}
	return nil
}

// over checks that nothing is left.
func (w *world) over() error {
	for _, c := range slices.Concat(w.past, slices.Collect(maps.Values(w.clients))) {
		if len(c.final) != 1 || w.cfg.Role != 0 && (c.arrived != 1 || c.ended != 1) {
			return fmt.Errorf("%s: %d ends, told the host %d and %d times", c.req.ID, len(c.final), c.arrived, c.ended)
		}
	}
	if w.pool.Available() != w.pool.Size() || len(w.s.handed) > 0 || len(w.s.queue)+len(w.s.running) > 0 {
		return fmt.Errorf("%d of %d blocks free, %d handovers open", w.pool.Available(), w.pool.Size(), len(w.s.handed))
	}
	return nil
}

// play runs one seed: a storm of requests and faults, then quiet until everything has ended.
func play(seed uint64) (*world, error) {
	w := newWorld(seed)
	for range 30 + w.rng.IntN(60) {
		if w.rng.IntN(3) == 0 {
			if err := w.submit(); err != nil {
				return w, err
			}
		}
		if _, err := w.turn(); err != nil {
			return w, err
		}
	}
	w.faults = false
	for range 20_000 {
		busy, err := w.turn()
		if err != nil {
			return w, err
		}
		if !busy {
			return w, w.over()
		}
	}
	return w, fmt.Errorf("still %d requests live long after the last fault", w.s.Live())
}
