package engine

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/kvcache"
	"github.com/kvport/kvport/engine/kvevents"
	"github.com/kvport/kvport/engine/model/sim"
	"github.com/kvport/kvport/engine/sched"
	"github.com/kvport/kvport/host"
)

// reader follows an engine's events. The loop's goroutine calls it, so it may look at the engine's cache.
type reader struct {
	t      testing.TB
	e      *Engine
	space  connector.KeySpace // of requests without salt
	blocks map[placed]bool
	kinds  map[kvevents.Kind]int
}

type placed struct {
	group int
	key   connector.BlockKey
}

// Publish implements EventSink: what is known by events afterwards is what the cache has.
func (r *reader) Publish(events []kvevents.Event) {
	for _, ev := range events {
		r.kinds[ev.Kind]++
		switch ev.Kind {
		case kvevents.Stored:
			r.store(&ev)
		case kvevents.Removed:
			for _, h := range ev.Hashes {
				assert.True(r.t, r.blocks[placed{ev.Group, keyOf(h)}], "it was there")
				delete(r.blocks, placed{ev.Group, keyOf(h)})
			}
		case kvevents.Cleared:
			clear(r.blocks)
		}
	}
	for b := range r.blocks {
		_, ok := r.e.loop.pool.Lookup(uint16(b.group), b.key)
		assert.True(r.t, ok, "a block that events speak of is there")
	}
}

// store checks that the name of each block follows from its parent and its tokens.
func (r *reader) store(ev *kvevents.Event) {
	assert.Equal(r.t, kvevents.GPU, ev.Medium)
	assert.Len(r.t, ev.Tokens, len(ev.Hashes)*ev.BlockSize)
	space, parent := r.space, keyOf(ev.Parent)
	if ev.Extra != nil {
		space.Salt = "salt"
		assert.Equal(r.t, []string{kvevents.Text("salt")}, ev.Extra[0])
	}
	if ev.Parent.IsZero() {
		parent = space.Root()
	}
	for i, h := range ev.Hashes {
		parent = space.Next(parent, ev.Tokens[i*ev.BlockSize:(i+1)*ev.BlockSize])
		assert.Equal(r.t, parent, keyOf(h))
		r.blocks[placed{ev.Group, parent}] = true
	}
}

func keyOf(h kvevents.Hash) (key connector.BlockKey) {
	if b := h.AppendTo(nil); len(b) == 33 {
		copy(key[:], b[1:])
	}
	return key
}

// Whoever follows the events knows the prefix cache at every moment, under evictions, preemptions and windows too.
func TestEvents(t *testing.T) {
	for _, groups := range []int{1, 2} {
		cfg := simConfig(t)
		var err error
		cfg.Model, err = sim.New(sim.Options{Layers: 4, BytesPerToken: 32, Seed: 1, MaxTokens: 1024, Groups: groups, Window: 40})
		require.NoError(t, err)
		cfg.NumBlocks = 40 * groups
		r := &reader{t: t, blocks: map[placed]bool{}, kinds: map[kvevents.Kind]int{}, space: connector.KeySpace{Model: cfg.Model.Spec().Weights}}
		cfg.Events = r
		ready := make(chan struct{})
		e := start(t, cfg)
		e.do(func(*loop) { // before anything is published
			r.e = e.Engine
			close(ready)
		})
		<-ready
		reqs := requests(60)
		for i := range reqs {
			if i%5 == 0 {
				reqs[i].Salt = "salt"
			}
		}
		for _, got := range e.ask(t, reqs, 8) {
			require.NoError(t, got.last.Err)
		}
		published := func(k kvevents.Kind) int {
			n := make(chan int)
			e.do(func(*loop) { n <- r.kinds[k] })
			return <-n
		}
		require.Positive(t, published(kvevents.Removed))
		same := requests(1)[0]
		same.ID = "again"
		known := make(chan bool)
		e.ask(t, []Request{same}, 1)
		e.do(func(l *loop) { // a block of a request that just ended is there, so it is known
			key := r.space.Keys(same.Prompt, l.e.cfg.BlockSize)[0]
			_, there := l.pool.Lookup(0, key)
			known <- !there || r.blocks[placed{0, key}]
		})
		require.True(t, <-known)
		require.NoError(t, e.Reset(t.Context()))
		e.ask(t, []Request{{ID: "last", Prompt: same.Prompt, MaxTokens: 1, Params: same.Params}}, 1)
		require.Equal(t, 1, published(kvevents.Cleared))
	}
}

// gathered is a sink that keeps everything.
type gathered []kvevents.Event

// Publish implements EventSink.
func (g *gathered) Publish(events []kvevents.Event) { *g = append(*g, events...) }

