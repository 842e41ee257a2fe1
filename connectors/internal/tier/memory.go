package tier

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
)

// memory is the tier in an arena.
type memory struct {
	*arena
	o      *Options
	index  *Index
	c      *counters
	serial atomic.Uint64

	fillMu sync.Mutex
	fills  map[connector.StoreKey]chan struct{} // blocks that are being written; closed when they are

	usedMu sync.Mutex
	used   map[uint64]int64 // bytes of each tenant; nil without a quota

	expires []atomic.Int64  // of each slot, in Unix ms; nil without a TTL
	lowered []atomic.Uint32 // of each slot: whether its block is in the lower tier
	pins    *pins
}

// What is known of a block and the lower tier.
const (
	notLowered = iota
	lowering   // it waits to be written
	isLowered
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

func newMemory(o *Options, c *counters) (*memory, error) {
	mem := o.Memory
	if mem == nil {
		mem = make([]byte, o.MemoryBytes)
	}
	a, whole, torn, err := openArena(mem, o.SlotBytes)
	if err != nil {
		return nil, err
	}
	index, err := NewIndex(a.slots, o.Policy)
	if err != nil {
		return nil, err
	}
	m := &memory{
		arena: a, o: o, index: index, c: c, fills: map[connector.StoreKey]chan struct{}{},
		lowered: make([]atomic.Uint32, a.slots), pins: newPins(o, a.slots),
	}
	if o.TenantBytes > 0 {
		m.used = map[uint64]int64{}
	}
	if o.TTL > 0 {
		m.expires = make([]atomic.Int64, a.slots)
	}
	m.serial.Store(a.generation)
	index.came, index.gone = func(id uint32) { m.changed(id, true) }, m.gone
	c.torn.Add(uint64(torn))
	for _, f := range whole {
		m.account(f.tenant, int64(f.length)) // what is there stays, over the quota or not
		if m.expires != nil {
			m.expires[f.id].Store(f.expires)
		}
		index.adopt(f.id, f.key)
	}
	c.adopted.Add(uint64(len(whole)))
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
		m.account(h.tenant, -int64(h.length))
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
	if m.expires == nil {
		return false
	}
	at := m.expires[id].Load()
	return at != 0 && at <= time.Now().UnixMilli()
}

// acquire pins a block of the given size until release; -1: of any. An error says why it cannot be
// served; a block that turns out to be damaged is forgotten.
func (m *memory) acquire(k connector.StoreKey, size int, use bool) (id uint32, err error) {
	for {
		id, ok := m.index.Acquire(k, use)
		if !ok {
			return 0, errAbsent
		}
		h, ok := m.header(id)
		switch {
		case !ok || h.key != k:
			err = fmt.Errorf("slot %d has a damaged header: %w", id, connector.ErrCorrupt)
		case m.expired(id):
			err = errAbsent
		case size >= 0 && int(h.length) != size:
			m.index.Release(id)
			return 0, fmt.Errorf("block of %d bytes, stored are %d: %w", size, h.length, connector.ErrIncompatible)
		default:
			return id, nil
		}
		same := m.index.forget(k, id)
		m.index.Release(id)
		if same {
			if errors.Is(err, errAbsent) {
				m.c.expired.Add(1)
			} else {
				m.c.torn.Add(1)
			}
			return 0, err
		}
		// Somebody else has written or removed it meanwhile: look again.
	}
}

// begin finds a slot for a block of size bytes. known: it is there already. A wait that is not nil ends
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
	if !it.Replace && m.has(it.Key) {
		m.fillMu.Unlock()
		return nil, true, nil, nil
	}
	f = &fill{key: it.Key, tenant: it.Tenant, expires: expires, done: make(chan struct{})}
	m.fills[it.Key] = f.done
	m.fillMu.Unlock()
	if !m.account(f.tenant, int64(size)) {
		m.fillDone(f)
		m.c.noQuota.Add(1)
		return nil, false, nil, m.quota(f.tenant)
	}
	id, v, err := m.index.Reserve(it.Key)
	if err != nil {
		m.account(f.tenant, -int64(size))
		m.fillDone(f)
		m.c.allPinned.Add(1)
		return nil, false, nil, err
	}
	if v.Evicted {
		m.c.evicted.Add(1)
	}
	f.id, f.slot = id, m.block(id, size)
	m.arena.begin(id)
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
	m.publish(f.id, &header{
		length: uint32(len(f.slot)), generation: m.serial.Add(1), key: f.key, expires: f.expires, tenant: f.tenant,
	})
	if m.expires != nil {
		m.expires[f.id].Store(f.expires)
	}
	m.lowered[f.id].Store(lowered)
	m.index.commit(f.id, f.key, 1)
	m.c.stored.Add(1)
	m.c.bytesIn.Add(uint64(len(f.slot)))
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
func (p *pins) loaded(x *Index, id uint32, k connector.StoreKey) {
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
