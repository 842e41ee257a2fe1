package peer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/lookupbuffer"
	"github.com/kvport/kvport/pipe"
)

// The limits of what is remembered about blocks that are pushed.
const (
	maxPushing = 1 << 12 // requests whose blocks are being sent
	maxComing  = 1 << 14 // holds whose blocks are coming
)

// pushing is what a producer knows about requests whose blocks it pushes to a consumer.
type pushing struct {
	mu   sync.Mutex
	sent *recent[connector.RequestID, map[connector.StoreKey]bool]
}

func newPushing() *pushing {
	return &pushing{sent: newRecent[connector.RequestID, map[connector.StoreKey]bool](maxPushing)}
}

// add records keys as sent for a request, and returns those that had not been sent before.
func (p *pushing) add(r connector.RequestID, keys []connector.StoreKey) (fresh []connector.StoreKey) {
	p.mu.Lock()
	defer p.mu.Unlock()
	sent, known := p.sent.get(r)
	if !known {
		sent = map[connector.StoreKey]bool{}
		p.sent.set(r, sent)
	}
	for _, k := range keys {
		if !sent[k] {
			sent[k], fresh = true, append(fresh, k)
		}
	}
	return fresh
}

// end forgets a request.
func (p *pushing) end(r connector.RequestID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sent.remove(r)
}

// coming is what a consumer knows about holds whose blocks are pushed to it.
type coming struct {
	mu    sync.Mutex
	holds *recent[ticket, arrival]
}

func newComing() *coming { return &coming{holds: newRecent[ticket, arrival](maxComing)} }

type arrival struct {
	since time.Time // when a request first asked
	whole bool      // the producer has said that it has sent everything
}

// whole records that a producer has sent all blocks of a hold.
func (c *coming) whole(t ticket) {
	c.mu.Lock()
	defer c.mu.Unlock()
	a, _ := c.holds.get(t)
	a.whole = true
	c.holds.set(t, a)
}

// waits reports whether more of a hold may still come, within a time limit that starts with the first
// query.
func (c *coming) waits(t ticket, within time.Duration) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	a, _ := c.holds.get(t)
	if a.since.IsZero() {
		a.since = time.Now()
	}
	c.holds.set(t, a)
	return !a.whole && time.Since(a.since) < within
}

// target is the address to which the blocks of a request are pushed, or "" if they are not pushed.
func (s *Store) target(r connector.RequestID) string {
	if s.peers.Push == nil || s.listener == nil || r == "" {
		return ""
	}
	to := s.peers.Push(r)
	if to == s.listener.Address() {
		return ""
	}
	return to
}

// push sends saved blocks to a consumer, and waits for the consumer if the config says so. Blocks that
// cannot be sent stay in the buffer until the consumer asks for them.
func (s *Store) push(ctx context.Context, to string, m *message) {
	p := s.producer(to)
	if s.peers.Await {
		m.done = make(chan struct{})
	}
	if p == nil || !p.enqueue(m) {
		s.counts.pushFailed.Add(int64(len(m.keys)))
		return
	}
	if !s.peers.Await {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, s.peers.Patience)
	defer cancel()
	select {
	case <-m.done:
	case <-ctx.Done():
	case <-s.ctx.Done():
	}
}

// pushAll sends the blocks of one message, from the buffer.
func (p *producer) pushAll(link *producerLink, m *message) error {
	s := p.store
	for i, k := range m.keys {
		size := 0
		found, err := s.memory.Read(k, func(data []byte) error {
			size = len(data)
			return s.send(link.Out, &message{kind: kindBlock, key: k}, data)
		})
		if err != nil {
			s.counts.pushFailed.Add(int64(len(m.keys) - i))
			return err
		}
		if found {
			s.counts.pushed.Add(1)
			s.counts.pushedBytes.Add(int64(size))
		}
	}
	return nil
}

// errUnasked refuses a block from a peer that is not allowed to send one.
var errUnasked = fmt.Errorf("a peer sent a block, which no peer may do here: %w", connector.ErrIncompatible)

// roomForPushed returns the memory for a block that a producer pushes.
func (s *Store) roomForPushed(k connector.StoreKey, size int) (*lookupbuffer.Slot, error) {
	if !s.peers.Pushed {
		return nil, errUnasked
	}
	if s.has(k) {
		return nil, errUnwanted // the block is already there
	}
	slot, err := s.memory.Reserve(k, size)
	if err != nil {
		s.counts.dropped.Add(1)
		return nil, fmt.Errorf("%w: %w", errUnwanted, err)
	}
	return slot, nil
}

