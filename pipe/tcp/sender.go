package tcp

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// receiverClosed is an acknowledgement that says that no frame will be received any more.
const receiverClosed = math.MaxUint64

func writeNumber(conn net.Conn, n uint64) error {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], n)
	_, err := conn.Write(b[:])
	return err
}

// sender is the sending end of a pipe: a queue of the frames whose Sends wait, and a goroutine that writes
// them.
type sender struct {
	*end
	tasks sync.WaitGroup

	queue  []*outgoing // not acknowledged, in order; guarded by end.mu
	next   uint64      // number of the next frame to write
	picked int         // frames of queue that are, or have been, written to the current connection
	bye    bool        // Close was called: the last frame is flagClose
}

// outgoing is one frame of one Send.
type outgoing struct {
	header  []byte
	spans   [][]byte
	size    int // of spans
	number  uint64
	flags   uint32
	writing bool
	gone    bool // its Send has returned: it is not written again
	done    chan error
}

// end tells the Send its result. Only the first call counts.
func (o *outgoing) end(err error) {
	select {
	case o.done <- err:
	default:
	}
}

func newSender(e *end) *sender {
	s := &sender{end: e, next: 1}
	s.tasks.Go(s.run)
	return s
}

// Recv implements pipe.Pipe.
func (s *sender) Recv(context.Context, pipe.Place) error {
	return fmt.Errorf("this end sends: %w", connector.ErrIncompatible)
}

// Send implements pipe.Pipe. It returns when the receiver has the frame.
func (s *sender) Send(ctx context.Context, header []byte, spans [][]byte) error {
	size := pipe.Size(spans)
	err := pipe.Check(len(header), int64(size))
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("send: %w", err)
	}
	o := &outgoing{header: header, spans: spans, size: size, done: make(chan error, 1)}
	if !s.network.NoDigest {
		o.flags = flagDigest
	}
	if err := s.enqueue(ctx, o); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	select {
	case err = <-o.done:
	case <-ctx.Done():
		s.withdraw(o)
		select {
		case err = <-o.done: // the receiver got it at the last moment
		default:
			err = ctx.Err()
		}
	}
	if err != nil {
		return fmt.Errorf("send: %w", err)
	}
	return nil
}

// enqueue waits for room in the window.
func (s *sender) enqueue(ctx context.Context, o *outgoing) error {
	for {
		s.mu.Lock()
		err := s.err
		switch {
		case err != nil:
		case s.bye:
			err = pipe.ErrClosed
		case len(s.queue) < window || o.flags&flagClose != 0:
			s.queue = append(s.queue, o)
			s.bye = o.flags&flagClose != 0
			s.changed()
			s.mu.Unlock()
			return nil
		}
		change := s.changes()
		s.mu.Unlock()
		if err != nil {
			return err
		}
		select {
		case <-change:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// withdraw makes sure that nothing reads the memory of a frame any more.
func (s *sender) withdraw(o *outgoing) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o.gone = true
	if o.writing {
		s.breakLocked(s.conn)
	}
	for o.writing {
		change := s.changes()
		s.mu.Unlock()
		<-change
		s.mu.Lock()
	}
}

// run writes frames, over one connection after another, until the pipe is over.
func (s *sender) run() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	s.tasks.Go(func() { // the end of the pipe ends a dial
		<-s.over
		cancel()
	})
	for {
		conn, peerHas, err := s.current(ctx, true)
		if err != nil {
			s.fail(s.why())
			return
		}
		acks := make(chan struct{})
		s.resume(peerHas)
		go func() {
			defer close(acks)
			s.acknowledgements(conn)
		}()
		s.write(conn)
		s.broken(conn)
		<-acks
	}
}

// resume starts a connection at the first frame that the peer does not have.
func (s *sender) resume(peerHas uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.acknowledged(peerHas)
	kept := s.queue[:0]
	s.next = peerHas + 1
	for _, o := range s.queue {
		if !o.gone {
			o.number = 0
			kept = append(kept, o)
		}
	}
	s.queue, s.picked = kept, 0
	s.changed() // there may be room for a Send that waits for it
}

// acknowledged ends the Sends of frames up to a number. The caller holds mu.
func (s *sender) acknowledged(number uint64) {
	n := 0
	for n < len(s.queue) && s.queue[n].number != 0 && s.queue[n].number <= number {
		s.queue[n].end(nil)
		n++
	}
	if n > 0 {
		s.queue = s.queue[n:]
		s.picked = max(0, s.picked-n)
		s.changed()
	}
}

// acknowledgements reads what the receiver says until the connection ends.
func (s *sender) acknowledgements(conn net.Conn) {
	defer s.broken(conn)
	var b [8]byte
	in := bufio.NewReaderSize(conn, 8*len(b))
	for {
		if _, err := io.ReadFull(in, b[:]); err != nil {
			return
		}
		number := binary.LittleEndian.Uint64(b[:])
		if number == receiverClosed {
			s.finish(fmt.Errorf("the receiver has closed: %w", pipe.ErrClosed))
			return
		}
		s.mu.Lock()
		if number < s.next {
			s.acknowledged(number)
		}
		s.mu.Unlock()
	}
}

// write writes what is in the queue until the connection ends.
func (s *sender) write(conn net.Conn) {
	w := newFrameWriter(conn)
	var frames []*outgoing
	for {
		frames = s.pick(conn, frames[:0])
		if len(frames) == 0 {
			return
		}
		var err error
		for _, o := range frames {
			if err == nil {
				err = w.add(prefix{flags: o.flags, number: o.number, header: len(o.header), payload: o.size}, o.header, o.spans)
			}
		}
		if err == nil {
			err = w.flush()
		}
		s.wrote(frames)
		if err != nil {
			return
		}
	}
}

// wrote records that nothing reads the memory of frames any more.
func (s *sender) wrote(frames []*outgoing) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range frames {
		if o.writing = false; o.gone {
			s.changed() // its Send waits for that
		}
	}
}

