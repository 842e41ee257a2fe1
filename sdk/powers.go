package sdk

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/wire"
)

// storePowers are the optional powers that a Store can have.
const storePowers = connector.CanReset | connector.CanStat | connector.CanEvents | connector.CanPlace

// Placing is a Store with CanPlace: it keeps blocks in slots of Env.Arena as Env.Placement says, if that is set. Package
// sdk/tier has such a Store.
type Placing interface {
	// Placed names the slots in which blocks with these keys lie, after a save or a load of them. Blocks that lie nowhere are
	// left out. The slice is the caller's.
	Placed(keys []connector.StoreKey) []uint32
	// Used counts as a use of what lies in each of the slots, in this order.
	Used(slots []uint32)
}

// Lending is a [Placing] Store that lends the host empty slots ahead of saves. These methods and all others of the Store take note of what
// the host has written there before they do anything else (rule PLACE-32).
type Lending interface {
	// Lends is how many slots are lent at a time; 0: none. It does not change.
	Lends() int
	// Lend lends up to n slots more. serial is that of the block that is written into the first one; that of each other one is the
	// next number.
	Lend(n int) (slots []uint32, serial uint64)
	// Back takes back the slots with these serials: the host does not write them. It ignores what is not lent.
	Back(serials []uint64)
}

// powers are Capabilities, and what the fields say that are short for some.
func (d *Definition) powers() connector.Capability {
	c := d.Capabilities
	if d.Reset {
		c |= connector.CanReset
	}
	if d.LayerWise {
		c |= connector.CanLayers
	}
	return c
}

// check returns an error if no Store can satisfy the Definition.
func (d *Definition) check() error {
	if more := d.Capabilities &^ storePowers; more != 0 {
		return fmt.Errorf("Definition.Capabilities: a Store cannot have %v: %w", more, connector.ErrIncompatible)
	}
	if (len(d.Stats) > 0) != (d.Capabilities&connector.CanStat != 0) {
		return fmt.Errorf("Definition.Stats: %d of them, with capabilities %q: %w", len(d.Stats), d.Capabilities, connector.ErrIncompatible)
	}
	if len(d.Medium) > connector.MaxMedium {
		return fmt.Errorf("Definition.Medium has %d bytes, limit %d: %w", len(d.Medium), connector.MaxMedium, connector.ErrIncompatible)
	}
	return connector.ValidateStats(d.Stats)
}

// has returns an error if the Definition claims a power that the Store lacks. Without an arena there is nothing to place in.
func (d *Definition) has(store connector.Store, arena bool) error {
	var lacks connector.Capability
	if _, ok := store.(connector.Resetter); !ok {
		lacks |= connector.CanReset
	}
	if _, ok := store.(connector.StatsSource); !ok {
		lacks |= connector.CanStat
	}
	if _, ok := store.(Watchable); !ok {
		lacks |= connector.CanEvents
	}
	if _, ok := store.(Placing); !ok && arena {
		lacks |= connector.CanPlace
	}
	if lacks &= d.Capabilities; lacks != 0 {
		return fmt.Errorf("Definition.Capabilities claims %v, but the Store lacks its methods: %w", lacks, connector.ErrIncompatible)
	}
	return nil
}

// Capabilities implements connector.Partial.
func (w *storeWorker) Capabilities() connector.Capability { return w.powers }

// SavePlaced implements connector.Placer.
func (w *storeWorker) SavePlaced(ctx context.Context, t *connector.Transfer, kv *connector.KV, used []uint32) (placed []uint32, err error) {
	return w.movePlaced(ctx, t, kv, used, w.Save)
}

// LoadPlaced implements connector.Placer.
func (w *storeWorker) LoadPlaced(ctx context.Context, t *connector.Transfer, kv *connector.KV, used []uint32) (placed []uint32, err error) {
	return w.movePlaced(ctx, t, kv, used, w.Load)
}

