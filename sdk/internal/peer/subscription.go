package peer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/wire"
	"github.com/kvport/kvport/lookupbuffer"
	"github.com/kvport/kvport/pipe"
)

// pushedTo is where this consumer listens for blocks that are pushed, or "".
func (s *Store) pushedTo() string {
	if s.listener == nil || !s.peers.Pushed {
		return ""
	}
	return s.listener.Address()
}

// What a producer that has stopped, or means harm, may cost.
const (
	maxPartial   = 1 << 17          // blocks of which parts have arrived over one link
	maxRanges    = 1 << 13          // parts of one block that do not touch: a producer sends what lies between two layers in one piece
	partPatience = 30 * time.Second // after this time without a part a block is given up: as long as a save may take after its last layer
)

// subscription receives what one producer computes, as long as the store is open.
type subscription struct {
	store    *Store
	address  string
	partial  map[connector.StoreKey]*partial
	received int64
	swept    time.Time // when blocks were last given up
}

// partial is a block of which some parts have arrived.
type partial struct {
	slot  *lookupbuffer.Slot // nil if there was no room; the parts are then dropped
	size  int
	got   ranges    // none without a slot
	count int       // bytes that have arrived
	grown time.Time // when a part came
}

// ranges are parts of a block: those of its bytes, from the first up to but not including the last, in order. They neither overlap
// nor touch.
type ranges [][2]int

// add adds a range, unless it overlaps one that is there.
func (r *ranges) add(from, to int) bool {
	all := *r
	at, _ := slices.BinarySearchFunc(all, from, func(x [2]int, from int) int { return cmp.Compare(x[0], from) })
	if at > 0 && all[at-1][1] > from || at < len(all) && all[at][0] < to {
		return false
	}
	after, before := at > 0 && all[at-1][1] == from, at < len(all) && all[at][0] == to
	switch {
	case after && before:
		all[at-1][1] = all[at][1]
		all = slices.Delete(all, at, at+1)
	case after:
		all[at-1][1] = to
	case before:
		all[at][0] = from
	default:
		all = slices.Insert(all, at, [2]int{from, to})
	}
	*r = all
	return true
}

// whole reports whether these are all bytes of a block.
func (r *ranges) whole(size int) bool { return len(*r) == 1 && (*r)[0] == [2]int{0, size} }

// mostPause is how long a subscription waits at most before it dials again.
const mostPause = 2 * time.Second

// run dials again and again. It warns of the first failure, and again when it hears that the producer refuses it, which
// the operator has to mend.
func (s *subscription) run() {
	for pause, warned, refused := redialAfter, false, false; ; pause = min(2*pause, mostPause) {
		began := time.Now()
		err := wire.Guard(s.store.log, "subscribe", s.once)
		if s.store.ctx.Err() != nil {
			return
		}
		if time.Since(began) > time.Second {
			pause, warned, refused = redialAfter, false, false
		}
		if refuses := errors.Is(err, connector.ErrIncompatible); !warned || refuses && !refused {
			s.store.log.Warn("a producer's layers do not arrive, its blocks are fetched instead", "address", s.address, "error", err)
			warned, refused = true, refuses
		}
		if !s.store.pause(pause) {
			return
		}
	}
}

// once dials and receives until the link breaks.
func (s *subscription) once() error {
	ctx, cancel := context.WithTimeout(s.store.ctx, s.store.peers.Wait)
	link, err := s.store.peers.Network.Dial(ctx, s.address)
	cancel()
	if err != nil {
		return err
	}
	s.partial, s.received = map[connector.StoreKey]*partial{}, 0
	defer func() {
		_ = link.Close()
		for k := range s.partial {
			s.drop(k)
		}
	}()
	if err := s.store.send(link.Out, &message{kind: kindSubscribe, from: s.store.pushedTo()}, nil); err != nil {
		return err
	}
	for {
		if err := s.receive(link); err != nil {
			return err
		}
	}
}