// pick waits for frames to write and takes small ones together. It returns none when the connection is
// over.
func (s *sender) pick(conn net.Conn, frames []*outgoing) []*outgoing {
	s.mu.Lock()
	defer s.mu.Unlock()
	for size := 0; ; {
		if s.conn != conn || s.err != nil {
			return nil
		}
		for s.picked < len(s.queue) && s.queue[s.picked].gone { // withdrawn before it was written
			s.queue = append(s.queue[:s.picked:s.picked], s.queue[s.picked+1:]...)
			s.changed()
		}
		if s.picked < len(s.queue) && (len(frames) == 0 || size+s.queue[s.picked].size <= piece) {
			o := s.queue[s.picked]
			o.number, o.writing = s.next, true
			s.next++
			s.picked++
			size += o.size
			frames = append(frames, o)
			continue
		}
		if len(frames) > 0 {
			return frames
		}
		change := s.changes()
		s.mu.Unlock()
		<-change
		s.mu.Lock()
	}
}

// fail ends all Sends.
func (s *sender) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range s.queue {
		o.end(err)
	}
	s.queue = nil
	s.changed()
}

// closePatience is how long Close waits for the receiver to confirm. The receiver has every frame whose
// Send has returned nil.
const closePatience = 100 * time.Millisecond

// Close implements pipe.Pipe. Waiting Sends end with ErrClosed, and the receiver is told.
func (s *sender) Close() error {
	s.mu.Lock()
	over := s.err != nil || s.bye
	var last *outgoing
	if !over {
		kept := s.queue[:0]
		for i, o := range s.queue {
			o.end(pipe.ErrClosed)
			o.gone = true
			if i < s.picked {
				kept = append(kept, o)
			}
		}
		s.queue, s.bye = kept, true
		last = &outgoing{flags: flagClose, done: make(chan error, 1)}
		s.queue = append(s.queue, last)
		s.changed()
	}
	s.mu.Unlock()
	if last != nil {
		timer := time.NewTimer(closePatience)
		defer timer.Stop()
		select {
		case err := <-last.done:
			if err != nil && !errors.Is(err, pipe.ErrClosed) && !errors.Is(err, connector.ErrGone) {
				return err
			}
		case <-timer.C:
		}
	}
	s.finish(pipe.ErrClosed)
	s.tasks.Wait()
	return nil
}
