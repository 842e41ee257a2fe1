package engine

import (
	"slices"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/kvcache"
	"github.com/kvport/kvport/engine/kvevents"
	"github.com/kvport/kvport/engine/sched"
	"github.com/kvport/kvport/host"
)

// EventSink is told which KV blocks an engine has; *kvevents.Publisher is one.
type EventSink interface {
	// Publish takes the events of a step, in order. It must not wait, and owns the events.
	Publish(events []kvevents.Event)
}

// The limits of events, and of what is remembered for the connector's reports.
const (
	maxReports  = 64      // that the loop has not taken yet
	maxReported = 1 << 16 // blocks; their tokens are remembered until then
	maxRun      = 1 << 14 // blocks of one event, fewer than any reader refuses
	mostAtOnce  = 1 << 14 // events and blocks that are taken from reports between two steps; one report more may be
	mostSpots   = 8       // where one block is published: a connector names the places, and may name a new one each time
)

// news gathers events for a sink: blocks of the prefix cache that come and go, and what the connector reports of its
// own. The loop's goroutine uses it. A nil one does nothing.
type news struct {
	sink      EventSink
	pool      *kvcache.Pool
	blockSize int
	groups    int
	secret    bool // tenants have a secret: neither tokens nor salts are told
	cleared   bool // the whole prefix cache is being emptied
	events    []kvevents.Event
	blocks    map[connector.BlockKey]*reported // nil: the connector reports nothing
	order     []connector.BlockKey             // of blocks, the oldest first
}

// reported is what an event needs of a block that the connector may report.
type reported struct {
	parent connector.BlockKey
	first  bool // it has no parent
	tokens []int32
	salt   string
	spots  []spot // where it is, by what was published
}

// spot is where blocks are, in vLLM's words.
type spot struct{ medium, locality string }

// cached is the engine's own cache.
func cached() spot { return spot{medium: kvevents.GPU} }

func newNews(e *Engine, pool *kvcache.Pool) *news {
	n := &news{
		sink: e.cfg.Events, pool: pool, blockSize: e.cfg.BlockSize, secret: len(e.space.Secret) > 0,
		groups: len(e.cfg.Model.Layout(e.cfg.BlockSize, 1).Groups),
	}
	if e.host != nil && e.host.Info().Capabilities&connector.CanEvents != 0 {
		n.blocks = map[connector.BlockKey]*reported{}
	}
	return n
}

// published notes a block that the prefix cache has from now on.
func (n *news) published(group uint16, block int, r *sched.Request, tokens []int32) {
	b := n.describe(block, r, tokens)
	n.stored(cached(), int(group), r.Keys[block], b)
	if n.blocks == nil || n.blocks[r.Keys[block]] != nil {
		return
	}
	n.blocks[r.Keys[block]], n.order = b, append(n.order, r.Keys[block])
	if len(n.order) > maxReported {
		n.takeBack(n.order[0], n.blocks[n.order[0]], nil)
		delete(n.blocks, n.order[0])
		n.order = n.order[1:]
	}
}

func (n *news) describe(block int, r *sched.Request, tokens []int32) *reported {
	b := &reported{first: block == 0}
	if block > 0 {
		b.parent = r.Keys[block-1]
	}
	if !n.secret {
		b.tokens = slices.Clone(tokens[block*n.blockSize : (block+1)*n.blockSize])
		b.salt = r.Space.Salt
	}
	return b
}

// stored adds a block to the last event if it continues that, and else begins one.
func (n *news) stored(at spot, group int, key connector.BlockKey, b *reported) {
	hash := kvevents.BytesHash(key[:])
	if last := n.last(kvevents.Stored, at, group); last != nil && !b.first && last.Hashes[len(last.Hashes)-1] == kvevents.BytesHash(b.parent[:]) {
		last.Hashes = append(last.Hashes, hash)
		last.Tokens = append(last.Tokens, b.tokens...)
		if last.Extra != nil {
			last.Extra = append(last.Extra, nil)
		}
		return
	}
	ev := kvevents.Event{
		Kind: kvevents.Stored, Medium: at.medium, Locality: at.locality, Group: group, Hashes: []kvevents.Hash{hash},
		Tokens: slices.Clone(b.tokens), BlockSize: n.blockSize,
	}
	if !b.first {
		ev.Parent = kvevents.BytesHash(b.parent[:])
	} else if b.salt != "" {
		ev.Extra = [][]string{{kvevents.Text(b.salt)}}
	}
	n.events = append(n.events, ev)
}

