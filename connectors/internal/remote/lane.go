package remote

import (
	"context"
	"crypto/tls"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// lane is a client that one call at a time uses. go-redis heeds a context's deadline, but not its
// end before that, while it waits for an answer; a lane knows its connections and ends their waiting.
// When a call has returned nothing reads from its connections any more, so nothing can write the
// blocks that it was given.
type lane struct {
	client  redis.UniversalClient
	scratch []byte // where the current call gathers values

	heard atomic.Int64 // when the server last sent something, in Unix nanoseconds

	mu    sync.Mutex
	conns map[*conn]struct{}
	over  bool // the current call has been cancelled
}

// lanes are those that no call uses. The one that was used last is taken first: its connection and what both ends
// keep for it are warm.
type lanes struct {
	free  chan struct{} // one for each
	mu    sync.Mutex
	stack []*lane
}

func newLanes(most int) *lanes { return &lanes{free: make(chan struct{}, most)} }

// take waits for a lane; nil if ctx ends before there is one.
func (p *lanes) take(ctx context.Context) *lane {
	select {
	case <-p.free:
	case <-ctx.Done():
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	last := len(p.stack) - 1
	l := p.stack[last]
	p.stack = p.stack[:last]
	return l
}

func (p *lanes) give(l *lane) {
	p.mu.Lock()
	p.stack = append(p.stack, l)
	p.mu.Unlock()
	p.free <- struct{}{}
}

// poolSize is more than a lane ever uses, which is one connection to each server: after that many refused
// connections in a row go-redis itself waits a second before it tries again, and we know better when to.
const poolSize = 1 << 10

// newLane makes a client; it connects when it is used.
func newLane(o *Options) *lane {
	l := &lane{conns: map[*conn]struct{}{}}
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		return l.dial(ctx, o, network, address)
	}
	l.client = redis.NewUniversalClient(&redis.UniversalOptions{
		Addrs: o.Addresses, IsClusterMode: o.Cluster, Dialer: dial, Username: o.Username, Password: o.Password, DB: o.DB,
		ContextTimeoutEnabled: true, MaxRetries: -1, MaxRedirects: 3, DialerRetries: 1,
		DialTimeout: o.Timeout, ReadTimeout: o.Timeout, WriteTimeout: o.Timeout,
		PoolSize: poolSize, DisableIdentity: true, Protocol: 2,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	return l
}

// silent keeps go-redis from logging by itself: what goes wrong is in its errors.
type silent struct{}

// Printf implements go-redis' logger.
func (silent) Printf(context.Context, string, ...any) {}

func (l *lane) dial(ctx context.Context, o *Options, network, address string) (net.Conn, error) {
	d := net.Dialer{Timeout: o.Timeout}
	raw, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	if o.TLS != nil {
		config := o.TLS.Clone()
		if config.ServerName == "" {
			config.ServerName, _, _ = net.SplitHostPort(address)
		}
		secure := tls.Client(raw, config)
		if err := secure.HandshakeContext(ctx); err != nil {
			_ = raw.Close()
			return nil, err
		}
		raw = secure
	}
	c := &conn{Conn: raw, lane: l}
	l.mu.Lock()
	l.conns[c] = struct{}{}
	l.mu.Unlock()
	return c, nil
}

// run does one call on the lane. When ctx ends, waiting for the server ends too.
func (l *lane) run(ctx context.Context, call func(context.Context, *lane) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	told := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(told)
		l.interrupt()
	})
	err := call(ctx, l)
	if stop() {
		return err
	}
	<-told
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = false
	for c := range l.conns { // go-redis closes those that failed; the others are as good as before
		_ = c.Conn.SetDeadline(time.Time{})
	}
	return err
}

// silent is how long the server has sent nothing, in a call that began at start.
func (l *lane) silent(start time.Time) time.Duration {
	return time.Since(time.Unix(0, max(start.UnixNano(), l.heard.Load())))
}

// interrupt lets every read and write of the lane fail at once.
func (l *lane) interrupt() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = true
	for c := range l.conns {
		_ = c.Conn.SetDeadline(past())
	}
}

// past is a deadline that is over.
func past() time.Time { return time.Unix(1, 0) }

func (l *lane) close() error { return l.client.Close() }

// conn is a connection of a lane, whose deadlines stay in the past after an interruption.
type conn struct {
	net.Conn
	lane *lane
}

// NetConn is the connection below, which go-redis asks whether it is still open.
func (c *conn) NetConn() net.Conn { return c.Conn }

// Read implements net.Conn.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.lane.heard.Store(time.Now().UnixNano())
	}
	return n, err
}

// SetDeadline implements net.Conn.
func (c *conn) SetDeadline(t time.Time) error { return c.set(c.Conn.SetDeadline, t) }

// SetReadDeadline implements net.Conn.
func (c *conn) SetReadDeadline(t time.Time) error { return c.set(c.Conn.SetReadDeadline, t) }

// SetWriteDeadline implements net.Conn.
func (c *conn) SetWriteDeadline(t time.Time) error { return c.set(c.Conn.SetWriteDeadline, t) }

func (c *conn) set(set func(time.Time) error, t time.Time) error {
	c.lane.mu.Lock()
	defer c.lane.mu.Unlock()
	if c.lane.over {
		t = past()
	}
	return set(t)
}

// Close implements net.Conn. Both go-redis and we may close it.
func (c *conn) Close() error {
	c.lane.mu.Lock()
	_, open := c.lane.conns[c]
	delete(c.lane.conns, c)
	c.lane.mu.Unlock()
	if !open {
		return nil
	}
	return c.Conn.Close()
}
