package lookupbuffer

import (
	"container/list"
	"context"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"syscall"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// Options of a Memory.
type Options struct {
	Bytes  int64 // limit for all blocks together
	Refuse bool  // at capacity Insert fails with ErrBusy; otherwise the oldest blocks are dropped
	Keep   bool  // blocks stay after they are selected, until their room is needed
	// Spill receives the oldest blocks when their room is needed; if it is nil, they are dropped. When it
	// is full, its own oldest blocks are dropped. The Memory owns it and closes it in Close.
	Spill *Pool
}

// Memory is a Buffer in this process's memory. It never takes more than Options.Bytes and the size of
// Options.Spill.
type Memory struct {
	o Options

	mu      sync.Mutex
	entries map[connector.StoreKey]*entry
	order   list.List // *entry values that can be found, the oldest first
	spilled list.List // the same, for those in the pool
	moved   int64     // blocks that were moved to the pool
	pooled  int       // entries whose bytes are in the pool
	used    int64     // bytes of all entries, including those that only readers still have
	spare   map[int][][]byte
	spared  int64 // bytes in spare
	waiters map[connector.StoreKey][]waiter
	closed  chan struct{}
	over    bool
}

// entry is one block. Its bytes do not change while anybody can see it.
type entry struct {
	key     connector.StoreKey
	data    []byte
	readers int           // selections that copy it, or are about to
	taken   bool          // a selection has succeeded, so the last reader removes it
	place   *list.Element // nil when it cannot be found any more
	pool    *piece        // where data is in the pool; nil if it is not there
}

// waiter is one item of a selection whose block is not there yet. It has capacity 1, and an entry sent to it counts one
// more reader.
type waiter chan *entry

// NewMemory makes an empty buffer.
func NewMemory(o Options) *Memory {
	return &Memory{
		o: o, entries: map[connector.StoreKey]*entry{}, spare: map[int][][]byte{},
		waiters: map[connector.StoreKey][]waiter{}, closed: make(chan struct{}),
	}
}

// Lookup implements Buffer.
func (m *Memory) Lookup(_ context.Context, runs [][]connector.StoreKey) ([]int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.over {
		return nil, ErrClosed
	}
	found := make([]int, len(runs))
	for i, keys := range runs {
		for found[i] < len(keys) && m.entries[keys[found[i]]] != nil {
			found[i]++
		}
	}
	return found, nil
}

// Insert implements Buffer.
func (m *Memory) Insert(ctx context.Context, items []connector.Item) error {
	var failed failures
	for i := range items {
		it := &items[i]
		if err := m.insert(ctx, it); err != nil {
			failed.add(i, err)
		}
	}
	return failed.error()
}

func (m *Memory) insert(ctx context.Context, it *connector.Item) error {
	if !it.Replace && m.has(it.Key) {
		return nil
	}
	return m.Fill(ctx, it.Key, it.Size(), func(data []byte) error {
		pipe.Copy([][]byte{data}, it.Spans)
		return nil
	})
}

func (m *Memory) has(k connector.StoreKey) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.entries[k] != nil && !m.over
}

// Fill puts in one block of size bytes, which fill writes. It replaces an older block of that key. Nobody
// sees the block before fill has returned nil; if fill fails, there is no block. Fill never waits for room.
func (m *Memory) Fill(ctx context.Context, k connector.StoreKey, size int, fill func(data []byte) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	slot, err := m.Reserve(k, size)
	if err != nil {
		return err
	}
	return slot.Done(fill(slot.Bytes()))
}

// Slot is the room for a block that is being written. Nobody sees the block before Done.
type Slot struct {
	memory *Memory
	entry  *entry
}

