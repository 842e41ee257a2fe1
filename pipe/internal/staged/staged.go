// Package staged is the common part of pipes whose payload takes another way than their control messages:
// it goes over UCX or NCCL, between memory that only the pipe uses.
//
// A link has one connection, which carries the control messages: a frame begins, a piece of it is in slot
// i, slot i is free. Payload is copied into a slot here, moved by a [Mover] into the same slot of the
// peer's landing memory, and copied out from there. A transport never touches the memory of callers, so a
// call may be cancelled and its memory used again while a transfer is still running. The slots are the only
// memory of a link.
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

// A Mover moves payload from slots here to slots of the peer. At most one call of Put and one of Take run
// at the same time. Their contexts end with the link; then they return, whatever the peer does.
type Mover interface {
	// Slot returns the memory of slot i, from which Put sends. It is as long as a piece.
	Slot(i int) []byte
	// Put moves the first n bytes of slot i to the peer's landing memory.
	Put(ctx context.Context, i, n int) error
	// Take returns the n bytes of the piece in slot i, and waits for them if necessary. They do not change
	// before the peer has been told that the slot is free.
	Take(ctx context.Context, i, n int) ([]byte, error)
	// Free ends the mover, after the last call. clean says that the peer has also ended: otherwise it may
	// still write to the landing memory, which must then not be used for anything else.
	Free(clean bool) error
}

// Options configure a link. Both ends have the same Room and Early.
type Options struct {
	Room
	Early    bool          // the peer is told about a piece before Put, because Put waits for Take; otherwise after Put
	Patience time.Duration // how long the peer may take to accept a control message
	NoDigest bool          // leaves the check of payload to the transport's checksums
	SeedOut  uint64        // for the digests sent; the peer's SeedIn is equal
	SeedIn   uint64
}

// Inline is how many bytes of payload a control message carries itself.
const Inline = 4 << 10

// maxHello bounds what two ends tell each other at the beginning, in bytes.
const maxHello = 64 << 10

const (
	helloMagic   = 0x6b767047 // "kvpG"
	helloVersion = 1
	helloHead    = 4 + 1 + 4
)

// Exchange sends mine, at most 64 KiB, to the peer and returns what the peer sends. ctx interrupts it. A
// peer with another protocol or version is connector.ErrIncompatible.
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
		return nil, fmt.Errorf("the peer sends no hello: %w: %w", err, connector.ErrGone)
	}
	n := binary.LittleEndian.Uint32(head[5:])
	switch {
	case binary.LittleEndian.Uint32(head[:]) != helloMagic || n > maxHello:
		return nil, fmt.Errorf("the peer does not speak kvport's protocol: %w", connector.ErrIncompatible)
	case head[4] != helloVersion:
		return nil, fmt.Errorf("the peer speaks version %d, this end version %d: %w", head[4], helloVersion, connector.ErrIncompatible)
	}
	theirs = make([]byte, n)
	if _, err := io.ReadFull(conn, theirs); err != nil {
		return nil, fmt.Errorf("the peer stops in its hello: %w: %w", err, connector.ErrGone)
	}
	return theirs, nil
}

// New makes a link of a connection on which both ends have exchanged their hellos, and of a mover. The link
// owns both. done, which may be nil, is called when nothing of the link is left.
func New(conn net.Conn, m Mover, o Options, done func()) pipe.Link {
	l := &link{conn: conn, mover: m, o: o, done: done, parted: make(chan struct{})}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.out, l.in = newOut(l), newIn(l)
	l.tasks.Go(l.out.write)
	l.tasks.Go(l.in.take)
	go l.read()
	return pipe.Link{Out: l.out, In: l.in}
}
