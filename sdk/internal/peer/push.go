package peer

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/wire"
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
	sent *recent[connector.RequestID, *sending]
}

// sending is what a producer has sent of one request.
type sending struct {
	keys  map[connector.StoreKey]bool
	over  *subscriber // which got layers of it; nil: none did
	until int64       // the bytes that it had been sent with the last of them
}

func newPushing() *pushing {
	return &pushing{sent: newRecent[connector.RequestID, *sending](maxPushing)}
}

// add records keys as sent for a request, and returns those that had not been sent before.
func (p *pushing) add(r connector.RequestID, keys []connector.StoreKey) (fresh []connector.StoreKey) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.of(r)
	for _, k := range keys {
		if !s.keys[k] {
			s.keys[k], fresh = true, append(fresh, k)
		}
	}
	return fresh
}

// addLayers records keys as sent for a request, layer by layer, to a subscriber.
func (p *pushing) addLayers(r connector.RequestID, keys []connector.StoreKey, over *subscriber) {
	p.add(r, keys)
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.of(r)
	s.over, s.until = over, over.sent.Load()
}

// of finds or makes what is known about a request. The caller holds mu.
func (p *pushing) of(r connector.RequestID) *sending {
	s, known := p.sent.get(r)
	if !known {
		s = &sending{keys: map[connector.StoreKey]bool{}}
		p.sent.set(r, s)
	}
	return s
}

// layers is the subscriber that got layers of a request, or nil, and how many bytes it had been sent with the last of them.
func (p *pushing) layers(r connector.RequestID) (over *subscriber, until int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s, known := p.sent.get(r); known {
		return s.over, s.until
	}
	return nil, 0
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

// Producers push: a consumer that has subscribed gets the layers of every block as they are computed, and
// has the block when the producer has it. It asks for blocks that do not arrive like for any others.

const (
	maxParts = 1024         // parts of one frame
	partSize = keySize + 12 // size of a part in a header
)

// part is a piece of a block.
type part struct {
	key                 connector.StoreKey
	total, offset, size uint32 // size of the block, offset of the piece in it, size of the piece
}

// appendParts encodes the header of a frame of parts; the payload holds their bytes, one after the other.
func appendParts(parts []part) []byte {
	header := []byte{protocolVersion, kindParts}
	for _, p := range parts {
		header = append(header, p.key[:]...)
		header = binary.LittleEndian.AppendUint32(header, p.total)
		header = binary.LittleEndian.AppendUint32(header, p.offset)
		header = binary.LittleEndian.AppendUint32(header, p.size)
	}
	return header
}

// parseParts reads what appendParts wrote, for a payload of size bytes.
func parseParts(rest []byte, size int) ([]part, bool) {
	if len(rest)%partSize != 0 || len(rest) > maxParts*partSize {
		return nil, false
	}
	parts := make([]part, 0, len(rest)/partSize)
	sum := uint64(0)
	for ; len(rest) > 0; rest = rest[partSize:] {
		p := part{key: connector.StoreKey(rest[:keySize])}
		p.total = binary.LittleEndian.Uint32(rest[keySize:])
		p.offset = binary.LittleEndian.Uint32(rest[keySize+4:])
		p.size = binary.LittleEndian.Uint32(rest[keySize+8:])
		if p.size == 0 || uint64(p.offset)+uint64(p.size) > uint64(p.total) || p.total > math.MaxInt32 {
			return nil, false
		}
		sum += uint64(p.size)
		parts = append(parts, p)
	}
	return parts, sum == uint64(size)
}

// subscriber is a consumer that receives what is computed here.
type subscriber struct {
	out     pipe.Pipe
	address string // at which it listens for blocks that are pushed; "" if it does not; it does not change once pushes has it

	sent  atomic.Int64 // bytes
	taken atomic.Int64 // bytes that it has confirmed
	lost  func()       // ends its link

	dues []due // pushes.mu guards it
}

// due is what happens when a subscriber has confirmed a number of bytes.
type due struct {
	bytes int64
	then  func()
}

// settle does what is due. The caller holds pushes.mu.
func (s *subscriber) settle(bytes int64) {
	s.dues = slices.DeleteFunc(s.dues, func(d due) bool {
		if d.bytes <= bytes {
			d.then()
		}
		return d.bytes <= bytes
	})
}

// pushes knows who subscribes and what is being sent, and counts it.
type pushes struct {
	mu          sync.Mutex
	subscribers map[*subscriber]struct{}
	sending     map[connector.StoreKey]struct{} // blocks whose layers are being sent

	sent, taken, early atomic.Int64 // bytes
}

// add adds a subscriber that listens at an address. It subscribes once: saves that are under way read the address.
func (p *pushes) add(s *subscriber, address string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, known := p.subscribers[s]; known {
		return fmt.Errorf("a consumer has subscribed already: %w", connector.ErrIncompatible)
	}
	s.address = address
	p.subscribers[s] = struct{}{}
	return nil
}

func (p *pushes) remove(s *subscriber) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.subscribers, s)
	s.settle(math.MaxInt64)
}