// Reserve takes room for a block of size bytes and drops older blocks for it if the options allow that. It
// never waits. The caller must call Done once for every Slot.
func (m *Memory) Reserve(k connector.StoreKey, size int) (*Slot, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := int64(size)
	switch {
	case m.over:
		return nil, ErrClosed
	case n > m.o.Bytes:
		return nil, fmt.Errorf("a block of %d bytes never fits into a buffer of %d: %w", n, m.o.Bytes, connector.ErrIncompatible)
	}
	for at := m.order.Front(); m.used+n > m.o.Bytes && at != nil && !m.o.Refuse; {
		e, isEntry := at.Value.(*entry)
		at = at.Next()
		if isEntry && e.readers == 0 && !m.spill(e) {
			m.remove(e)
		}
	}
	if m.used+n > m.o.Bytes {
		return nil, fmt.Errorf("%d of %d bytes are in use: %w", m.used, m.o.Bytes, connector.ErrBusy)
	}
	m.used += n
	return &Slot{m, &entry{key: k, data: m.alloc(size), readers: 1}}, nil
}

// Bytes is the memory to write. After Done it belongs to the buffer again.
func (s *Slot) Bytes() []byte { return s.entry.data }

// Done makes the block visible, in place of an older block of that key. If err says that it could not be
// written, Done gives its room back instead. It returns err, or the reason why the block was not put in.
func (s *Slot) Done(err error) error {
	m, e := s.memory, s.entry
	m.mu.Lock()
	defer m.mu.Unlock()
	e.readers--
	if err == nil && m.over {
		err = ErrClosed
	}
	if err != nil {
		m.free(e)
		return err
	}
	if old := m.entries[e.key]; old != nil {
		m.remove(old)
	}
	m.entries[e.key], e.place = e, m.order.PushBack(e)
	e.readers += len(m.waiters[e.key]) // counted before anybody can remove the entry
	for _, w := range m.waiters[e.key] {
		w <- e
	}
	delete(m.waiters, e.key)
	return nil
}

// alloc returns size bytes of memory and reuses old memory if it can. The caller holds mu and has counted
// the bytes.
func (m *Memory) alloc(size int) []byte {
	if free := m.spare[size]; len(free) > 0 {
		data := free[len(free)-1]
		m.spare[size] = free[:len(free)-1]
		m.spared -= int64(size)
		return data
	}
	if m.used+m.spared > m.o.Bytes {
		clear(m.spare) // these have sizes that are not in use now
		m.spared = 0
	}
	return make([]byte, size)
}

// list is the list that holds a visible entry. The caller holds mu.
func (m *Memory) list(e *entry) *list.List {
	if e.pool != nil {
		return &m.spilled
	}
	return &m.order
}

// spill moves an entry that nobody reads to the pool and drops older ones there if necessary. The caller
// holds mu.
func (m *Memory) spill(e *entry) bool {
	if m.o.Spill == nil {
		return false
	}
	to, ok := m.o.Spill.alloc(len(e.data))
	for at := m.spilled.Front(); !ok && at != nil; {
		old, isEntry := at.Value.(*entry)
		at = at.Next()
		if isEntry && old.readers == 0 {
			m.remove(old)
			to, ok = m.o.Spill.alloc(len(e.data))
		}
	}
	if !ok {
		return false
	}
	copy(to.data, e.data)
	m.order.Remove(e.place)
	m.free(e)
	e.data, e.pool, e.place = to.data, &to, m.spilled.PushBack(e)
	m.pooled++
	m.moved++
	return true
}

// remove makes an entry invisible. The caller holds mu.
func (m *Memory) remove(e *entry) {
	if e.place == nil {
		return
	}
	m.list(e).Remove(e.place)
	e.place = nil
	delete(m.entries, e.key)
	if e.readers == 0 {
		m.free(e)
	}
}

// free gives back the memory of an entry that nobody sees. The caller holds mu.
func (m *Memory) free(e *entry) {
	if e.pool != nil {
		m.o.Spill.release(*e.pool)
		m.pooled--
		e.data, e.pool = nil, nil
		return
	}
	m.used -= int64(len(e.data))
	m.spare[len(e.data)] = append(m.spare[len(e.data)], e.data)
	m.spared += int64(len(e.data))
	e.data = nil
}

// done ends one read of an entry. taken says that a selection has copied the block.
func (m *Memory) done(e *entry, taken bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e.readers--
	e.taken = e.taken || taken
	switch {
	case e.readers > 0:
	case e.place == nil:
		m.free(e)
	case e.taken && !m.o.Keep:
		m.remove(e)
	case m.over:
		m.closePool(e)
	}
}

