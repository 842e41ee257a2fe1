package pipe

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
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
	address := s.Address
	if address == "" {
		address = "127.0.0.1:0"
	}
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
