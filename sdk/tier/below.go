package tier

import (
	"context"
	"encoding/binary"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/storekit"
)

// LowerHeader is how many bytes a block has more in the lower tier: before it comes the time until which it may be served, in
// Unix ms, little-endian; 0: for ever.
const LowerHeader = 8

// below is the way to and from the lower tier. One goroutine writes behind, one fetches ahead.
type below struct {
	o      *Options
	memory *memory
	lower  connector.Store
	gate   *sync.RWMutex // the Store's
	c      counts
	admit  *sketch // nil: every block
	staged staging

	queue   chan job
	ahead   chan []*stage
	stop    context.CancelFunc
	stopped <-chan struct{} // closed by stop
	writes  interruptible
	done    sync.WaitGroup
	ends    sync.Map // of blocks on their way up: key -> expiry

	renewer  Renewer       // the lower tier; nil: it keeps what it has
	renewals atomic.Uint32 // of it, at the last look
}

// Renewer is a lower tier that may lose all its blocks at once and then begins with none.
type Renewer interface {
	// Renewals looks whether the blocks are lost, and gives how often they were.
	Renewals() uint32
}

// look finds out whether the lower tier has lost what it had: then no block is there, whatever is known of those in memory.
func (b *below) look() {
	if b.renewer == nil {
		return
	}
	if n := b.renewer.Renewals(); n != b.renewals.Load() {
		b.renewals.Store(n)
		b.staged.clear()
	}
}

// lowered is the state of a block in memory that is in the lower tier, until that has lost it.
func (b *below) lowered() uint32 { return isLowered + b.renewals.Load() }

// job is a block to be written, or a sign that all before it are.
type job struct {
	key  connector.StoreKey
	mark chan struct{}
}

const writeBatch = 16

// fetchWait is how long one block may take that is fetched ahead. Then the blocks behind it are not fetched, and a load asks for them itself.
const fetchWait = 2 * time.Second

func newBelow(o *Options, m *memory, gate *sync.RWMutex) *below {
	b := &below{
		o: o, memory: m, lower: o.Lower, gate: gate, queue: make(chan job, o.WriteBehind), ahead: make(chan []*stage, 64),
		staged: staging{most: 4 * o.Prefetch},
	}
	if o.AdmitAfter > 1 {
		b.admit = newSketch(8 * m.slots)
	}
	b.renewer, _ = o.Lower.(Renewer)
	ctx, cancel := context.WithCancel(context.Background())
	b.stop, b.stopped = cancel, ctx.Done()
	b.done.Go(func() { b.write(ctx) })
	b.done.Go(func() { b.fetch(ctx) })
	return b
}

// interruptible ends what is written behind while somebody waits for the gate, which a write holds. Its zero value is ready to use.
type interruptible struct {
	mu      sync.Mutex
	waiting int                // how many ask for its end
	end     context.CancelFunc // of the last write; nil: there was none
	over    chan struct{}      // closed at its end
}

// begin is the context of a write, until end. It has ended already if somebody waits.
func (i *interruptible) begin(ctx context.Context) (_ context.Context, end func()) {
	ctx, cancel := context.WithCancel(ctx)
	over := make(chan struct{})
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.waiting > 0 {
		cancel()
	}
	i.end, i.over = cancel, over
	return ctx, func() {
		cancel()
		close(over)
	}
}

// wait waits for the write that is under way, and ends it when that takes longer than patience. Those that begin before resume end at once.
func (i *interruptible) wait(patience time.Duration) {
	i.mu.Lock()
	i.waiting++
	end, over := i.end, i.over
	i.mu.Unlock()
	if end == nil {
		return
	}
	select {
	case <-over:
	case <-time.After(patience):
		end()
	}
}

func (i *interruptible) resume() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.waiting--
}

func (b *below) close() {
	b.stop()
	b.done.Wait()
}

// guard makes an error of a panic of the lower tier in a goroutine of this package. Those in calls of others are theirs: the sdk does
// the same for what a host calls.
func (b *below) guard(what string, call func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			b.o.Log.Error("the tier below memory panicked", "call", what, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			err = fmt.Errorf("the tier below memory panicked: %s: %v", what, p)
		}
	}()
	return call()
}

