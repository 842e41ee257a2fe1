package peer

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/kvport/kvport/connector"
)

// The kinds of messages between peers. The numbers are part of the protocol and never reused.
const (
	kindWant      byte = 1 + iota // consumer: the payload holds the keys of blocks to send
	kindBlock                     // producer: the header names a block, and the payload is that block
	kindGone                      // producer: the payload holds the keys of blocks that it does not have
	kindFetched                   // consumer: the header names a hold whose blocks it has
	kindPushed                    // producer: the header names one of its holds and its address; everything that it pushes of that hold has been sent
	kindSubscribe                 // consumer: it subscribes to what is computed from now on, layer by layer; the header names its own address if blocks are pushed to it
	kindParts                     // producer: the header names pieces of blocks, and the payload holds them
	kindDrop                      // producer: the payload holds the keys of blocks whose other pieces will not come
	kindTaken                     // consumer: the header counts the bytes of pieces that have arrived over this link
)

// kindPush is never sent: it makes a producer send blocks as kindBlock.
const kindPush byte = 255

const (
	protocolVersion = 1 // first byte of every header and ticket
	keySize         = len(connector.StoreKey{})
)

// message is one frame between peers.
type message struct {
	kind byte
	keys []connector.StoreKey // want, gone
	key  connector.StoreKey   // block
	hold connector.HoldID     // fetched, pushed
	from string               // pushed: the producer's address; subscribe: the consumer's, or ""

	parts []part // parts
	bytes int64  // taken

	done chan struct{} // push: closed when the message was sent or cannot be sent; nil if nobody waits
}

// over tells whoever waits for a message that it was sent or cannot be sent.
func (m *message) over() {
	if m.done != nil {
		close(m.done)
	}
}

// encode returns header and payload, except for the payload of a block.
func (m *message) encode() (header, payload []byte) {
	header = []byte{protocolVersion, m.kind}
	switch m.kind {
	case kindBlock:
		header = append(header, m.key[:]...)
	case kindFetched, kindPushed:
		header = append(binary.LittleEndian.AppendUint64(header, uint64(m.hold)), m.from...)
	case kindSubscribe:
		header = append(header, m.from...)
	case kindTaken:
		header = binary.LittleEndian.AppendUint64(header, uint64(m.bytes))
	case kindWant, kindGone, kindDrop:
		payload = make([]byte, 0, len(m.keys)*keySize)
		for _, k := range m.keys {
			payload = append(payload, k[:]...)
		}
	}
	return header, payload
}

// parseMessage reads a header and checks the payload's size. Errors wrap connector.ErrIncompatible.
func parseMessage(header []byte, size int) (*message, error) {
	ok := len(header) >= 2 && header[0] == protocolVersion
	m := &message{}
	if ok {
		m.kind = header[1]
		ok = m.parse(header[2:], size)
	}
	if !ok {
		return nil, fmt.Errorf("message with %d bytes of header and %d of payload does not follow the protocol: %w", len(header), size, connector.ErrIncompatible)
	}
	return m, nil
}

// parse reads what follows the kind in a header.
func (m *message) parse(rest []byte, size int) bool {
	switch m.kind {
	case kindWant, kindGone, kindDrop:
		return len(rest) == 0 && size%keySize == 0 && size <= maxWant*keySize
	case kindBlock:
		if len(rest) != keySize || size == 0 {
			return false
		}
		m.key = connector.StoreKey(rest)
		return true
	case kindFetched, kindPushed:
		return m.parseHold(rest) && size == 0
	case kindSubscribe, kindParts, kindTaken:
		return m.parseLayers(rest, size)
	}
	return false
}

// parseHold reads a hold and, if it was pushed, the address of its producer.
func (m *message) parseHold(b []byte) bool {
	if len(b) < 8 {
		return false
	}
	m.hold, m.from = connector.HoldID(binary.LittleEndian.Uint64(b)), string(b[8:])
	if m.kind == kindPushed {
		return m.from != "" && len(m.from) <= maxAddress
	}
	return m.from == ""
}

// parseKeys reads the payload of want and gone.
func (m *message) parseKeys(payload []byte) error {
	if len(payload)%keySize != 0 {
		return fmt.Errorf("%d bytes of keys: %w", len(payload), connector.ErrIncompatible)
	}
	for ; len(payload) > 0; payload = payload[keySize:] {
		m.keys = append(m.keys, connector.StoreKey(payload[:keySize]))
	}
	return nil
}

// ticket is what a consumer needs to find a producer: the plugin's part of a signed ticket.
type ticket struct {
	hold    connector.HoldID
	address string
	pushed  bool // the producer sends the blocks to the consumer without being asked
}

