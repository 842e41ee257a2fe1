package tcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// end is what both ends of a pipe have in common: one connection after another.
type end struct {
	network  *Network
	id       linkID
	address  string    // where the dialer dials; "" at the listener's end
	listener *listener // nil at the dialer's end

	mu        sync.Mutex
	conn      net.Conn // nil while there is none
	peerHas   uint64   // frames that the peer had when conn was made
	delivered uint64   // frames that were received here
	busy      bool     // a frame is being received
	closing   bool     // Close was called: whatever ends the pipe from here on, it was that
	err       error    // why the pipe is over
	change    chan struct{}
}

func newEnd(n *Network, id linkID, address string, l *listener) *end {
	return &end{network: n, id: id, address: address, listener: l, change: make(chan struct{})}
}

// changed wakes those who wait. The caller holds mu.
func (e *end) changed() {
	close(e.change)
	e.change = make(chan struct{})
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

// quiet gives up the connection, waits until nothing is received from it, and gives the number of
// frames that were received.
func (e *end) quiet() uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.breakLocked(e.conn)
	for e.busy && e.err == nil {
		change := e.change
		e.mu.Unlock()
		<-change
		e.mu.Lock()
	}
	return e.delivered
}

// broken gives up a connection, if it is still the one.
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

// finish ends the pipe with an error, the first of which stays.
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
	if e.conn != nil {
		_ = e.conn.Close()
		e.conn = nil
	}
	e.changed()
	if e.listener != nil {
		go e.listener.forget(e.id)
	}
}

// over is why the pipe is over; nil while it is not.
func (e *end) over() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.err
}

// Close ends the pipe at once.
func (e *end) Close() error {
	e.finish(pipe.ErrClosed)
	return nil
}

// current waits for a connection: the dialer makes one, the listener's end is given one. When that takes
// longer than the network's patience the peer is gone.
func (e *end) current(ctx context.Context, outward bool) (net.Conn, uint64, error) {
	patient, cancel := context.WithTimeout(ctx, e.network.patience())
	defer cancel()
	for {
		e.mu.Lock()
		conn, peerHas, err, change := e.conn, e.peerHas, e.err, e.change
		e.mu.Unlock()
		if err != nil || conn != nil {
			return conn, peerHas, err
		}
		if e.address != "" {
			err = e.redial(patient, outward)
			if err == nil || errors.Is(err, connector.ErrGone) || errors.Is(err, connector.ErrIncompatible) {
				if err != nil {
					e.finish(fmt.Errorf("%s: %w", e.address, err))
				}
				continue
			}
		}
		var pause <-chan time.Time
		if e.address != "" {
			pause = time.After(redialPause)
		}
		select {
		case <-change:
		case <-pause:
		case <-patient.Done():
			if ctx.Err() != nil {
				return nil, 0, ctx.Err()
			}
			e.finish(fmt.Errorf("the connection broke and was not made anew within %v: %w", e.network.patience(), connector.ErrGone))
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

// receiver is the receiving end of a pipe.
type receiver struct {
	*end
	turn   chan struct{} // holds one token while a Recv runs
	reader frameReader
	conn   net.Conn // of reader
}

// Send implements pipe.Pipe.
func (r *receiver) Send(context.Context, []byte, [][]byte) error {
	return fmt.Errorf("this end receives: %w", connector.ErrIncompatible)
}

// Recv implements pipe.Pipe.
func (r *receiver) Recv(ctx context.Context, place pipe.Place) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("receive: %w", err)
	}
	select {
	case r.turn <- struct{}{}:
		defer func() { <-r.turn }()
	case <-ctx.Done():
		return fmt.Errorf("receive: %w", ctx.Err())
	}
	for damaged := 0; ; {
		conn, _, err := r.current(ctx, false)
		if err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		taken, err := r.frame(ctx, conn, place)
		switch {
		case taken && err != nil:
			return fmt.Errorf("receive: %w", err)
		case taken:
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("receive: %w", ctx.Err())
		case errors.Is(err, errDamaged):
			if damaged++; damaged > 2 {
				r.finish(fmt.Errorf("a frame arrives damaged again and again: %w", connector.ErrCorrupt))
			}
		case errors.Is(err, connector.ErrIncompatible):
			r.finish(err)
		}
	}
}

// frame receives one frame from a connection. taken says that the frame is over for the caller, who may
// have refused it; otherwise err says why the connection was left.
func (r *receiver) frame(ctx context.Context, conn net.Conn, place pipe.Place) (taken bool, err error) {
	if r.conn != conn {
		r.conn, r.reader = conn, frameReader{conn: conn}
	}
	stop := interruptible(ctx, conn)
	began, err := r.reader.wait()
	if err != nil {
		stop()
		if began || ctx.Err() == nil {
			r.broken(conn)
		}
		return false, err
	}
	if !r.begin(conn) {
		stop()
		return false, nil
	}
	p, taken, err := r.body(place)
	stop()
	closed := taken && p.flags&flagClose != 0
	r.mu.Lock()
	r.busy = false
	if taken {
		r.delivered = p.number
	}
	r.changed()
	r.mu.Unlock()
	if !taken && err != nil {
		r.broken(conn)
		return false, err
	}
	if e := r.acknowledge(conn); e != nil {
		r.broken(conn)
	}
	if closed {
		r.finish(pipe.ErrClosed)
		return false, nil
	}
	return taken, err
}

// begin notes that a frame is being received, unless the connection was given up meanwhile.
func (r *receiver) begin(conn net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.end.conn != conn {
		return false
	}
	r.busy = true
	return true
}

// body receives a frame whose first byte is there. A frame that was delivered before is dropped: it
// counts neither as taken nor as an error.
func (r *receiver) body(place pipe.Place) (p prefix, taken bool, err error) {
	p, err = r.reader.begin()
	if err != nil {
		return p, false, err
	}
	r.mu.Lock()
	next := r.delivered + 1
	r.mu.Unlock()
	if p.number > next {
		return p, false, fmt.Errorf("frame %d came instead of %d: %w", p.number, next, connector.ErrIncompatible)
	}
	if p.number < next || p.flags&flagClose != 0 {
		return p, p.number == next, r.reader.skip(&p)
	}
	spans, refused := pipe.Ask(place, r.reader.header, p.payload)
	if refused != nil {
		if err := r.reader.skip(&p); err != nil {
			return p, false, err
		}
		return p, true, refused
	}
	if err := r.reader.fill(&p, spans); err != nil {
		return p, false, err
	}
	return p, true, nil
}

// acknowledge tells the sender how many frames were received.
func (r *receiver) acknowledge(conn net.Conn) error {
	r.mu.Lock()
	number := r.delivered
	r.mu.Unlock()
	return writeNumber(conn, number)
}

// Close implements pipe.Pipe. It tells the sender, if there is a connection.
func (r *receiver) Close() error {
	r.mu.Lock()
	conn, over := r.end.conn, r.err != nil
	r.closing = true
	r.mu.Unlock()
	if conn != nil && !over {
		_ = conn.SetWriteDeadline(time.Now().Add(time.Second))
		_ = writeNumber(conn, receiverClosed) // who does not hear it finds the connection closed
	}
	r.finish(pipe.ErrClosed)
	return nil //nolint:nilerr // over is another's error
}

func readFull(conn net.Conn, b []byte) (int, error) { return io.ReadFull(conn, b) }
