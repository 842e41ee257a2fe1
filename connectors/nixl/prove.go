package nixl

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

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

// needsKey refuses to begin without any key.
func (c *Config) needsKey(link connector.Secret) error {
	if c.KeyFile != "" || link != nil {
		return nil
	}
	return fmt.Errorf("key_file: it is needed, since this engine's host gives its plugins no link key (it is older than this plugin), "+
		"and every user of the machine reaches loopback: %w", connector.ErrIncompatible)
}

// greet finds out whether whoever has connected has the key, and then answers its questions.
func (n *Node) greet(ctx context.Context, raw net.Conn, _ *pipe.Acceptor) error {
	stop := context.AfterFunc(ctx, func() { _ = raw.Close() })
	conn, err := n.admit(ctx, raw)
	if err == nil && !stop() {
		err = ctx.Err()
	}
	if err != nil {
		stop()
		n.complain(raw, err)
		return err
	}
	if !n.keep(conn) {
		return errors.New("the side channel is being closed")
	}
	n.tasks.Go(func() {
		defer n.forget(conn)
		n.serve(conn)
	})
	return nil
}

// complain logs a stranger, but not one after the other.
func (n *Node) complain(conn net.Conn, err error) {
	last, now := n.complained.Load(), time.Now().UnixNano()
	if now-last < int64(complainEvery) || !n.complained.CompareAndSwap(last, now) {
		return
	}
	n.log.Warn("side channel: somebody without the key was refused", "peer", conn.RemoteAddr().String(), "error", err)
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
	return conn, pipe.Demand(conn, n.env.LinkKey, head[:])
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
	prove, err := pipe.Prove(conn, l.key, greeting())
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
