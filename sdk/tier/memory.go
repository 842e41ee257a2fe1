package tier

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/place"
	"github.com/kvport/kvport/internal/storekit"
)

// memory is the tier in an arena.
type memory struct {
	*arena
	o     *Options
	index *keyIndex
	c     *counts

	fillMu sync.Mutex
	fills  map[connector.StoreKey]chan struct{} // blocks that are being written; closed when they are

	usedMu sync.Mutex
	used   map[uint64]int64 // bytes of each tenant; nil without a quota

	expires []atomic.Int64  // of each slot, in Unix ms; nil without a TTL
	lowered []atomic.Uint32 // of each slot: whether its block is in the lower tier
	pins    *pins
	loans   loans
}

// What is known of a block and the lower tier.
const (
	notLowered = iota
	lowering   // it waits to be written
	isLowered  // and all above: see below.lowered
)

// fill is a slot that is being written.
type fill struct {
	key     connector.StoreKey
	id      uint32
	tenant  uint64
	expires int64
	slot    []byte
	done    chan struct{}
}

func newMemory(o *Options, c *counts) (*memory, error) {
	mem := o.Memory
	if mem == nil {
		mem = make([]byte, o.MemoryBytes)
	}
	a, whole, torn, err := openArena(mem, o.SlotBytes, o.Placement)
	if err != nil {
		return nil, err
	}
	if o.Slots > 0 {
		a.slots = min(a.slots, o.Slots)
	}
	index, err := newKeyIndex(a.slots, o.Policy)
	if err != nil {
		a.leave()
		return nil, err
	}
	m := &memory{
		arena: a, o: o, index: index, c: c, fills: map[connector.StoreKey]chan struct{}{},
		lowered: make([]atomic.Uint32, a.slots), pins: newPins(o, a.slots), loans: loans{most: o.mostLent(a.slots)},
	}
	if o.TenantBytes > 0 {
		m.used = map[uint64]int64{}
	}
	if o.TTL > 0 {
		m.expires = make([]atomic.Int64, a.slots)
	}
	index.came, index.gone = func(id uint32) { m.changed(id, true) }, m.gone
	c.Count(func(n *Stats) { n.Torn += uint64(torn) })
	for _, f := range whole {
		if int(f.Slot) >= a.slots { // of a life that used more of them
			a.Retire(f.Slot)
			continue
		}
		m.account(f.Tenant, int64(f.Length)) // what is there stays, over the quota or not
		if m.expires != nil {
			m.expires[f.Slot].Store(f.Expires)
		}
		index.adopt(uint32(f.Slot), f.Key)
	}
	c.Count(func(n *Stats) { n.Adopted += uint64(index.Len()) })
	return m, nil
}

func (m *memory) changed(id uint32, stored bool) {
	if m.o.Changed != nil {
		m.o.Changed(m.index.keys[id], stored)
	}
}

// gone is called for every block that leaves, before its slot is used again.
func (m *memory) gone(id uint32) {
	if h, ok := m.header(id); ok {
		m.account(h.Tenant, -int64(h.Length))
	}
	m.clear(id)
	m.lowered[id].Store(notLowered)
	m.pins.forget(id)
	m.changed(id, false)
}

// account adds to what a tenant has; false if that is too much, and then nothing was added.
func (m *memory) account(tenant uint64, bytes int64) bool {
	if m.used == nil {
		return true
	}
	m.usedMu.Lock()
	defer m.usedMu.Unlock()
	if now := m.used[tenant] + bytes; bytes <= 0 || now <= m.o.TenantBytes {
		if m.used[tenant] = now; now <= 0 {
			delete(m.used, tenant)
		}
		return true
	}
	return false
}

// has reports whether a block can be served. It changes nothing.
func (m *memory) has(k connector.StoreKey) bool {
	id := m.index.entry(k)
	return id != none && !m.expired(id)
}

func (m *memory) expired(id uint32) bool {
	return m.expires != nil && past(m.expires[id].Load())
}

// acquire pins a block of the given size until release; -1: of any. Its header is valid for as long: once a block is replaced, the
// slot's own header says nothing. An error says why the block cannot be served; one that turns out to be damaged is forgotten.
func (m *memory) acquire(k connector.StoreKey, size int, use bool) (id uint32, h place.Header, err error) {
	for {
		id, ok := m.index.Acquire(k, use)
		if !ok {
			return 0, h, errAbsent
		}
		h, ok = m.header(id)
		switch {
		case !ok || h.Key != k:
			err = fmt.Errorf("slot %d has a damaged header: %w", id, connector.ErrCorrupt)
		case m.expired(id):
			err = errAbsent
		case size >= 0 && int(h.Length) != size:
			m.index.Release(id)
			return 0, h, fmt.Errorf("block of %d bytes, stored are %d: %w", size, h.Length, connector.ErrIncompatible)
		default:
			return id, h, nil
		}
		same := m.index.forget(k, id)
		m.index.Release(id)
		if same {
			if errors.Is(err, errAbsent) {
				m.c.Count(func(n *Stats) { n.Expired++ })
			} else {
				m.c.Count(func(n *Stats) { n.Torn++ })
			}
			return 0, h, err
		}
		// Somebody else has written or removed it meanwhile: look again.
	}
}

