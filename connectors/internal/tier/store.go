// Package tier is the library of the connectors that keep blocks in memory and below: a memory tier
// that survives the plugin process, a disk tier, eviction policies and an index.
//
// A [Store] is a connector.Store: blocks are kept in fixed slots of an arena (Options.Memory) and, if
// there is a lower tier (Options.Lower, a [Disk] or any other Store), written behind to it. A connector
// is a config that becomes Options:
//
//	disk, err := tier.OpenDisk(tier.DiskOptions{Path: path, Bytes: 1 << 40, SlotBytes: n})
//	store, err := tier.Open(tier.Options{SlotBytes: n, Memory: arena, Lower: disk})
//
// [Index] can be used alone by stores that keep their bytes elsewhere.
package tier

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

// Store keeps blocks in memory and in the tier below.
type Store struct {
	o         Options
	memory    *memory
	below     *below  // nil without a lower tier
	threshold *sketch // nil without a store threshold
	mem       counters

	gate   sync.RWMutex // held for reading by every call, so that Reset meets none
	closed bool
}

// Open makes a Store. Blocks that an earlier one left in Options.Memory are there at once, in the order
// in which they were written; half written ones are not. Errors wrap connector.ErrIncompatible.
func Open(o Options) (*Store, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	s := &Store{o: o.withDefaults()}
	var err error
	if s.memory, err = newMemory(&s.o, &s.mem); err != nil {
		return nil, err
	}
	if s.o.StoreThreshold > 1 {
		s.threshold = newSketch(s.o.Tracked)
	}
	if s.o.Lower != nil {
		s.below = newBelow(&s.o, s.memory, &s.gate)
	}
	return s, nil
}

// Has reports whether a block is in memory. It may be called from DiskOptions.Changed.
func (s *Store) Has(k connector.StoreKey) bool { return s.memory.has(k) }

// Slots is the number of blocks that fit into memory.
func (s *Store) Slots() int { return s.memory.slots }

// Stats gives the counts of the memory tier and of the way to the lower one. What a Disk itself counts
// is in Disk.Stats.
func (s *Store) Stats() (memory, lower Stats) {
	memory = s.mem.stats()
	memory.Blocks, memory.Slots = uint64(s.memory.index.Len()), uint64(s.memory.slots)
	if s.below != nil {
		lower = s.below.c.stats()
	}
	return memory, lower
}

// Lookup implements connector.Store.
func (s *Store) Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
	s.gate.RLock()
	defer s.gate.RUnlock()
	found := make([]int, len(runs))
	for i, keys := range runs {
		found[i] = s.inMemory(keys, 0)
		if i%64 == 63 && ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
	if s.below != nil {
		s.lookupBelow(ctx, runs, found)
	}
	return found, ctx.Err()
}

// inMemory is how many keys from the n-th on are in memory, and those before.
func (s *Store) inMemory(keys []connector.StoreKey, n int) int {
	for n < len(keys) && s.memory.has(keys[n]) {
		n++
	}
	return n
}

// lookupBelow continues runs that ended in memory, by turns below and in memory, with one Lookup for all
// runs in a round. A lower tier that fails has nothing.
func (s *Store) lookupBelow(ctx context.Context, runs [][]connector.StoreKey, found []int) {
	open := make([]int, 0, len(runs))
	for i := range runs {
		if found[i] < len(runs[i]) {
			open = append(open, i)
		}
	}
	for len(open) > 0 {
		rest := make([][]connector.StoreKey, len(open))
		for j, i := range open {
			rest[j] = runs[i][found[i]:]
		}
		counts, err := s.o.Lower.Lookup(ctx, rest)
		if err != nil || len(counts) != len(rest) {
			s.below.c.errors.Add(1)
			return
		}
		next := open[:0]
		for j, i := range open {
			n := min(max(0, counts[j]), len(rest[j]))
			s.below.prefetch(rest[j][:n])
			if found[i] += n; n > 0 && found[i] < len(runs[i]) {
				was := found[i]
				if found[i] = s.inMemory(runs[i], was); found[i] > was && found[i] < len(runs[i]) {
					next = append(next, i)
				}
			}
		}
		open = next
	}
}

// Get implements connector.Store.
func (s *Store) Get(ctx context.Context, items []connector.Item) error {
	s.gate.RLock()
	defer s.gate.RUnlock()
	errs := make([]error, len(items))
	absent := s.fromMemory(ctx, items, errs)
	if len(absent) > 0 && s.below != nil {
		s.below.get(ctx, items, absent, errs)
		s.promote(ctx, items, absent, errs)
	}
	for i, err := range errs {
		if errors.Is(err, errAbsent) {
			errs[i] = fmt.Errorf("%v: %w: %w", items[i].Key, err, connector.ErrGone)
		}
	}
	return itemError(errs)
}

