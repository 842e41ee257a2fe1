package mutants

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

// pdQuestion asks for one block of a hold, or says that a rank has all that it needs. Place counts a
// group's blocks from the prompt's first.
type pdQuestion struct {
	Engine   string            `json:"engine"`
	Epoch    uint64            `json:"epoch"`
	Hold     connector.HoldID  `json:"hold"`
	Slot     connector.BlockID `json:"slot"`
	Rank     int               `json:"rank"`
	Nonce    uint64            `json:"nonce"`
	Group    uint16            `json:"group"`
	Place    int               `json:"place"`
	Done     bool              `json:"done"`
	Reshaped bool              `json:"reshaped,omitempty"` // with Done, of another shape
	Last     bool              `json:"last,omitempty"`     // then: all is read
	Push     *pdPush           `json:"push,omitempty"`

	Layout *connector.Layout `json:"layout,omitempty"` // of who asks; faults believe it
}

// pdAnswer is a block; Gone: the hold does not have it. With a Window it is a write, and with Keys the end of them.
type pdAnswer struct {
	Nonce uint64 `json:"nonce"`
	Gone  bool   `json:"gone"`
	Key   []byte `json:"key"`
	Data  []byte `json:"data"`

	Window uint64   `json:"window,omitempty"`
	Item   int      `json:"item,omitempty"`
	Rank   int      `json:"rank,omitempty"`
	Keys   [][]byte `json:"keys,omitempty"`
}

const (
	pdMaxMessage = 1 << 20
	pdPatience   = 2500 * time.Millisecond // for one question or answer; longer than a lease
)

// writePD writes a message: its length, JSON, and the MAC of that.
func writePD(c net.Conn, secret []byte, m any) error {
	data, err := json.Marshal(m)
	if err != nil {
		return err
	}
	frame := append(binary.LittleEndian.AppendUint32(nil, uint32(len(data))), data...)
	mac := hmac.New(sha256.New, secret)
	_, _ = mac.Write(frame) // never fails
	_, err = c.Write(mac.Sum(frame))
	return err
}

// readPD reads a message and says whether its MAC is that of a secret.
func readPD(c net.Conn, oneRead bool) (data []byte, signed func(secret []byte) bool, err error) {
	head := make([]byte, 4)
	if _, err := io.ReadFull(c, head); err != nil {
		return nil, nil, err
	}
	n := binary.LittleEndian.Uint32(head)
	if n > pdMaxMessage {
		return nil, nil, fmt.Errorf("message of %d bytes: %w", n, connector.ErrCorrupt)
	}
	rest := make([]byte, int(n)+sha256.Size)
	if oneRead {
		_, err = c.Read(rest)
	} else {
		_, err = io.ReadFull(c, rest)
	}
	if err != nil {
		return nil, nil, err
	}
	return rest[:n], func(secret []byte) bool {
		mac := hmac.New(sha256.New, secret)
		_, _ = mac.Write(head)
		_, _ = mac.Write(rest[:n])
		return hmac.Equal(mac.Sum(nil), rest[n:])
	}, nil
}

func (n *pdNode) accept() {
	for {
		c, err := n.listener.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			continue
		}
		n.mu.Lock()
		n.dialled++
		n.conns[c] = struct{}{}
		conn := n.dialled
		n.mu.Unlock()
		n.tasks.Go(func() {
			n.serve(c, conn)
			_ = c.Close()
			n.mu.Lock()
			defer n.mu.Unlock()
			delete(n.conns, c)
		})
	}
}

// serve answers the questions of one connection, the conn-th. A peer that cannot sign with the hold's secret gets no answer.
func (n *pdNode) serve(c net.Conn, conn int) {
	var kept *pdHold // for a fault
	for {
		_ = c.SetReadDeadline(time.Now().Add(time.Minute))
		data, signed, err := readPD(c, false)
		if err != nil {
			return
		}
		var q pdQuestion
		err = json.Unmarshal(data, &q)
		if err != nil && !n.guesses {
			return
		}
		if q.Push != nil {
			if !n.write(c, conn, &q, signed) {
				return
			}
			continue
		}
		release := n.occupy()
		a, secret := n.answer(conn, &q, signed, &kept)
		release()
		if a == nil {
			return
		}
		_ = c.SetWriteDeadline(time.Now().Add(pdPatience))
		if err := writePD(c, secret, a); err != nil {
			return
		}
	}
}

