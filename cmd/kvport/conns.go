package main

import (
	"container/list"
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	mostConnections   = 2048      // by default, where the process may have many more descriptors
	fewestConnections = 8         // fewer leave no room for probes while requests run
	mostComing        = 256 << 20 // bytes of bodies that have not come whole yet, of all connections together
)

// How long a client may take for a body, and for an answer that is no stream.
const clientTime = 30 * time.Second

// descriptors is how many files this process may have open.
func descriptors() int {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) != nil {
		return 1024
	}
	return int(min(limit.Cur, 1<<20))
}

// defaultConnections leaves most descriptors to the engine, its connector and a router's upstreams.
func defaultConnections() int {
	return max(fewestConnections, min(mostConnections, descriptors()/4))
}

// gate is a listener that has a limited number of connections. When one more comes, the one that has
// waited for its client longest is closed: idle, before the end of a header, or before the end of a body.
// So nobody can lock others out by opening connections and leaving them. Requests that run are never
// closed.
type gate struct {
	*net.TCPListener
	most       int
	mostComing int64

	mu      sync.Mutex
	open    int
	waiting list.List // of *connection: those that wait for their client, the longest first
	coming  int64     // bytes of bodies that have not come whole
}

// connection is one of a gate's.
type connection struct {
	*net.TCPConn
	gate *gate

	// The gate's mu guards these.
	gone   bool
	place  *list.Element // among those that wait; nil: a request runs
	coming int64         // bytes of its body so far
}

func newGate(l *net.TCPListener, most int) *gate {
	return &gate{TCPListener: l, most: most, mostComing: mostComing}
}

// Accept implements net.Listener.
func (g *gate) Accept() (net.Conn, error) {
	for {
		tcp, err := g.AcceptTCP()
		if err != nil {
			return nil, err
		}
		c := &connection{TCPConn: tcp, gate: g}
		if g.admit(c) {
			return c, nil
		}
		_ = tcp.Close() // requests run on all others
	}
}

// admit makes room for a connection.
func (g *gate) admit(c *connection) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.open >= g.most {
		oldest := g.waiting.Front()
		if oldest == nil {
			return false
		}
		g.closeLocked(oldest)
	}
	g.open++
	c.place = g.waiting.PushBack(c)
	return true
}

// closeLocked closes a connection that waits. The caller holds mu.
func (g *gate) closeLocked(place *list.Element) {
	c, ok := place.Value.(*connection)
	if !ok {
		return
	}
	g.forgetLocked(c)
	_ = c.TCPConn.Close() // nobody is told: it was in the middle of nothing, or too slow
}

func (g *gate) forgetLocked(c *connection) {
	if c.gone {
		return
	}
	c.gone = true
	g.open--
	g.leaveLocked(c)
}

// leaveLocked takes a connection from those that wait.
func (g *gate) leaveLocked(c *connection) {
	if c.place != nil {
		g.waiting.Remove(c.place)
		c.place = nil
	}
	g.coming -= c.coming
	c.coming = 0
}

// Close implements net.Conn.
func (c *connection) Close() error {
	c.gate.mu.Lock()
	c.gate.forgetLocked(c)
	c.gate.mu.Unlock()
	return c.TCPConn.Close()
}

// runs says that the connection's request has come whole.
func (c *connection) runs() {
	c.gate.mu.Lock()
	defer c.gate.mu.Unlock()
	c.gate.leaveLocked(c)
}

// waits says that the next move is the client's, from now on.
func (c *connection) waits() {
	c.gate.mu.Lock()
	defer c.gate.mu.Unlock()
	c.gate.leaveLocked(c)
	if !c.gone {
		c.place = c.gate.waiting.PushBack(c)
	}
}

// took counts n bytes of a body. If all bodies together are too large, those whose clients take longest
// are not waited for any more, be it this one.
func (c *connection) took(n int) {
	g := c.gate
	g.mu.Lock()
	defer g.mu.Unlock()
	if c.gone || c.place == nil {
		return
	}
	c.coming += int64(n)
	g.coming += int64(n)
	for place := g.waiting.Front(); place != nil && g.coming > g.mostComing; {
		next := place.Next()
		if other, ok := place.Value.(*connection); ok && other.coming > 0 {
			g.closeLocked(place)
		}
		place = next
	}
}

type connectionKey struct{}

// withConnection lets a request's handler find its connection.
func withConnection(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connectionKey{}, c)
}

func connectionOf(ctx context.Context) *connection {
	c, _ := ctx.Value(connectionKey{}).(*connection)
	return c
}

// body tells when a request has come whole.
type body struct {
	io.ReadCloser
	took  func(n int)
	whole func()
}

// Read implements io.Reader.
func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if n > 0 {
		b.took(n)
	}
	if err == io.EOF && b.whole != nil {
		b.whole()
		b.whole = nil
	}
	return n, err
}

// bounded limits how long a client may take for its body and for its answer, where the handler does
// not do so itself. It calls begin when a POST has come whole, and what that gives when its handler
// returns.
func bounded(next http.Handler, begin func() (end func())) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := connectionOf(r.Context())
		control := http.NewResponseController(w)
		var limit time.Time // none: a POST's handler sets its own before it writes
		if r.Method != http.MethodPost {
			limit = time.Now().Add(clientTime)
		}
		_ = control.SetWriteDeadline(limit)
		end := func() {}
		whole := func() {
			if r.Method == http.MethodPost {
				c.runs()
				end = begin()
			}
		}
		c.waits() // for the rest of the request; what came before does not count any more
		if r.ContentLength == 0 {
			whole()
		} else {
			_ = control.SetReadDeadline(time.Now().Add(clientTime))
			r.Body = &body{ReadCloser: r.Body, took: c.took, whole: func() {
				_ = control.SetReadDeadline(time.Time{}) // from here on a read only notices that the client left
				whole()
			}}
		}
		defer func() {
			end()
			c.waits()
			_ = control.SetWriteDeadline(time.Now().Add(clientTime)) // for what is still in the buffer
		}()
		next.ServeHTTP(w, r)
	})
}
