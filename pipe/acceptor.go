package pipe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"
)

const (
	handshakeTimeout = 5 * time.Second
	acceptPause      = 20 * time.Millisecond
	maxPending       = 64 // limit of handshakes at the same time, and of links that nobody has accepted yet
)

// handshake is a connection from a peer that has not yet proved who it is.
type handshake struct {
	conn   net.Conn
	cancel context.CancelFunc
}

// Acceptor is the common part of listeners whose links begin with a connection. It accepts connections,
// shakes hands with a bounded number of strangers at the same time, drops the oldest of them when one more
// comes, and keeps the resulting links until they are accepted. Its methods may be called concurrently.
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
		h := &handshake{conn, cancel}
		a.begin(h)
		a.tasks.Go(func() {
			defer a.end(h)
			if a.greet(ctx, conn, a) != nil {
				_ = conn.Close()
			}
		})
	}
}

// begin records a handshake. When there are too many, it ends the oldest, so that silent strangers keep
// nobody out.
func (a *Acceptor) begin(h *handshake) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.handshakes) >= maxPending {
		oldest := a.handshakes[0]
		a.handshakes = a.handshakes[1:]
		oldest.cancel()
		_ = oldest.conn.Close()
	}
	a.handshakes = append(a.handshakes, h)
}

func (a *Acceptor) end(h *handshake) {
	h.cancel()
	a.mu.Lock()
	defer a.mu.Unlock()
	if i := slices.Index(a.handshakes, h); i >= 0 {
		a.handshakes = slices.Delete(a.handshakes, i, i+1)
	}
}