// used notes that a block in memory was stored or loaded, and has it written to the lower tier once
// that was often enough. The block is pinned.
func (b *below) used(k connector.StoreKey, id uint32) {
	state := &b.memory.lowered[id]
	was := state.Load()
	if was == lowering || was == b.lowered() {
		return
	}
	if b.admit != nil && b.admit.add(k) < b.o.AdmitAfter {
		b.c.Count(func(n *Stats) { n.NotAdmitted++ })
		return
	}
	if !state.CompareAndSwap(was, lowering) {
		return
	}
	select {
	case b.queue <- job{key: k}:
	default:
		state.Store(notLowered)
		b.c.Count(func(n *Stats) { n.Dropped++ })
	}
}

// write writes behind, several blocks in one call if there are.
func (b *below) write(ctx context.Context) {
	for {
		var jobs []job
		select {
		case <-ctx.Done():
			return
		case j := <-b.queue:
			jobs = append(jobs, j)
		}
		for len(jobs) < min(writeBatch, b.memory.slots/8) && len(b.queue) > 0 {
			jobs = append(jobs, <-b.queue)
		}
		b.writeJobs(ctx, jobs)
		for _, j := range jobs {
			if j.mark != nil {
				close(j.mark)
			}
		}
	}
}

// writeJobs writes blocks to the lower tier. It is a call like any other: after a Reset it finds none.
func (b *below) writeJobs(ctx context.Context, jobs []job) {
	b.gate.RLock()
	defer b.gate.RUnlock()
	ctx, end := b.writes.begin(ctx)
	defer end()
	var items []connector.Item
	var ids []uint32
	for _, j := range jobs {
		if j.mark != nil {
			continue
		}
		id, h, err := b.memory.acquire(j.key, -1, false)
		if err != nil {
			b.c.Count(func(n *Stats) { n.Dropped++ })
			continue
		}
		data := b.memory.block(id, int(h.Length))
		digests := len(data) - b.o.Digests[len(data)]
		items = append(items, b.item(j.key, h.Expires, data[:digests], data[digests:]))
		ids = append(ids, id)
	}
	if len(items) == 0 {
		return
	}
	lowered := b.lowered() // before what it had may be lost
	failed := storekit.ErrorsOf(b.guard("put", func() error { return b.lower.Put(ctx, items) }), len(items))
	for i, id := range ids {
		state := lowered
		if failed[i] != nil {
			state = notLowered
			b.c.Count(func(n *Stats) { n.Errors++ })
		} else {
			b.c.Count(func(n *Stats) {
				n.WriteBacks++
				n.BytesIn += uint64(items[i].Size())
			})
		}
		b.memory.lowered[id].CompareAndSwap(lowering, state)
		b.memory.index.Release(id)
	}
}

// item is a block as the lower tier gets it. One that expires replaces what may have expired there.
func (b *below) item(k connector.StoreKey, expires int64, spans ...[]byte) connector.Item {
	head := binary.LittleEndian.AppendUint64(nil, uint64(expires))
	return connector.Item{Key: k, Replace: expires != 0, Spans: append([][]byte{head}, spans...)}
}

// replace writes blocks through that were found damaged, wherever that was.
func (b *below) replace(ctx context.Context, items []connector.Item, expires []int64, errs []error) {
	var again []connector.Item
	for i, it := range items {
		if !it.Replace || errs[i] != nil {
			continue
		}
		b.staged.drop(it.Key)
		var until int64
		if expires != nil {
			until = expires[i]
		}
		lower := b.item(it.Key, until, it.Spans...)
		lower.Replace = true
		again = append(again, lower)
	}
	if len(again) > 0 && b.lower.Put(ctx, again) != nil {
		b.c.Count(func(n *Stats) { n.Errors++ }) // memory has the right bytes
	}
}

