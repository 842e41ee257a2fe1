// Package tier puts memory before a Store: what was stored last, or is wanted most, comes from memory, and everything
// else from below.
//
// A [Store] keeps blocks in fixed slots of the arena that the host lends (Env.Arena). They outlive the plugin, and the host
// reads them there itself, without a call. Some slots it lends the host, empty, which writes there what it saves (Store.Lend). What lies below ([Options].Lower) is any connector.Store, such as an author's own or
// a [Disk], and is written behind; nil is memory alone. A connector is a config that becomes Options:
//
//	o := tier.OptionsFor(&env)
//	o.Lower = mine
//	return tier.Open(o)
//
// Its sdk.Definition has [Capabilities] and [Infos], and its config a method ArenaBytes.
package tier

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/storekit"
)

// Capabilities are the optional powers of a Store.
const Capabilities = connector.CanReset | connector.CanStat | connector.CanPlace

// Store keeps blocks in memory and in the tier below. It is a connector.Store, connector.Resetter, connector.StatsSource and
// sdk.Placing, and safe for concurrent use.
type Store struct {
	o         Options
	memory    *memory
	below     *below  // nil without a lower tier
	threshold *sketch // nil without a store threshold
	mem       counts

	gate   sync.RWMutex // held for reading by every call, so that Reset meets none
	closed atomic.Bool
	left   bool // the memory is not the Store's any more
}

// Open makes a Store. Blocks that an earlier one left in Options.Memory are there at once, in the order
// in which they were written; half written ones are not. Errors wrap connector.ErrIncompatible; Options.Lower is closed then.
func Open(o Options) (*Store, error) {
	s, err := openStore(o)
	if err != nil && o.Lower != nil {
		err = errors.Join(err, o.Lower.Close())
	}
	return s, err
}

func openStore(o Options) (*Store, error) {
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

// Counts are the numbers of the memory tier and of the way to the lower one so far. What a Disk itself counts
// is in Disk.Counts.
func (s *Store) Counts() (memory, lower Stats) {
	if s.gate.TryRLock() { // numbers do not wait for a Reset
		if !s.left {
			s.memory.settle()
		}
		s.gate.RUnlock()
	}
	memory = s.mem.Now()
	memory.Blocks, memory.Slots = uint64(s.memory.index.Len()), uint64(s.memory.slots)
	if s.below != nil {
		lower = s.below.c.Now()
	}
	return memory, lower
}

// Lookup implements connector.Store.
func (s *Store) Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
	s.gate.RLock()
	defer s.gate.RUnlock()
	s.memory.settle()
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
			s.below.c.Count(func(n *Stats) { n.Errors++ })
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
	s.memory.settle()
	errs := make([]error, len(items))
	absent := s.fromMemory(ctx, items, errs)
	if len(absent) > 0 && s.below != nil {
		lowered := s.below.lowered() // before what it had may be lost
		s.below.get(ctx, items, absent, errs)
		s.promote(ctx, items, absent, errs, lowered)
	}
	for i, err := range errs {
		if errors.Is(err, errAbsent) {
			errs[i] = fmt.Errorf("%v: %w: %w", items[i].Key, err, connector.ErrGone)
		}
	}
	return storekit.ItemError(errs)
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
			id, _, err := s.memory.acquire(items[i].Key, size, true)
			if err != nil {
				errs[i] = err
				s.mem.Count(func(n *Stats) { n.Misses++ })
				if errors.Is(err, errAbsent) {
					absent = append(absent, i)
				}
				continue
			}
			ids = append(ids, id)
			pieces = scatter(pieces, items[i].Spans, s.memory.block(id, size))
			s.mem.Count(func(n *Stats) { n.read(size) })
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

// promote puts what came from below into memory, in the state lowered. What does not fit stays below.
func (s *Store) promote(ctx context.Context, items []connector.Item, from []int, errs []error, lowered uint32) {
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
		p := &put{store: s, ctx: ctx, items: good, expires: expires, errs: make([]error, len(good)), lowered: lowered}
		p.run()
	}
}

// Placed implements sdk.Placing.
func (s *Store) Placed(keys []connector.StoreKey) []uint32 {
	s.gate.RLock()
	defer s.gate.RUnlock()
	s.memory.settle()
	slots := make([]uint32, 0, len(keys))
	for _, k := range keys {
		if id := s.memory.index.entry(k); id != none && !s.memory.expired(id) {
			slots = append(slots, id)
		}
	}
	return slots
}

