package tcp

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// An acknowledgement costs both ends about as much as 20 KB of payload. So it waits for the next frame if
// that has begun to arrive, but never for longer than lazyTime: a caller that does not receive again must
// not keep the sender waiting.
const (
	lazyFrames = window / 2
	lazyBytes  = 256 << 10
	lazyTime   = 500 * time.Microsecond
)

// receiver is the receiving end of a pipe.
type receiver struct {
	*end
	turn   chan struct{} // holds one token while a Recv runs
	reader frameReader
	conn   net.Conn // the connection that reader reads

	owed      int  // frames received and not acknowledged; guarded by end.mu, as are the next two
	owedBytes int  // payload bytes of those frames
	armed     bool // timer runs
	timer     *time.Timer
}

func newReceiver(e *end) *receiver { return &receiver{end: e, turn: make(chan struct{}, 1)} }

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

// frame receives one frame from a connection. taken says that the frame is over for the caller, which may
// have refused it; otherwise err says why the connection was given up.
func (r *receiver) frame(ctx context.Context, conn net.Conn, place pipe.Place) (taken bool, err error) {
	if r.conn != conn {
		r.conn, r.reader = conn, frameReader{in: bufio.NewReaderSize(conn, bufferSize)}
	}
	if !r.reader.more() {
		r.settle(conn)
	}
	stop := interruptible(ctx, conn.SetReadDeadline)
	if err := r.reader.wait(); err != nil {
		stop()
		if ctx.Err() == nil {
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
	r.mu.Lock()
	r.busy = false
	if taken {
		r.delivered = p.number
		r.owed, r.owedBytes = r.owed+1, r.owedBytes+p.payload
	}
	r.changed()
	r.mu.Unlock()
	if !taken && err != nil {
		r.broken(conn)
		return false, err
	}
	closed := taken && p.flags&flagClose != 0
	if closed || !taken || !r.reader.more() || !r.later() {
		r.acknowledge(conn)
	}
	if closed {
		r.finish(pipe.ErrClosed)
		return false, nil
	}
	return taken, err
}

// later lets frames be acknowledged together with the next one, or after lazyTime. It returns false if they
// must be acknowledged now.
func (r *receiver) later() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.owed >= lazyFrames || r.owedBytes >= lazyBytes {
		return false
	}
	switch {
	case r.armed:
	case r.timer == nil:
		r.timer = time.AfterFunc(lazyTime, r.soon)
	default:
		r.timer.Reset(lazyTime)
	}
	r.armed = true
	return true
}

// soon acknowledges the frames that are still owed an acknowledgement.
func (r *receiver) soon() {
	r.mu.Lock()
	r.armed = false
	conn := r.end.conn
	r.mu.Unlock()
	if conn != nil {
		r.settle(conn)
	}
}

// settle sends the acknowledgement that is owed, if any is.
func (r *receiver) settle(conn net.Conn) {
	r.mu.Lock()
	owed := r.owed > 0
	r.mu.Unlock()
	if owed {
		r.acknowledge(conn)
	}
}

// begin records that a frame is being received, unless the connection has been given up.
func (r *receiver) begin(conn net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.end.conn != conn {
		return false
	}
	r.busy = true
	return true
}

// body receives a frame whose first byte has arrived. It drops a frame that was delivered before, which
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
func (r *receiver) acknowledge(conn net.Conn) {
	r.mu.Lock()
	number := r.delivered
	r.owed, r.owedBytes = 0, 0
	r.mu.Unlock()
	if writeNumber(conn, number) != nil {
		r.broken(conn)
	}
}

// Close implements pipe.Pipe. It tells the sender if there is a connection.
func (r *receiver) Close() error {
	r.mu.Lock()
	conn, over := r.end.conn, r.err != nil
	r.closing = true
	r.mu.Unlock()
	if conn != nil && !over {
		_ = conn.SetWriteDeadline(time.Now().Add(time.Second))
		r.settle(conn)                        // the Sends of received frames succeed
		_ = writeNumber(conn, receiverClosed) // a sender that misses it finds the connection closed
	}
	r.finish(pipe.ErrClosed)
	return nil //nolint:nilerr // over is why the pipe had already ended
}