// get serves the items that memory does not have, from what was fetched ahead or from the lower tier.
func (b *below) get(ctx context.Context, items []connector.Item, absent []int, errs []error) {
	var rest []connector.Item
	var index []int
	for _, i := range absent {
		it := items[i]
		if b.fromStaged(ctx, it) {
			errs[i] = nil
			b.c.Count(func(n *Stats) { n.read(it.Size()) })
			continue
		}
		rest, index = append(rest, b.item(it.Key, 0, it.Spans...)), append(index, i)
	}
	if len(rest) == 0 {
		return
	}
	failed := storekit.ErrorsOf(b.lower.Get(ctx, rest), len(rest))
	for j, i := range index {
		errs[i] = failed[j]
		if errs[i] == nil {
			errs[i] = b.arrived(rest[j].Key, rest[j].Spans[0])
		}
		if errs[i] != nil {
			b.c.Count(func(n *Stats) { n.Misses++ })
			continue
		}
		b.c.Count(func(n *Stats) { n.read(items[i].Size()) })
	}
}

// arrived takes the time until which a block may be served from its head, and refuses what is too old.
func (b *below) arrived(k connector.StoreKey, head []byte) error {
	until := int64(binary.LittleEndian.Uint64(head))
	if past(until) {
		b.c.Count(func(n *Stats) { n.Expired++ })
		return fmt.Errorf("%w: its time is over", errAbsent)
	}
	if until != 0 {
		b.ends.Store(k, until)
	}
	return nil
}

// expiry gives and forgets what arrived has read.
func (b *below) expiry(k connector.StoreKey) int64 {
	if until, ok := b.ends.LoadAndDelete(k); ok {
		return until.(int64) //nolint:forcetypeassert // arrived stores nothing else
	}
	return 0
}

// flush waits until all that is queued now was written. Nothing is any more once stop was called.
func (b *below) flush(ctx context.Context) error {
	mark := make(chan struct{})
	select {
	case b.queue <- job{mark: mark}:
	case <-b.stopped:
		return errClosed
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-mark:
		return nil
	case <-b.stopped:
		return errClosed
	case <-ctx.Done():
		return ctx.Err()
	}
}

// forget drops what waits and what was fetched. No call is running.
func (b *below) forget() {
	for {
		select {
		case j := <-b.queue:
			if j.mark != nil {
				close(j.mark)
			}
			continue
		default:
		}
		break
	}
	b.staged.clear()
}

// staging keeps blocks that were fetched from the lower tier before somebody asked for them. They are
// no part of the memory tier: a lookup that starts a fetch evicts nothing, so that no other lookup can
// observe it (rule SCHED-02).
type staging struct {
	most int // blocks at the same time

	mu    sync.Mutex
	byKey map[connector.StoreKey]*stage
	order []*stage // the earliest first; some may be gone
	spare [][]byte
}

// stage is one block, on its way until done is closed.
type stage struct {
	key    connector.StoreKey
	data   []byte // with its head; nil until it is fetched
	done   chan struct{}
	err    error
	wanted bool // nobody fetches it otherwise
}

// start makes stages for those of the keys that have none. What was fetched and not asked for goes.
func (g *staging) start(keys []connector.StoreKey) (started []*stage) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.byKey == nil {
		g.byKey = map[connector.StoreKey]*stage{}
	}
	for _, k := range keys {
		if g.byKey[k] != nil {
			continue
		}
		for len(g.byKey) >= g.most && len(g.order) > 0 {
			g.abandon(g.order[0])
		}
		s := &stage{key: k, done: make(chan struct{}), wanted: true}
		g.byKey[k] = s
		g.order = append(g.order, s)
		started = append(started, s)
	}
	return started
}

// begin gives a stage its memory, unless nobody waits for it any more.
func (g *staging) begin(s *stage, size int) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !s.wanted {
		return false
	}
	if n := len(g.spare); n > 0 {
		s.data, g.spare = g.spare[n-1], g.spare[:n-1]
	} else {
		s.data = make([]byte, size)
	}
	return true
}

// abandon removes a stage that nobody will ask for.
func (g *staging) abandon(s *stage) {
	s.wanted = false
	g.remove(s)
}