// same reports whether a block is there as it is, as far as its size and the beginning of its digests say. If so, its slot is pinned.
func (m *memory) same(it connector.Item, size int) (id uint32, is bool) {
	id, _, err := m.acquire(it.Key, size, false)
	if err != nil {
		return 0, false
	}
	want, at := storekit.Mark(it)
	if !bytes.Equal(m.block(id, size)[at:][:len(want)], want) {
		m.index.Release(id)
		return 0, false
	}
	return id, true
}

// begin finds a slot for a block of size bytes. known: it is there already, in the slot of f, which is pinned. A wait that is not nil ends
// when somebody else has written it.
func (m *memory) begin(it connector.Item, size int, expires int64) (f *fill, known bool, wait <-chan struct{}, err error) {
	if int64(size) > m.slotBytes {
		return nil, false, nil, fmt.Errorf("block of %d bytes, slots have %d: %w", size, m.slotBytes, connector.ErrIncompatible)
	}
	m.fillMu.Lock()
	if other := m.fills[it.Key]; other != nil {
		m.fillMu.Unlock()
		return nil, false, other, nil
	}
	if !it.Replace {
		if id, is := m.same(it, size); is {
			m.fillMu.Unlock()
			return &fill{id: id}, true, nil, nil
		}
	}
	f = &fill{key: it.Key, tenant: it.Tenant, expires: expires, done: make(chan struct{})}
	m.fills[it.Key] = f.done
	m.fillMu.Unlock()
	if !m.account(f.tenant, int64(size)) {
		m.fillDone(f)
		m.c.Count(func(n *Stats) { n.NoQuota++ })
		return nil, false, nil, m.quota(f.tenant)
	}
	id, v, err := m.index.Reserve(it.Key)
	if err != nil {
		m.account(f.tenant, -int64(size))
		m.fillDone(f)
		m.c.Count(func(n *Stats) { n.AllPinned++ })
		return nil, false, nil, err
	}
	if v.Evicted {
		m.c.Count(func(n *Stats) { n.Evicted++ })
	}
	f.id, f.slot = id, m.block(id, size)
	m.Begin(place.Slot(id))
	return f, false, nil, nil
}

func (m *memory) quota(tenant uint64) error {
	m.usedMu.Lock()
	defer m.usedMu.Unlock()
	return &QuotaError{Tenant: tenant, Used: m.used[tenant], Limit: m.o.TenantBytes}
}

func (m *memory) fillDone(f *fill) {
	m.fillMu.Lock()
	delete(m.fills, f.key)
	m.fillMu.Unlock()
	close(f.done)
}

// commit makes a written slot visible and leaves it pinned.
func (m *memory) commit(f *fill, lowered uint32) {
	defer m.fillDone(f)
	m.Publish(place.Slot(f.id), &place.Header{Length: uint32(len(f.slot)), Key: f.key, Expires: f.expires, Tenant: f.tenant})
	if m.expires != nil {
		m.expires[f.id].Store(f.expires)
	}
	m.lowered[f.id].Store(lowered)
	m.index.commit(f.id, f.key, 1)
	m.c.Count(func(n *Stats) { n.wrote(len(f.slot)) })
}

// abandon frees a slot that was not written.
func (m *memory) abandon(f *fill) {
	m.clear(f.id)
	m.account(f.tenant, -int64(len(f.slot)))
	m.index.Cancel(f.id)
	m.fillDone(f)
}

// reset forgets every block. No call may be writing.
func (m *memory) reset() {
	for _, k := range m.index.Keys() {
		m.index.Remove(k)
	}
}

// pins keeps often loaded blocks from eviction, not more than a share of all.
type pins struct {
	after, most int

	mu    sync.Mutex
	loads []uint8
	queue []connector.StoreKey
}

func newPins(o *Options, slots int) *pins {
	p := &pins{after: min(o.PinAfter, maxCount), most: int(o.PinShare * float64(slots))}
	if p.after > 0 && p.most > 0 {
		p.loads = make([]uint8, slots)
	}
	return p
}

