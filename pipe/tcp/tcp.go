// Package tcp is a pipe over TCP.
//
// Frames are written from the caller's memory and read into the caller's memory, each with a digest. Send
// returns when the receiver has the frame: a frame is received exactly once as long as both processes live,
// whatever happens to the connections between them. When a connection breaks, the dialer connects again and
// the link continues with the first frame that was not acknowledged. If that does not succeed within
// Network.Patience, or the other process has restarted, the pipe ends with connector.ErrGone.
//
// Listening beyond loopback needs mutual TLS, from certificates or from a key that all peers share (see
// [KeyTLS]). On loopback a key is enough: both ends prove that they have it before anything else
// ([pipe.Prove]). Without a key, every user of the machine may connect.
package tcp

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// Network makes links over TCP. It must not be changed once it is in use.
type Network struct {
	Address   string      // to listen at; empty means 127.0.0.1 with a port that the system chooses
	Advertise string      // what peers dial, if that differs; ":0" at its end stands for the port that the listener has
	TLS       *tls.Config // mutual TLS; nil means none, and then only loopback
	// Key is the key that dialer and listener prove to each other that they have when there is no TLS; with
	// TLS it is not used. Without Key and TLS, anybody who can reach the address can connect.
	Key connector.Secret
	// More are further keys that peers may have while an operator replaces the key.
	More     []connector.Secret
	Patience time.Duration // how long a broken connection may take to come back; 0 means 3 s
	// NoDigest leaves the check of payloads to TCP's checksum, or TLS, and to the host's digests.
	NoDigest bool
}

const (
	defaultPatience = 3 * time.Second
	helloTimeout    = 5 * time.Second
	redialPause     = 20 * time.Millisecond
	halfTime        = 5 * time.Second // for the second connection of a link to arrive
	maxHalf         = 256             // links that wait for it
	window          = 8               // frames that are sent and not acknowledged
)

func (n *Network) patience() time.Duration {
	if n.Patience > 0 {
		return n.Patience
	}
	return defaultPatience
}

// keyed reports whether both ends must prove that they have the key.
func (n *Network) keyed() bool { return n.TLS == nil && len(n.Key) > 0 }

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
	both, dialing := errgroup.WithContext(ctx)
	for e, outward := range map[*end]bool{out: true, in: false} {
		both.Go(func() error {
			conn, _, err := n.connect(dialing, address, hello{link: id, outward: outward})
			if err == nil {
				e.adopt(conn, 0)
			}
			return err
		})
	}
	if err := both.Wait(); err != nil {
		return pipe.Link{}, errors.Join(fmt.Errorf("dial %s: %w", address, err), out.Close(), in.Close())
	}
	return pipe.Link{Out: newSender(out), In: newReceiver(in)}, nil
}

// connect makes one connection and sends the hello. delivered is how many frames the listener has.
func (n *Network) connect(ctx context.Context, address string, h hello) (_ net.Conn, delivered uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	conn, err := n.side().Dial(ctx, address)
	if err != nil {
		return nil, 0, err
	}
	stop := interruptible(ctx, conn.SetDeadline)
	defer stop()
	h.keyed = n.keyed()
	verdict, delivered, err := n.introduce(conn, h.encode())
	if err == nil && h.again != (verdict == verdictAgain) {
		err = fmt.Errorf("the peer has begun the link again from its start: %w", connector.ErrGone)
	}
	if err != nil {
		return nil, 0, errors.Join(err, conn.Close())
	}
	return conn, delivered, nil
}

// introduce sends the hello, proves the key if there is one, and returns the listener's answer.
func (n *Network) introduce(conn net.Conn, h []byte) (verdict byte, delivered uint64, err error) {
	if t, isTCP := conn.RemoteAddr().(*net.TCPAddr); n.keyed() && (!isTCP || !t.IP.IsLoopback()) {
		return 0, 0, fmt.Errorf("%s is on another host, which needs key_file: %w", conn.RemoteAddr(), connector.ErrIncompatible)
	}
	if !n.keyed() {
		if _, err := conn.Write(h); err != nil {
			return 0, 0, err
		}
		return readAnswer(conn)
	}
	prove, err := pipe.Prove(conn, n.Key, h, n.More...)
	if err != nil {
		return 0, 0, err
	}
	if verdict, _, err = readAnswer(conn); err == nil && verdict != verdictProve {
		err = fmt.Errorf("the peer's answer has verdict %d where the key must be proved: %w", verdict, connector.ErrIncompatible)
	}
	if err == nil {
		err = prove()
	}
	if err != nil {
		return 0, 0, err
	}
	return readAnswer(conn)
}