// The ticket of blocks that are pushed has its own first byte and its own end, so that no change of one
// byte turns one kind of ticket into the other.
const (
	pushedVersion = 2
	pushedEnd     = "\x00pushed"
)

// maxAddress limits the length of an address in a ticket.
const maxAddress = 1024

func (t ticket) encode() []byte {
	version, end := byte(protocolVersion), ""
	if t.pushed {
		version, end = pushedVersion, pushedEnd
	}
	return append(append(binary.LittleEndian.AppendUint64([]byte{version}, uint64(t.hold)), t.address...), end...)
}

func parseTicket(b []byte) (ticket, error) {
	pushed := bytes.HasSuffix(b, []byte(pushedEnd))
	ours := len(b) >= 10 && (b[0] == protocolVersion && !pushed || b[0] == pushedVersion && pushed)
	address := bytes.TrimSuffix(b[min(9, len(b)):], []byte(pushedEnd))
	if !ours || len(address) == 0 || len(address) > maxAddress {
		return ticket{}, fmt.Errorf("ticket of %d bytes does not follow the protocol: %w", len(b), connector.ErrIncompatible)
	}
	return ticket{connector.HoldID(binary.LittleEndian.Uint64(b[1:])), string(address), pushed}, nil
}

// maxHolds limits the holds that are remembered, and the reports that nobody has fetched.
const maxHolds = 1 << 14

// holdTable knows how often holds are still to be fetched.
type holdTable struct {
	mu     sync.Mutex
	waits  *recent[connector.HoldID, int]
	report chan connector.HoldID
}

func newHoldTable() *holdTable {
	return &holdTable{waits: newRecent[connector.HoldID, int](maxHolds), report: make(chan connector.HoldID, maxHolds)}
}

// open returns a new id of a hold for some consumers. Ids are random, so a ticket that was changed, or one from an earlier process of
// the plugin, names no open hold (rule PD-09).
func (h *holdTable) open(consumers int) connector.HoldID {
	h.mu.Lock()
	defer h.mu.Unlock()
	id := connector.HoldID(rand.Uint64()>>1 | 1)
	for h.waits.has(id) {
		id += 2
	}
	h.waits.set(id, consumers)
	return id
}

// fetched records that a consumer has fetched a hold. After its last one, or for an unknown hold, it does
// nothing.
func (h *holdTable) fetched(id connector.HoldID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if left, waits := h.waits.get(id); waits {
		if h.waits.set(id, left-1); left == 1 {
			h.waits.remove(id)
		}
		select {
		case h.report <- id:
		default: // the engine does not ask; weak holds end on their own
		}
	}
}

// consumed waits for holds that were fetched.
func (h *holdTable) consumed(ctx context.Context) ([]connector.HoldID, error) {
	select {
	case id := <-h.report:
		ids := []connector.HoldID{id}
		for len(h.report) > 0 {
			ids = append(ids, <-h.report)
		}
		return ids, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// recent is a map of the keys that were added last. A key is dropped when limit more keys have been added,
// however often it was set in between. The caller must hold a lock.
type recent[K comparable, V any] struct {
	limit   int
	entries map[K]recentEntry[V]
	order   []K    // in the order of their addition, including deleted keys
	first   uint64 // sequence number of order[0]
}

type recentEntry[V any] struct {
	value V
	turn  uint64 // sequence number of its addition
}

func newRecent[K comparable, V any](limit int) *recent[K, V] {
	return &recent[K, V]{limit: limit, entries: map[K]recentEntry[V]{}}
}

// get returns a key's value.
func (r *recent[K, V]) get(k K) (value V, known bool) {
	e, known := r.entries[k]
	return e.value, known
}

// has reports whether a key is there.
func (r *recent[K, V]) has(k K) bool {
	_, known := r.entries[k]
	return known
}

// set gives a key a value, and drops the oldest key if there is one too many.
func (r *recent[K, V]) set(k K, value V) {
	e, known := r.entries[k]
	e.value = value
	if !known {
		e.turn = r.first + uint64(len(r.order))
		r.order = append(r.order, k)
	}
	r.entries[k] = e
	if len(r.order) > r.limit {
		if oldest := r.order[0]; r.entries[oldest].turn == r.first { // the key was not deleted and, perhaps, added again
			delete(r.entries, oldest)
		}
		r.order, r.first = r.order[1:], r.first+1
	}
}

// remove deletes a key.
func (r *recent[K, V]) remove(k K) { delete(r.entries, k) }
