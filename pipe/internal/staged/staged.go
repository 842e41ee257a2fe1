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
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
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

const (
	defaultPatience = 3 * time.Second
	maxRoom         = 1 << 30 // bytes of one direction of a link
)

// Room says how the memory of each direction of a link is divided. Both ends have the same Room.
type Room struct {
	Piece int // bytes of a slot, moved at a time
	Slots int // number of slots
}

// Settle fills in defaults for fields that are 0. The other fields must be positive, and the whole at most
// 1 GiB; otherwise the error wraps connector.ErrIncompatible.
func (r Room) Settle(defaults Room) (Room, error) {
	r.Piece, r.Slots = cmp.Or(r.Piece, defaults.Piece), cmp.Or(r.Slots, defaults.Slots)
	if r.Piece < 1 || r.Slots < 1 || r.Piece > maxRoom/r.Slots {
		return r, fmt.Errorf("%d pieces of %d bytes: %w", r.Slots, r.Piece, connector.ErrIncompatible)
	}
	return r, nil
}

// Agree refuses a peer that has another Room, with connector.ErrIncompatible.
func (r Room) Agree(theirs Room) error {
	if theirs != r {
		return fmt.Errorf("the peer has %d pieces of %d bytes, this end %d of %d: %w", theirs.Slots, theirs.Piece, r.Slots, r.Piece, connector.ErrIncompatible)
	}
	return nil
}

const meetHead = 4 + 4 + 8 // piece, slots, seed

// Meet has the two ends tell each other their protocol, Room and seed, and what else mine says. It returns what else
// the peer says, and the Options on which the ends agree; the caller adds those that need no agreement.
func (r Room) Meet(ctx context.Context, conn net.Conn, protocol string, mine []byte) (theirs []byte, o Options, err error) {
	o = Options{Room: r, SeedOut: Seed()}
	b := binary.LittleEndian.AppendUint32([]byte(protocol), uint32(r.Piece))
	b = binary.LittleEndian.AppendUint32(b, uint32(r.Slots))
	b = binary.LittleEndian.AppendUint64(b, o.SeedOut)
	if theirs, err = Exchange(ctx, conn, append(b, mine...)); err != nil {
		return nil, o, err
	}
	theirs, err = r.met(&o, protocol, theirs)
	return theirs, o, err
}

// met reads what the peer says to Meet, and returns what else it says.
func (r Room) met(o *Options, protocol string, b []byte) (theirs []byte, err error) {
	theirs, speaks := bytes.CutPrefix(b, []byte(protocol))
	if !speaks || len(theirs) < meetHead {
		return nil, fmt.Errorf("the peer does not speak %s: %w", protocol, connector.ErrIncompatible)
	}
	o.SeedIn = binary.LittleEndian.Uint64(theirs[8:])
	return theirs[meetHead:], r.Agree(Room{Piece: int(binary.LittleEndian.Uint32(theirs)), Slots: int(binary.LittleEndian.Uint32(theirs[4:]))})
}

// Patience is d, or 3 s if d is 0.
func Patience(d time.Duration) time.Duration {
	if d > 0 {
		return d
	}
	return defaultPatience
}

// Seed returns a new seed for digests, which nobody can guess.
func Seed() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return binary.LittleEndian.Uint64(b[:])
}

// Network makes links from connections on which both ends shake hands. It is a pipe.Network.
type Network struct {
	Side    pipe.Side
	Timeout time.Duration // for Dial, including the handshake
	Start   func() error  // before anything else
	// Shake makes a link of a connection; dialer says that this end dialed. If it fails, the caller still
	// owns the connection.
	Shake func(ctx context.Context, conn net.Conn, dialer bool) (pipe.Link, error)
}

// listener is a listener of this network.
type listener struct {
	*pipe.Acceptor
	side *pipe.Side
}

// Address implements pipe.Listener.
func (l *listener) Address() string { return l.side.Reach(l.Addr()) }

// Listen implements pipe.Network.
func (n *Network) Listen(ctx context.Context) (pipe.Listener, error) {
	if err := n.Start(); err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	inner, err := n.Side.Listen(ctx)
	if err != nil {
		return nil, err
	}
	return &listener{pipe.NewAcceptor(inner, func(ctx context.Context, raw net.Conn, a *pipe.Acceptor) error {
		conn, err := n.Side.Secure(ctx, raw, true)
		if err != nil {
			return err
		}
		link, err := n.Shake(ctx, conn, false)
		if err != nil {
			return err
		}
		return a.Offer(link)
	}), &n.Side}, nil
}

// Dial implements pipe.Network.
func (n *Network) Dial(ctx context.Context, address string) (pipe.Link, error) {
	if err := n.Start(); err != nil {
		return pipe.Link{}, fmt.Errorf("dial %s: %w", address, err)
	}
	ctx, cancel := context.WithTimeout(ctx, n.Timeout)
	defer cancel()
	conn, err := n.Side.Dial(ctx, address)
	if err != nil {
		return pipe.Link{}, fmt.Errorf("dial %s: %w", address, err)
	}
	link, err := n.Shake(ctx, conn, true)
	if err != nil {
		return pipe.Link{}, errors.Join(fmt.Errorf("dial %s: %w", address, err), conn.Close())
	}
	return link, nil
}
