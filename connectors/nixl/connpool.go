package nixl

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

const (
	askTimeout = 2 * time.Second
	maxIdle    = 4  // connections that wait at one address for the next question
	maxPeers   = 64 // other engines' lives that NIXL is told to remember
	maxFaces   = 8  // metadata of one that is remembered; for more NIXL is told again
)

// connPool is a consumer's connections to the side channels of producers, by address.
type connPool struct {
	tls *tls.Config
	key connector.Secret // proven to producers, and by them, where there is no TLS

	more []connector.Secret // that producers may have as well

	mu   sync.Mutex
	idle map[string][]net.Conn
}

// peers are the agents that a rank's agent knows: producers that it reads from and consumers that it writes to.
type peers struct {
	rank *rank

	mu   sync.Mutex
	list []*peer // the longest unused first
}

// peer is an agent that ours knows.
type peer struct {
	metadata  [][]byte // all that it was made known by: its memory changes
	name      string
	transport string // for metrics
	users     int
	broken    bool
}

// ask asks one question. It takes a connection that is there, and a new one if that has died. Errors wrap
// what the caller can act on: connector.ErrGone or ErrIncompatible.
func (l *connPool) ask(ctx context.Context, address string, q *question) (*answer, error) {
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
	if q.Push != nil {
		deadline = time.Now().Add(time.Duration(q.Push.LimitMS) * time.Millisecond)
	}
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

func (l *connPool) conn(ctx context.Context, address string) (conn net.Conn, fresh bool, err error) {
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
	if l.tls == nil && !pipe.IsLoopback(host) {
		return nil, false, fmt.Errorf("it is on another host, which needs key_file")
	}
	conn, err = l.dial(ctx, address)
	return conn, true, err
}

func (l *connPool) keep(address string, conn net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.idle[address]) >= maxIdle {
		_ = conn.Close()
		return
	}
	l.idle[address] = append(l.idle[address], conn)
}

// use makes an agent known, or finds it. The caller gives it back.
func (l *peers) use(metadata []byte, transport string) (*peer, error) {
	if own := l.rank.cache(); own != nil && bytes.Equal(own.metadata, metadata) { // a ticket of this engine's own
		return &peer{name: l.rank.agent.Name(), transport: transport}, nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.list {
		if !p.broken && slices.ContainsFunc(p.metadata, func(m []byte) bool { return bytes.Equal(m, metadata) }) {
			p.users++
			return p, nil
		}
	}
	l.shrink(maxPeers - 1)
	name, err := l.rank.agent.AddPeer(metadata)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, connector.ErrGone)
	}
	for _, p := range l.list { // one whose memory has changed: NIXL knows it by its name
		if p.name == name && p.broken {
			return nil, fmt.Errorf("agent %s is about to be forgotten: %w", name, connector.ErrGone)
		}
		if p.name == name {
			p.metadata = append(p.metadata[max(0, len(p.metadata)-maxFaces+1):], metadata)
			p.users++
			return p, nil
		}
	}
	p := &peer{metadata: [][]byte{metadata}, name: name, users: 1, transport: transport}
	l.list = append(l.list, p)
	return p, nil
}

// giveBack ends a use. After a failed transfer the agent is forgotten: it may be another life's.
func (l *peers) giveBack(p *peer, failed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p.users--
	p.broken = p.broken || failed
	l.shrink(maxPeers)
}

// shrink forgets agents that nobody uses: broken ones, and the oldest beyond n. The caller holds l.mu.
func (l *peers) shrink(n int) {
	left := l.list[:0]
	extra := len(l.list) - n
	for _, p := range l.list {
		if p.users == 0 && (p.broken || extra > 0) {
			extra--
			if err := l.rank.agent.RemovePeer(p.name); err != nil {
				l.rank.env.Log.Debug("forget a producer", "peer", p.name, "error", err)
			}
			continue
		}
		left = append(left, p)
	}
	l.list = left
}

// close forgets all agents. No read runs any more.
func (l *peers) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.shrink(0)
}

// close ends the connections. No question is under way.
func (l *connPool) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, idle := range l.idle {
		for _, c := range idle {
			_ = c.Close()
		}
	}
}
