// Package tcp is a pipe over TCP.
//
// Frames are written from where they lie and read to where they belong, with a digest each. Send returns
// when the receiver has the frame: a frame is received exactly once as long as both processes live,
// whatever happens to connections between them. A connection that breaks is made anew by the dialer and
// goes on with the first frame that was not acknowledged. When that does not succeed within
// Network.Patience, or the other process has begun a new life, the pipe ends with connector.ErrGone.
//
// Listening beyond loopback needs mutual TLS: from certificates, or from a key that all peers share (see
// [KeyTLS]).
package tcp

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// Network makes links over TCP. It must not be changed once it is used.
type Network struct {
	Address   string        // to listen at; empty: 127.0.0.1 with a port that the system chooses
	Advertise string        // what peers dial, where that differs; ":0" at its end stands for the port taken
	TLS       *tls.Config   // mutual TLS; nil: none, and loopback only
	Patience  time.Duration // for a broken connection to be made anew; 0: 3 s
	// NoDigest leaves payloads to TCP's checksum, or TLS, and to the host's digests.
	NoDigest bool
}

const (
	defaultPatience = 3 * time.Second
	helloTimeout    = 5 * time.Second
	redialPause     = 20 * time.Millisecond
	window          = 8 // frames that are sent and not acknowledged
)

func (n *Network) patience() time.Duration {
	if n.Patience > 0 {
		return n.Patience
	}
	return defaultPatience
}

func (n *Network) side() *pipe.Side {
	return &pipe.Side{Address: n.Address, Advertise: n.Advertise, TLS: n.TLS}
}

// Listen implements pipe.Network.
func (n *Network) Listen(ctx context.Context) (pipe.Listener, error) {
	inner, err := n.side().Listen(ctx)
	if err != nil {
		return nil, err
	}
	l := &listener{network: n, links: map[linkID]*accepted{}}
	l.Acceptor = pipe.NewAcceptor(inner, l.greet)
	return l, nil
}

// Dial implements pipe.Network.
func (n *Network) Dial(ctx context.Context, address string) (pipe.Link, error) {
	var id linkID
	_, _ = rand.Read(id[:]) // never fails
	out, in := newEnd(n, id, address, nil), newEnd(n, id, address, nil)
	for _, first := range []struct {
		e       *end
		outward bool
	}{{out, true}, {in, false}} {
		conn, _, err := n.connect(ctx, address, hello{link: id, outward: first.outward})
		if err != nil {
			return pipe.Link{}, errors.Join(fmt.Errorf("dial %s: %w", address, err), out.Close(), in.Close())
		}
		first.e.adopt(conn, 0)
	}
	return pipe.Link{Out: newSender(out), In: newReceiver(in)}, nil
}

// connect makes one connection and says hello. delivered is how many frames the listener has.
func (n *Network) connect(ctx context.Context, address string, h hello) (_ net.Conn, delivered uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	conn, err := n.side().Dial(ctx, address)
	if err != nil {
		return nil, 0, err
	}
	stop := interruptible(ctx, conn.SetDeadline)
	defer stop()
	_, err = conn.Write(h.encode())
	var verdict byte
	if err == nil {
		verdict, delivered, err = readAnswer(conn)
	}
	if err == nil && h.again != (verdict == verdictAgain) {
		err = fmt.Errorf("the peer has begun the link anew: %w", connector.ErrGone)
	}
	if err != nil {
		return nil, 0, errors.Join(err, conn.Close())
	}
	return conn, delivered, nil
}

// interruptible makes the end of ctx end what a deadline of a connection is for; stop undoes it.
func interruptible(ctx context.Context, deadline func(time.Time) error) (stop func()) {
	done := make(chan struct{})
	end := context.AfterFunc(ctx, func() {
		defer close(done)
		_ = deadline(time.Unix(1, 0))
	})
	return func() {
		if !end() {
			<-done
			_ = deadline(time.Time{})
		}
	}
}

// listener puts connections together to links.
type listener struct {
	*pipe.Acceptor
	network *Network

	mu    sync.Mutex
	links map[linkID]*accepted
}

// accepted is a link whose connections have been, or are being, accepted.
type accepted struct {
	out, in *end
	sides   int // connections that have arrived
}

// Address implements pipe.Listener.
func (l *listener) Address() string { return l.network.side().Reach(l.Addr()) }

// Close implements pipe.Listener. Links that were accepted stay, but a connection of theirs that breaks
// cannot be mended any more.
func (l *listener) Close() error {
	err := l.Acceptor.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range l.links {
		if a.sides < 2 {
			_ = errors.Join(a.out.Close(), a.in.Close())
		}
	}
	return err
}

// greet reads the hello of a connection and gives it to its link.
func (l *listener) greet(ctx context.Context, raw net.Conn, to *pipe.Acceptor) error {
	stop := context.AfterFunc(ctx, func() { _ = raw.Close() })
	defer stop()
	conn, err := l.network.side().Secure(ctx, raw, true)
	if err != nil {
		return err
	}
	var b [helloSize]byte
	if _, err := readFull(conn, b[:]); err != nil {
		return err
	}
	h, err := parseHello(b[:])
	if err != nil {
		_, _ = conn.Write(encodeAnswer(verdictVersion, 0))
		return err
	}
	return l.join(conn, &h, to)
}

// join finds or makes the link of a hello.
func (l *listener) join(conn net.Conn, h *hello, to *pipe.Acceptor) error {
	l.mu.Lock()
	a := l.links[h.link]
	if a == nil && !h.again {
		a = &accepted{out: newEnd(l.network, h.link, "", l), in: newEnd(l.network, h.link, "", l)}
		l.links[h.link] = a
	}
	l.mu.Unlock()
	if a == nil {
		_, _ = conn.Write(encodeAnswer(verdictUnknown, 0))
		return connector.ErrGone
	}
	e, verdict := a.out, byte(verdictNew)
	if h.outward { // it sends, we receive
		e = a.in
	}
	if h.again {
		verdict = verdictAgain
	}
	delivered := e.quiet() // nothing of an older connection counts from here on
	if _, err := conn.Write(encodeAnswer(verdict, delivered)); err != nil {
		return err
	}
	e.adopt(conn, h.delivered)
	if h.again {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if a.sides++; a.sides < 2 {
		return nil
	}
	return to.Offer(pipe.Link{Out: newSender(a.out), In: newReceiver(a.in)})
}

// forget is called by an end that is over.
func (l *listener) forget(id linkID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.links, id)
}