// interruptible makes the end of ctx interrupt reads and writes on a connection, through a deadline; stop
// undoes it.
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

// listener combines connections into links.
type listener struct {
	*pipe.Acceptor
	network *Network

	mu    sync.Mutex
	links map[linkID]*accepted
	half  []*accepted // links of which only one connection has arrived, the oldest first
}

// accepted is a link whose connections have been, or are being, accepted.
type accepted struct {
	out, in *end
	sides   int         // connections that have arrived
	expiry  *time.Timer // ends the link if its other connection does not come
}

// expire ends a link that is incomplete.
func (a *accepted) expire() {
	err := fmt.Errorf("the second connection of a link did not come: %w", connector.ErrGone)
	a.out.finish(err)
	a.in.finish(err)
}

// Address implements pipe.Listener.
func (l *listener) Address() string { return l.network.side().Reach(l.Addr()) }

// Close implements pipe.Listener. Accepted links stay open, but if one of their connections breaks, the
// link cannot be restored.
func (l *listener) Close() error {
	err := l.Acceptor.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range l.half {
		a.expiry.Stop()
		a.expire()
	}
	l.half = nil
	return err
}

// greet reads the hello of a connection and hands the connection to its link.
func (l *listener) greet(ctx context.Context, raw net.Conn, to *pipe.Acceptor) error {
	stop := context.AfterFunc(ctx, func() { _ = raw.Close() })
	defer stop()
	conn, err := l.network.side().Secure(ctx, raw, true)
	if err != nil {
		return err
	}
	var b [helloSize]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		return err
	}
	h, err := parseHello(b[:])
	if err != nil {
		_, _ = conn.Write(encodeAnswer(verdictVersion, uint64(version(l.network.keyed()))))
		return err
	}
	if h.keyed != l.network.keyed() {
		_, _ = conn.Write(encodeAnswer(verdictVersion, uint64(version(l.network.keyed()))))
		return otherVersion(uint64(h.version()))
	}
	if h.keyed {
		if _, err := conn.Write(encodeAnswer(verdictProve, 0)); err != nil {
			return err
		}
		if err := pipe.Demand(conn, l.network.Key, b[:], l.network.More...); err != nil {
			return err
		}
	}
	return l.join(conn, &h, to)
}

// join finds or makes the link of a hello.
func (l *listener) join(conn net.Conn, h *hello, to *pipe.Acceptor) error {
	a := l.find(h)
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
	delivered := e.quiet() // from here on nothing from an older connection counts
	if _, err := conn.Write(encodeAnswer(verdict, delivered)); err != nil {
		return err
	}
	e.adopt(conn, h.delivered)
	if h.again {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	a.sides++
	i := slices.Index(l.half, a)
	if a.sides < 2 || i < 0 || !a.expiry.Stop() { // it is incomplete, or has expired
		return nil
	}
	l.half = slices.Delete(l.half, i, i+1)
	return to.Offer(pipe.Link{Out: newSender(a.out), In: newReceiver(a.in)})
}

// find returns the link of a hello: a new one, the existing one if the hello continues it, or nil if that
// does not exist any more.
func (l *listener) find(h *hello) *accepted {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.links[h.link]
	if a != nil || h.again {
		return a
	}
	a = &accepted{out: newEnd(l.network, h.link, "", l), in: newEnd(l.network, h.link, "", l)}
	if len(l.half) >= maxHalf && l.half[0].expiry.Stop() {
		l.half[0].expire()
		l.half = l.half[1:]
	}
	a.expiry = time.AfterFunc(halfTime, func() { l.giveUp(a) })
	l.links[h.link], l.half = a, append(l.half, a)
	return a
}

// giveUp ends a link whose second connection did not come in time.
func (l *listener) giveUp(a *accepted) {
	l.mu.Lock()
	if i := slices.Index(l.half, a); i >= 0 {
		l.half = slices.Delete(l.half, i, i+1)
	}
	l.mu.Unlock()
	a.expire()
}

// forget is called by an end that is over.
func (l *listener) forget(id linkID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.links, id)
}