// last is the last event, if it is of that kind and place.
func (n *news) last(kind kvevents.Kind, at spot, group int) *kvevents.Event {
	if len(n.events) == 0 {
		return nil
	}
	ev := &n.events[len(n.events)-1]
	if ev.Kind == kind && (spot{ev.Medium, ev.Locality}) == at && ev.Group == group && len(ev.Hashes) < maxRun {
		return ev
	}
	return nil
}

// gone notes a block that the prefix cache no longer has.
func (n *news) gone(group uint16, key connector.BlockKey) {
	if !n.cleared {
		n.removed(cached(), int(group), key)
	}
}

func (n *news) removed(at spot, group int, key connector.BlockKey) {
	hash := kvevents.BytesHash(key[:])
	if last := n.last(kvevents.Removed, at, group); last != nil {
		last.Hashes = append(last.Hashes, hash)
		return
	}
	n.events = append(n.events, kvevents.Event{Kind: kvevents.Removed, Medium: at.medium, Locality: at.locality, Group: group, Hashes: []kvevents.Hash{hash}})
}

// reused tells about the blocks again that a request found in the prefix cache, so that a reader that came late knows the
// prompts that are asked most. vLLM does so with kv_cache_report_mode full.
func (n *news) reused(r *sched.Request, tokens int) {
	if n == nil || tokens == 0 {
		return
	}
	for g := range n.groups {
		for block := range min(tokens/n.blockSize, len(r.Keys)) {
			if _, ok := n.pool.Lookup(uint16(g), r.Keys[block]); !ok {
				break // of a group with a window, or it is gone already
			}
			n.stored(cached(), g, r.Keys[block], n.describe(block, r, r.Prompt))
		}
	}
}

// clear empties the prefix cache.
func (n *news) clear(forget func()) {
	if n == nil {
		forget()
		return
	}
	n.cleared = true
	forget()
	n.cleared = false
	n.events = append(n.events, kvevents.Event{Kind: kvevents.Cleared})
	for _, b := range n.blocks {
		b.spots = nil
	}
}

// extent is how many events and blocks a report has.
func extent(r host.BlockReport) int {
	n := 1 + len(r.Events)
	for i := range r.Events {
		n += len(r.Events[i].Keys)
	}
	return n
}

// report takes what the connector reports about its blocks. Those that the engine did not publish lately are left out, since
// nobody knows their tokens any more.
func (n *news) report(r host.BlockReport) {
	if r.Gap {
		n.takeAllBack()
	}
	for _, e := range r.Events {
		at := spotOf(&e)
		switch e.Kind {
		case connector.BlocksStored:
			for _, key := range e.Keys {
				if b := n.blocks[key]; b != nil && len(b.spots) < mostSpots && !slices.Contains(b.spots, at) {
					b.spots = append(b.spots, at)
					n.stored(at, -1, key, b)
				}
			}
		case connector.BlocksRemoved:
			for _, key := range e.Keys {
				n.takeBack(key, n.blocks[key], []spot{at})
			}
		case connector.BlocksCleared:
			n.takeAllBack()
		}
	}
}

// spotOf is where the blocks of a connector's event are: remote if every engine sees them that reaches the same backend.
func spotOf(e *connector.BlockEvent) spot {
	if e.Scope == connector.ScopeShared {
		return spot{mediumOf(e.Medium), kvevents.Remote}
	}
	return spot{mediumOf(e.Medium), kvevents.Local}
}

// mediumOf is what vLLM calls a place that a connector names, as python/kvport_vllm/events.py has it. What vLLM has no name for keeps
// the connector's.
func mediumOf(name string) string {
	switch name {
	case connector.MediumMemory:
		return kvevents.CPU
	case connector.MediumDisk, connector.MediumRemote:
		return kvevents.Storage
	case "", kvevents.GPU: // only the engine speaks of its own cache
		return "kvport"
	}
	return name
}

// takeBack says that a block is no longer in some spots; nil: in none.
func (n *news) takeBack(key connector.BlockKey, b *reported, spots []spot) {
	if b == nil {
		return
	}
	b.spots = slices.DeleteFunc(b.spots, func(at spot) bool {
		if spots != nil && !slices.Contains(spots, at) {
			return false
		}
		n.removed(at, -1, key)
		return true
	})
}

// takeAllBack says that the connector has none of the blocks, or that nobody knows.
func (n *news) takeAllBack() {
	for _, key := range n.order {
		n.takeBack(key, n.blocks[key], nil)
	}
}

// send gives the sink what has gathered.
func (n *news) send() {
	if n == nil || len(n.events) == 0 {
		return
	}
	n.sink.Publish(n.events)
	n.events = nil
}
