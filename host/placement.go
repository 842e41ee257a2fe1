package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/place"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/wire"
)

// placement is the host's end of a connector that places its blocks: what is resident is matched and loaded without a call
// of the plugin, and while none is up. Whatever is in doubt goes by message, and so does what is not resident, unless it is known to be
// nowhere. A nil placement finds nothing.
type placement struct {
	layout *connector.Layout // of the cache
	shape  connector.Fingerprint
	world  int
	pools  []*pool                   // of the ranks
	failed func(blocks, damaged int) // is told about blocks that were found in slots and cannot be used, and how many of them are not what was saved; may be nil
	piece  int64                     // how many bytes come at least from one announcement to the next; 0: as pieces says

	mu      sync.RWMutex // held for reading by whoever reads the arena, for writing by whoever takes it away: nobody waits for it to read
	host    *place.Host  // nil: nothing is placed
	first   *byte        // of the arena
	kv      *connector.KV
	unnamed unnamed
	writers sync.RWMutex // held for reading by whoever writes lent slots, who does not wait for it, and for writing while the next life opens

	complete atomic.Bool // the plugin has nothing but what it has named

	resets atomic.Pointer[atomic.Int32] // that are on their way in this life
	loads  atomic.Bool                  // a load of this life has named slots, so the plugin knows what loads are told, too

	used uses // for the next save or load by message to tell
}

func newPlacement(layout *connector.Layout, shape connector.Fingerprint, world int, failed func(blocks, damaged int)) *placement {
	p := &placement{layout: layout, shape: shape, world: world, failed: failed}
	p.resets.Store(new(atomic.Int32))
	for range world {
		p.pools = append(p.pools, newPool())
	}
	return p
}

const lifeSerials = 1 << 40 // that a life of the plugin may draw

// reopen prepares the arena for the next life of the plugin, which has said whether what is placed is all that it has. nil: it is
// not placed. Lookups and loads of what the life before has placed go on meanwhile, and are not waited for (rule PLACE-28), but
// whoever writes slots is (rule PLACE-06). One goroutine calls reopen and close.
func (p *placement) reopen(arena []byte, complete bool) (*connector.Placement, error) {
	if p == nil || len(arena) == 0 {
		return nil, nil
	}
	p.writers.Lock()
	defer p.writers.Unlock()
	for _, pool := range p.pools {
		pool.open(0)
	}
	if p.host == nil || p.first != unsafe.SliceData(arena) {
		if err := p.layOut(arena); err != nil {
			p.close()
			return nil, err
		}
	}
	var opening place.Opening
	err := shm.Guard(func() (err error) {
		p.host.Died()
		opening, err = p.host.Reopen()
		return err
	})
	if err != nil {
		p.close()
		return nil, err
	}
	p.complete.Store(complete)
	p.resets.Store(new(atomic.Int32))
	p.loads.Store(false)
	slots, size := p.kv.Layout().Blocks, largestBlock(p.layout)
	return &connector.Placement{Slots: slots, SlotBytes: size, Epoch: opening.Epoch, Serial: p.host.Draw(lifeSerials)}, nil
}

// largestBlock is the size of the largest block of a layout.
func largestBlock(l *connector.Layout) (size int64) {
	for g := range l.Groups {
		size = max(size, l.BlockBytes(uint16(g)))
	}
	return size
}

// layOut takes an arena that nobody has used, once nobody reads the former one.
func (p *placement) layOut(arena []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.host = nil
	g := place.Fit(int64(len(arena)), largestBlock(p.layout), connector.MaxSlots)
	if err := g.Validate(); err != nil {
		return err
	}
	memory, err := place.Map(arena[:g.ArenaBytes()])
	if err != nil {
		return err
	}
	// To the copy and its digest a slot is a block of a cache: its segments one behind the other.
	layout := *p.layout
	layout.Blocks, layout.Segments = g.Slots, append([]connector.Segment(nil), layout.Segments...)
	at := make([]int64, len(layout.Groups))
	for i := range layout.Segments {
		s := &layout.Segments[i]
		s.Region, s.Offset, s.BlockStride = 0, g.SlotAt(0)+at[s.Group], g.Stride()
		at[s.Group] += s.Bytes
	}
	if p.kv, err = connector.NewKV(layout, [][]byte{arena}); err != nil {
		return err
	}
	p.host, err = place.NewReader(memory, g)
	p.first = unsafe.SliceData(arena)
	return err
}