// movePlaced is Save or Load of a Store that places.
func (w *storeWorker) movePlaced(ctx context.Context, t *connector.Transfer, kv *connector.KV, used []uint32, move mover) (placed []uint32, err error) {
	store, ok := w.store.(Placing)
	if !ok {
		return nil, fmt.Errorf("the connector cannot %v: %w", connector.CanPlace, connector.ErrIncompatible)
	}
	if len(used) > 0 { // before the move, which may evict
		err = wire.Guard(w.log, "used", func() error {
			store.Used(used)
			return nil
		})
	}
	if err == nil {
		err = move(ctx, t, kv)
	}
	if err != nil {
		w.unnamed.add(w.keys(others(t.Blocks, err)))
		return nil, err
	}
	keys := append(w.keys(t.Blocks), w.unnamed.take()...)
	err = wire.Guard(w.log, "placed", func() error {
		placed = store.Placed(keys)
		return nil
	})
	if err != nil {
		w.unnamed.add(keys)
	}
	return placed[:min(len(placed), wire.MaxPlaced)], err
}

// Lends implements connector.Lender. All ranks share what the Store lends.
func (w *storeWorker) Lends() int {
	store, ok := w.store.(Lending)
	if !ok || w.env.Placement == nil || !w.env.Role.Saves() {
		return 0
	}
	return store.Lends() / max(1, w.env.World)
}

// Lend implements connector.Lender. It lends last: an error has no room for slots.
func (w *storeWorker) Lend(ctx context.Context, l *connector.Lending) (loan *connector.Loan, err error) {
	store, lends := w.store.(Lending)
	placing, places := w.store.(Placing)
	if !lends || !places {
		return nil, fmt.Errorf("the connector lends no slots: %w", connector.ErrIncompatible)
	}
	loan = &connector.Loan{}
	unnamed := w.unnamed.take()
	err = wire.Guard(w.log, "lend", func() error {
		placing.Used(l.Used)
		w.written(ctx, l.Written, placing)
		store.Back(l.Back)
		loan.Placed = placing.Placed(slices.Concat(unnamed, w.keys(l.Written))) // the host knows of those that it wrote
		loan.Placed = loan.Placed[:min(len(loan.Placed), wire.MaxPlaced)]
		loan.Slots, loan.Serial = store.Lend(min(l.Want, w.Lends()))
		return nil
	})
	if err != nil { // the host says again what it has written
		w.unnamed.add(unnamed)
	}
	return loan, err
}

// written tells the watch about blocks that the host has written into lent slots, and that the Store still has.
func (w *storeWorker) written(ctx context.Context, blocks []connector.Block, store Placing) {
	if w.watch == nil || len(blocks) == 0 {
		return
	}
	items := make([]connector.Item, 0, len(blocks))
	for _, k := range w.keys(blocks) {
		items = append(items, connector.Item{Key: k})
	}
	items, keys, _ := w.watched(items, &connector.Transfer{Blocks: blocks})
	w.watch.saving(items, keys)
	w.watch.saved(items, w.gone(ctx, items, store)) // of what went before saving the watch did not hear
}

// gone are the items, by index, that the Store does not have. What left memory may be below: a query says so. As a rule nothing did, and one
// question for all shows that: each costs the Store a look at all that it lends.
func (w *storeWorker) gone(ctx context.Context, items []connector.Item, store Placing) map[int]bool {
	gone := map[int]bool{}
	keys := make([]connector.StoreKey, len(items))
	for i, it := range items {
		keys[i] = it.Key
	}
	if len(store.Placed(keys)) == len(items) {
		return gone
	}
	var evicted []int
	var runs [][]connector.StoreKey
	for i, it := range items {
		if run := []connector.StoreKey{it.Key}; len(store.Placed(run)) == 0 {
			gone[i], evicted, runs = true, append(evicted, i), append(runs, run)
		}
	}
	if len(runs) == 0 {
		return gone
	}
	found, err := w.store.Lookup(ctx, runs)
	for j, i := range evicted {
		gone[i] = err != nil || j >= len(found) || found[j] == 0
	}
	return gone
}

// others are the blocks that were moved although some were not.
func others(blocks []connector.Block, err error) (some []connector.Block) {
	failed, is := errors.AsType[*connector.BlockError](err)
	if !is {
		return nil
	}
	not := map[connector.BlockID]bool{}
	for _, id := range failed.Blocks {
		not[id] = true
	}
	for _, b := range blocks {
		if !not[b.ID] {
			some = append(some, b)
		}
	}
	return some
}

