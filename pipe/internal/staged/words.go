package staged

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/zeebo/xxh3"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// What ends say to each other. The numbers are part of the protocol and never reused.
const (
	wordFrame  byte = 1 + iota // sender: a frame begins
	wordPiece                  // sender: a piece of it is in a slot, or comes into it
	wordAbort                  // sender: the rest of the frame does not come
	wordClose                  // sender: there are no more frames
	wordFree                   // receiver: a slot is free
	wordTaken                  // receiver: a frame is over
	wordClosed                 // receiver: it receives no more
	wordBye                    // last: this end moves nothing any more
)

const (
	wordHead  = 1 + 4     // kind, bytes that follow
	frameHead = 8 + 4 + 8 // payload, header, digest of header and inline payload
	pieceSize = 4 + 4 + 8 // slot, bytes, digest
	window    = 64        // frames that were begun and are not over
	maxWord   = frameHead + pipe.MaxHeader + Inline
)

// word is one message.
type word struct {
	kind    byte
	header  []byte // frame
	payload int    // frame
	inline  []byte // frame: its payload, if that is short
	slot, n int    // piece; free: slot
	sum     uint64 // frame: of header and inline; piece: of its bytes
	data    []byte // piece, when it was taken
	err     error  // instead of all others: nothing follows
}

// inlined reports whether a frame's payload comes with it.
func (w *word) inlined() bool { return w.payload <= Inline }

func (w *word) encode(to []byte) []byte {
	to = append(to, w.kind, 0, 0, 0, 0)
	at := len(to)
	switch w.kind {
	case wordFrame:
		to = binary.LittleEndian.AppendUint64(to, uint64(w.payload))
		to = binary.LittleEndian.AppendUint32(to, uint32(len(w.header)))
		to = binary.LittleEndian.AppendUint64(to, w.sum)
		to = append(append(to, w.header...), w.inline...)
	case wordPiece:
		to = binary.LittleEndian.AppendUint32(to, uint32(w.slot))
		to = binary.LittleEndian.AppendUint32(to, uint32(w.n))
		to = binary.LittleEndian.AppendUint64(to, w.sum)
	case wordFree:
		to = binary.LittleEndian.AppendUint32(to, uint32(w.slot))
	}
	binary.LittleEndian.PutUint32(to[at-4:], uint32(len(to)-at))
	return to
}

// readWord reads one message. What cannot be one wraps connector.ErrIncompatible.
func readWord(r io.Reader) (*word, error) {
	var head [wordHead]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	size := binary.LittleEndian.Uint32(head[1:])
	if size > maxWord {
		return nil, fmt.Errorf("a word of %d bytes: %w", size, connector.ErrIncompatible)
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(r, body); err != nil {
		return nil, err
	}
	return parseWord(head[0], body)
}

func parseWord(kind byte, b []byte) (*word, error) {
	w := &word{kind: kind}
	ok := false
	switch kind {
	case wordFrame:
		ok = w.parseFrame(b)
	case wordPiece:
		if ok = len(b) == pieceSize; ok {
			w.slot, w.n = int(binary.LittleEndian.Uint32(b)), int(binary.LittleEndian.Uint32(b[4:]))
			w.sum = binary.LittleEndian.Uint64(b[8:])
		}
	case wordFree:
		if ok = len(b) == 4; ok {
			w.slot = int(binary.LittleEndian.Uint32(b))
		}
	case wordAbort, wordClose, wordTaken, wordClosed, wordBye:
		ok = len(b) == 0
	}
	if !ok {
		return nil, fmt.Errorf("a word of kind %d with %d bytes is none of ours: %w", kind, len(b), connector.ErrIncompatible)
	}
	return w, nil
}

func (w *word) parseFrame(b []byte) bool {
	if len(b) < frameHead {
		return false
	}
	payload, header := binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint32(b[8:])
	w.sum = binary.LittleEndian.Uint64(b[12:])
	rest := b[frameHead:]
	if payload > pipe.MaxPayload || header > pipe.MaxHeader || int(header) > len(rest) {
		return false
	}
	w.payload, w.header, w.inline = int(payload), rest[:header], rest[header:]
	if w.inlined() {
		return len(w.inline) == w.payload
	}
	return len(w.inline) == 0
}

// digest is the digest of bytes that a seed, known to both ends only, is mixed into.
type digest struct{ h *xxh3.Hasher }

func newDigest(seed uint64, off bool) *digest {
	if off {
		return &digest{}
	}
	return &digest{xxh3.NewSeed(seed)}
}

func (d *digest) reset() {
	if d.h != nil {
		d.h.Reset()
	}
}

func (d *digest) add(b []byte) {
	if d.h != nil {
		_, _ = d.h.Write(b) // never fails
	}
}

func (d *digest) sum() uint64 {
	if d.h == nil {
		return 0
	}
	return d.h.Sum64()
}
