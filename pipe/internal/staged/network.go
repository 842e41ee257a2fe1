package staged

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

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
	if r.Piece == 0 {
		r.Piece = defaults.Piece
	}
	if r.Slots == 0 {
		r.Slots = defaults.Slots
	}
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
