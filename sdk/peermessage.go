package sdk

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/kvport/kvport/connector"
)

// What peers say to each other. The numbers are part of the protocol and never reused.
const (
	kindWant      byte = 1 + iota // consumer: the payload is keys of blocks to send
	kindBlock                     // producer: the header names a block, the payload is it
	kindGone                      // producer: the payload is keys of blocks that it does not have
	kindFetched                   // consumer: the header names a hold whose blocks it has
	kindPushed                    // producer: the header names a hold of its, and its address: what it pushes of it was sent
	kindSubscribe                 // consumer: it wants what is computed from now on, layer by layer
	kindParts                     // producer: the header names pieces of blocks, the payload is they
	kindDrop                      // producer: the payload is keys of blocks whose other pieces will not come
	kindTaken                     // consumer: the header counts the bytes of pieces that have come over this link
)

// kindPush is not sent: it has a producer send blocks as kindBlock.
const kindPush byte = 255

const (
	peerVersion = 1 // first byte of every header and ticket
	keySize     = len(connector.StoreKey{})
)

// message is one frame between peers.
type message struct {
	kind byte
	keys []connector.StoreKey // want, gone
	key  connector.StoreKey   // block
	hold connector.HoldID     // fetched, pushed
	from string               // pushed: the producer's address

	parts []part // parts
	bytes int64  // taken

	done chan struct{} // push: closed when it was sent or cannot be; nil: nobody waits
}

// over tells who waits for a message that it was sent or cannot be.
func (m *message) over() {
	if m.done != nil {
		close(m.done)
	}
}

// encode gives header and payload, but for the payload of a block.
func (m *message) encode() (header, payload []byte) {
	header = []byte{peerVersion, m.kind}
	switch m.kind {
	case kindBlock:
		header = append(header, m.key[:]...)
	case kindFetched, kindPushed:
		header = append(binary.LittleEndian.AppendUint64(header, uint64(m.hold)), m.from...)
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
	ok := len(header) >= 2 && header[0] == peerVersion
	m := &message{}
	if ok {
		m.kind = header[1]
		ok = m.parse(header[2:], size)
	}
	if !ok {
		return nil, fmt.Errorf("message with %d bytes of header and %d of payload is none of ours: %w", len(header), size, connector.ErrIncompatible)
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

// parseHold reads a hold and, where it was pushed, whose it is.
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

// peerTicket is what a consumer needs to find a producer: the plugin's part of a signed ticket.
type peerTicket struct {
	hold    connector.HoldID
	address string
	pushed  bool // the producer sends the blocks to the consumer by itself
}

// The ticket of blocks that are pushed has a first byte and an end of its own, so that no change of one byte
// makes it of another.
const (
	pushedVersion = 2
	pushedEnd     = "\x00pushed"
)

// maxAddress is the length of an address in a ticket.
const maxAddress = 1024

func (t peerTicket) encode() []byte {
	version, end := byte(peerVersion), ""
	if t.pushed {
		version, end = pushedVersion, pushedEnd
	}
	return append(append(binary.LittleEndian.AppendUint64([]byte{version}, uint64(t.hold)), t.address...), end...)
}

func parsePeerTicket(b []byte) (peerTicket, error) {
	pushed := bytes.HasSuffix(b, []byte(pushedEnd))
	ours := len(b) >= 10 && (b[0] == peerVersion && !pushed || b[0] == pushedVersion && pushed)
	address := bytes.TrimSuffix(b[min(9, len(b)):], []byte(pushedEnd))
	if !ours || len(address) == 0 || len(address) > maxAddress {
		return peerTicket{}, fmt.Errorf("ticket of %d bytes is none of ours: %w", len(b), connector.ErrIncompatible)
	}
	return peerTicket{connector.HoldID(binary.LittleEndian.Uint64(b[1:])), string(address), pushed}, nil
}

// maxHolds bounds the holds that are remembered, and the reports that nobody has asked for.
const maxHolds = 1 << 14

// holdTable knows which holds were not fetched yet.
type holdTable struct {
	mu     sync.Mutex
	waits  *recent[connector.HoldID, struct{}]
	report chan connector.HoldID
}

func newHoldTable() *holdTable {
	return &holdTable{waits: newRecent[connector.HoldID, struct{}](maxHolds), report: make(chan connector.HoldID, maxHolds)}
}

// open gives a new id. None says anything of another, so a ticket that was changed, or one of a plugin's
// former life, names no open hold (rule PD-09).
func (h *holdTable) open() connector.HoldID {
	h.mu.Lock()
	defer h.mu.Unlock()
	id := connector.HoldID(rand.Uint64()>>1 | 1)
	for h.waits.has(id) {
		id += 2
	}
	h.waits.set(id, struct{}{})
	return id
}

// fetched notes that a consumer has fetched a hold; a second time, or of an unknown one, nothing.
func (h *holdTable) fetched(id connector.HoldID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.waits.has(id) {
		h.waits.remove(id)
		select {
		case h.report <- id:
		default: // the engine does not ask; weak holds end by themselves
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