// loaded counts a load of a block.
func (p *pins) loaded(x *keyIndex, id uint32, k connector.StoreKey) {
	if p.loads == nil {
		return
	}
	p.mu.Lock()
	due := false
	if p.loads[id] < maxCount {
		p.loads[id]++
		due = int(p.loads[id]) == p.after
	}
	var let connector.StoreKey
	full := due && len(p.queue) >= p.most
	if full {
		let, p.queue = p.queue[0], p.queue[1:]
	}
	if due {
		p.queue = append(p.queue, k)
	}
	p.mu.Unlock()
	if full {
		x.Unkeep(let)
	}
	if due {
		x.Keep(k)
	}
}

func (p *pins) forget(id uint32) {
	if p.loads == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.loads[id] = 0
}

// arena is slots in memory that may outlive this process, as package place lays them out.
type arena struct {
	*place.Shelf
	slotBytes int64
	slots     int    // that are used
	leave     func() // ends the use of the memory
}

// ArenaHead is how many bytes an arena takes beyond its slots and 256 bytes for each, at most.
const ArenaHead = 2 * superSize

// ArenaBytes is the size in bytes of Options.Memory, or of a Disk, with n slots of slotBytes.
func ArenaBytes(n int, slotBytes int64) int64 { return need(n, slotBytes) }

// openArena takes memory into use, whatever is in it. found are the blocks that are whole, in the
// order in which they were written; torn is the number of slots that are not. Everything else is free.
// p is how the host divides the memory, which it reads; nil: nobody but this process reads it.
func openArena(mem []byte, slotBytes int64, p *connector.Placement) (a *arena, found []place.Found, torn int, err error) {
	g, o := place.Fit(int64(len(mem)), slotBytes, maxEntries), place.ShelfOpening{}
	if p != nil {
		g, o = place.Geometry{Slots: p.Slots, SlotBytes: p.SlotBytes}, place.ShelfOpening{Epoch: p.Epoch, Serial: p.Serial}
		if err := g.Validate(); err != nil || p.SlotBytes != slotBytes || g.ArenaBytes() > int64(len(mem)) {
			return nil, nil, 0, fmt.Errorf("the host has placed %d slots of %d bytes in %d, want slots of %d: %w", p.Slots, p.SlotBytes, len(mem), slotBytes, connector.ErrIncompatible)
		}
	}
	if g.Slots < 1 {
		return nil, nil, 0, fmt.Errorf("an arena of %d bytes has no room for a block of %d: %w", len(mem), slotBytes, connector.ErrIncompatible)
	}
	memory, err := place.Private(mem[:g.ArenaBytes()])
	if err != nil {
		return nil, nil, 0, fmt.Errorf("arena: %w: %w", err, connector.ErrIncompatible)
	}
	leave := func() {}
	if p != nil {
		if !place.Take(memory, p.Serial) {
			return nil, nil, 0, fmt.Errorf("another Store of this process uses the arena, all sides and ranks must share it: %w", connector.ErrIncompatible)
		}
		leave = func() { place.Leave(memory, p.Serial) }
	}
	shelf, found, torn, err := place.OpenShelf(memory, g, o, time.Now().UnixMilli())
	if err != nil {
		leave()
		return nil, nil, 0, fmt.Errorf("arena: %w: %w", err, connector.ErrIncompatible)
	}
	return &arena{Shelf: shelf, slotBytes: slotBytes, slots: g.Slots, leave: leave}, found, torn, nil
}

// block is the bytes of a slot.
func (a *arena) block(id uint32, length int) []byte { return a.Bytes(place.Slot(id), length) }

// clear says that the slot holds nothing.
func (a *arena) clear(id uint32) { a.Retire(place.Slot(id)) }

// header reads back what a slot was published with.
func (a *arena) header(id uint32) (h place.Header, ok bool) { return a.Header(place.Slot(id)) }

// found is a slot of the disk tier that a former process left.
type found struct {
	header
	id uint32
}

// The disk tier is a row of slots of one size with a row of headers before them:
//
//	0      superblock: magic, version, slot size, number of slots, checksum
//	4096   headers, 128 bytes each
//	       slots, from the next multiple of 4096 on
//
// A slot is written between two states of its header: it is taken out of use, filled, and made ready
// when all of it is there. Whoever finds it in between finds no block (rule OFF-02).
const (
	superSize  = 4096
	headerSize = 128
	slotAlign  = 64
	magic      = "kvport tier 1\n\x00\x00"
)

// The states of a slot. Any other value is a damaged header.
const (
	stateFree    = 0
	stateWriting = 0x57524954
	stateReady   = 0x52454459
)

// header is what is known of the block in a slot.
type header struct {
	length     uint32 // of the block in bytes
	generation uint64 // grows with every write: the order of writing
	key        connector.StoreKey
	expires    int64 // Unix time in ms; 0: never
	tenant     uint64
	data       xxh3.Uint128 // of the block's bytes
}