// closePool drops an entry in the pool of a closed buffer. The caller holds mu.
func (m *Memory) closePool(e *entry) {
	if e.pool == nil || e.readers > 0 {
		return
	}
	m.remove(e)
	if m.pooled == 0 {
		_ = m.o.Spill.close() // it cannot fail, because the mapping belongs to the pool
	}
}

// Read passes the bytes of one block to read, in place, and reports whether the block is there. The bytes
// are valid only during the call and must not be changed. The block stays, whatever read returns, and
// becomes the youngest.
func (m *Memory) Read(k connector.StoreKey, read func(data []byte) error) (found bool, err error) {
	data, release, found := m.Hold(k)
	if !found {
		return false, nil
	}
	defer release()
	return true, read(data)
}

// Hold keeps one block as it is, and reports whether it is there. Its bytes are valid, and must not be changed, until release is
// called, once; a block that takes its place meanwhile is another one. The block becomes the youngest.
func (m *Memory) Hold(k connector.StoreKey) (data []byte, release func(), ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.entries[k]
	if e == nil || m.over {
		return nil, nil, false
	}
	e.readers++
	m.list(e).MoveToBack(e.place)
	return e.data, func() { m.done(e, false) }, true
}

// DropSelect implements Buffer.
func (m *Memory) DropSelect(ctx context.Context, items []connector.Item) error {
	var failed failures
	waiting := make([]waiter, len(items)) // joins the queues of all items before it waits for the first
	for i := range items {
		e, w, err := m.find(items[i].Key)
		if err == nil && e != nil {
			err = m.take(ctx, e, &items[i])
		}
		waiting[i] = w
		if err != nil {
			failed.add(i, err)
		}
	}
	for i, w := range waiting {
		if w == nil {
			continue
		}
		e, err := m.await(ctx, items[i].Key, w)
		if err == nil {
			err = m.take(ctx, e, &items[i])
		}
		if err != nil {
			failed.add(i, err)
		}
	}
	return failed.error()
}

// find returns an entry with one more reader, or a waiter in the queue for it.
func (m *Memory) find(k connector.StoreKey) (*entry, waiter, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.over {
		return nil, nil, ErrClosed
	}
	if e := m.entries[k]; e != nil {
		e.readers++
		return e, nil, nil
	}
	w := make(waiter, 1)
	m.waiters[k] = append(m.waiters[k], w)
	return nil, w, nil
}

func (m *Memory) await(ctx context.Context, k connector.StoreKey, w waiter) (*entry, error) {
	select {
	case e := <-w:
		return e, nil
	default: // a block that is there wins over a context that has ended
	}
	var err error
	select {
	case e := <-w:
		return e, nil
	case <-m.closed:
		err = ErrClosed
	case <-ctx.Done():
		err = ctx.Err()
	}
	m.leave(k, w)
	return nil, err
}

// leave removes a waiter from the queue. If it was served in the meantime, it gives the block back.
func (m *Memory) leave(k connector.StoreKey, w waiter) {
	m.mu.Lock()
	m.waiters[k] = slices.DeleteFunc(m.waiters[k], func(other waiter) bool { return other == w })
	if len(m.waiters[k]) == 0 {
		delete(m.waiters, k)
	}
	m.mu.Unlock()
	select {
	case e := <-w:
		m.done(e, false)
	default:
	}
}

// take copies an entry into the item's spans and ends the read.
func (m *Memory) take(ctx context.Context, e *entry, it *connector.Item) error {
	err := ctx.Err()
	if err == nil {
		err = fits(it, len(e.data))
	}
	if err == nil {
		pipe.Copy(it.Spans, [][]byte{e.data})
	}
	m.done(e, err == nil)
	return err
}

// Bytes is how many bytes all blocks take now, without those in the pool.
func (m *Memory) Bytes() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.used
}

// Pooled is how many bytes the blocks in the pool take now.
func (m *Memory) Pooled() int64 {
	if m.o.Spill == nil {
		return 0
	}
	return m.o.Spill.Used()
}

