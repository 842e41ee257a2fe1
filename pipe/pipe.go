// Package pipe moves frames of bytes from one process to another, in order.
//
// A [Pipe] has one direction. A frame is a small header and a payload; the payload is sent from where it is
// and received into the memory that the receiver names, so that a block of KV cache is copied only as often
// as the transport needs. A [Link] is a pair of pipes, one for each direction, and a [Network] makes links
// between processes. Package sdk makes a connector of a Network: that is the level for distributed
// peer-to-peer connectors (rules PIPE-01 and following).
//
// The folders below this one hold pipes in memory, over TCP, over shared memory, over UCX and over NCCL.
// pipetest is the suite that every other pipe should pass, too.
package pipe

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvport/kvport/connector"
)

// The largest frame, in bytes. A receiver refuses a larger one before it allocates anything.
const (
	MaxHeader  = 64 << 10
	MaxPayload = 1 << 30
)

// ErrClosed says that this end of the pipe is closed, or that the other end is closed and everything sent
// before has been received. If the peer has died, the error is connector.ErrGone instead.
var ErrClosed = errors.New("pipe is closed")

// Place says where the payload of a frame goes: into the spans, in order, whose sizes add up to size bytes.
// The header is valid only during the call. An error refuses the frame: its bytes are dropped.
//
// Place is called once for each frame. It is called again only if the transport loses a frame half way and
// receives it again; nothing is then written to the earlier spans any more.
type Place func(header []byte, size int) (spans [][]byte, err error)

// A Pipe moves frames in one direction. Both ends have the same type; Send at the receiving end and Recv at
// the sending end fail with connector.ErrIncompatible. Calls may be made concurrently, and Close at any
// time.
type Pipe interface {
	// Send sends one frame. When it returns, with an error or without, header and spans belong to the
	// caller again. A nil error means that the frame will be received, unless an end is closed or dies
	// first. Frames are received in the order in which their Sends returned nil, each at most once and
	// never in part. Send waits while the pipe is full: a pipe holds a bounded number of bytes. If ctx ends
	// during the wait, the frame may have been sent or not, and later frames are not affected.
	Send(ctx context.Context, header []byte, spans [][]byte) error
	// Recv waits for a frame and fills the spans that place returns. After Recv returns, nothing writes to
	// them. If ctx ends before a frame begins, no frame is lost. If place refuses a frame, Recv returns its
	// error, and the next call gets the next frame.
	Recv(ctx context.Context, place Place) error
	// Close ends the pipe and every call that waits. If this is the sending end, the other end still
	// receives what was sent before. Calls after the first do nothing.
	Close() error
}

// Link is a pair of pipes to one other process, or more generally to the holder of the other end of the
// link. Both may be the same value if that value can both send and receive.
type Link struct {
	Out Pipe // to send to the peer
	In  Pipe // to receive from it
}

// Close closes both pipes.
func (l Link) Close() error { return errors.Join(l.Out.Close(), l.In.Close()) }

// A Network makes links to other processes.
type Network interface {
	// Listen makes this process reachable. The Network's config says at which address.
	Listen(ctx context.Context) (Listener, error)
	// Dial makes a link to the process that listens at an address. The address comes from the config, or
	// from Listener.Address by a way that is trusted. Dial returns connector.ErrGone if no peer is there,
	// and connector.ErrIncompatible if the peer is not allowed to talk to us or cannot.
	Dial(ctx context.Context, address string) (Link, error)
}

// A Listener accepts links.
type Listener interface {
	// Address is what a peer dials, with the port that the listener really has.
	Address() string
	// Accept waits for the next link. It returns ErrClosed after Close.
	Accept(ctx context.Context) (Link, error)
	// Close ends the Accept that waits. Links that were accepted stay open.
	Close() error
}

// Peers is what a connector made by sdk.FromPipe works with.
type Peers struct {
	Network Network // to the other engines' plugins
	// Addresses lists producers to ask, in this order, for prompts that come without a ticket. A ticket
	// names its producer itself.
	Addresses []string
	// Subscribe lists producers from which a consumer takes blocks as they are computed, layer by layer,
	// without asking for each. The producers need not be running when the consumer starts.
	Subscribe []string
	// Bytes limits the memory of the blocks that wait to be fetched and of those that have arrived; 0 means
	// 1 GiB. When it is full, the oldest blocks are dropped.
	Bytes int64
	// Wait is how long a consumer waits for a block that it has asked for; 0 means 1.5 s. The host stops
	// waiting on its own after its deadline "later", which is 2 s by default.
	Wait  time.Duration
	Close func() error // closes the Network, after the last call; may be nil

	// Push, if it is not nil, returns where a producer sends the blocks of a request as they are saved: the
	// address at which the request's consumer listens, or "" if no trusted source has named one. It is
	// called often.
	Push func(r connector.RequestID) (address string)
	// LayersToTarget makes a producer send the layers of a request to no subscriber but the one that has said that it listens where
	// Push sends the request's blocks. Otherwise every subscriber gets the layers of all requests.
	LayersToTarget bool
	// Await makes a save wait until its blocks have been sent to the consumer, for at most Patience.
	Await bool
	// Pushed makes consumers listen, too, and accept blocks that they have not asked for. Every peer that
	// can connect is trusted to send what it claims to send: the host's digests are the only check.
	Pushed bool
	// Find, if it is not nil, returns producers to ask before Addresses for a prompt that comes without a
	// ticket.
	Find func(r connector.RequestID) (addresses []string)
	// Patience is how long a peer may neither receive nor answer before the link to it is cut; 0 means 10
	// s.
	Patience time.Duration
	// Spill is how much more host memory blocks may take when Bytes is full; 0 means none.
	Spill int64
	// Stats returns the Network's own numbers, which the Definition declares after sdk.PeerStats; it may be
	// nil.
	Stats func() []connector.Stat
}

// Size is the total length of spans in bytes.
func Size(spans [][]byte) int {
	n := 0
	for _, s := range spans {
		n += len(s)
	}
	return n
}

// Check returns an error if a frame exceeds the limits. The error wraps connector.ErrIncompatible.
func Check(header int, payload int64) error {
	switch {
	case header < 0 || header > MaxHeader:
		return fmt.Errorf("header of %d bytes, limit %d: %w", header, MaxHeader, connector.ErrIncompatible)
	case payload < 0 || payload > MaxPayload:
		return fmt.Errorf("payload of %d bytes, limit %d: %w", payload, MaxPayload, connector.ErrIncompatible)
	}
	return nil
}

// Ask calls place and checks that the spans it returns have exactly size bytes. It is for authors of pipes.
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

// Copy copies the bytes of from to the spans of to, across the borders of spans, and returns how many bytes
// it copied.
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

// Receive receives one frame into memory that it allocates. It is for small frames.
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
