package nixl

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/kvport/kvport/connector"
)

const (
	askTimeout = 2 * time.Second
	maxIdle    = 4  // connections that wait at one address for the next question
	maxPeers   = 64 // producers' lives that NIXL is told to remember
)

// links are a consumer's ways to producers: connections by address, and agents by their metadata.
type links struct {
	rank *rank

	mu    sync.Mutex
	idle  map[string][]net.Conn
	peers []*peer // the longest unused first
}

// peer is a producer's agent that ours knows.
type peer struct {
	metadata []byte
	name     string
	users    int
	broken   bool
}

func newLinks(r *rank) *links { return &links{rank: r, idle: map[string][]net.Conn{}} }

// ask asks one question. It takes a connection that is there, and a new one if that has died. Errors wrap
// what the caller can act on: connector.ErrGone or ErrIncompatible.
func (l *links) ask(ctx context.Context, address string, q *question) (*answer, error) {
	for {
		conn, fresh, err := l.conn(ctx, address)
		if err != nil {
			return nil, fmt.Errorf("ask producer %s: %w: %w", address, err, connector.ErrGone)
		}
		a, err := exchange(ctx, conn, q)
		if err == nil {
			l.keep(address, conn)
			return a, a.err()
		}
		_ = conn.Close()
		if fresh || !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
			return nil, fmt.Errorf("ask producer %s: %w: %w", address, err, connector.ErrGone)
		}
	}
}

func exchange(ctx context.Context, conn net.Conn, q *question) (*answer, error) {
	deadline := time.Now().Add(askTimeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if err := conn.SetDeadline(deadline); err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := writeMessage(conn, q); err != nil {
		return nil, err
	}
	var a answer
	if err := readMessage(conn, maxMessage, &a); err != nil {
		return nil, err
	}
	return &a, nil
}

func (l *links) conn(ctx context.Context, address string) (conn net.Conn, fresh bool, err error) {
	l.mu.Lock()
	if idle := l.idle[address]; len(idle) > 0 {
		conn = idle[len(idle)-1]
		l.idle[address] = idle[:len(idle)-1]
	}
	l.mu.Unlock()
	if conn != nil {
		return conn, false, nil
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, false, err
	}
	if l.rank.node.tls == nil && !isLoopback(host) {
		return nil, false, fmt.Errorf("it is on another host, which needs key_file")
	}
	dialer := &net.Dialer{Timeout: askTimeout}
	if t := l.rank.node.tls; t != nil {
		conn, err = (&tls.Dialer{NetDialer: dialer, Config: t}).DialContext(ctx, "tcp", address)
	} else {
		conn, err = dialer.DialContext(ctx, "tcp", address)
	}
	return conn, true, err
}

func (l *links) keep(address string, conn net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.idle[address]) >= maxIdle {
		_ = conn.Close()
		return
	}
	l.idle[address] = append(l.idle[address], conn)
}

// use makes an agent known, or finds it. The caller gives it back.
func (l *links) use(metadata []byte) (*peer, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.peers {
		if !p.broken && bytes.Equal(p.metadata, metadata) {
			p.users++
			return p, nil
		}
	}
	l.shrink(maxPeers - 1)
	name, err := l.rank.agent.AddPeer(metadata)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, connector.ErrGone)
	}
	p := &peer{metadata: metadata, name: name, users: 1}
	l.peers = append(l.peers, p)
	return p, nil
}

// giveBack ends a use. After a failed transfer the agent is forgotten: it may be another life's.
func (l *links) giveBack(p *peer, failed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p.users--
	p.broken = p.broken || failed
	l.shrink(maxPeers)
}

// shrink forgets agents that nobody uses: broken ones, and the oldest beyond n. The caller holds l.mu.
func (l *links) shrink(n int) {
	left := l.peers[:0]
	extra := len(l.peers) - n
	for _, p := range l.peers {
		if p.users == 0 && (p.broken || extra > 0) {
			extra--
			if err := l.rank.agent.RemovePeer(p.name); err != nil {
				l.rank.env.Log.Debug("forget a producer", "peer", p.name, "error", err)
			}
			continue
		}
		left = append(left, p)
	}
	l.peers = left
}

func (l *links) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, idle := range l.idle {
		for _, c := range idle {
			_ = c.Close()
		}
	}
	l.shrink(0)
}