// receive handles one frame, or gives up the blocks that do not become whole if none comes for a long time.
func (s *subscription) receive(link pipe.Link) error {
	ctx, cancel := context.WithCancel(s.store.ctx)
	defer cancel()
	idle := time.AfterFunc(partPatience, cancel)
	defer idle.Stop()
	var m *message
	var payload []byte
	err := link.In.Recv(ctx, func(header []byte, size int) (spans [][]byte, err error) {
		idle.Reset(partPatience) // for the payload: a producer may stop in the middle of it
		if m, err = parseMessage(header, size); err != nil {
			return nil, err
		}
		if m.kind != kindParts {
			payload = make([]byte, size)
			return [][]byte{payload}, nil
		}
		for _, p := range m.parts {
			span, err := s.place(&p)
			if err != nil {
				return nil, err
			}
			spans = append(spans, span)
		}
		return spans, nil
	})
	switch {
	case err != nil && m == nil && ctx.Err() != nil && s.store.ctx.Err() == nil:
		s.sweep(time.Now())
		return nil
	case err != nil:
		return err
	}
	return s.handle(link.Out, m, payload)
}

// handle does what a message says.
func (s *subscription) handle(out pipe.Pipe, m *message, payload []byte) error {
	switch m.kind {
	case kindParts:
		for _, p := range m.parts {
			if err := s.arrived(&p); err != nil {
				return err
			}
		}
		s.sweep(time.Now())
		return s.store.send(out, &message{kind: kindTaken, bytes: s.received}, nil)
	case kindDrop:
		if err := m.parseKeys(payload); err != nil {
			return err
		}
		for _, k := range m.keys {
			s.drop(k)
		}
		return nil
	}
	return fmt.Errorf("a producer sent a message of kind %d: %w", m.kind, connector.ErrIncompatible)
}

// errMisfit is the error of parts that do not make up a block.
var errMisfit = fmt.Errorf("a producer sends parts that do not fit: %w", connector.ErrIncompatible)

// place returns the memory for a part.
func (s *subscription) place(p *part) ([]byte, error) {
	b := s.partial[p.key]
	if b == nil {
		if len(s.partial) >= maxPartial {
			return nil, fmt.Errorf("a producer has begun more than %d blocks: %w", maxPartial, connector.ErrIncompatible)
		}
		slot, err := s.room(p.key, int(p.total))
		if err != nil {
			return nil, err
		}
		b = &partial{slot: slot, size: int(p.total), grown: time.Now()}
		s.partial[p.key] = b
	}
	switch {
	case b.size != int(p.total):
		return nil, errMisfit
	case b.slot == nil:
		return make([]byte, p.size), nil
	}
	return b.slot.Bytes()[p.offset:][:p.size], nil
}

// room takes room for a block of which parts arrive; nil if there is none. Such blocks cannot be dropped for others, so all of them
// together take half of the buffer at most.
func (s *subscription) room(k connector.StoreKey, size int) (*lookupbuffer.Slot, error) {
	if s.store.partial.Add(int64(size)) > s.store.peers.Bytes/2 {
		s.store.partial.Add(-int64(size))
		return nil, nil //nolint:nilnil // the parts are dropped
	}
	slot, err := s.store.memory.Reserve(k, size)
	if err != nil {
		s.store.partial.Add(-int64(size))
	}
	if errors.Is(err, connector.ErrBusy) || errors.Is(err, connector.ErrIncompatible) {
		return nil, nil //nolint:nilnil // as above
	}
	return slot, err
}

// arrived counts a part; with the last one its block can be found.
func (s *subscription) arrived(p *part) error {
	s.received += int64(p.size)
	b := s.partial[p.key]
	if b == nil {
		return errMisfit
	}
	b.count += int(p.size)
	b.grown = time.Now()
	switch {
	case b.count > b.size:
		return errMisfit
	case b.slot == nil:
		if b.count == b.size {
			s.drop(p.key)
		}
		return nil
	case !b.got.add(int(p.offset), int(p.offset+p.size)) || len(b.got) > maxRanges:
		return errMisfit
	case b.got.whole(b.size):
		return s.end(p.key, nil)
	}
	return nil
}

// drop gives up a block that will not be complete.
func (s *subscription) drop(k connector.StoreKey) { _ = s.end(k, errUnwanted) }

// end makes a block visible if err is nil, and gives its room back otherwise.
func (s *subscription) end(k connector.StoreKey, err error) error {
	b := s.partial[k]
	delete(s.partial, k)
	if b == nil || b.slot == nil {
		return nil
	}
	s.store.partial.Add(-int64(b.size))
	return b.slot.Done(err)
}

// sweep gives up the blocks of which no part has come for a long time: their producer has stopped, or sends no more of them.
func (s *subscription) sweep(now time.Time) {
	if now.Sub(s.swept) < partPatience/2 {
		return
	}
	s.swept = now
	for k, b := range s.partial {
		if now.Sub(b.grown) >= partPatience {
			s.drop(k)
		}
	}
}