// close ends the use of the arena, once nobody reads it.
func (p *placement) close() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.host, p.kv = nil, nil
}

// pause forgets everything until resume is called: what the plugin has is being reset (rule PLACE-24). It does not wait for loads. What was
// said meanwhile is not believed. Resets may overlap, and one of a former life ends none of this one.
func (p *placement) pause() (resume func()) {
	if p == nil {
		return func() {}
	}
	resets := p.resets.Load()
	resets.Add(1)
	p.forget()
	p.voidLoans()
	return func() {
		p.forget()
		p.voidLoans()
		resets.Add(-1)
		for _, pool := range p.pools {
			pool.wake()
		}
	}
}

func (p *placement) paused() bool { return p.resets.Load().Load() > 0 }

func (p *placement) forget() {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if p.host != nil {
		p.host.Forget()
	}
}

// enter lets a reader in; leave follows if it is true. While the arena is taken away it is false at once: whoever waited would wait for
// readers that are at work, and the host's own lock may be held.
func (p *placement) enter() bool {
	if p == nil || !p.mu.TryRLock() {
		return false
	}
	if p.host == nil || p.paused() {
		p.mu.RUnlock()
		return false
	}
	return true
}

// open says whether anything may be found.
func (p *placement) open() bool {
	in := p.enter()
	if in {
		p.leave()
	}
	return in
}

func (p *placement) leave() { p.mu.RUnlock() }

// match answers a query: if every full block of the prompt is resident that a request needs, on all ranks, and for a connector
// that has nothing else, from what is resident, which may be nothing.
func (p *placement) match(q *connector.Query) (m connector.Match, ok bool) {
	m, whole, sure := p.search(q, false)
	return m, whole || sure
}

// matchAlone answers a query that no plugin can answer: with what is resident of the prompt. whole says that this is all that a request
// needs, and sure that the connector has nothing else.
func (p *placement) matchAlone(q *connector.Query) (m connector.Match, whole, sure bool) {
	return p.search(q, true)
}

// search looks for the full blocks of a prompt. whole says that all that a request needs are resident, and sure that what is not is
// nowhere. If neither is true, the match counts only where a part was asked for.
func (p *placement) search(q *connector.Query, part bool) (m connector.Match, whole, sure bool) {
	if len(q.Ticket) > 0 || q.Computed < 0 || !p.enter() {
		return m, false, false
	}
	defer p.leave()
	tokens := p.layout.Groups[0].BlockTokens
	if len(q.Keys)*tokens > q.Tokens || slices.ContainsFunc(p.layout.Groups, func(g connector.Group) bool { return g.BlockTokens != tokens }) {
		return m, false, false
	}
	err := shm.Guard(func() error {
		// While some block is known to be wrong, whoever misses one asks the plugin: its load heals it.
		sure = p.complete.Load() && !p.host.Wrong() && !p.unnamed.any()
		end := p.prefix(q.Keys, min(q.Computed/tokens, len(q.Keys)), !sure && !part)
		if n := end*tokens - q.Computed; n > 0 {
			m = connector.Match{Tokens: n, Async: true}
		}
		whole = end == len(q.Keys) && m.Tokens > 0
		return nil
	})
	if err != nil {
		return connector.Match{}, false, false
	}
	return m, whole, sure
}

// prefix is how many blocks of a prompt a request can have that has the first ones: all ranks have every block before there
// of the groups of full attention, and of other groups the last ones. whole: anything but all of them is of no use.
func (p *placement) prefix(keys []connector.BlockKey, first int, whole bool) (end int) {
	now := time.Now().UnixMilli()
	end = len(keys)
	for was := -1; was != end && end > first; {
		was = end
		for g, group := range p.layout.Groups {
			from := first
			switch {
			case group.Policy == connector.PolicyTrailing:
				from = max(first, end-group.Trailing)
			case was < len(keys):
				continue // known from the first round
			}
			if end = p.run(keys, from, end, uint16(g), now); whole && end < len(keys) {
				return end
			}
		}
	}
	return end
}

// run is where the blocks from one on, and before end, end that all ranks have.
func (p *placement) run(keys []connector.BlockKey, from, end int, group uint16, now int64) int {
	for rank := range p.world {
		shards := make([]connector.StoreKey, end-from)
		for i, k := range keys[from:end] {
			shards[i] = p.key(k, group, rank)
		}
		end = from + p.host.Run(shards, now)
	}
	return end
}

