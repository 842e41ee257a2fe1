package tier

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvport/kvport/internal/place"
)

// lentShare is how many slots there are for each that is lent, at least. Those are empty, so memory has room for as many blocks fewer, and
// the hit ratio is that of the policy within a percent.
const lentShare = 128

// loans are the slots that the host may write (rules PLACE-29 and PLACE-33), until settle finds a block there or the host gives
// them back.
type loans struct {
	most int // 0: none are lent

	mu     sync.RWMutex // held for reading by calls that look for blocks of the host; they wait for no eviction
	list   []loan       // in the order of their serials
	coming int          // slots that lend is evicting for
	n      atomic.Int32 // of list
}

// loan is one lent slot.
type loan struct {
	id     uint32
	word   place.Word
	serial uint64
	void   bool // a reset has been answered since: whatever comes there is older
}

// mostLent is how many slots are lent. It is none where a block that is offered need not be kept, or not for ever: what
// the host has written has been acknowledged already. ARC has to know the key for which it evicts, and what lies below may be read by others,
// to whom a block that was acknowledged must not come later than by message.
func (o *Options) mostLent(slots int) int {
	if !o.Lend || o.Placement == nil || o.StoreThreshold > 1 || o.TenantBytes > 0 || o.TTL > 0 || o.Policy == ARC || o.Lower != nil {
		return 0
	}
	return slots / lentShare
}

// lend lends up to n slots, fewer if all others are pinned. Those of other blocks are evicted first.
func (m *memory) lend(n int) (slots []uint32, serial uint64) {
	l := &m.loans
	n = l.reserve(n)
	defer l.reserved(n)
	for range n {
		id, v, err := m.index.Lend()
		if err != nil {
			break
		}
		if v.Evicted {
			m.c.Count(func(n *Stats) { n.Evicted++ })
		}
		slots = append(slots, id)
	}
	if len(slots) == 0 {
		return nil, 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	serial = m.Draw(len(slots))
	for i, id := range slots {
		l.list = append(l.list, loan{id: id, word: m.Lend(place.Slot(id)), serial: serial + uint64(i)})
	}
	l.n.Store(int32(len(l.list)))
	return slots, serial
}

// reserve says how many of n slots may be lent, and keeps them from other calls until reserved.
func (l *loans) reserve(n int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n = max(0, min(n, l.most-len(l.list)-l.coming))
	l.coming += n
	return n
}

// reserved ends what reserve began: the slots are in the list, or will not be.
func (l *loans) reserved(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.coming -= n
}

// back takes back slots that the host does not write. Serials that mean nothing here are of slots that were taken back
// already.
func (m *memory) back(serials []uint64) {
	if len(serials) == 0 {
		return
	}
	given := make(map[uint64]bool, len(serials))
	for _, serial := range serials {
		given[serial] = true
	}
	l := &m.loans
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = slices.DeleteFunc(l.list, func(one loan) bool {
		if !given[one.serial] {
			return false
		}
		m.Back(place.Slot(one.id), one.word)
		m.index.Back(one.id)
		return true
	})
	l.n.Store(int32(len(l.list)))
}

// settle takes note of what the host has written into lent slots.
func (m *memory) settle() {
	l := &m.loans
	if l.n.Load() == 0 || !m.anyWritten() {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = slices.DeleteFunc(l.list, func(one loan) bool {
		h, over, ok := m.Written(place.Slot(one.id), one.word, one.serial)
		if !over {
			return false
		}
		if !ok || one.void || !m.adopt(&one, &h) {
			m.clear(one.id)
			m.index.Back(one.id)
			return true
		}
		m.index.Release(one.id)
		return true
	})
	l.n.Store(int32(len(l.list)))
}

// anyWritten says whether the host has written into a lent slot of which nobody has taken note yet. Calls look at the same time: most find
// nothing.
func (m *memory) anyWritten() bool {
	l := &m.loans
	l.mu.RLock()
	defer l.mu.RUnlock()
	return slices.ContainsFunc(l.list, func(one loan) bool {
		_, over, _ := m.Written(place.Slot(one.id), one.word, one.serial)
		return over
	})
}

// adopt makes a block visible that the host has written, and leaves it pinned. Of one that is there already the later one stays (rule
// PLACE-13).
func (m *memory) adopt(one *loan, h *place.Header) bool {
	if !m.index.Settle(one.id, h.Key, func(old uint32) bool {
		was, ok := m.header(old)
		return ok && was.Serial > one.serial
	}) {
		return false
	}
	m.c.Count(func(n *Stats) { n.wrote(int(h.Length)) })
	return true
}

// void says that a reset is answered now: what comes into lent slots from here on is older.
func (m *memory) void() {
	m.loans.mu.Lock()
	defer m.loans.mu.Unlock()
	for i := range m.loans.list {
		m.loans.list[i].void = true
	}
}

// Lends implements sdk.Lending.
func (s *Store) Lends() int { return s.memory.loans.most }

// Lend implements sdk.Lending.
func (s *Store) Lend(n int) (slots []uint32, serial uint64) {
	s.gate.RLock()
	defer s.gate.RUnlock()
	s.memory.settle()
	return s.memory.lend(n)
}

// Back implements sdk.Lending.
func (s *Store) Back(serials []uint64) {
	s.gate.RLock()
	defer s.gate.RUnlock()
	s.memory.settle()
	s.memory.back(serials)
}