// begin claims a block whose layers are to be sent. It reports false while another transfer sends them: a subscriber puts a block
// together of parts and could not tell those of one transfer from those of the other.
func (p *pushes) begin(k connector.StoreKey) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, busy := p.sending[k]; busy {
		return false
	}
	p.sending[k] = struct{}{}
	return true
}

// end gives up the claim to blocks: no more of their layers will be sent.
func (p *pushes) end(blocks []*layered) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, b := range blocks {
		delete(p.sending, b.key)
	}
}

func (p *pushes) all() []*subscriber {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Collect(maps.Keys(p.subscribers))
}

// after calls a function, which must not block, when a subscriber has confirmed a number of bytes or is gone.
func (p *pushes) after(s *subscriber, bytes int64, then func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, here := p.subscribers[s]; here && s.taken.Load() < bytes && len(s.dues) < maxPushing {
		s.dues = append(s.dues, due{bytes, then})
		return
	}
	then()
}

// confirmed records how much a subscriber has received.
func (p *pushes) confirmed(s *subscriber, bytes int64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if was := s.taken.Load(); bytes < was || bytes > s.sent.Load() {
		return fmt.Errorf("a consumer confirms %d bytes after %d, but %d were sent: %w", bytes, was, s.sent.Load(), connector.ErrIncompatible)
	}
	p.taken.Add(bytes - s.taken.Swap(bytes))
	s.settle(bytes)
	return nil
}

// layerStat is the first of LayerStats.
const layerStat = "layer_bytes_total"

// LayerStats declares what a connector counts about layers.
func LayerStats() []connector.StatInfo { return infos(layerNumbers()) }

// layerNumbers are the numbers of pushes.
func layerNumbers() []number[*pushes] {
	return []number[*pushes]{
		{layerStat, "Bytes sent to subscribers while they were computed, layer by layer.", connector.Counter, func(p *pushes) int64 { return p.sent.Load() }},
		{"layer_confirmed_bytes_total", "Those of them that subscribers have confirmed.", connector.Counter, func(p *pushes) int64 { return p.taken.Load() }},
		{"layer_early_bytes_total", "Those that were confirmed when the KV of the last layer was computed.", connector.Counter, func(p *pushes) int64 { return p.early.Load() }},
		{"subscribers", "Consumers that get layers as they are computed.", connector.Gauge, func(p *pushes) int64 { return int64(len(p.all())) }},
	}
}

// parseLayers reads the messages of subscriptions.
func (m *message) parseLayers(rest []byte, size int) (ok bool) {
	switch m.kind {
	case kindParts:
		m.parts, ok = parseParts(rest, size)
		return ok
	case kindTaken:
		if len(rest) != 8 || size != 0 {
			return false
		}
		m.bytes = int64(binary.LittleEndian.Uint64(rest))
		return m.bytes >= 0
	}
	m.from = string(rest)
	return len(rest) <= maxAddress && size == 0
}

// layered is a block that is being computed: its room in the buffer, and the offsets of its segments there.
type layered struct {
	key     connector.StoreKey
	block   connector.Block
	slot    *lookupbuffer.Slot
	offsets map[int]int // by segment
}

// roomForLayers takes room for a block whose layers are pushed. Until all of them are, nothing else can have it, so such blocks
// take half of the buffer at most.
func (s *Store) roomForLayers(k connector.StoreKey, size int) (slot *lookupbuffer.Slot, err error) {
	if s.layers.Add(int64(size)) > s.peers.Bytes/2 {
		err = connector.ErrBusy
	} else {
		slot, err = s.memory.Reserve(k, size)
	}
	if err != nil {
		s.layers.Add(-int64(size))
	}
	return slot, err
}

// end makes the block visible if err is nil, and gives its room back otherwise.
func (b *layered) end(s *Store, err error) error {
	s.layers.Add(-int64(len(b.slot.Bytes())))
	return b.slot.Done(err)
}