// encode writes all but the state, which comes first.
func (h *header) encode(b []byte) {
	binary.LittleEndian.PutUint32(b[4:], h.length)
	binary.LittleEndian.PutUint64(b[8:], h.generation)
	copy(b[16:48], h.key[:])
	binary.LittleEndian.PutUint64(b[48:], uint64(h.expires))
	binary.LittleEndian.PutUint64(b[56:], h.tenant)
	binary.LittleEndian.PutUint64(b[64:], h.data.Lo)
	binary.LittleEndian.PutUint64(b[72:], h.data.Hi)
	binary.LittleEndian.PutUint64(b[80:], xxh3.Hash(b[4:80]))
}

// decode reads a header; false if its bytes are not what was written.
func (h *header) decode(b []byte) bool {
	h.length = binary.LittleEndian.Uint32(b[4:])
	h.generation = binary.LittleEndian.Uint64(b[8:])
	copy(h.key[:], b[16:48])
	h.expires = int64(binary.LittleEndian.Uint64(b[48:]))
	h.tenant = binary.LittleEndian.Uint64(b[56:])
	h.data = xxh3.Uint128{Lo: binary.LittleEndian.Uint64(b[64:]), Hi: binary.LittleEndian.Uint64(b[72:])}
	return binary.LittleEndian.Uint64(b[80:]) == xxh3.Hash(b[4:80])
}

// shape is the geometry of a row of slots.
type shape struct {
	slotBytes int64 // the largest block
	slots     int
}

// fit is how many slots of the given size fit into total bytes.
func fit(total, slotBytes int64) shape {
	s := shape{slotBytes: slotBytes}
	s.slots = int(min(maxEntries, max(0, (total-superSize)/(s.stride()+headerSize))))
	for s.slots > 0 && need(s.slots, slotBytes) > total { // what aligning the slots costs
		s.slots--
	}
	return s
}

// need is how many bytes n slots take.
func need(n int, slotBytes int64) int64 {
	s := shape{slotBytes: slotBytes, slots: n}
	return s.dataAt() + int64(n)*s.stride()
}

func (s shape) stride() int64 { return (s.slotBytes + slotAlign - 1) &^ (slotAlign - 1) }

func (s shape) headerAt(id uint32) int64 { return superSize + int64(id)*headerSize }

func (s shape) dataAt() int64 {
	return (superSize + int64(s.slots)*headerSize + superSize - 1) &^ (superSize - 1)
}

func (s shape) slotAt(id uint32) int64 { return s.dataAt() + int64(id)*s.stride() }

// super is the superblock, as far as it says something.
func (s shape) super() []byte {
	b := make([]byte, 64)
	copy(b, magic)
	binary.LittleEndian.PutUint64(b[16:], uint64(s.slotBytes))
	binary.LittleEndian.PutUint64(b[24:], uint64(s.slots))
	binary.LittleEndian.PutUint64(b[32:], xxh3.Hash(b[:32]))
	return b
}

// piece is one copy to make.
type piece struct{ dst, src []byte }

const (
	pieceBytes    = 256 << 10 // no piece is larger, so that workers end together
	parallelBytes = 512 << 10 // less is copied by the caller alone: starting a worker costs as much
)

// scatter appends the copies from a slot to the spans of an item.
func scatter(to []piece, spans [][]byte, slot []byte) []piece {
	for _, s := range spans {
		to = split(to, s, slot[:len(s)])
		slot = slot[len(s):]
	}
	return to
}

// gather appends the copies from the spans of an item to a slot.
func gather(to []piece, slot []byte, spans [][]byte) []piece {
	for _, s := range spans {
		to = split(to, slot[:len(s)], s)
		slot = slot[len(s):]
	}
	return to
}

func split(to []piece, dst, src []byte) []piece {
	for len(src) > pieceBytes {
		to = append(to, piece{dst[:pieceBytes], src[:pieceBytes]})
		dst, src = dst[pieceBytes:], src[pieceBytes:]
	}
	return append(to, piece{dst, src})
}

// copyAll makes the copies, with at most workers goroutines, and returns when all are made.
func copyAll(pieces []piece, workers int) {
	bytes := 0
	for _, p := range pieces {
		bytes += len(p.src)
	}
	if bytes < parallelBytes || workers < 2 {
		for _, p := range pieces {
			copy(p.dst, p.src)
		}
		return
	}
	const chunk = 4 // pieces are often much smaller than pieceBytes
	storekit.Parallel((len(pieces)+chunk-1)/chunk, min(workers, 1+bytes/pieceBytes), func(i int) {
		for _, p := range pieces[i*chunk : min((i+1)*chunk, len(pieces))] {
			copy(p.dst, p.src)
		}
	})
}