// Used implements sdk.Placing: the host has read what lies in the slots, or lay there.
func (s *Store) Used(slots []uint32) {
	s.gate.RLock()
	defer s.gate.RUnlock()
	s.memory.settle()
	for _, id := range slots {
		k, ok := s.memory.index.use(id)
		if !ok {
			continue
		}
		if h, ok := s.memory.header(id); ok {
			s.mem.Count(func(n *Stats) { n.read(int(h.Length)) })
		}
		s.memory.pins.loaded(s.memory.index, id, k)
		s.writeBehind(k, id)
		s.memory.index.Release(id)
	}
}

// Put implements connector.Store. The cause of an item that was not stored is ErrThreshold, a
// *QuotaError, ErrPinned, or what connector.Store says.
func (s *Store) Put(ctx context.Context, items []connector.Item) error {
	s.gate.RLock()
	defer s.gate.RUnlock()
	if s.below != nil {
		s.below.look()
	}
	s.memory.settle()
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
	return storekit.ItemError(p.errs)
}

// Reset implements connector.Resetter: it waits for running calls and forgets every block, in memory
// and below. emptied is false if the lower tier cannot forget.
func (s *Store) Reset(ctx context.Context) (emptied bool, err error) {
	if s.below != nil { // what is written behind has no caller whose patience ends
		s.below.writes.wait(closeWait)
	}
	s.gate.Lock()
	defer s.gate.Unlock()
	s.memory.settle()
	s.memory.void()
	if s.below != nil {
		s.below.writes.resume()
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

// Flush waits until every block that waits for the lower tier has been written there, or ctx ends. After Close it is an error.
func (s *Store) Flush(ctx context.Context) error {
	if s.below == nil {
		return nil
	}
	return s.below.flush(ctx)
}

// closeWait is how long Close goes on writing to the lower tier, and how long Reset waits for what is being written there.
const closeWait = 2 * time.Second

// Close implements connector.Store. What waits to be written to the lower tier is, for a short time.
// Blocks in Options.Memory stay there for the next Store.
func (s *Store) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	if s.below != nil { // before the gate, which a write holds as long as it likes
		ctx, cancel := context.WithTimeout(context.Background(), closeWait)
		defer cancel()
		_ = s.below.flush(ctx) // what is not written is computed again
		s.below.close()
	}
	s.gate.Lock() // until running calls are over
	defer s.gate.Unlock()
	s.left = true
	s.memory.leave()
	if s.below == nil {
		return nil
	}
	return s.o.Lower.Close()
}

// put is one call that writes blocks into memory. What it has written, and what was there already, stays pinned until the call is
// over, so that it does not evict its own blocks: when it returns all are visible.
type put struct {
	store   *Store
	ctx     context.Context //nolint:containedctx // the arguments of a call, for the time of the call
	items   []connector.Item
	expires []int64 // nil: never
	errs    []error
	lowered uint32 // what is known of the blocks and the lower tier; not notLowered: they come from there

	pinned []uint32
	pieces []piece
	fills  []*fill
	index  []int // items of fills
}

// run writes the items. An item that somebody else is writing is looked at again afterwards: nobody
// waits while others may wait for them.
func (p *put) run() {
	todo := make([]int, len(p.items))
	for i := range todo {
		todo[i] = i
	}
	for len(todo) > 0 {
		var later []int
		var wait <-chan struct{}
		for len(todo) > 0 {
			n := min(batch, len(todo))
			busy, first := p.write(todo[:n])
			todo = todo[n:]
			if len(busy) > 0 && wait == nil {
				wait = first
			}
			later = append(later, busy...)
		}
		if wait != nil {
			select {
			case <-wait:
			case <-p.ctx.Done():
			}
		}
		todo = later
	}
	for _, id := range p.pinned {
		p.store.memory.index.Release(id)
	}
}

// write writes one batch. busy are the items that others are writing, the first of them until wait ends.
func (p *put) write(batch []int) (busy []int, wait <-chan struct{}) {
	p.pieces, p.fills, p.index = p.pieces[:0], p.fills[:0], p.index[:0]
	for _, i := range batch {
		other := p.begin(i)
		if other == nil {
			continue
		}
		if wait == nil {
			wait = other
		}
		busy = append(busy, i)
	}
	copyAll(p.pieces, p.store.o.Workers)
	for j, f := range p.fills {
		if err := p.ctx.Err(); err != nil {
			p.store.memory.abandon(f)
			p.errs[p.index[j]] = err
			continue
		}
		p.store.memory.commit(f, p.lowered)
		p.pinned = append(p.pinned, f.id)
		if p.lowered == notLowered {
			p.store.writeBehind(f.key, f.id)
		}
	}
	return busy, wait
}

// begin starts to write one item. The result is not nil if somebody else is writing it.
func (p *put) begin(i int) (wait <-chan struct{}) {
	s, it := p.store, p.items[i]
	if p.errs[i] = p.ctx.Err(); p.errs[i] != nil {
		return nil
	}
	if p.lowered == notLowered && s.threshold != nil && !s.memory.has(it.Key) && s.threshold.add(it.Key) < s.o.StoreThreshold {
		s.mem.Count(func(n *Stats) { n.BelowThreshold++ })
		p.errs[i] = ErrThreshold
		return nil
	}
	var expires int64
	if p.expires != nil {
		expires = p.expires[i]
	}
	size := it.Size()
	f, known, wait, err := s.memory.begin(it, size, expires)
	switch {
	case err != nil:
		p.errs[i] = err
	case known:
		s.mem.Count(func(n *Stats) { n.Known++ })
		if p.lowered == notLowered {
			s.memory.index.Touch(it.Key)
			s.writeBehind(it.Key, f.id) // the lower tier may not have it, or not any more
		}
		p.pinned = append(p.pinned, f.id)
	case wait == nil:
		p.pieces = gather(p.pieces, f.slot, it.Spans)
		p.fills, p.index = append(p.fills, f), append(p.index, i)
	}
	return wait
}

// Why a block was not stored. Put gives them inside a *connector.ItemError.
var (
	// ErrPinned says that every slot is in use at this moment.
	ErrPinned = fmt.Errorf("all slots are pinned: %w", connector.ErrDeclined)
	// ErrThreshold says that the block was not offered often enough yet (Options.StoreThreshold).
	ErrThreshold = fmt.Errorf("below the store threshold: %w", connector.ErrDeclined)
	errFull      = errors.New("the disk is full")
	errLost      = errors.New("the tier's file was removed, and no other can be opened")
	errAbsent    = errors.New("not stored")
	errClosed    = errors.New("the store is closed")
	// ErrQuota is what every *QuotaError is.
	ErrQuota = fmt.Errorf("over quota: %w", connector.ErrDeclined)
)

// QuotaError says that a tenant may not store a block.
type QuotaError struct {
	Tenant      uint64
	Used, Limit int64 // bytes
}

// Error implements error.
func (e *QuotaError) Error() string {
	return fmt.Sprintf("tenant %016x has %d of %d bytes: %v", e.Tenant, e.Used, e.Limit, ErrQuota)
}

// Unwrap makes it ErrQuota.
func (e *QuotaError) Unwrap() error { return ErrQuota }

// Options say how a Store works. Zero values are the defaults.
type Options struct {
	// SlotBytes is the size of the largest block in bytes, all spans of an Item together.
	SlotBytes int64
	// SameSize says that every block has SlotBytes, so that blocks can be fetched from Lower before
	// anybody has said how large they are.
	SameSize bool
	// Memory is what the memory tier lives in. Blocks that an earlier Store left in it are taken over.
	// The caller owns it and keeps it until Close has returned. nil: MemoryBytes of this process.
	Memory      []byte
	MemoryBytes int64
	// Placement is Env.Placement, which OptionsFor sets with Memory, Env.Arena as a whole: the host reads the slots, and the Store keeps
	// it to their number and size. With other memory, or a second Store for the same arena, Open fails: all sides and ranks share
	// one, as sdk.FromStore has them do. nil, as below a MultiConnector: nobody but the Store reads Memory, and nobody notices a second
	// Store for it, with which it would overwrite blocks.
	Placement *connector.Placement
	arena     []byte // of which Placement is
	// Lend has the Store lend the host slots, which writes there what it saves and tells the Store later (sdk.Lending). Put is not called for that, so
	// a Store around this one whose Put does more leaves it out. Nothing is lent where not every block is kept: with a StoreThreshold, TTL or
	// TenantBytes; nor with the policy ARC, which has to know the key for which it evicts; nor with a Lower, which would get blocks later than by Put.
	Lend bool
	// Slots limits how many blocks are kept in memory; 0: as many as fit.
	Slots int
	// Policy is the memory tier's eviction policy: LRU, ARC, S3FIFO or FIFO; "": LRU.
	Policy string
	// StoreThreshold is how often a block is offered before it is stored; 0 and 1: at once.
	StoreThreshold int
	// Tracked is how many keys StoreThreshold tells apart; 0: 64000, vLLM's max_tracker_size.
	Tracked int
	// TTL is how long a block may be served after it was stored; 0: for ever.
	TTL time.Duration
	// TenantBytes limits what one tenant has in memory, in bytes; 0: no limit. What lies below counts for nobody.
	TenantBytes int64
	// PinAfter keeps a block from eviction once it was loaded that often; 0: never. At most PinShare
	// of all slots are kept, the earliest is let go for the next; 0: a tenth.
	PinAfter int
	PinShare float64
	// Digests are the bytes that the digests at the end of a block take, by the size of the block. They are a span of their
	// own in what is written to Lower, which can so tell with which key they were made. What is not in it counts as having none.
	Digests map[int]int
	// Lower is the tier below memory: a Disk, or a store elsewhere. Its Items begin with a span more, of LowerHeader bytes, and
	// end with the digests as all do. The Store owns it: it closes it, and resets it if it is a connector.Resetter. It is called
	// from several goroutines. Each call must end with its context, that of a write behind, too: Reset and Close end it if it takes
	// long. A Put that was ended must not take effect after a Reset. nil: none.
	Lower connector.Store
	// AdmitAfter is how often a block is stored or loaded before it is written to Lower; 0: twice, 1:
	// every block.
	AdmitAfter int
	// WriteBehind is how many blocks may wait to be written to Lower; 0: 1024. More are dropped.
	WriteBehind int
	// Prefetch is how many blocks of a run are fetched from Lower when Lookup has found them there; 0:
	// none.
	Prefetch int
	// Workers is how many goroutines copy the blocks of one call at most; 0: two.
	Workers int
	// Changed is told when a block appears in or leaves the memory tier. It must be quick and must not
	// call the Store; nil: nobody is.
	Changed func(k connector.StoreKey, stored bool)
	// Log is for what an operator should know; nil: nothing.
	Log *slog.Logger
}

// OptionsFor are those for the engine of env: its arena, as its host has placed it, and the sizes of its blocks. All
// others have their defaults, and nothing lies below. If env has no arena, set MemoryBytes.
func OptionsFor(env *connector.Env) Options {
	o := Options{Memory: env.Arena, Placement: env.Placement, arena: env.Arena, Log: env.Log}
	o.Fit(&env.Layout)
	return o
}

// Fit sets SlotBytes, SameSize and Digests for the blocks of a layout. It copies what it needs of it.
func (o *Options) Fit(l *connector.Layout) {
	if len(l.Groups) == 0 {
		return // Validate misses the size
	}
	sizes := make([]int64, len(l.Groups))
	for g := range sizes {
		sizes[g] = l.BlockBytes(uint16(g))
	}
	o.Digests = map[int]int{}
	for _, s := range l.Segments {
		if s.Layer == connector.DigestLayer && int(s.Group) < len(sizes) {
			o.Digests[int(sizes[s.Group])] = int(s.Bytes)
		}
	}
	o.SlotBytes = slices.Max(sizes)
	o.SameSize = slices.Min(sizes) == o.SlotBytes
}

// Validate reports the first option that cannot work. Errors wrap connector.ErrIncompatible.
func (o *Options) Validate() error {
	bad := func(what string, value any) error {
		return fmt.Errorf("tier: %s is %v: %w", what, value, connector.ErrIncompatible)
	}
	for _, n := range []int{o.Slots, o.PinAfter, o.Prefetch, o.WriteBehind, o.Workers, o.Tracked, int(min(o.TTL, 0)), int(min(o.TenantBytes, 0))} {
		if n < 0 {
			return bad("a limit", "negative")
		}
	}
	switch {
	case o.SlotBytes < 1:
		return bad("the largest block", o.SlotBytes)
	case o.misplaced():
		return bad("the memory", "not the arena that the host has placed")
	case o.Memory == nil && o.MemoryBytes < 1:
		return bad("the memory's size", o.MemoryBytes)
	case o.StoreThreshold < 0 || o.StoreThreshold > maxCount:
		return bad("the store threshold", o.StoreThreshold)
	case o.AdmitAfter < 0 || o.AdmitAfter > maxCount:
		return bad("the admission threshold", o.AdmitAfter)
	case o.PinShare < 0 || o.PinShare > 0.5:
		return bad("the share of pinned slots", o.PinShare)
	}
	return nil
}

// misplaced says whether Placement is of other memory.
func (o *Options) misplaced() bool {
	return o.Placement != nil && (len(o.Memory) == 0 || len(o.Memory) != len(o.arena) || &o.Memory[0] != &o.arena[0])
}

// defaults of Options.
const (
	defaultTracked     = 64000
	defaultAdmitAfter  = 2
	defaultWriteBehind = 1024
	defaultWorkers     = 2
	defaultPinShare    = 0.1
)

func (o Options) withDefaults() Options {
	o.Tracked = cmp.Or(o.Tracked, defaultTracked)
	o.AdmitAfter = cmp.Or(o.AdmitAfter, defaultAdmitAfter)
	o.WriteBehind = cmp.Or(o.WriteBehind, defaultWriteBehind)
	o.Workers = cmp.Or(o.Workers, defaultWorkers)
	o.PinShare = cmp.Or(o.PinShare, defaultPinShare)
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	return o
}