// batch is how many blocks are pinned and copied in one go.
const batch = 64

// fromMemory serves what is in memory and gives the items that are not.
func (s *Store) fromMemory(ctx context.Context, items []connector.Item, errs []error) (absent []int) {
	ids := make([]uint32, 0, min(batch, len(items)))
	var pieces []piece
	for first := 0; first < len(items); first += batch {
		ids, pieces = ids[:0], pieces[:0]
		last := min(first+batch, len(items))
		for i := first; i < last; i++ {
			if errs[i] = ctx.Err(); errs[i] != nil {
				continue
			}
			size := items[i].Size()
			id, err := s.memory.acquire(items[i].Key, size, true)
			if err != nil {
				errs[i] = err
				s.mem.misses.Add(1)
				if errors.Is(err, errAbsent) {
					absent = append(absent, i)
				}
				continue
			}
			ids = append(ids, id)
			pieces = scatter(pieces, items[i].Spans, s.memory.block(id, size))
			s.mem.hits.Add(1)
			s.mem.bytesOut.Add(uint64(size))
			s.memory.pins.loaded(s.memory.index, id, items[i].Key)
			s.writeBehind(items[i].Key, id)
		}
		copyAll(pieces, s.o.Workers)
		for _, id := range ids {
			s.memory.index.Release(id)
		}
	}
	return absent
}

func (s *Store) writeBehind(k connector.StoreKey, id uint32) {
	if s.below != nil {
		s.below.used(k, id)
	}
}

// promote puts what came from below into memory. What does not fit stays below.
func (s *Store) promote(ctx context.Context, items []connector.Item, from []int, errs []error) {
	var good []connector.Item
	var expires []int64
	for _, i := range from {
		if errs[i] == nil {
			it := items[i]
			it.Replace = false
			good = append(good, it)
			expires = append(expires, s.below.expiry(it.Key))
		}
	}
	if len(good) > 0 {
		p := &put{store: s, ctx: ctx, items: good, expires: expires, errs: make([]error, len(good)), lowered: isLowered}
		p.run()
	}
}

// Put implements connector.Store. The cause of an item that was not stored is ErrThreshold, a
// *QuotaError, ErrPinned, or what connector.Store says.
func (s *Store) Put(ctx context.Context, items []connector.Item) error {
	s.gate.RLock()
	defer s.gate.RUnlock()
	p := &put{store: s, ctx: ctx, items: items, errs: make([]error, len(items))}
	if s.o.TTL > 0 {
		until := time.Now().Add(s.o.TTL).UnixMilli()
		p.expires = make([]int64, len(items))
		for i := range items {
			p.expires[i] = until
		}
	}
	p.run()
	if s.below != nil {
		s.below.replace(ctx, items, p.expires, p.errs)
	}
	return itemError(p.errs)
}

// Reset implements connector.Resetter: it waits for running calls and forgets every block, in memory
// and below. emptied is false if the lower tier cannot forget.
func (s *Store) Reset(ctx context.Context) (emptied bool, err error) {
	s.gate.Lock()
	defer s.gate.Unlock()
	if s.below != nil {
		s.below.forget()
	}
	s.memory.reset()
	if s.o.Lower == nil {
		return true, nil
	}
	if r, ok := connector.As[connector.Resetter](s.o.Lower); ok {
		return r.Reset(ctx)
	}
	return false, nil
}

// Flush waits until every block that waits for the lower tier has been written there, or ctx ends.
func (s *Store) Flush(ctx context.Context) error {
	if s.below == nil {
		return nil
	}
	return s.below.flush(ctx)
}

// closeWait is how long Close goes on writing to the lower tier.
const closeWait = 2 * time.Second

// Close implements connector.Store. What waits to be written to the lower tier is, for a short time.
// Blocks in Options.Memory stay there for the next Store.
func (s *Store) Close() error {
	s.gate.Lock()
	closed := s.closed
	s.closed = true
	s.gate.Unlock()
	if closed || s.below == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeWait)
	defer cancel()
	_ = s.below.flush(ctx) // what is not written is computed again
	s.below.close()
	return s.o.Lower.Close()
}

// itemError makes one error of those of the items, nil if there is none.
func itemError(errs []error) error {
	failed := &connector.ItemError{}
	for i, err := range errs {
		if err != nil {
			failed.Items = append(failed.Items, i)
			if failed.Err == nil || errors.Is(err, connector.ErrCorrupt) && !errors.Is(failed.Err, connector.ErrCorrupt) {
				failed.Err = err // corruption is what must not be overlooked
			}
		}
	}
	if len(failed.Items) == 0 {
		return nil
	}
	return failed
}
