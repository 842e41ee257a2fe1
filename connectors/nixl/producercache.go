package nixl

import (
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
)

// producerCache is what a rank remembers of producers that have answered: with it and a ticket that names its
// blocks, the rank does not have to ask where they are.
type producerCache struct {
	mu  sync.Mutex
	all map[string]*producer // by life
}

// producer is a rank of a producer's life. It does not change.
type producer struct {
	address   string
	answer    answer // without what belongs to one hold
	transport string
	mode      string
	near      bool // it is on this machine, and we see its board
}

// remember keeps what the producer of a ticket has answered to a question that began at a moment of our clock.
// A producer that says it is another than the ticket's is not remembered.
func (r *rank) remember(from *ticket, a *answer, began uint64) *producer {
	p := &producer{address: from.Address, answer: *a}
	p.answer.Blocks, p.answer.Tokens = nil, 0
	var first uint64
	if len(a.Segments) > 0 {
		first = a.Segments[0].Addr
	}
	p.transport = r.node.transports.transport(r.backend.Name(), a.Host, a.PID, first)
	p.mode = r.mode(a, p.transport)
	p.near = a.Clock != "" && a.Clock == clockName() && began <= a.Now && a.Now <= monotonic() && a.Slots > 0 && canRead(a.PID, a.Board)
	if a.Life == "" || a.Life != from.Life {
		return p
	}
	r.producers.mu.Lock()
	defer r.producers.mu.Unlock()
	for life, other := range r.producers.all { // a former life at this address, or one too many
		if other.address == from.Address || len(r.producers.all) >= maxPeers {
			delete(r.producers.all, life)
		}
	}
	if r.producers.all == nil {
		r.producers.all = map[string]*producer{}
	}
	r.producers.all[a.Life] = p
	return p
}

func (m *producerCache) get(life string) *producer {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.all[life]
}

func (m *producerCache) forget(life string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.all, life)
}

// answers is what the producer would answer about a ticket's blocks; nil: the rank has to ask. A read that
// needs its process awake is a question first, which wakes it; a push is a question itself.
func (p *producer) answers(from *ticket, t *connector.Transfer, l *connector.Layout) *answer {
	if p == nil || p.address != from.Address || p.mode == modePull && copied(p.transport, rdmaDevices) || !from.names(t, l) {
		return nil
	}
	blocks, err := unpackIDs(from.IDs, len(l.Groups))
	if err != nil {
		return nil
	}
	a := p.answer
	a.Tokens, a.Blocks = from.Tokens, blocks
	return &a
}

// holds says whether the hold of a ticket is seen to be open now. False may mean that it cannot be seen.
func (p *producer) holds(slot int, sum ticketSum) bool {
	if p == nil || !p.near || slot < 1 || slot > p.answer.Slots {
		return false
	}
	var raw [slotBytes]byte
	local := []unix.Iovec{{Base: &raw[0], Len: slotBytes}}
	remote := []unix.RemoteIovec{{Base: uintptr(p.answer.Board + uint64(slot-1)*slotBytes), Len: slotBytes}}
	n, err := unix.ProcessVMReadv(p.answer.PID, local, remote, 0)
	return err == nil && n == slotBytes && slotSays(raw[:], sum)
}