// push is what one transfer sends to its subscribers.
type push struct {
	store *Store
	to    map[*subscriber]int64 // how much each had confirmed when the transfer began
	sent  int64                 // bytes sent to each
	until time.Time             // when all has to be sent, from the last layer on; before that each frame has the patience of all
}

// beginPush begins to push what a request computes whose blocks are pushed to an address, or "": to all subscribers, or to the one
// that listens there.
func (s *Store) beginPush(to string) *push {
	p := &push{store: s, to: map[*subscriber]int64{}}
	for _, sub := range s.pushes.all() {
		if s.peers.LayersToTarget && (to == "" || sub.address != to) {
			continue
		}
		p.to[sub] = sub.taken.Load()
	}
	return p
}

// reached is a subscriber that has been sent all layers and listens at an address; nil if there is none.
func (p *push) reached(address string) *subscriber {
	for sub := range p.to {
		if address != "" && sub.address == address {
			return sub
		}
	}
	return nil
}

// early counts what subscribers had confirmed when the last layer was computed.
func (p *push) early() {
	for sub, before := range p.to {
		p.store.pushes.early.Add(max(0, min(sub.taken.Load()-before, p.sent)))
	}
}

// layers copies layers to the buffer and sends them.
func (p *push) layers(ctx context.Context, blocks []*layered, kv *connector.KV, from, to int) {
	var parts []part
	var spans [][]byte
	for _, b := range blocks {
		data := b.slot.Bytes()
		for _, s := range kv.Between(b.block.Group, from, to) {
			at := b.offsets[s]
			piece := data[at : at+copy(data[at:], kv.View(s, b.block.ID))]
			parts = append(parts, part{key: b.key, total: uint32(len(data)), offset: uint32(at), size: uint32(len(piece))})
			spans = append(spans, piece)
		}
		if len(parts) >= maxParts-len(b.offsets) {
			p.send(ctx, parts, spans)
			parts, spans = nil, nil
		}
	}
	p.send(ctx, parts, spans)
}

// send sends parts to every subscriber, unless ctx has ended.
func (p *push) send(ctx context.Context, parts []part, spans [][]byte) {
	if len(parts) == 0 || ctx.Err() != nil {
		return
	}
	size := int64(pipe.Size(spans))
	for sub := range p.to {
		sub.sent.Add(size)
	}
	p.tell(ctx, appendParts(parts), spans)
	p.store.pushes.sent.Add(size * int64(len(p.to)))
	p.sent += size
}

// tell sends one frame to all subscribers at once. It drops those that do not take it before ctx ends or they have tried the
// patience of all.
func (p *push) tell(ctx context.Context, header []byte, spans [][]byte) {
	until := p.until
	if until.IsZero() {
		until = time.Now().Add(p.store.peers.Patience)
	}
	ctx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	defer context.AfterFunc(p.store.ctx, cancel)()
	subscribers := slices.Collect(maps.Keys(p.to))
	errs := make([]error, len(subscribers))
	var sends sync.WaitGroup
	for i, sub := range subscribers {
		sends.Go(func() {
			errs[i] = wire.Guard(p.store.log, "send", func() error { return sub.out.Send(ctx, header, spans) })
		})
	}
	sends.Wait()
	for i, sub := range subscribers {
		if errs[i] == nil {
			continue
		}
		p.store.log.Warn("a subscriber was dropped", "error", errs[i])
		if errors.Is(errs[i], context.DeadlineExceeded) {
			p.store.counts.cut.Add(1)
		}
		sub.lost()
		delete(p.to, sub)
	}
}

// giveUp frees the room of blocks that will not be complete. It does not wait until subscribers have heard of that: the engine
// needs the blocks.
func (p *push) giveUp(blocks []*layered, err error) {
	if len(blocks) == 0 {
		return
	}
	for _, b := range blocks {
		_ = b.end(p.store, err)
	}
	p.store.tasks.Go(func() {
		p.drop(blocks)
		p.store.pushes.end(blocks)
	})
}

// drop tells subscribers that the rest of some blocks will not come.
func (p *push) drop(blocks []*layered) {
	m := message{kind: kindDrop}
	for _, b := range blocks {
		m.keys = append(m.keys, b.key)
	}
	for len(m.keys) > 0 {
		some := message{kind: kindDrop, keys: m.keys[:min(len(m.keys), maxWant)]}
		m.keys = m.keys[len(some.keys):]
		header, payload := some.encode()
		p.tell(p.store.ctx, header, [][]byte{payload})
	}
}
