package policy_test

import (
	"container/heap"
	"container/list"
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvport/kvport/engine/router/policy"
)

// This file is a simulation of a cluster from a seed: engines with LRU caches of blocks, a queue for the computing of
// prompts, and the policy in front. Times are virtual.

const (
	blockBytes = 64 // 16 tokens of 4 bytes
	tokenBytes = 4
)

// cache is the prefix cache of an engine: chained hashes of blocks, the one that was not used for longest is evicted.
type cache struct {
	most   int
	blocks map[uint64]*list.Element
	order  list.List // the newest first
}

func newCache(blocks int) *cache { return &cache{most: blocks, blocks: map[uint64]*list.Element{}} }

func chain(text []byte) (blocks []uint64) {
	h := uint64(1)
	for ; len(text) >= blockBytes; text = text[blockBytes:] {
		h = xxh3.HashSeed(text[:blockBytes], h)
		blocks = append(blocks, h)
	}
	return blocks
}

// held is how many tokens at the beginning of a prompt are there.
func (c *cache) held(blocks []uint64) int {
	n := 0
	for n < len(blocks) && c.blocks[blocks[n]] != nil {
		n++
	}
	return n * blockBytes / tokenBytes
}

func (c *cache) use(blocks []uint64) {
	for _, block := range slices.Backward(blocks) { // the beginning is the newest
		if e := c.blocks[block]; e != nil {
			c.order.MoveToFront(e)
			continue
		}
		c.blocks[block] = c.order.PushFront(block)
	}
	for len(c.blocks) > c.most {
		delete(c.blocks, c.order.Remove(c.order.Back()).(uint64))
	}
}

// machine is an engine. It computes one prompt after the other.
type machine struct {
	role    policy.Role
	cache   *cache
	rate    float64 // seconds for each token of a prompt
	base    float64
	link    float64 // seconds for each token that it loads from another
	fetch   float64 // and for each that it loads from the store
	free    float64 // when it has computed all that it has been given
	running int
}

// compute queues a prompt and says when its first token is there. What runs slows it down.
func (m *machine) compute(now float64, tokens int) float64 {
	m.free = max(m.free, now) + m.base + m.rate*float64(tokens)*(1+0.02*float64(m.running))
	return m.free
}

// job is a request of a trace.
type job struct {
	at      float64
	prompt  policy.Prompt
	blocks  []uint64
	tokens  int
	out     int // tokens of its answer
	session string
	whole   bool // the answer is not streamed
}

// event is something that happens at a time.
type event struct {
	at float64
	n  int // breaks ties
	do func(now float64)
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].n < e[j].n
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// world runs a trace over machines.
type world struct {
	policy   *policy.Policy
	machines []*machine
	told     bool   // the policy is told what each engine holds
	store    *cache // that all engines share; nil: none
	mixed    bool   // what lies in the store is told as if it were in the engine's own cache
	alone    bool   // never a prefill instance

	events events
	n      int

	prompt, cached int // tokens of prompts at the engines that compute them
	ttft           float64
	answered       int
	skipped        int
	aside          int // prompts of over 32 tokens to compute that skipped the prefill instances
}

func newWorld(c policy.Config, machines []*machine) *world {
	p, err := policy.New(c)
	if err != nil {
		panic(err)
	}
	for place, m := range machines {
		p.Add(place, policy.Instance{Role: m.role, Name: string(rune('a' + place))})
	}
	return &world{policy: p, machines: machines}
}

func (w *world) at(t float64, do func(now float64)) {
	w.n++
	heap.Push(&w.events, event{t, w.n, do})
}

func stamp(now float64) time.Time { return time.Unix(1e9, int64(now*1e9)) }

func (w *world) run(jobs []job) {
	for _, j := range jobs {
		w.at(j.at, func(now float64) { w.arrive(now, j) })
	}
	for len(w.events) > 0 {
		e := heap.Pop(&w.events).(event)
		e.do(e.at)
	}
}

func (w *world) arrive(now float64, j job) {
	r := &policy.Request{Prompt: j.prompt, Session: j.session, Alone: w.alone, Whole: j.whole, Standing: func(int) policy.Standing { return policy.Up }}
	if w.told {
		for place, m := range w.machines {
			own, all := w.held(m, j)
			h := policy.Held{Place: place, Hit: policy.Hit{Engine: own, Shared: all}, Sure: true}
			if w.mixed {
				h.Hit = policy.Hit{Engine: all}
			}
			r.Held = append(r.Held, h)
		}
	}
	c, _ := w.policy.Choose(r)
	if c.Prefill == nil {
		w.skipped++
		if c.Decode.Compute > 32 {
			w.aside++
		}
		w.decode(now, now, c.Decode, j, false)
		return
	}
	w.policy.Sent(c.Prefill, stamp(now))
	w.compute(now, c.Prefill, j, func(now float64, usage policy.Usage) {
		w.policy.Answered(c.Prefill, stamp(now), usage)
		w.policy.Done(c.Prefill)
		w.machines[c.Prefill.Place].running--
		w.decode(now, j.at, c.Decode, j, true)
	})
}

