package sdk

import (
	"slices"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/eventlog"
)

// Watchable is a Store that says which keys have gone, so that [FromStore] can make an EventSource of
// it (connector.CanEvents).
type Watchable interface {
	// Watch is called once, before any other method. The Store calls removed, from any goroutine,
	// whenever keys that were Put cannot be found any more, unless a Reset forgot them; removed
	// returns soon and keeps no part of its argument. Nil means all keys.
	Watch(removed func(keys []connector.StoreKey))
}

// watchedBlocks is the number of blocks whose end a watch waits for.
const watchedBlocks = 1 << 16

// watch makes events of blocks from what happens to shards: a Store knows store keys only, from which
// no block key can be derived, so the watch remembers those that were saved. A block is stored when
// its part is on every rank, in every group that keeps all blocks, and removed with the first of them.
// A block that there is no room to remember is reported as removed: nobody waits for its end any more.
type watch struct {
	medium string
	scope  connector.Scope
	need   int // shards that make a block
	log    *eventlog.Log

	mu     sync.Mutex
	shards map[connector.StoreKey]*shardState
	blocks map[connector.BlockKey]*blockState
	oldest []connector.BlockKey // of blocks, by their first save; may name some that are gone
}

type shardState struct {
	block  *blockState
	stored bool
}

type blockState struct {
	key    connector.BlockKey
	shards []connector.StoreKey
	stored int
	told   bool // as stored
}

func newWatch(d *Definition, env *connector.Env) *watch {
	all := 0
	for _, g := range env.Layout.Groups {
		if g.Policy == connector.PolicyAll {
			all++
		}
	}
	return &watch{
		medium: d.Medium, scope: d.Scope, need: max(1, env.World) * max(1, all),
		shards: map[connector.StoreKey]*shardState{}, blocks: map[connector.BlockKey]*blockState{}, log: eventlog.New(),
	}
}

// saving is told before items are Put, so that one which is removed at once is not taken for stored.
// keys are their blocks.
func (w *watch) saving(items []connector.Item, keys []connector.BlockKey) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, it := range items {
		if w.shards[it.Key] != nil {
			continue
		}
		b := w.blocks[keys[i]]
		if b == nil {
			b = &blockState{key: keys[i]}
			w.blocks[keys[i]] = b
			w.oldest = append(w.oldest, keys[i])
		}
		b.shards = append(b.shards, it.Key)
		w.shards[it.Key] = &shardState{block: b}
	}
	for len(w.blocks) > watchedBlocks {
		b := w.blocks[w.oldest[0]]
		w.oldest = w.oldest[1:]
		w.end(b)
	}
	if len(w.oldest) > 2*watchedBlocks { // most are gone
		w.oldest = slices.DeleteFunc(w.oldest, func(k connector.BlockKey) bool { return w.blocks[k] == nil })
	}
}

// saved is told which of the items were stored: all but failed, by index.
func (w *watch) saved(items []connector.Item, failed map[int]bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var stored []connector.BlockKey
	for i, it := range items {
		s := w.shards[it.Key]
		if s == nil || s.stored || failed[i] {
			continue
		}
		s.stored = true
		s.block.stored++
		if s.block.stored >= w.need && !s.block.told {
			s.block.told = true
			stored = append(stored, s.block.key)
		}
	}
	w.tell(connector.BlocksStored, stored)
}

// removed is told by the Store.
func (w *watch) removed(keys []connector.StoreKey) {
	if keys == nil {
		w.cleared()
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var gone []connector.BlockKey
	for _, k := range keys {
		if s := w.shards[k]; s != nil {
			if s.block.told {
				gone = append(gone, s.block.key)
			}
			w.forget(s.block)
		}
	}
	w.tell(connector.BlocksRemoved, gone)
}

// cleared is told when the Store has forgotten everything.
func (w *watch) cleared() {
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.shards)
	clear(w.blocks)
	w.oldest = nil
	w.put(connector.BlockEvent{Kind: connector.BlocksCleared})
}

// end stops watching a block, which may be nil. The caller holds the lock.
func (w *watch) end(b *blockState) {
	if b == nil {
		return
	}
	w.forget(b)
	if b.told {
		w.tell(connector.BlocksRemoved, []connector.BlockKey{b.key})
	}
}

func (w *watch) forget(b *blockState) {
	for _, k := range b.shards {
		delete(w.shards, k)
	}
	delete(w.blocks, b.key)
}

func (w *watch) tell(kind connector.BlockEventKind, keys []connector.BlockKey) {
	if len(keys) > 0 {
		w.put(connector.BlockEvent{Kind: kind, Keys: keys})
	}
}

// put adds an event. The caller holds the lock, so that events are in the order of what they tell.
func (w *watch) put(e connector.BlockEvent) {
	e.Medium, e.Scope = w.medium, w.scope
	w.log.Add(e)
}
