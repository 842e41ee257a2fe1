package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// end is the common part of both ends of a pipe: one connection after another.
type end struct {
	network  *Network
	id       linkID
	address  string    // where the dialer dials; "" at the listener's end
	listener *listener // nil at the dialer's end

	mu        sync.Mutex
	conn      net.Conn // nil while there is none
	peerHas   uint64   // frames that the peer had received when conn was made
	delivered uint64   // frames that were received here
	busy      bool     // a frame is being received
	closing   bool     // Close was called, so whatever ends the pipe from here on counts as that
	err       error    // why the pipe is over
	change    chan struct{}
	awaited   bool          // somebody waits for change
	over      chan struct{} // closed when err is set
}

func newEnd(n *Network, id linkID, address string, l *listener) *end {
	return &end{network: n, id: id, address: address, listener: l, change: make(chan struct{}), over: make(chan struct{})}
}

// changed wakes everybody who waits. The caller holds mu.
func (e *end) changed() {
	if e.awaited {
		close(e.change)
		e.change, e.awaited = make(chan struct{}), false
	}
}

// changes returns a channel that is closed at the next change. The caller holds mu.
func (e *end) changes() <-chan struct{} {
	e.awaited = true
	return e.change
}

// adopt makes conn the connection of the pipe.
func (e *end) adopt(conn net.Conn, peerHas uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.err != nil {
		_ = conn.Close()
		return
	}
	if e.conn != nil {
		_ = e.conn.Close()
	}
	e.conn, e.peerHas = conn, peerHas
	e.changed()
}

// quiet gives up the connection, waits until nothing is received from it any more, and returns the number
// of frames that were received.
func (e *end) quiet() uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.breakLocked(e.conn)
	for e.busy && e.err == nil {
		change := e.changes()
		e.mu.Unlock()
		<-change
		e.mu.Lock()
	}
	return e.delivered
}

// broken gives up a connection, if it is still the current one.
func (e *end) broken(conn net.Conn) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.breakLocked(conn)
}

func (e *end) breakLocked(conn net.Conn) {
	if conn == nil {
		return
	}
	_ = conn.Close()
	if e.conn == conn {
		e.conn = nil
		e.changed()
	}
}

// finish ends the pipe with an error. Only the first error counts.
func (e *end) finish(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.err != nil {
		return
	}
	if e.closing {
		err = pipe.ErrClosed
	}
	e.err = err
	close(e.over)
	if e.conn != nil {
		_ = e.conn.Close()
		e.conn = nil
	}
	e.changed()
	if e.listener != nil {
		go e.listener.forget(e.id)
	}
}

// why returns why the pipe is over, or nil while it is not.
func (e *end) why() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.err
}

// Close ends the pipe at once.
func (e *end) Close() error {
	e.finish(pipe.ErrClosed)
	return nil
}

// now returns the connection if there is one, or the reason why the pipe is over.
func (e *end) now() (_ net.Conn, peerHas uint64, _ error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.conn, e.peerHas, e.err
}

// current waits for a connection: the dialer makes one, and the listener's end gets one from the listener.
// If that takes longer than the network's patience, the peer is gone.
func (e *end) current(ctx context.Context, outward bool) (net.Conn, uint64, error) {
	if conn, peerHas, err := e.now(); err != nil || conn != nil {
		return conn, peerHas, err
	}
	patient, cancel := context.WithTimeout(ctx, e.network.patience())
	defer cancel()
	for {
		e.mu.Lock()
		conn, peerHas, err, change := e.conn, e.peerHas, e.err, e.changes()
		e.mu.Unlock()
		if err != nil || conn != nil {
			return conn, peerHas, err
		}
		var pause <-chan time.Time
		if e.address != "" {
			err = e.redial(patient, outward)
			if err == nil || errors.Is(err, connector.ErrGone) || errors.Is(err, connector.ErrIncompatible) {
				if err != nil {
					e.finish(fmt.Errorf("%s: %w", e.address, err))
				}
				continue
			}
			pause = time.After(redialPause)
		}
		select {
		case <-change:
		case <-pause:
		case <-patient.Done():
			if ctx.Err() != nil {
				return nil, 0, ctx.Err()
			}
			e.finish(fmt.Errorf("the connection broke and did not come back within %v: %w", e.network.patience(), connector.ErrGone))
		}
	}
}

func (e *end) redial(ctx context.Context, outward bool) error {
	e.mu.Lock()
	delivered := e.delivered
	e.mu.Unlock()
	conn, peerHas, err := e.network.connect(ctx, e.address, hello{link: e.id, outward: outward, again: true, delivered: delivered})
	if err != nil {
		return err
	}
	e.adopt(conn, peerHas)
	return nil
}