// held is how many tokens of a prompt a machine has, and how many there and in the store.
func (w *world) held(m *machine, j job) (own, all int) {
	own = m.cache.held(j.blocks)
	if w.store == nil {
		return own, own
	}
	return own, max(own, w.store.held(j.blocks))
}

// compute queues a prompt at a machine, after it has loaded what the store has, which keeps nobody else from computing.
func (w *world) compute(now float64, l *policy.Leg, j job, done func(now float64, u policy.Usage)) {
	m := w.machines[l.Place]
	own, all := w.held(m, j)
	u := policy.Usage{Prompt: j.tokens, Cached: all}
	w.prompt += u.Prompt
	w.cached += u.Cached
	start := func(now float64) {
		first := m.compute(now, u.Prompt-u.Cached)
		m.running++
		m.cache.use(j.blocks)
		w.at(first, func(now float64) {
			if w.store != nil {
				w.store.use(j.blocks)
			}
			done(now, u)
		})
	}
	if all == own {
		start(now)
		return
	}
	w.at(now+m.fetch*float64(all-own), start)
}

func (w *world) decode(now, arrived float64, l *policy.Leg, j job, ticket bool) {
	m := w.machines[l.Place]
	w.policy.Sent(l, stamp(now))
	if !ticket {
		w.compute(now, l, j, func(now float64, _ policy.Usage) { w.first(now, arrived, l, j) })
		return
	}
	lacks := j.tokens - m.cache.held(j.blocks)
	m.running++
	w.at(now+0.004+m.link*float64(lacks), func(now float64) { // loading keeps nobody else from computing
		m.cache.use(j.blocks)
		w.at(m.compute(now, 1), func(now float64) { w.first(now, arrived, l, j) })
	})
}

// first is the first token of an answer.
func (w *world) first(now, arrived float64, l *policy.Leg, j job) {
	at := stamp(now)
	if j.whole { // when its first token is there cannot be seen
		at = time.Time{}
	}
	w.policy.Answered(l, at, policy.Usage{}) // a stream says nothing about that
	w.ttft += now - arrived
	w.answered++
	w.at(now+float64(j.out)*0.02, func(float64) {
		w.policy.Done(l)
		w.machines[l.Place].running--
	})
}

func newJob(at float64, text []byte, out int, session string) job {
	return job{at, policy.NewPrompt(7, nil, text), chain(text), len(text) / tokenBytes, out, session, false}
}

// text is random text, whose bytes tell it apart from all other.
func text(rng *rand.Rand, tokens int) []byte {
	b := make([]byte, 0, tokens*tokenBytes+8)
	for len(b) < tokens*tokenBytes {
		b = binary.LittleEndian.AppendUint64(b, rng.Uint64())
	}
	return b[:tokens*tokenBytes]
}

// conversations makes a trace of conversations that share a few system prompts; some fork. gap is the mean time
// between requests, think that between the turns of one.
func conversations(seed uint64, count, turns int, gap, think float64) (jobs []job) {
	rng := rand.New(rand.NewPCG(seed, 1))
	systems := make([][]byte, 6)
	for i := range systems {
		systems[i] = text(rng, 200+300*i)
	}
	start := 0.0
	for c := range count {
		start += rng.ExpFloat64() * gap * float64(turns)
		at := start
		history := append([]byte(nil), systems[min(rng.IntN(6), rng.IntN(6))]...)
		for range turns {
			history = append(slices.Clip(history), text(rng, 40+rng.IntN(400))...)
			out := 20 + rng.IntN(200)
			session := strconv.Itoa(c)
			jobs = append(jobs, newJob(at, history, out, session))
			if rng.IntN(6) == 0 { // another branch from the same history
				jobs = append(jobs, newJob(at+rng.ExpFloat64()*think, append(slices.Clip(history), text(rng, 100)...), out, session))
			}
			history = append(slices.Clip(history), text(rng, out)...)
			at += rng.ExpFloat64()*think + 0.02*float64(out)
		}
	}
	return jobs
}