// What a connector reports is published with the tokens of the blocks, and taken back when nobody knows any more.
func TestReports(t *testing.T) {
	tokens := []int32{1, 2, 3, 4, 5, 6}
	space := connector.KeySpace{Salt: "s"}
	r := &sched.Request{Prompt: tokens, Space: &space, Keys: space.Keys(tokens, 2)}
	var told gathered
	n := &news{sink: &told, pool: kvcache.New(4), blockSize: 2, groups: 1, blocks: map[connector.BlockKey]*reported{}}
	for block := range 3 {
		n.published(0, block, r, tokens)
	}
	n.send()
	hash := func(i int) kvevents.Hash { return kvevents.BytesHash(r.Keys[i][:]) }
	salted := [][]string{{kvevents.Text("s")}, nil, nil}
	require.Equal(t, gathered{{
		Kind: kvevents.Stored, Medium: kvevents.GPU, Hashes: []kvevents.Hash{hash(0), hash(1), hash(2)}, Tokens: tokens, BlockSize: 2, Extra: salted,
	}}, told)
	report := func(gap bool, events ...connector.BlockEvent) gathered {
		told = nil
		n.report(host.BlockReport{Gap: gap, Events: events})
		n.send()
		return told
	}
	stored := func(medium string, keys ...connector.BlockKey) connector.BlockEvent {
		return connector.BlockEvent{Kind: connector.BlocksStored, Keys: keys, Medium: medium}
	}
	removed := func(medium string, hashes ...kvevents.Hash) kvevents.Event {
		return kvevents.Event{Kind: kvevents.Removed, Medium: medium, Locality: kvevents.Local, Group: -1, Hashes: hashes}
	}
	require.Equal(t, gathered{{
		Kind: kvevents.Stored, Medium: kvevents.CPU, Locality: kvevents.Local, Group: -1, Parent: hash(0), Hashes: []kvevents.Hash{hash(1), hash(2)}, Tokens: tokens[2:], BlockSize: 2,
	}}, report(false, stored("memory", r.Keys[1], r.Keys[2], connector.BlockKey{9})))
	require.Empty(t, report(false, stored("memory", r.Keys[1])), "it is known")
	require.Equal(t, kvevents.Storage, report(false, stored("disk", r.Keys[0]))[0].Medium)
	shared := stored("disk", r.Keys[0])
	shared.Scope = connector.ScopeShared
	both := report(false, shared)
	require.Equal(t, []string{kvevents.Storage, kvevents.Remote}, []string{both[0].Medium, both[0].Locality}, "a disk of the node is another place")
	shared.Kind = connector.BlocksRemoved
	require.Equal(t, []string{kvevents.Storage, kvevents.Remote}, []string{report(false, shared)[0].Medium, told[0].Locality})
	require.Equal(t, "kvport", report(false, stored("", r.Keys[0]))[0].Medium)
	require.Equal(t, "tape", report(false, stored("tape", r.Keys[0]))[0].Medium)
	require.Equal(t, gathered{removed(kvevents.CPU, hash(1))},
		report(false, connector.BlockEvent{Kind: connector.BlocksRemoved, Keys: []connector.BlockKey{r.Keys[1], {9}}, Medium: "memory"}))
	require.Equal(t, gathered{
		removed(kvevents.Storage, hash(0)), removed("kvport", hash(0)), removed("tape", hash(0)), removed(kvevents.CPU, hash(2)),
	}, report(false, connector.BlockEvent{Kind: connector.BlocksCleared}))
	report(false, stored("memory", r.Keys[0]))
	require.Equal(t, gathered{removed(kvevents.CPU, hash(0))}, report(true))
	n.clear(func() {})
	require.Equal(t, gathered{{Kind: kvevents.Cleared}}, report(true), "the connector has nothing left to take back")

	// The oldest block makes room, and is taken back if it was reported.
	n.blocks, n.order = map[connector.BlockKey]*reported{}, nil
	n.published(0, 0, r, tokens)
	report(false, stored("memory", r.Keys[0]))
	for len(n.order) < maxReported {
		n.order = append(n.order, connector.BlockKey{byte(len(n.order)), byte(len(n.order) >> 8), 7})
	}
	n.published(0, 1, r, tokens)
	require.Contains(t, n.events, removed(kvevents.CPU, hash(0)))
	require.Len(t, n.order, maxReported)
	require.Nil(t, n.blocks[r.Keys[0]])

	// Where tenants have a secret nothing says what is in a block.
	n = &news{sink: &told, pool: kvcache.New(4), blockSize: 2, groups: 1, secret: true}
	n.published(0, 0, r, tokens)
	require.Equal(t, []kvevents.Event{{Kind: kvevents.Stored, Medium: kvevents.GPU, Hashes: []kvevents.Hash{hash(0)}, BlockSize: 2}}, n.events)
}

// A connector that reports without end, or names a new place each time, neither keeps steps from going on nor takes memory without
// end.
func TestNewsIsBounded(t *testing.T) {
	key := connector.BlockKey{1}
	n := &news{blocks: map[connector.BlockKey]*reported{key: {}}, order: []connector.BlockKey{key}}
	stored := func(medium string, keys ...connector.BlockKey) host.BlockReport {
		return host.BlockReport{Events: []connector.BlockEvent{{Kind: connector.BlocksStored, Medium: medium, Keys: keys}}}
	}
	for i := range 100 {
		n.report(stored(strconv.Itoa(i), key))
	}
	require.Len(t, n.blocks[key].spots, mostSpots)
	n.report(stored(kvevents.GPU, key))
	require.NotContains(t, n.blocks[key].spots, spot{kvevents.GPU, kvevents.Local}, "only the engine speaks of its own cache")

	reports := make(chan host.BlockReport, 8)
	l := &loop{e: &Engine{}, news: n, reports: reports}
	for range 4 {
		reports <- stored("", make([]connector.BlockKey, mostAtOnce)...)
	}
	for left := 3; left >= 0; left-- {
		l.receive()
		require.Len(t, reports, left)
	}
	for range 8 {
		reports <- stored("", key)
	}
	l.receive()
	require.Empty(t, reports, "small ones are taken together")
}

// An event has no more blocks than readers take.
func TestNewsRun(t *testing.T) {
	n := &news{}
	for i := range maxRun + 1 {
		n.removed(cached(), 0, connector.BlockKey{byte(i), byte(i >> 8)})
	}
	require.Len(t, n.events, 2)
	require.Len(t, n.events[0].Hashes, maxRun)
}