// receive handles one frame from a peer. A block goes to the memory that room returns and stays there until
// it is loaded. A nil message means that the frame was a block for which there is no use.
func (s *Store) receive(in pipe.Pipe, room func(connector.StoreKey, int) (*lookupbuffer.Slot, error)) (*message, error) {
	var m *message
	var slot *lookupbuffer.Slot
	var payload []byte
	drop := func() {
		if slot != nil {
			_ = slot.Done(errUnwanted)
			slot = nil
		}
	}
	err := in.Recv(s.ctx, func(header []byte, size int) (spans [][]byte, err error) {
		drop() // the frame may come a second time
		if m, err = parseMessage(header, size); err != nil {
			return nil, err
		}
		if m.kind == kindParts {
			return nil, errUnasked
		}
		if m.kind == kindBlock {
			if slot, err = room(m.key, size); err != nil {
				return nil, err
			}
			return [][]byte{slot.Bytes()}, nil
		}
		payload = make([]byte, size)
		return [][]byte{payload}, nil
	})
	switch {
	case errors.Is(err, errUnwanted):
		return nil, nil //nolint:nilnil // the frame was received, and there is nothing to do
	case err != nil:
		drop()
		return nil, err
	case m.kind == kindBlock:
		s.counts.received.Add(1)
		s.counts.receivedBytes.Add(int64(len(slot.Bytes())))
		return m, slot.Done(nil)
	}
	return m, m.parseKeys(payload)
}

// counts are the numbers of a Store.
type counts struct {
	pushed, pushedBytes, pushFailed, served, servedBytes, received, receivedBytes, dropped, cut atomic.Int64
}

// Stats declares what a connector counts, except for layers and for the numbers of Peers.Stats.
func Stats() []connector.StatInfo { return infos(numbers()) }

// Stats implements connector.StatsSource.
func (s *Store) Stats(context.Context) ([]connector.Stat, error) {
	stats := values(numbers(), s)
	if s.layered {
		stats = append(stats, values(layerNumbers(), &s.pushes)...)
	}
	if s.peers.Stats != nil {
		stats = append(stats, s.peers.Stats()...)
	}
	return stats, nil
}

// numbers are the numbers of a Store.
func numbers() []number[*Store] {
	return []number[*Store]{
		{"pushed_blocks_total", "Blocks that a producer sent to the consumer that a request names.", connector.Counter, func(s *Store) int64 { return s.counts.pushed.Load() }},
		{"pushed_bytes_total", "Bytes of those blocks.", connector.Counter, func(s *Store) int64 { return s.counts.pushedBytes.Load() }},
		{"push_failures_total", "Blocks that could not be sent, and wait to be asked for.", connector.Counter, func(s *Store) int64 { return s.counts.pushFailed.Load() }},
		{"served_blocks_total", "Blocks that consumers asked for and were sent.", connector.Counter, func(s *Store) int64 { return s.counts.served.Load() }},
		{"served_bytes_total", "Bytes of those blocks.", connector.Counter, func(s *Store) int64 { return s.counts.servedBytes.Load() }},
		{"received_blocks_total", "Blocks that arrived from producers.", connector.Counter, func(s *Store) int64 { return s.counts.received.Load() }},
		{"received_bytes_total", "Bytes of those blocks.", connector.Counter, func(s *Store) int64 { return s.counts.receivedBytes.Load() }},
		{"dropped_blocks_total", "Blocks that arrived and found no room.", connector.Counter, func(s *Store) int64 { return s.counts.dropped.Load() }},
		{"peers_cut_total", "Links given up because the peer did not answer or receive in time.", connector.Counter, func(s *Store) int64 { return s.counts.cut.Load() }},
		{"spilled_blocks_total", "Blocks that moved from the buffer to the pool of host memory.", connector.Counter, func(s *Store) int64 { return s.memory.Spilled() }},
		{"buffer_bytes", "Bytes of blocks in the buffer.", connector.Gauge, func(s *Store) int64 { return s.memory.Bytes() }},
		{"pool_bytes", "Bytes of blocks in the pool of host memory.", connector.Gauge, func(s *Store) int64 { return s.memory.Pooled() }},
	}
}

// number is one number of a T that a connector reports.
type number[T any] struct {
	name, help string
	kind       connector.StatKind
	of         func(T) int64
}

// infos returns the declarations of numbers.
func infos[T any](list []number[T]) []connector.StatInfo {
	out := make([]connector.StatInfo, len(list))
	for i, n := range list {
		out[i] = connector.StatInfo{Name: n.name, Help: n.help, Kind: n.kind}
	}
	return out
}

// values returns their present values.
func values[T any](list []number[T], of T) []connector.Stat {
	out := make([]connector.Stat, len(list))
	for i, n := range list {
		out[i] = connector.Stat{Name: n.name, Value: float64(n.of(of))}
	}
	return out
}
