package pipe

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvport/kvport/connector"
)

// Side says where and how a process makes the connections of its links. It is for authors of networks that
// run over TCP or send their control messages over it. It must not be changed once it is in use.
type Side struct {
	Address   string      // to listen at; empty: 127.0.0.1 with a port that the system chooses
	Advertise string      // what peers dial, if that differs; ":0" at its end stands for the port that the listener has
	TLS       *tls.Config // mutual TLS; nil means none, and then only loopback
}

// Listen listens at the side's address. Without TLS it refuses an address that other machines can reach,
// with connector.ErrIncompatible.
func (s *Side) Listen(ctx context.Context) (net.Listener, error) {
	address := cmp.Or(s.Address, "127.0.0.1:0")
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen at %s: %w", address, err)
	}
	if t, ok := l.Addr().(*net.TCPAddr); s.TLS == nil && (!ok || !t.IP.IsLoopback()) {
		return nil, errors.Join(fmt.Errorf("listen at %s: others can reach it, so it needs a shared key or TLS certificates: %w",
			address, connector.ErrIncompatible), l.Close())
	}
	return l, nil
}

// Reach is the address that peers dial to reach the side's listener at l.
func (s *Side) Reach(l net.Addr) string {
	own := l.String()
	if s.Advertise == "" {
		return own
	}
	host, port, err := net.SplitHostPort(s.Advertise)
	if err != nil || port != "0" {
		return s.Advertise
	}
	_, port, _ = net.SplitHostPort(own)
	return net.JoinHostPort(host, port)
}

// Dial connects to a peer. If no peer is there, the error wraps connector.ErrGone.
func (s *Side) Dial(ctx context.Context, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return nil, fmt.Errorf("%w: %w", err, connector.ErrGone)
	}
	if err != nil {
		return nil, err
	}
	return s.Secure(ctx, conn, false)
}

// Secure tunes a connection and puts TLS on it; server says that this end accepted the connection. If it
// fails, it closes the connection.
func (s *Side) Secure(ctx context.Context, conn net.Conn, server bool) (net.Conn, error) {
	if t, ok := conn.(*net.TCPConn); ok {
		_ = t.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: time.Second, Count: 5})
	}
	if s.TLS == nil {
		return conn, nil
	}
	secured := tls.Client(conn, s.TLS)
	if server {
		secured = tls.Server(conn, s.TLS)
	}
	if err := secured.HandshakeContext(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("TLS: %w: %w", err, connector.ErrIncompatible), conn.Close())
	}
	return secured, nil
}

// IsLoopback reports whether only this host can reach a host, which is "localhost" or an IP address.
func IsLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

const (
	handshakeTimeout = 5 * time.Second
	acceptPause      = 20 * time.Millisecond
	maxPending       = 64 // limit of handshakes at the same time, and of links that nobody has accepted yet
	maxOthers        = 16 // of these, handshakes of one other user of this machine
)

// handshake is a connection from a peer that has not yet proved who it is.
type handshake struct {
	conn   net.Conn
	cancel context.CancelFunc
	party  *party // nil: not looked up yet
}

// Acceptor is the common part of listeners whose links begin with a connection. It accepts connections,
// shakes hands with a bounded number of strangers at the same time, drops the oldest of those who have the most
// of them when one more comes, and keeps the resulting links until they are accepted. Its methods may be called concurrently.
// [NewAcceptor] makes one.
type Acceptor struct {
	inner  net.Listener
	greet  Greet
	ready  chan Link
	ctx    context.Context //nolint:containedctx // it lasts until Close
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	once   sync.Once

	mu         sync.Mutex
	handshakes []*handshake // the oldest first
	look       time.Time    // when it may be looked up again whose they are
}

// Greet shakes hands on a connection. It may offer a link to the acceptor, now or when a later connection
// comes. ctx ends after 5 s, or when the acceptor is closed. If Greet returns an error, the acceptor closes
// the connection; otherwise Greet owns it.
type Greet func(ctx context.Context, conn net.Conn, a *Acceptor) error

// NewAcceptor accepts connections from inner until Close. The acceptor owns inner.
func NewAcceptor(inner net.Listener, greet Greet) *Acceptor {
	a := &Acceptor{inner: inner, greet: greet, ready: make(chan Link, maxPending)}
	a.ctx, a.cancel = context.WithCancel(context.Background())
	a.tasks.Go(a.run)
	return a
}

// Addr is the address at which inner listens.
func (a *Acceptor) Addr() net.Addr { return a.inner.Addr() }

// Accept waits for a link, as [Listener] describes. It returns ErrClosed after Close.
func (a *Acceptor) Accept(ctx context.Context) (Link, error) {
	select {
	case link := <-a.ready:
		return link, nil
	case <-a.ctx.Done():
		return Link{}, fmt.Errorf("accept: %w", ErrClosed)
	case <-ctx.Done():
		return Link{}, ctx.Err()
	}
}