func (p *placement) key(k connector.BlockKey, group uint16, rank int) connector.StoreKey {
	return connector.NewStoreKey(k, p.shape, group, connector.Shard{Rank: rank, World: p.world})
}

// load copies blocks of one rank to the cache and verifies them there. false: not all of them came whole, and the plugin
// has to be asked for all; or ctx has ended.
func (p *placement) load(ctx context.Context, r *rank, number int, blocks []connector.Block) bool {
	did := p.loadLayers(ctx, r, number, blocks, nil)
	p.tally(&did)
	return did.whole
}

// where says in which slots all blocks of one rank lie; false: not all of them do.
func (p *placement) where(number int, blocks []connector.Block) ([]place.Ref, bool) {
	keys := make([]connector.StoreKey, len(blocks))
	for i, b := range blocks {
		if b.Key == (connector.BlockKey{}) {
			return nil, false
		}
		keys[i] = p.key(b.Key, b.Group, number)
	}
	refs, err := p.find(keys, time.Now().UnixMilli())
	if err != nil {
		return nil, false
	}
	for i, b := range blocks {
		if int64(refs[i].Part.Length) != p.layout.BlockBytes(b.Group) {
			p.host.Drop(refs[i]) // else it would be found again and again
			p.fail(1, 0)
			return nil, false
		}
	}
	return refs, true
}

// tally counts the blocks of a load that were copied and cannot be used, and that the plugin is asked for.
func (p *placement) tally(did *placedLoad) {
	if n := did.failed(); n > 0 {
		p.fail(n, len(did.found.corrupt))
	}
}

func (p *placement) fail(blocks, damaged int) {
	if p.failed != nil {
		p.failed(blocks, damaged)
	}
}

// find says where blocks are, all of them or none.
func (p *placement) find(keys []connector.StoreKey, now int64) (refs []place.Ref, err error) {
	err = shm.Guard(func() (err error) {
		refs, err = p.host.Find(keys, now)
		return err
	})
	return refs, err
}

// saveBy has a worker read blocks. One that places is told which slots were read, and says in which the blocks lie. A nil placement tells and
// learns nothing.
func (p *placement) saveBy(ctx context.Context, w connector.Worker, t *connector.Transfer, kv *connector.KV) (slots []uint32, err error) {
	placer, places := connector.As[connector.Placer](w)
	if !places || p == nil {
		return nil, w.Save(ctx, t, kv)
	}
	return placer.SavePlaced(ctx, t, kv, p.takeUsed())
}

// loadBy is saveBy for a worker that fills blocks.
func (p *placement) loadBy(ctx context.Context, w connector.Worker, t *connector.Transfer, kv *connector.KV) (slots []uint32, err error) {
	placer, places := connector.As[connector.Placer](w)
	if !places || p == nil {
		return nil, w.Load(ctx, t, kv)
	}
	slots, err = placer.LoadPlaced(ctx, t, kv, p.usedForLoad())
	if len(slots) > 0 {
		p.loads.Store(true)
	}
	return slots, err
}

// takeUsed gives what the next save or load tells the plugin.
func (p *placement) takeUsed() []uint32 { return p.used.take() }

// usedForLoad is takeUsed for a load. A plugin that knows of saves alone would drop what a load tells, so it is kept for a save until
// the plugin has shown otherwise.
func (p *placement) usedForLoad() []uint32 {
	if !p.loads.Load() {
		return nil
	}
	return p.takeUsed()
}

// looks is how often a slot is looked at that was named: while the host looks, another answer may tell it of a block that has left the slot
// since, and nobody would name again what is there now.
const looks = 3

// learn takes note of slots that a save or load of that many blocks has named. The error says that no honest plugin names them.
func (p *placement) learn(slots []uint32, moved int) error {
	if len(slots) > moved+wire.MaxUnnamed {
		return fmt.Errorf("%d slots are named for %d blocks", len(slots), moved)
	}
	if !p.enter() {
		return nil
	}
	defer p.leave()
	now := time.Now().UnixMilli()
	for _, s := range slots {
		err := shm.Guard(func() (err error) {
			for range looks {
				if p.host.Knows(place.Slot(s)) {
					return nil
				}
				if err = p.host.Notice(&place.Notice{Slots: []place.Slot{place.Slot(s)}}, now); !errors.Is(err, place.ErrGone) {
					return err
				}
			}
			return err
		})
		if refused, is := errors.AsType[*place.RefusalError](err); is && refused.Fault() {
			return err
		}
	}
	return nil
}