// unnamed are blocks whose slots the host has not heard: an error has no room for slots, so the next answer has them (rule
// PLACE-26). Its zero value has none.
type unnamed struct {
	mu   sync.Mutex
	keys []connector.StoreKey
}

func (u *unnamed) add(keys []connector.StoreKey) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.keys = append(u.keys, keys...)
	u.keys = u.keys[max(0, len(u.keys)-wire.MaxUnnamed):] // the oldest are forgotten
}

func (u *unnamed) take() (keys []connector.StoreKey) {
	u.mu.Lock()
	defer u.mu.Unlock()
	keys, u.keys = u.keys, nil
	return keys
}

// keys are those of the full blocks.
func (w *storeWorker) keys(blocks []connector.Block) []connector.StoreKey {
	shard := connector.Shard{Rank: w.env.Rank, World: max(1, w.env.World)}
	keys := make([]connector.StoreKey, 0, len(blocks))
	for _, b := range blocks {
		if b.Key != (connector.BlockKey{}) {
			keys = append(keys, connector.NewStoreKey(b.Key, w.env.Shape, b.Group, shard))
		}
	}
	return keys
}

// Capabilities implements connector.Partial.
func (s *storeScheduler) Capabilities() connector.Capability { return s.powers }

// Reset implements connector.Resetter.
func (s *storeScheduler) Reset(ctx context.Context) (emptied bool, err error) {
	store, err := power[connector.Resetter](s.store, connector.CanReset)
	if err != nil {
		return false, err
	}
	err = wire.Guard(s.log, "reset", func() (err error) {
		emptied, err = store.Reset(ctx)
		return err
	})
	if emptied && err == nil && s.watch != nil {
		s.watch.cleared()
	}
	return emptied, err
}

// Stats implements connector.StatsSource.
func (s *storeScheduler) Stats(ctx context.Context) (stats []connector.Stat, err error) {
	store, err := power[connector.StatsSource](s.store, connector.CanStat)
	if err != nil {
		return nil, err
	}
	err = wire.Guard(s.log, "stats", func() (err error) {
		stats, err = store.Stats(ctx)
		return err
	})
	return stats, err
}

// Events implements connector.EventSource.
func (s *storeScheduler) Events(ctx context.Context) ([]connector.BlockEvent, error) {
	if s.watch == nil {
		return nil, fmt.Errorf("the connector cannot %v: %w", connector.CanEvents, connector.ErrIncompatible)
	}
	return s.watch.log.Next(ctx)
}

// put stores items. It tells a watch about them before and after.
func (w *storeWorker) put(ctx context.Context, items []connector.Item, t *connector.Transfer) error {
	call := func() error { return wire.Guard(w.log, "put", func() error { return w.store.Put(ctx, items) }) }
	if w.watch == nil {
		return call()
	}
	watched, keys, index := w.watched(items, t)
	w.watch.saving(watched, keys)
	err := call()
	var some *connector.ItemError
	switch {
	case err == nil:
		w.watch.saved(watched, nil)
	case errors.As(err, &some) && len(some.Items) > 0:
		named := map[int]bool{}
		for _, i := range some.Items {
			named[i] = true
		}
		failed := map[int]bool{}
		for at, i := range index {
			failed[at] = named[i]
		}
		w.watch.saved(watched, failed)
	}
	return err
}

// watched returns the items of groups that keep all blocks, with their blocks' keys and their indexes.
func (w *storeWorker) watched(items []connector.Item, t *connector.Transfer) (out []connector.Item, keys []connector.BlockKey, index []int) {
	groups, n := w.env.Layout.Groups, 0
	for _, b := range t.Blocks {
		if b.Key == (connector.BlockKey{}) {
			continue
		}
		if len(groups) == 1 || groups[b.Group].Policy == connector.PolicyAll {
			out, keys, index = append(out, items[n]), append(keys, b.Key), append(index, n)
		}
		n++
	}
	return out, keys, index
}