// Spilled is how many blocks have been moved to the pool since the buffer was made.
func (m *Memory) Spilled() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.moved
}

// Close implements Buffer.
func (m *Memory) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.over {
		return nil
	}
	m.over = true
	close(m.closed)
	clear(m.spare)
	m.spared = 0
	if m.o.Spill == nil {
		return nil
	}
	if m.pooled == 0 {
		return m.o.Spill.close()
	}
	for at := m.spilled.Front(); at != nil; {
		e, isEntry := at.Value.(*entry)
		at = at.Next()
		if isEntry {
			m.closePool(e)
		}
	}
	return nil
}

// Pool is host memory for blocks that a [Memory] has no room for. It is a buddy allocator over pages that
// the system provides when they are first written and gets back at Close. It is safe for concurrent use.
type Pool struct {
	mu   sync.Mutex
	data []byte // nil after Close
	free [poolOrders][]int
	at   map[int]int // order of the free piece that begins at an offset
	used int64
}

const (
	poolLeast  = 512 // bytes of the smallest piece
	poolOrders = 40
)

// NewPool makes a pool of size bytes, rounded down to a multiple of 512. It takes address space at once,
// and memory only as blocks come.
func NewPool(size int64) (*Pool, error) {
	size -= size % poolLeast
	if size < poolLeast {
		return nil, fmt.Errorf("pool of %d bytes: %w", size, connector.ErrIncompatible)
	}
	data, err := syscall.Mmap(-1, 0, int(size), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON|syscall.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("pool of %d bytes: %w", size, err)
	}
	p := &Pool{data: data, at: map[int]int{}}
	for from := 0; from < len(data); { // the largest pieces that are aligned and fit
		order := bits.Len(uint(len(data)-from)/poolLeast) - 1
		if from > 0 {
			order = min(order, bits.TrailingZeros(uint(from)/poolLeast))
		}
		p.give(from, order)
		from += poolLeast << order
	}
	return p, nil
}

func (p *Pool) give(from, order int) {
	p.free[order] = append(p.free[order], from)
	p.at[from] = order
}

// piece is memory of a pool.
type piece struct {
	data        []byte
	from, order int
}

// alloc returns n bytes of memory. ok is false if there is no room or the pool is closed.
func (p *Pool) alloc(n int) (_ piece, ok bool) {
	want := 0
	for poolLeast<<want < n {
		want++
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for order := want; order < poolOrders && p.data != nil; order++ {
		from, found := p.pop(order)
		if !found {
			continue
		}
		for order > want {
			order--
			p.give(from+poolLeast<<order, order)
		}
		p.used += poolLeast << want
		return piece{p.data[from : from+n : from+n], from, want}, true
	}
	return piece{}, false
}

// pop takes a free piece of an order. It skips pieces that have been merged into larger ones.
func (p *Pool) pop(order int) (from int, ok bool) {
	for list := p.free[order]; len(list) > 0; list = p.free[order] {
		from = list[len(list)-1]
		p.free[order] = list[:len(list)-1]
		if o, is := p.at[from]; is && o == order {
			delete(p.at, from)
			return from, true
		}
	}
	return 0, false
}

// release gives memory back and merges it with its free neighbours.
func (p *Pool) release(m piece) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.data == nil {
		return
	}
	p.used -= poolLeast << m.order
	from, order := m.from, m.order
	for {
		buddy := from ^ poolLeast<<order
		if o, is := p.at[buddy]; !is || o != order {
			break
		}
		delete(p.at, buddy)
		from, order = min(from, buddy), order+1
	}
	p.give(from, order)
}

// Used is how many bytes blocks take, rounded up to the pool's pieces.
func (p *Pool) Used() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used
}

// Size is how many bytes the pool has.
func (p *Pool) Size() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return int64(len(p.data))
}

// close gives the memory back to the system. Nobody may use it any more.
func (p *Pool) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	data := p.data
	p.data = nil
	if data == nil {
		return nil
	}
	return syscall.Munmap(data)
}
