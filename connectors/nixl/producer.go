package nixl

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

const (
	maxQuestion = 8 << 20 // of which a push of very many runs needs most
	maxConns    = 1024
	idleConn    = time.Minute // a consumer that asks nothing for so long dials again
)

// listen opens the side channel.
func (n *Node) listen(ctx context.Context) error {
	var lc net.ListenConfig
	address := net.JoinHostPort(n.config.Host, strconv.Itoa(n.config.Port))
	inner, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("side_channel_host, side_channel_port: %w", err)
	}
	n.listener = pipe.NewAcceptor(inner, n.greet)
	return nil
}

// address is what tickets name.
func (n *Node) address() string {
	_, port, err := net.SplitHostPort(n.listener.Addr().String())
	if err != nil || n.config.Advertise == "" {
		return n.listener.Addr().String()
	}
	return net.JoinHostPort(n.config.Advertise, port)
}

// errFull refuses a consumer when all that are connected are being answered.
var errFull = fmt.Errorf("%d consumers are connected and are all being answered: %w", maxConns, connector.ErrGone)

// keep notes a connection. When there are too many, the one goes that has been silent for longest; one that is being
// answered stays.
func (n *Node) keep(c net.Conn) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	select {
	case <-n.stop:
		return errors.New("the side channel is being closed")
	default:
	}
	if len(n.conns) >= maxConns {
		var silent net.Conn
		for other, since := range n.conns {
			if !since.IsZero() && (silent == nil || since.Before(n.conns[silent])) {
				silent = other
			}
		}
		if silent == nil {
			n.tally.count("connections_refused_total", 1)
			return errFull
		}
		delete(n.conns, silent)
		_ = silent.Close() // which ends its serve
	}
	n.conns[c] = time.Now()
	return nil
}

// mark notes since when a consumer is silent; zero while it is answered.
func (n *Node) mark(c net.Conn, since time.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, known := n.conns[c]; known {
		n.conns[c] = since
	}
}

func (n *Node) forget(c net.Conn) {
	_ = c.Close()
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.conns, c)
}

// serve answers the questions of one connection until that ends.
func (n *Node) serve(c net.Conn) {
	for {
		_ = c.SetDeadline(time.Now().Add(idleConn))
		var q question
		if err := readMessage(c, maxQuestion, &q); err != nil {
			return
		}
		n.mark(c, time.Time{})
		a, err := n.reply(&q)
		if err != nil {
			n.log.Info("a consumer is refused", "peer", c.RemoteAddr().String(), "hold", q.Hold, "reason", err)
			a = refuse(err)
		}
		_ = c.SetDeadline(time.Now().Add(askTimeout)) // a push may have taken its time
		if err := writeMessage(c, a); err != nil {
			return
		}
		n.mark(c, time.Now())
	}
}

// reply answers one question. Errors that wrap connector.ErrIncompatible are for good.
func (n *Node) reply(q *question) (*answer, error) {
	switch {
	case q.Version != protocolVersion:
		return nil, fmt.Errorf("you speak version %d, I %d: %w", q.Version, protocolVersion, connector.ErrIncompatible)
	case !bytes.Equal(q.Model, n.env.Model[:]):
		return nil, fmt.Errorf("another model: %w", connector.ErrIncompatible)
	}
	if err := n.sameShape(q); err != nil {
		return nil, err
	}
	if len(q.Beats) > 0 {
		return n.hear(q.Beats)
	}
	if q.Follow != nil {
		return n.follow(q)
	}
	if q.Done {
		q.Bytes = min(q.Bytes, cacheBytes(&n.env.Layout)) // nobody can have read more
		return &answer{}, n.holds.done(q, time.Now())
	}
	e, err := n.holds.find(q.Hold, q.Secret)
	if err == nil {
		err = q.mayReshape(&e)
	}
	if err != nil {
		return nil, err
	}
	r, err := n.rankOf(q.producerRank())
	if err != nil {
		return nil, err
	}
	if q.Push != nil {
		if err := n.holds.verify(q); err != nil {
			return nil, err
		}
		return n.pushes.once(q, func() (*answer, error) { return n.push(r, q, &e) })
	}
	r.wake()
	a := r.cache().answer()
	n.introduce(a)
	a.Tokens = e.Tokens
	for _, b := range e.Blocks {
		a.Blocks = append(a.Blocks, heldBlock{Group: b.Group, ID: b.ID, Key: b.Key[:]})
	}
	if n.told != nil {
		n.told()
	}
	return a, nil
}

