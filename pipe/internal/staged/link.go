package staged

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// linger is how long a link that is over waits for its peer to end as well.
const linger = time.Second

// link is one end of a link: a connection, a mover and two pipes.
type link struct {
	conn  net.Conn
	mover Mover
	o     Options
	done  func()
	out   *out
	in    *in

	ctx    context.Context //nolint:containedctx // the link's life
	cancel context.CancelFunc
	tasks  sync.WaitGroup // goroutines that use the mover
	parted chan struct{}  // closed when both pipes are over and the peer was told

	writing sync.Mutex
	buffer  []byte

	mu    sync.Mutex
	over  [2]bool // out, in
	ended bool
	dirty bool // a Put has failed, and it may still write
}

// ending is whether one pipe of a link is over, and why.
type ending struct {
	mu   sync.Mutex
	err  error
	over chan struct{} // closed when err is set
}

// end ends the pipe, unless that has happened.
func (e *ending) end(err error) (first bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.err != nil {
		return false
	}
	e.err = err
	close(e.over)
	return true
}

func (e *ending) reason() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.err
}

// say sends one message. If the peer does not take it in time, the link ends.
func (l *link) say(w *message) error {
	l.writing.Lock()
	defer l.writing.Unlock()
	l.buffer = w.encode(l.buffer[:0])
	_ = l.conn.SetWriteDeadline(time.Now().Add(l.o.Patience))
	if _, err := l.conn.Write(l.buffer); err != nil {
		return fmt.Errorf("the peer does not take messages: %w: %w", err, connector.ErrGone)
	}
	return nil
}

// read receives the peer's messages until the last one, and then releases what the link holds.
func (l *link) read() {
	r := bufio.NewReaderSize(l.conn, 64<<10)
	var err error
	clean := false
	for err == nil {
		var w *message
		if w, err = readMessage(r); err == nil {
			clean = w.kind == messageBye
			err = l.hear(w)
		}
	}
	if !errors.Is(err, connector.ErrIncompatible) {
		err = fmt.Errorf("the peer has gone: %w: %w", err, connector.ErrGone)
	}
	l.lose(err)
	<-l.parted
	_ = l.conn.Close()
	_ = l.mover.Free(clean)
	if l.done != nil {
		l.done()
	}
}

// hear acts on one message.
func (l *link) hear(w *message) error {
	switch w.kind {
	case messageFree:
		return l.out.freed(w.slot)
	case messageTaken:
		return l.out.taken()
	case messageClosed:
		l.out.finish(fmt.Errorf("the receiver has closed: %w", pipe.ErrClosed))
		return nil
	case messageBye:
		return nil
	}
	return l.in.heard(w)
}

// lose ends both pipes. What has already come can still be received.
func (l *link) lose(err error) {
	l.out.finish(err)
	l.in.lost(err)
	l.cancel()
}

// halfOver records the end of one pipe. After the second, nothing is moved any more, and the peer is told.
func (l *link) halfOver(half int) {
	l.mu.Lock()
	l.over[half] = true
	last := l.over[0] && l.over[1] && !l.ended
	l.ended = l.ended || last
	l.mu.Unlock()
	if !last {
		return
	}
	l.cancel()
	go func() {
		defer close(l.parted)
		l.tasks.Wait()
		_ = l.conn.SetReadDeadline(time.Now().Add(linger))
		if l.isDirty() {
			_ = l.conn.Close()
			return
		}
		_ = l.say(&message{kind: messageBye}) // a peer that misses it keeps its landing memory for a while
		if c, ok := l.conn.(interface{ CloseWrite() error }); !ok || c.CloseWrite() != nil {
			_ = l.conn.Close()
		}
	}()
}

func (l *link) isDirty() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dirty
}

func (l *link) soil() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dirty = true
}

// The pipes of a link.
const (
	halfOut = iota
	halfIn
)

// The kinds of messages. The numbers are part of the protocol and never reused.
const (
	messageFrame  byte = 1 + iota // sender: a frame begins
	messagePiece                  // sender: a piece of it is in a slot, or is on its way there
	messageAbort                  // sender: the rest of the frame will not come
	messageClose                  // sender: there are no more frames
	messageFree                   // receiver: a slot is free
	messageTaken                  // receiver: a frame is over
	messageClosed                 // receiver: it does not receive any more
	messageBye                    // the last message: this end does not move anything any more
)

const (
	messageHead = 1 + 4     // kind, bytes that follow
	frameHead   = 8 + 4 + 8 // payload, header, digest of header and inline payload
	pieceSize   = 4 + 4 + 8 // slot, bytes, digest
	window      = 64        // frames that have begun and are not over
	maxWord     = frameHead + pipe.MaxHeader + Inline
)

// message is one control message.
type message struct {
	kind    byte
	header  []byte // frame
	payload int    // frame
	inline  []byte // frame: its payload if that is short
	slot, n int    // piece; free: slot
	sum     uint64 // frame: the digest of header and inline; piece: the digest of its bytes
	data    []byte // piece, when it was taken
	err     error  // set instead of all other fields: nothing follows
}

// inlined reports whether a frame's payload comes with it.
func (w *message) inlined() bool { return w.payload <= Inline }

func (w *message) encode(to []byte) []byte {
	to = append(to, w.kind, 0, 0, 0, 0)
	at := len(to)
	switch w.kind {
	case messageFrame:
		to = binary.LittleEndian.AppendUint64(to, uint64(w.payload))
		to = binary.LittleEndian.AppendUint32(to, uint32(len(w.header)))
		to = binary.LittleEndian.AppendUint64(to, w.sum)
		to = append(append(to, w.header...), w.inline...)
	case messagePiece:
		to = binary.LittleEndian.AppendUint32(to, uint32(w.slot))
		to = binary.LittleEndian.AppendUint32(to, uint32(w.n))
		to = binary.LittleEndian.AppendUint64(to, w.sum)
	case messageFree:
		to = binary.LittleEndian.AppendUint32(to, uint32(w.slot))
	}
	binary.LittleEndian.PutUint32(to[at-4:], uint32(len(to)-at))
	return to
}

// readMessage reads one message. Errors about an invalid message wrap connector.ErrIncompatible.
func readMessage(r io.Reader) (*message, error) {
	var head [messageHead]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	size := binary.LittleEndian.Uint32(head[1:])
	if size > maxWord {
		return nil, fmt.Errorf("a message of %d bytes: %w", size, connector.ErrIncompatible)
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(r, body); err != nil {
		return nil, err
	}
	return parseWord(head[0], body)
}

func parseWord(kind byte, b []byte) (*message, error) {
	w := &message{kind: kind}
	ok := false
	switch kind {
	case messageFrame:
		ok = w.parseFrame(b)
	case messagePiece:
		if ok = len(b) == pieceSize; ok {
			w.slot, w.n = int(binary.LittleEndian.Uint32(b)), int(binary.LittleEndian.Uint32(b[4:]))
			w.sum = binary.LittleEndian.Uint64(b[8:])
		}
	case messageFree:
		if ok = len(b) == 4; ok {
			w.slot = int(binary.LittleEndian.Uint32(b))
		}
	case messageAbort, messageClose, messageTaken, messageClosed, messageBye:
		ok = len(b) == 0
	}
	if !ok {
		return nil, fmt.Errorf("a message of unknown kind %d with %d bytes: %w", kind, len(b), connector.ErrIncompatible)
	}
	return w, nil
}

func (w *message) parseFrame(b []byte) bool {
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

// digest is a digest of bytes into which a seed is mixed that only the two ends know.
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