// answer reads a block where it lies. The lease is looked at afterwards: what was read then was held.
func (n *pdNode) answer(conn int, q *pdQuestion, signed func([]byte) bool, kept **pdHold) (*pdAnswer, []byte) {
	from := n
	if n.foreignHold {
		from = n.all.newest(n)
	}
	from.mu.Lock()
	defer from.mu.Unlock()
	h := from.choose(conn, q, signed, *kept)
	if h == nil || !n.noMAC && !signed(h.secret) || !n.meant(q) {
		return nil, nil
	}
	*kept = h
	if q.Done || n.startedIsTaken {
		from.done(h, q)
	}
	if q.Done {
		return &pdAnswer{Nonce: q.Nonce}, h.secret
	}
	a := from.read(h, q)
	if time.Now().After(h.expires) && !n.noExpiry && !n.reaperStops && !n.oneCheck {
		return nil, nil
	}
	return a, h.secret
}

// meant reports whether a question is for this life of this engine.
func (n *pdNode) meant(q *pdQuestion) bool {
	return (n.noEngine || q.Engine == n.id.engine) && (n.noEpoch || q.Epoch == n.id.epoch)
}

// newest is the youngest producer of this process, n if there is none.
func (a *pdNodes) newest(n *pdNode) *pdNode {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, o := range slices.Backward(a.order) {
		if o.listener != nil {
			return o
		}
	}
	return n
}

// choose finds the hold that a question is about. The caller holds mu.
func (n *pdNode) choose(conn int, q *pdQuestion, signed func([]byte) bool, kept *pdHold) *pdHold {
	h := n.find(q)
	switch {
	case n.oneCheck && kept != nil:
		h = kept
	case n.byOrder && n.holds[connector.HoldID(conn)] != nil:
		h = n.holds[connector.HoldID(conn)]
	case n.guesses && (h == nil || !signed(h.secret)):
		h, *q = n.oldest(), pdQuestion{}
	}
	return h
}

// read copies a block; nil: its rank has no cache here. The caller holds mu.
func (n *pdNode) read(h *pdHold, q *pdQuestion) *pdAnswer {
	b, found := n.place(h, q)
	if n.slotByte {
		b.ID &= 0xFF
	}
	kv := n.caches[q.Rank]
	if n.firstRank {
		kv = n.caches[0]
	}
	if kv == nil {
		return nil
	}
	spans, err := n.spans(kv, b, q.Layout)
	if !found || err != nil || n.firstGone && n.beginsAnew(h) || n.oneOwner && n.owners[b.ID] != h.id {
		return &pdAnswer{Nonce: q.Nonce, Gone: true}
	}
	data := slices.Concat(spans...)
	if n.savedTails && b.Key == (connector.BlockKey{}) {
		clear(data)
		copy(data, n.saved[h.ended.Request].tail)
	}
	h.mix(q.Rank, b, data)
	return &pdAnswer{Nonce: q.Nonce, Key: b.Key[:], Data: data}
}

// spans is where a block lies, and for faults where it would lie if the cache were cut as that of who asks.
func (f *pdFaults) spans(kv *connector.KV, b connector.Block, asks *connector.Layout) ([][]byte, error) {
	if f.ownBlocks && int(b.ID) >= asks.Blocks {
		return nil, connector.ErrGone
	}
	spans, err := kv.Spans(b)
	if memory, at := kv.Region(0), 0; f.ownLayout && err == nil {
		for _, s := range asks.Segments {
			if from := s.Offset + int64(b.ID)*s.BlockStride; s.Group == b.Group {
				spans[at] = memory[min(from, int64(len(memory))-s.Bytes):][:s.Bytes]
				at++
			}
		}
	}
	for i := range spans {
		if f.shortLength {
			spans[i] = spans[i][:len(spans[i])&0xFFFF]
		}
	}
	return spans, err
}

// oldest is the oldest hold. The caller holds mu.
func (n *pdNode) oldest() *pdHold {
	for id := connector.HoldID(1); id <= n.last; id++ {
		if n.holds[id] != nil {
			return n.holds[id]
		}
	}
	return nil
}

// place finds a block by its place in the prompt: a group's blocks end with the last token.
func (n *pdNode) place(h *pdHold, q *pdQuestion) (connector.Block, bool) {
	var own []connector.Block
	for _, b := range h.ended.Blocks {
		if b.Group == q.Group {
			own = append(own, b)
		}
	}
	first := (h.ended.Tokens+n.size-1)/n.size - len(own)
	if n.fromFirst {
		first = 0
	}
	if n.placeByte {
		q.Place &= 0xFF
	}
	if at := q.Place - first; at >= 0 && at < len(own) {
		b := own[at]
		if n.shifted {
			b.ID++
		}
		return b, true
	}
	return connector.Block{}, false
}

// pdBlockTokens is the block size of the suite's engines.
const pdBlockTokens = 4
