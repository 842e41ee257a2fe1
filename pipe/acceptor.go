package pipe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

const (
	handshakeTimeout = 5 * time.Second
	acceptPause      = 20 * time.Millisecond
	maxPending       = 64 // handshakes at once, and links that nobody has accepted yet
)

// Acceptor is what listeners have in common whose links begin with a connection: it accepts connections,
// shakes hands with a bounded number of strangers at once, and keeps the links that come of it until
// they are accepted. Its methods may be called concurrently. It is made by [NewAcceptor].
type Acceptor struct {
	inner  net.Listener
	greet  Greet
	ready  chan Link
	ctx    context.Context //nolint:containedctx // it is the acceptor's life, which Close ends
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	once   sync.Once
}

// Greet shakes hands on a connection. It may offer a link to the acceptor, now or at a later connection.
// ctx ends after 5 s, or when the acceptor is closed. After an error the acceptor closes the connection;
// otherwise it is Greet's.
type Greet func(ctx context.Context, conn net.Conn, a *Acceptor) error

// NewAcceptor accepts what connects to inner, which becomes the acceptor's, until Close.
func NewAcceptor(inner net.Listener, greet Greet) *Acceptor {
	a := &Acceptor{inner: inner, greet: greet, ready: make(chan Link, maxPending)}
	a.ctx, a.cancel = context.WithCancel(context.Background())
	a.tasks.Go(a.run)
	return a
}

// Addr is where inner listens.
func (a *Acceptor) Addr() net.Addr { return a.inner.Addr() }

// Accept waits for a link, as [Listener] says. It returns ErrClosed after Close.
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

// Offer hands a link to the next Accept. It closes the link when too many wait already.
func (a *Acceptor) Offer(link Link) error {
	select {
	case a.ready <- link:
		return nil
	default:
		return link.Close()
	}
}

// Close ends inner and all handshakes, waits for them, and closes links that nobody accepted. Links
// that were accepted stay. Closing twice does nothing.
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
	handshakes := make(chan struct{}, maxPending)
	for {
		conn, err := a.inner.Accept()
		if err != nil {
			select {
			case <-a.ctx.Done():
				return
			case <-time.After(acceptPause): // out of descriptors, say
				continue
			}
		}
		select {
		case handshakes <- struct{}{}:
			a.tasks.Go(func() {
				defer func() { <-handshakes }()
				ctx, cancel := context.WithTimeout(a.ctx, handshakeTimeout)
				defer cancel()
				if a.greet(ctx, conn, a) != nil {
					_ = conn.Close()
				}
			})
		default:
			_ = conn.Close() // too many strangers at once
		}
	}
}
