// Package staged is what pipes have in common whose payload goes another way than their words: by UCX or
// NCCL, between memory that only the pipe uses.
//
// A link has one connection, over which go the words: a frame begins, a piece of it lies in slot i, slot i
// is free. Payload is copied into a slot here, moved by a [Mover] into the same slot of the peer's landing
// memory, and copied out from there; callers' memory is never in a transport's hands, so a call may be
// cancelled and its memory used again although a transfer goes on. The slots are all that a link holds.
package staged

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// A Mover moves payload from slots here to slots of the peer. One call of Put and one of Take run at a
// time. Their contexts end with the link; then they return, whatever the peer does.
type Mover interface {
	// Slot is the memory of slot i from which Put sends, as long as a piece.
	Slot(i int) []byte
	// Put moves the first n bytes of slot i to the peer's landing memory.
	Put(ctx context.Context, i, n int) error
	// Take gives the n bytes that have come, or come, into slot i. They do not change before the peer
	// has been told that the slot is free.
	Take(ctx context.Context, i, n int) ([]byte, error)
	// Free ends the mover, after the last call. clean says that the peer has ended too: otherwise it may
	// still write to the landing memory, which must not become anything else then.
	Free(clean bool) error
}

// Options are those of a link. Both ends have the same Room and Early.
type Options struct {
	Room
	Early    bool          // the peer is told of a piece before Put, since Put waits for Take; otherwise after it
	Patience time.Duration // for the peer to take a word
	NoDigest bool          // leaves payload to the transport's checksums
	SeedOut  uint64        // of the digests sent, which the peer has as its SeedIn
	SeedIn   uint64
}

// Inline is how many bytes of payload go with the words.
const Inline = 4 << 10

// maxHello bounds what two ends tell each other at the beginning, in bytes.
const maxHello = 64 << 10

const (
	helloMagic   = 0x6b767047 // "kvpG"
	helloVersion = 1
	helloHead    = 4 + 1 + 4
)

// Exchange tells the peer mine, at most 64 KiB, and gives what it tells. ctx interrupts it. A peer that is
// none of ours, or of another version, is connector.ErrIncompatible.
func Exchange(ctx context.Context, conn net.Conn, mine []byte) (theirs []byte, err error) {
	if len(mine) > maxHello {
		return nil, fmt.Errorf("hello of %d bytes: %w", len(mine), connector.ErrIncompatible)
	}
	done := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(done)
		_ = conn.SetDeadline(time.Unix(1, 0))
	})
	defer func() {
		if !stop() {
			<-done
			err = errors.Join(err, ctx.Err())
		}
	}()
	b := append(binary.LittleEndian.AppendUint32(nil, helloMagic), helloVersion)
	b = append(binary.LittleEndian.AppendUint32(b, uint32(len(mine))), mine...)
	if _, err := conn.Write(b); err != nil {
		return nil, err
	}
	var head [helloHead]byte
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		return nil, fmt.Errorf("the peer says nothing: %w: %w", err, connector.ErrGone)
	}
	n := binary.LittleEndian.Uint32(head[5:])
	switch {
	case binary.LittleEndian.Uint32(head[:]) != helloMagic || n > maxHello:
		return nil, fmt.Errorf("the peer is no kvport: %w", connector.ErrIncompatible)
	case head[4] != helloVersion:
		return nil, fmt.Errorf("peer speaks version %d, we %d: %w", head[4], helloVersion, connector.ErrIncompatible)
	}
	theirs = make([]byte, n)
	if _, err := io.ReadFull(conn, theirs); err != nil {
		return nil, fmt.Errorf("the peer stops in its hello: %w: %w", err, connector.ErrGone)
	}
	return theirs, nil
}

// New makes a link of a connection on which hellos were exchanged, and of a mover; both are the link's.
// done, which may be nil, is called when nothing of the link is left.
func New(conn net.Conn, m Mover, o Options, done func()) pipe.Link {
	l := &link{conn: conn, mover: m, o: o, done: done, parted: make(chan struct{})}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.out, l.in = newOut(l), newIn(l)
	l.tasks.Go(l.out.write)
	l.tasks.Go(l.in.take)
	go l.read()
	return pipe.Link{Out: l.out, In: l.in}
}