// cacheBytes is the size of a rank's cache.
func cacheBytes(l *connector.Layout) (n uint64) {
	for _, s := range l.Segments {
		n += uint64(s.Bytes) * uint64(l.Blocks)
	}
	return n
}

// introduce adds what a consumer needs to do without such an answer next time.
func (n *Node) introduce(a *answer) {
	a.Life, a.Clock, a.Now = n.life, clockName(), monotonic()
	a.Board, a.Slots = n.board.addr(), boardSlots
}

// hear takes the signs of life of consumers.
func (n *Node) hear(beats []beat) (*answer, error) {
	if len(beats) > maxBeats {
		return nil, fmt.Errorf("%d signs of life, the limit is %d: %w", len(beats), maxBeats, connector.ErrIncompatible)
	}
	a := &answer{}
	for _, b := range beats {
		if n.holds.renew(b.Hold, b.Secret) != nil {
			a.Over = append(a.Over, b.Hold)
		}
	}
	return a, nil
}

// producerCache is what a rank remembers of producers that have answered: with it and a ticket that names its
// blocks, the rank does not have to ask where they are.
type producerCache struct {
	mu  sync.Mutex
	all map[string]*producer // by life
}

// producer is a rank of a producer's life. It does not change.
type producer struct {
	address   string
	answer    answer // without what belongs to one hold
	transport string
	mode      string
	near      bool // it is on this machine, and we see its board
}

// remember keeps what the producer of a ticket has answered to a question that began at a moment of our clock.
// A producer that says it is another than the ticket's is not remembered.
func (r *rank) remember(from *ticket, a *answer, began uint64) *producer {
	p := &producer{address: from.Address, answer: *a}
	p.answer.Blocks, p.answer.Tokens = nil, 0
	var first uint64
	if len(a.Segments) > 0 {
		first = a.Segments[0].Addr
	}
	p.transport = r.node.transports.transport(r.backend.Name(), a.Host, a.PID, first)
	p.mode = r.mode(a, p.transport)
	p.near = a.Clock != "" && a.Clock == clockName() && began <= a.Now && a.Now <= monotonic() && a.Slots > 0 && canRead(a.PID, a.Board)
	if a.Life == "" || a.Life != from.Life {
		return p
	}
	r.producers.mu.Lock()
	defer r.producers.mu.Unlock()
	for life, other := range r.producers.all { // a former life at this address, or one too many
		if other.address == from.Address || len(r.producers.all) >= maxPeers {
			delete(r.producers.all, life)
		}
	}
	r.producers.all[a.Life] = p
	return p
}

func (m *producerCache) get(life string) *producer {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.all[life]
}

func (m *producerCache) forget(life string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.all, life)
}

// answers is what the producer would answer about a ticket's blocks; nil: the rank has to ask. A read that
// needs its process awake is a question first, which wakes it; a push is a question itself.
func (p *producer) answers(from *ticket, t *connector.Transfer, l *connector.Layout) *answer {
	if p == nil || p.address != from.Address || p.mode == modePull && copied(p.transport, rdmaDevices) || !from.names(t, l) {
		return nil
	}
	blocks, err := unpackIDs(from.IDs, len(l.Groups))
	if err != nil {
		return nil
	}
	a := p.answer
	a.Tokens, a.Blocks = from.Tokens, blocks
	return &a
}

// holds says whether the hold of a ticket is seen to be open now. False may mean that it cannot be seen.
func (p *producer) holds(slot int, sum ticketSum) bool {
	if p == nil || !p.near || slot < 1 || slot > p.answer.Slots {
		return false
	}
	raw := make([]byte, slotBytes)
	return peek(p.answer.PID, p.answer.Board+uint64(slot-1)*slotBytes, raw) && slotSays(raw, sum)
}

// Without TLS a connection of the side channel begins with eight bytes of the consumer's, magic and version, and
// as many of the producer's; both prove that they have the link key (see [pipe.Prove]). No question is
// read before. Releases without it asked at once, and take the magic for a length that they refuse.
const (
	greetMagic   = "kvpN"
	greetVersion = 1
	greetSize    = 8
	// unread is how much of what an older consumer says is thrown away, so that it hears why it is refused.
	unread = 64 << 10
	// complainEvery is between two lines of the log about strangers.
	complainEvery = time.Second
)

