package mem

import (
	"context"
	"fmt"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// Network connects listeners and dialers of one process. The zero value is ready.
type Network struct {
	Limit int // bytes that each pipe holds; 0 means 1 MiB

	mu        sync.Mutex
	last      int
	listeners map[string]*listener
}

type listener struct {
	network *Network
	address string
	links   chan pipe.Link
	once    sync.Once
	closed  chan struct{}
}

// Listen implements pipe.Network. Each call gets an address of its own.
func (n *Network) Listen(context.Context) (pipe.Listener, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.last++
	l := &listener{network: n, address: fmt.Sprintf("mem-%d", n.last), links: make(chan pipe.Link), closed: make(chan struct{})}
	if n.listeners == nil {
		n.listeners = map[string]*listener{}
	}
	n.listeners[l.address] = l
	return l, nil
}

// Dial implements pipe.Network.
func (n *Network) Dial(ctx context.Context, address string) (pipe.Link, error) {
	n.mu.Lock()
	l, limit := n.listeners[address], n.Limit
	n.mu.Unlock()
	if l == nil {
		return pipe.Link{}, fmt.Errorf("dial %q: nobody listens: %w", address, connector.ErrGone)
	}
	if limit == 0 {
		limit = 1 << 20
	}
	ours, theirs := NewLink(limit)
	select {
	case l.links <- theirs:
		return ours, nil
	case <-l.closed:
		return pipe.Link{}, fmt.Errorf("dial %q: nobody listens any more: %w", address, connector.ErrGone)
	case <-ctx.Done():
		return pipe.Link{}, fmt.Errorf("dial %q: %w", address, ctx.Err())
	}
}

// Address implements pipe.Listener.
func (l *listener) Address() string { return l.address }

// Accept implements pipe.Listener.
func (l *listener) Accept(ctx context.Context) (pipe.Link, error) {
	select {
	case link := <-l.links:
		return link, nil
	case <-l.closed:
		return pipe.Link{}, fmt.Errorf("accept: %w", pipe.ErrClosed)
	case <-ctx.Done():
		return pipe.Link{}, ctx.Err()
	}
}

// Close implements pipe.Listener.
func (l *listener) Close() error {
	l.once.Do(func() {
		l.network.mu.Lock()
		delete(l.network.listeners, l.address)
		l.network.mu.Unlock()
		close(l.closed)
	})
	return nil
}
