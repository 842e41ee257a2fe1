// Package pipe moves frames of bytes from one process to another, in order.
//
// A [Pipe] has one direction. A frame is a small header and a payload; the payload is sent from where
// it lies and received where the receiver wants it, so that a block of KV cache is copied no more often
// than the transport needs. A [Link] is a pair of pipes, one for each direction, and a [Network] makes
// links between processes. Package sdk makes a connector of a Network: that is the level for distributed
// peer-to-peer connectors (rules PIPE-01 and following).
//
// Folders below this one hold pipes in memory, over TCP and over shared memory; pipetest is the suite
// that a pipe of one's own should pass. One-sided transports, in which one end reads or writes the
// other's registered memory, will get an interface of their own, OneSided, with their first user.
package pipe

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvport/kvport/connector"
)

// What a frame may be at most, in bytes. A receiver refuses more before it allocates anything.
const (
	MaxHeader  = 64 << 10
	MaxPayload = 1 << 30
)

// ErrClosed says that this end of the pipe was closed, or that the other end was and everything sent
// before has been received. A peer that died is connector.ErrGone instead.
var ErrClosed = errors.New("pipe is closed")

// Place says where the payload of a frame goes: spans of size bytes together, in order. The header is
// valid during the call only. An error refuses the frame: its bytes are dropped.
//
// Place is called once for each frame; again only if the transport lost the frame half way and got it
// anew, and then nothing is written to the earlier spans any more.
type Place func(header []byte, size int) (spans [][]byte, err error)

// A Pipe moves frames in one direction. Both ends have the same type; the end that is not made for a
// call refuses it with connector.ErrIncompatible. Calls may be made concurrently, and Close at any time.
type Pipe interface {
	// Send sends one frame. Header and spans are the caller's again when it returns, whatever it
	// returns. A nil error means that the frame will be received, unless an end is closed or dies
	// before; frames are received in the order in which Sends returned nil, each at most once and
	// never in part. Send waits while the pipe is full: a pipe holds a bounded number of bytes. If ctx
	// ends meanwhile, the frame may have been sent or not, and later frames are not harmed.
	Send(ctx context.Context, header []byte, spans [][]byte) error
	// Recv waits for a frame and fills the spans that place gives. When it returns nothing writes to
	// them any more. If ctx ends before a frame began, none is lost. If place refuses a frame Recv
	// returns its error, and the next call gets the next frame.
	Recv(ctx context.Context, place Place) error
	// Close ends the pipe and every call that waits. The other end still receives what was sent
	// before, if this is the sending end. Calls after the first do nothing.
	Close() error
}

// Link is a pair of pipes to one other process, or more generally to one other holder of a Link. Both
// may be the same value if that knows what to do with Send and with Recv.
type Link struct {
	Out Pipe // to send to the peer
	In  Pipe // to receive from it
}

// Close closes both pipes.
func (l Link) Close() error { return errors.Join(l.Out.Close(), l.In.Close()) }

// A Network makes links to other processes.
type Network interface {
	// Listen makes this process reachable. Where, is the Network's own config.
	Listen(ctx context.Context) (Listener, error)
	// Dial makes a link to the process that listens at an address: one of its config or what
	// Listener.Address gave, brought by somebody who was trusted to say it. A peer that is not there
	// is connector.ErrGone, one that may not or cannot talk to us connector.ErrIncompatible.
	Dial(ctx context.Context, address string) (Link, error)
}

// A Listener accepts links.
type Listener interface {
	// Address is what a peer dials, with the port that was really taken.
	Address() string
	// Accept waits for the next link. It returns ErrClosed after Close.
	Accept(ctx context.Context) (Link, error)
	// Close ends the waiting Accept. Links that were accepted stay open.
	Close() error
}

// Peers is what a connector made by sdk.FromPipe works with.
type Peers struct {
	Network Network // to the other engines' plugins
	// Addresses are producers to ask for prompts that come without a ticket, in this order. A ticket
	// names its producer itself.
	Addresses []string
	// Subscribe are producers whose blocks a consumer takes over as they are computed, layer by layer,
	// without having asked for them. It needs no producer to be there.
	Subscribe []string
	// Bytes is how much memory blocks may take that wait to be fetched, and those that have arrived; 0:
	// 1 GiB. When it is full the oldest blocks go.
	Bytes int64
	// Wait is how long a consumer waits for a block that it has asked for; 0: 1.5 s. The host gives up
	// waiting by itself after its deadline "later", 2 s.
	Wait  time.Duration
	Close func() error // closes the Network, after the last call; may be nil

	// Push, if it is not nil, says where a producer sends the blocks of a request as they are saved: the
	// address at which its consumer listens, "" if nobody who may be trusted has said. It is called often.
	Push func(r connector.RequestID) (address string)
	// Await has a save wait until the consumer has been sent the blocks, for Patience at most.
	Await bool
	// Pushed lets consumers listen too, and take blocks that they have not asked for. All who can connect
	// are trusted to send what they say: the host's digests are the only check.
	Pushed bool
	// Find, if it is not nil, names producers to ask for a prompt that comes without a ticket, before
	// Addresses.
	Find func(r connector.RequestID) (addresses []string)
	// Patience is for a peer that neither receives nor answers: then the link to it is cut; 0: 10 s.
	Patience time.Duration
	// Spill is how much host memory blocks may take besides Bytes, when these are full; 0: none.
	Spill int64
	// Stats are numbers of the Network's, declared behind sdk.PeerStats in the Definition; may be nil.
	Stats func() []connector.Stat
}

// Size is the length of spans together, in bytes.
func Size(spans [][]byte) int {
	n := 0
	for _, s := range spans {
		n += len(s)
	}
	return n
}

// Check reports whether a frame is within the limits. The error wraps connector.ErrIncompatible.
func Check(header int, payload int64) error {
	switch {
	case header < 0 || header > MaxHeader:
		return fmt.Errorf("header of %d bytes, limit %d: %w", header, MaxHeader, connector.ErrIncompatible)
	case payload < 0 || payload > MaxPayload:
		return fmt.Errorf("payload of %d bytes, limit %d: %w", payload, MaxPayload, connector.ErrIncompatible)
	}
	return nil
}

// Ask calls place and checks its answer: spans of exactly size bytes. It is for authors of pipes.
func Ask(place Place, header []byte, size int) ([][]byte, error) {
	spans, err := place(header, size)
	if err != nil {
		return nil, fmt.Errorf("frame of %d bytes refused: %w", size, err)
	}
	if n := Size(spans); n != size {
		return nil, fmt.Errorf("frame of %d bytes got room for %d: %w", size, n, connector.ErrIncompatible)
	}
	return spans, nil
}

// Copy copies what lies in from to the spans, across their borders, and gives how much it was.
func Copy(to, from [][]byte) int {
	total, at := 0, 0
	for _, f := range from {
		for len(f) > 0 && len(to) > 0 {
			n := copy(to[0][at:], f)
			f, at, total = f[n:], at+n, total+n
			if at == len(to[0]) {
				to, at = to[1:], 0
			}
		}
	}
	return total
}

// Receive gets one frame in memory of its own: for small frames.
func Receive(ctx context.Context, p Pipe) (header, payload []byte, err error) {
	err = p.Recv(ctx, func(h []byte, size int) ([][]byte, error) {
		header, payload = append([]byte(nil), h...), make([]byte, size)
		return [][]byte{payload}, nil
	})
	if err != nil {
		return nil, nil, err
	}
	return header, payload, nil
}