// Offer hands a link to the next Accept. It closes the link if too many links already wait.
func (a *Acceptor) Offer(link Link) error {
	select {
	case a.ready <- link:
		return nil
	default:
		return link.Close()
	}
}

// Close closes inner, ends all handshakes, waits for them, and closes the links that nobody has accepted.
// Accepted links stay open. A second Close does nothing.
func (a *Acceptor) Close() (err error) {
	a.once.Do(func() {
		a.cancel()
		err = a.inner.Close()
		a.tasks.Wait()
		for len(a.ready) > 0 {
			link := <-a.ready
			err = errors.Join(err, link.Close())
		}
	})
	return err
}

func (a *Acceptor) run() {
	for {
		conn, err := a.inner.Accept()
		if err != nil {
			select {
			case <-a.ctx.Done():
				return
			case <-time.After(acceptPause): // for example, because there are no file descriptors left
				continue
			}
		}
		ctx, cancel := context.WithTimeout(a.ctx, handshakeTimeout)
		h := &handshake{conn: conn, cancel: cancel}
		a.begin(h)
		a.tasks.Go(func() {
			defer a.end(h)
			if a.greet(ctx, conn, a) != nil {
				_ = conn.Close()
			}
		})
	}
}

// begin records a handshake. When there are too many, it ends another one, so that silent strangers keep nobody out.
func (a *Acceptor) begin(h *handshake) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.handshakes = append(a.handshakes, h)
	if len(a.handshakes) <= maxOthers {
		return // they all may stay, whoever they are
	}
	// The kernel's tables grow with the sockets that strangers open, so reading them gets a tenth of the time at most.
	var who *parties
	began := time.Now()
	if !began.Before(a.look) {
		who = newParties()
	}
	i := excess(a.handshakes, who)
	if who != nil {
		now := time.Now()
		a.look = now.Add(9 * now.Sub(began))
	}
	if i >= 0 {
		dropped := a.handshakes[i]
		a.handshakes = slices.Delete(a.handshakes, i, i+1)
		dropped.cancel()
		_ = dropped.conn.Close()
	}
}

func (a *Acceptor) end(h *handshake) {
	h.cancel()
	a.mu.Lock()
	defer a.mu.Unlock()
	if i := slices.Index(a.handshakes, h); i >= 0 {
		a.handshakes = slices.Delete(a.handshakes, i, i+1)
	}
}

// The kernel's tables of TCP sockets.
const (
	tcpTable  = "/proc/net/tcp"
	tcp6Table = "/proc/net/tcp6"
)

// tableOf is the table that has the socket at an address.
func tableOf(a *net.TCPAddr) string {
	if a.IP.To4() == nil {
		return tcp6Table
	}
	return tcpTable
}

// passedOnByUs reports whether the process at the other end of a connection over loopback, which forwards
// what somebody else says, belongs to this user or to root. One example is a forwarder between two
// container networks. The result is false if the owner is unknown.
func passedOnByUs(conn net.Conn) bool {
	peer, isTCP := conn.RemoteAddr().(*net.TCPAddr)
	own, alike := conn.LocalAddr().(*net.TCPAddr)
	if !isTCP || !alike || !peer.IP.IsLoopback() {
		return false
	}
	table, err := os.ReadFile(tableOf(peer))
	if err != nil {
		return false
	}
	uid, known := ownerOf(string(table), peer, own)
	return known && (uid == os.Getuid() || uid == 0)
}

// ownerOf looks in one of the kernel's tables for the user whose socket is at one address and connected to
// another.
func ownerOf(table string, local, remote *net.TCPAddr) (uid int, known bool) {
	from, to := tableAddress(local), tableAddress(remote)
	for line := range strings.Lines(table) {
		const localField, remoteField, stateField, uidField = 1, 2, 3, 7
		const established = "01" // sockets in other states have no owner any more
		fields := strings.Fields(line)
		if len(fields) <= uidField || fields[localField] != from || fields[remoteField] != to || fields[stateField] != established {
			continue
		}
		uid, err := strconv.Atoi(fields[uidField])
		return uid, err == nil
	}
	return 0, false
}

// tableAddress is an address in the form that the kernel's tables have on little-endian machines: each four
// bytes are one number. On other machines nothing is found, and every forwarder is refused.
func tableAddress(a *net.TCPAddr) string {
	ip := a.IP.To4()
	if ip == nil {
		ip = a.IP.To16()
	}
	turned := make([]byte, 0, len(ip))
	for i := 0; i+4 <= len(ip); i += 4 {
		turned = append(turned, ip[i+3], ip[i+2], ip[i+1], ip[i])
	}
	return strings.ToUpper(hex.EncodeToString(turned)) + ":" + strings.ToUpper(hex.EncodeToString([]byte{byte(a.Port >> 8), byte(a.Port)}))
}