func (g *staging) remove(s *stage) {
	if g.byKey[s.key] == s {
		delete(g.byKey, s.key)
	}
	if i := slices.Index(g.order, s); i >= 0 {
		g.order = slices.Delete(g.order, i, i+1)
	}
}

// take gives the stage of a key to its only user; nil if there is none.
func (g *staging) take(k connector.StoreKey) *stage {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.byKey[k]
	if s != nil {
		g.remove(s)
	}
	return s
}

// drop forgets what was fetched of a key.
func (g *staging) drop(k connector.StoreKey) {
	if s := g.take(k); s != nil {
		g.leave(s)
	}
}

// leave says that whoever has taken a stage does not wait for it.
func (g *staging) leave(s *stage) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s.wanted = false
}

func (g *staging) clear() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, s := range g.order {
		s.wanted = false
	}
	g.byKey, g.order = nil, nil
}

// reuse takes back the memory of a stage that nobody has any more.
func (g *staging) reuse(s *stage) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.spare) < g.most {
		g.spare = append(g.spare, s.data)
	}
}

// prefetch has the next blocks of a run fetched, unless enough is on its way.
func (b *below) prefetch(keys []connector.StoreKey) {
	n := min(len(keys), b.o.Prefetch)
	if n == 0 || !b.o.SameSize {
		return
	}
	started := b.staged.start(keys[:n])
	if len(started) == 0 {
		return
	}
	select {
	case b.ahead <- started:
	default:
		for _, s := range started {
			b.staged.drop(s.key)
			s.err = errAbsent
			close(s.done)
		}
	}
}

// fetch reads ahead.
func (b *below) fetch(ctx context.Context) {
	for {
		var stages []*stage
		select {
		case <-ctx.Done():
			return
		case stages = <-b.ahead:
		}
		var err error
		for _, s := range stages { // one at a time: the first is wanted first
			if err == nil {
				err = b.fetchStage(ctx, s)
			} else {
				s.err = errAbsent
			}
			close(s.done)
		}
	}
}

// fetchStage fetches one block. The error says that the lower tier does not answer; nobody's patience ends such a call otherwise.
func (b *below) fetchStage(ctx context.Context, s *stage) error {
	if !b.staged.begin(s, int(b.o.SlotBytes)+LowerHeader) {
		s.err = errAbsent
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, fetchWait)
	defer cancel()
	s.err = b.guard("get", func() error { return b.lower.Get(ctx, []connector.Item{b.stagedItem(s)}) })
	if s.err == nil {
		b.c.Count(func(n *Stats) { n.Prefetches++ })
		return nil
	}
	return ctx.Err()
}

// stagedItem is the item into which a stage is fetched: its spans are those that item makes.
func (b *below) stagedItem(s *stage) connector.Item {
	data := s.data[LowerHeader:]
	digests := len(data) - b.o.Digests[len(data)]
	return connector.Item{Key: s.key, Spans: [][]byte{s.data[:LowerHeader:LowerHeader], data[:digests:digests], data[digests:]}}
}

// fromStaged serves an item from what was fetched ahead.
func (b *below) fromStaged(ctx context.Context, it connector.Item) bool {
	if b.staged.most == 0 {
		return false
	}
	s := b.staged.take(it.Key)
	if s == nil {
		return false
	}
	select {
	case <-s.done:
	case <-b.stopped: // nobody fetches it any more
		return false
	case <-ctx.Done():
		b.staged.leave(s)
		return false
	}
	if s.err != nil || it.Size()+LowerHeader != len(s.data) {
		return false
	}
	defer b.staged.reuse(s)
	if b.arrived(it.Key, s.data[:LowerHeader]) != nil {
		return false
	}
	rest := s.data[LowerHeader:]
	for _, span := range it.Spans {
		rest = rest[copy(span, rest):]
	}
	return true
}

// past reports whether a time in Unix ms is over; 0 is never.
func past(until int64) bool { return until != 0 && until <= time.Now().UnixMilli() }
