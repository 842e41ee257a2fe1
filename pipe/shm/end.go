package shm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/pipe"
)

// end is one end of a link: its two pipes in one process.
type end struct {
	conn   *net.UnixConn
	region *shm.Region
	out    sender
	in     receiver
	bells  sync.WaitGroup

	mu     sync.Mutex
	open   int           // how many of out and in are open
	gone   bool          // the other process, or its end of the link
	change chan struct{} // closed and replaced when the bell has rung
}

// half is the common part of a sender and a receiver.
type half struct {
	end    *end
	ring   ring
	turn   chan struct{} // holds one token while the ring is used; Close keeps it
	once   sync.Once
	closed chan struct{}
}

// newEnd takes over a connection and the memory that both ends agreed on over it.
func newEnd(conn *net.UnixConn, region *shm.Region, listens bool) *end {
	memory := region.Bytes()
	first, second := newRing(memory[:len(memory)/2]), newRing(memory[len(memory)/2:])
	if listens {
		first, second = second, first
	}
	e := &end{conn: conn, region: region, open: 2, change: make(chan struct{})}
	e.out.half = half{end: e, ring: first, turn: make(chan struct{}, 1), closed: make(chan struct{})}
	e.in.half = half{end: e, ring: second, turn: make(chan struct{}, 1), closed: make(chan struct{})}
	e.bells.Go(e.listen)
	return e
}

func (e *end) link() pipe.Link { return pipe.Link{Out: &e.out, In: &e.in} }

// listen wakes everybody who waits whenever the other end rings the bell, and tells them when that end is
// gone.
func (e *end) listen() {
	var bells [64]byte
	for {
		_, err := e.conn.Read(bells[:])
		e.mu.Lock()
		e.gone = err != nil
		close(e.change)
		e.change = make(chan struct{})
		e.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (e *end) state() (gone bool, change <-chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.gone, e.change
}

// bell wakes the other end, if it asked for it.
func (e *end) bell(waits *atomic.Uint32) {
	if waits.Swap(0) == 1 {
		_, _ = e.conn.Write([]byte{1}) // if this fails, the other end is gone, which listen notices
	}
}

// leave ends one half; when the last half ends, so does the link.
func (e *end) leave() error {
	e.mu.Lock()
	e.open--
	last := e.open == 0
	e.mu.Unlock()
	if !last {
		return nil
	}
	err := e.conn.Close()
	e.bells.Wait()
	return errors.Join(err, e.region.Close())
}

// enter takes the turn to use the ring.
func (h *half) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	select {
	case <-h.closed:
		return pipe.ErrClosed
	default:
	}
	select {
	case h.turn <- struct{}{}:
		return nil
	case <-h.closed:
		return pipe.ErrClosed
	case <-ctx.Done():
		return ctx.Err()
	}
}

// until waits until ready is true and asks the other end to ring for that. The caller holds the turn.
func (h *half) until(ctx context.Context, waits *atomic.Uint32, ready func(gone bool) (bool, error)) error {
	for {
		gone, change := h.end.state()
		waits.Store(1)
		ok, err := ready(gone)
		if ok || err != nil {
			waits.Store(0)
			return err
		}
		if gone {
			return fmt.Errorf("the peer is gone: %w", connector.ErrGone)
		}
		select {
		case <-change:
		case <-h.closed:
			return pipe.ErrClosed
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// close tells the other end that this half is over, when its last call has ended.
func (h *half) close(tell func(*control)) (err error) {
	h.once.Do(func() {
		close(h.closed)
		h.turn <- struct{}{} // for good
		tell(h.ring.control)
		err = h.end.leave()
	})
	return err
}

// sender is the sending end of a pipe.
type sender struct{ half }

// Recv implements pipe.Pipe.
func (s *sender) Recv(context.Context, pipe.Place) error {
	return fmt.Errorf("this end sends: %w", connector.ErrIncompatible)
}

// Send implements pipe.Pipe. It returns when all of the frame is in the ring.
func (s *sender) Send(ctx context.Context, header []byte, spans [][]byte) error {
	size := pipe.Size(spans)
	if err := pipe.Check(len(header), int64(size)); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	if err := s.enter(ctx); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	defer func() { <-s.turn }()
	if err := s.begin(ctx, header, size); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	for _, span := range spans {
		for len(span) > 0 {
			n, err := s.more(ctx, span)
			if err != nil {
				s.publish(chunk{kind: kindAbort})
				return fmt.Errorf("send: %w", err)
			}
			span = span[n:]
		}
	}
	return nil
}

// piece is how much of a payload is written before the receiver sees it, so that the receiver copies out
// while the sender copies in.
const piece = 128 << 10

// begin writes the first chunk of a frame.
func (s *sender) begin(ctx context.Context, header []byte, size int) error {
	if err := s.room(ctx, beginBytes+len(header)); err != nil {
		return err
	}
	frame := encodeFrame(len(header), size)
	s.publish(chunk{length: frameHead + len(header), kind: kindBegin}, frame[:], header)
	return nil
}

// more writes a part of a payload.
func (s *sender) more(ctx context.Context, span []byte) (int, error) {
	want := min(len(span), piece)
	if err := s.room(ctx, chunkHead+want); err != nil {
		return 0, err
	}
	s.publish(chunk{length: want, kind: kindMore}, span[:want])
	return want, nil
}

// room waits for that many free bytes in addition to those of an abort.
func (s *sender) room(ctx context.Context, want int) error {
	return s.until(ctx, &s.ring.control.sendWaits, func(gone bool) (bool, error) {
		if s.ring.control.recvClosed.Load() != 0 {
			return false, fmt.Errorf("the receiver has closed: %w", pipe.ErrClosed)
		}
		used, err := s.ring.used()
		return !gone && len(s.ring.data)-used >= want+reserve, err
	})
}

// publish writes a chunk and shows it to the receiver. The caller has made sure that there is room.
func (s *sender) publish(c chunk, parts ...[]byte) {
	head, at := c.encode(), s.ring.control.head.Load()
	s.ring.put(at, head[:])
	at += chunkHead
	for _, p := range parts {
		s.ring.put(at, p)
		at += uint64(len(p))
	}
	s.ring.control.head.Store(at)
	s.end.bell(&s.ring.control.recvWaits)
}

// Close implements pipe.Pipe.
func (s *sender) Close() error {
	return s.close(func(c *control) {
		c.sendClosed.Store(1)
		s.end.bell(&c.recvWaits)
	})
}