func greeting() []byte { return append([]byte(greetMagic), greetVersion, 0, 0, 0) }

// greet finds out whether whoever has connected has the key, and then answers its questions.
func (n *Node) greet(ctx context.Context, raw net.Conn, _ *pipe.Acceptor) error {
	stop := context.AfterFunc(ctx, func() { _ = raw.Close() })
	conn, err := n.admit(ctx, raw)
	if err == nil && !stop() {
		err = ctx.Err()
	}
	if err != nil {
		stop()
		n.complain(raw, "side channel: somebody without the key was refused", err)
		return err
	}
	if err := n.keep(conn); err != nil {
		if errors.Is(err, errFull) {
			n.complain(raw, "side channel: a consumer was refused", err)
			_ = conn.SetDeadline(time.Now().Add(askTimeout))
			if writeMessage(conn, refuse(err)) == nil { // the answer to what it is about to ask
				_, _ = io.CopyN(io.Discard, conn, unread)
			}
		}
		return errors.Join(err, conn.Close())
	}
	n.tasks.Go(func() {
		defer n.forget(conn)
		n.serve(conn)
	})
	return nil
}

// complain logs a connection that was refused, but not one after the other.
func (n *Node) complain(conn net.Conn, what string, err error) {
	last, now := n.complained.Load(), time.Now().UnixNano()
	if now-last < int64(complainEvery) || !n.complained.CompareAndSwap(last, now) {
		return
	}
	n.log.Warn(what, "peer", conn.RemoteAddr().String(), "error", err)
}

// admit has a consumer prove that it has the key.
func (n *Node) admit(ctx context.Context, raw net.Conn) (net.Conn, error) {
	conn, err := (&pipe.Side{TLS: n.tls}).Secure(ctx, raw, true)
	if err != nil || n.tls != nil {
		return conn, err
	}
	var head [greetSize]byte
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		return nil, err
	}
	if string(head[:len(greetMagic)]) != greetMagic {
		err := fmt.Errorf("no link key was proven first: the consumer is an older release of the plugin, or has a key_file that we lack: %w", connector.ErrIncompatible)
		if writeMessage(conn, refuse(err)) == nil {
			_, _ = io.CopyN(io.Discard, conn, unread)
		}
		return nil, err
	}
	if _, err := conn.Write(greeting()); err != nil {
		return nil, err
	}
	if v := head[len(greetMagic)]; v != greetVersion {
		return nil, otherGreeting(v)
	}
	return conn, pipe.Demand(conn, n.env.LinkKey, head[:], n.env.MoreLinkKeys...)
}

func otherGreeting(theirs byte) error {
	return fmt.Errorf("peer speaks version %d of the side channel, we speak %d: %w", theirs, greetVersion, connector.ErrIncompatible)
}

// dial makes a connection to a producer. Both ends have proven to each other then that they have the key.
func (l *connPool) dial(ctx context.Context, address string) (conn net.Conn, err error) {
	dialer := &net.Dialer{Timeout: askTimeout}
	if l.tls != nil {
		return (&tls.Dialer{NetDialer: dialer, Config: l.tls}).DialContext(ctx, "tcp", address)
	}
	if conn, err = dialer.DialContext(ctx, "tcp", address); err != nil {
		return nil, err
	}
	_ = conn.SetDeadline(time.Now().Add(askTimeout))
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := l.prove(conn); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

func (l *connPool) prove(conn net.Conn) error {
	if t, isTCP := conn.RemoteAddr().(*net.TCPAddr); !isTCP || !t.IP.IsLoopback() {
		return fmt.Errorf("it is on another host, which needs key_file: %w", connector.ErrIncompatible)
	}
	prove, err := pipe.Prove(conn, l.key, greeting(), l.more...)
	if err != nil {
		return err
	}
	var head [greetSize]byte
	_, err = io.ReadFull(conn, head[:])
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
		return fmt.Errorf("it hung up where it had to prove the link key: it is an older release of the plugin, or has a key_file: %w: %w",
			connector.ErrIncompatible, err)
	case err != nil:
		return err
	case string(head[:len(greetMagic)]) != greetMagic:
		return fmt.Errorf("it is no NixlConnector, or has a key_file: %w", connector.ErrIncompatible)
	case head[len(greetMagic)] != greetVersion:
		return otherGreeting(head[len(greetMagic)])
	}
	return prove()
}
