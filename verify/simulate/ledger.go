package simulate

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/ticket"
	"github.com/kvport/kvport/internal/tracker"
)

// ledger knows every ticket that was issued, and checks those that are accepted.
type ledger struct {
	issued []*issued
	byHash map[uint64]*issued // of the signed bytes
	newest map[string]map[string]uint64
	nonce  uint64
}

type issued struct {
	signed    []byte
	engine    string
	epoch     uint64
	size      int // tokens of a block
	consumers int
	turn      bool                                    // for the next turn: nothing keeps its blocks
	used      map[string]map[connector.RequestID]bool // by the accepting engine's life
}

func newLedger() ledger {
	return ledger{byHash: map[uint64]*issued{}, newest: map[string]map[string]uint64{}}
}

// issue signs the ticket of a finished request as a host does.
func (w *World) issue(e *engine, t *tracker.Ticket, turn bool) []byte {
	env := &ticket.Envelope{
		Engine: e.name, Epoch: e.epoch, Hold: t.Hold, Tokens: t.Tokens, Lease: t.Lease, Consumers: t.Consumers, Plugin: t.Plugin,
		Shape: e.shape(), Cut: cutOf(t),
	}
	if turn && w.is(TurnLeased) {
		env.Lease = holdMax
	}
	w.tickets.nonce++
	binary.LittleEndian.PutUint64(env.Nonce[:], w.tickets.nonce)
	signed, err := ticket.Seal(w.key, env)
	if err != nil {
		w.fail('t', "%s cannot sign a ticket: %v", e.name, err)
		return nil
	}
	i := &issued{signed, e.name, e.epoch, e.size, env.Consumers, turn, map[string]map[connector.RequestID]bool{}}
	w.tickets.issued = append(w.tickets.issued, i)
	w.tickets.byHash[hash(string(signed))] = i
	return signed
}

// tamper is what happens to a ticket on its way to an engine.
func (l *ledger) tamper(t []byte, to *engine, d *rng, f Fault) []byte {
	if len(l.issued) == 0 {
		return t
	}
	other := l.issued[d.n(len(l.issued))].signed
	switch f {
	case faultLost:
		return nil
	case faultLater, faultBusy, faultStuck:
		if old := l.stale(to, d); old != nil {
			return old
		}
		return other
	case faultTwice, faultPartial, faultForeign:
		return other // replayed, or of another prompt
	case faultWrong, faultHalf, faultWild:
		bad := append([]byte(nil), other...)
		bad[d.n(len(bad))] ^= 1 << d.n(8)
		return bad
	default:
	}
	return t
}

// stale picks a ticket of a life of which an engine must know that it is over, because it has accepted one of a later life.
func (l *ledger) stale(at *engine, d *rng) []byte {
	newest := l.newest[fmt.Sprint(at.life)]
	var old []*issued
	for _, i := range l.issued {
		if i.epoch < newest[i.engine] {
			old = append(old, i)
		}
	}
	if len(old) == 0 {
		return nil
	}
	return old[d.n(len(old))].signed
}

// accepted checks that a ticket which an engine took is genuine, of its issuer's newest known life, and not used
// up. It reports whether it is of an earlier turn.
func (l *ledger) accepted(w *World, e *engine, id connector.RequestID, signed []byte) (turn bool) {
	i := l.byHash[hash(string(signed))]
	if i == nil {
		w.fail('t', "%s accepts a ticket for %s that nobody issued", e.name, id)
		return false
	}
	if i.size != e.size && i.turn {
		w.fail('t', "%s accepts a ticket for %s of blocks of %d tokens, which nothing keeps", e.name, id, i.size)
	}
	life := fmt.Sprint(e.life)
	if l.newest[life] == nil {
		l.newest[life] = map[string]uint64{}
	}
	if newest := l.newest[life][i.engine]; i.epoch < newest {
		w.fail('t', "%s accepts a ticket for %s of epoch %d of %s, and has seen epoch %d", e.name, id, i.epoch, i.engine, newest)
		return false
	}
	l.newest[life][i.engine] = i.epoch
	if i.used[life] == nil {
		i.used[life] = map[connector.RequestID]bool{}
	}
	i.used[life][id] = true
	if len(i.used[life]) > i.consumers {
		w.fail('t', "%s accepts a ticket for %s that was used %d times and allows %d", e.name, id, len(i.used[life])-1, i.consumers)
	}
	return i.turn
}

// verify opens a ticket as a host does.
func (h *host) verify(signed []byte, id connector.RequestID) (*ticket.Envelope, error) {
	e, err := ticket.Open(h.w.key, signed)
	if err != nil && h.w.is(AcceptForged) {
		if i := h.w.tickets.like(signed); i != nil {
			return ticket.Open(h.w.key, i.signed)
		}
	}
	if err != nil {
		return nil, err
	}
	err = h.guard.Check(e, id)
	switch {
	case h.w.is(AcceptReplayed) && errors.Is(err, ticket.ErrReplayed), h.w.is(AcceptStale) && errors.Is(err, ticket.ErrStale):
		return e, nil
	}
	return e, err
}

// like finds the ticket that a forged one was made of.
func (l *ledger) like(forged []byte) *issued {
	for _, i := range l.issued {
		if len(i.signed) != len(forged) {
			continue
		}
		same := 0
		for k := range forged {
			if forged[k] == i.signed[k] {
				same++
			}
		}
		if same >= len(forged)-1 {
			return i
		}
	}
	return nil
}
