package shm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"unsafe"

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

// receiver is the receiving end of a pipe.
type receiver struct {
	half
	left   int // unread bytes of the frame that has begun
	header []byte
}

// Send implements pipe.Pipe.
func (r *receiver) Send(context.Context, []byte, [][]byte) error {
	return fmt.Errorf("this end receives: %w", connector.ErrIncompatible)
}

// Recv implements pipe.Pipe. A frame that had begun when ctx ended is lost.
func (r *receiver) Recv(ctx context.Context, place pipe.Place) error {
	if err := r.enter(ctx); err != nil {
		return fmt.Errorf("receive: %w", err)
	}
	defer func() { <-r.turn }()
	for {
		taken, err := r.frame(ctx, place)
		if err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		if taken {
			return nil
		}
	}
}

// frame receives one frame. The frame is not taken if its Send gave it up, now or before.
func (r *receiver) frame(ctx context.Context, place pipe.Place) (taken bool, err error) {
	for r.left > 0 { // of a frame whose Recv has ended
		c, err := r.next(ctx)
		if err != nil {
			return false, err
		}
		r.consume(c)
	}
	c, err := r.next(ctx)
	if err != nil {
		return false, err
	}
	size, err := r.begin(c)
	if err != nil {
		return false, err
	}
	spans, err := pipe.Ask(place, r.header, size)
	if err != nil {
		return false, err
	}
	return r.fill(ctx, spans)
}

// begin reads the first chunk of a frame.
func (r *receiver) begin(c chunk) (size int, err error) {
	var b [frameHead]byte
	at := r.ring.control.tail.Load() + chunkHead
	r.ring.get(at, b[:])
	header, size, err := parseFrame(b[:], c.length)
	if err != nil {
		return 0, err
	}
	if cap(r.header) < header {
		r.header = make([]byte, header)
	}
	r.header = r.header[:header]
	r.ring.get(at+frameHead, r.header)
	r.consume(c)
	r.left = size
	return size, nil
}

// fill reads the payload of a frame.
func (r *receiver) fill(ctx context.Context, spans [][]byte) (taken bool, err error) {
	for r.left > 0 {
		c, err := r.next(ctx)
		if err != nil {
			return false, err
		}
		at := r.ring.control.tail.Load() + chunkHead
		for n := c.length; n > 0; {
			part := spans[0][:min(n, len(spans[0]))]
			r.ring.get(at, part)
			at, n = at+uint64(len(part)), n-len(part)
			if spans[0] = spans[0][len(part):]; len(spans[0]) == 0 {
				spans = spans[1:]
			}
		}
		r.consume(c)
		if c.kind == kindAbort {
			return false, nil
		}
	}
	return true, nil
}

// next waits for a chunk and reads its head.
func (r *receiver) next(ctx context.Context) (c chunk, err error) {
	err = r.until(ctx, &r.ring.control.recvWaits, func(bool) (bool, error) {
		closed := r.ring.control.sendClosed.Load() != 0 // read first, so that everything the sender wrote before is visible
		used, err := r.ring.used()
		if err != nil || used == 0 {
			if closed && err == nil {
				err = pipe.ErrClosed
			}
			return false, err
		}
		if used < chunkHead {
			return false, fmt.Errorf("only %d bytes where a chunk begins: %w", used, connector.ErrCorrupt)
		}
		var head [chunkHead]byte
		r.ring.get(r.ring.control.tail.Load(), head[:])
		c, err = parseChunk(head[:], used-chunkHead, r.left)
		return err == nil, err
	})
	return c, err
}

// consume gives the room of a chunk back.
func (r *receiver) consume(c chunk) {
	switch c.kind {
	case kindMore:
		r.left -= c.length
	case kindAbort:
		r.left = 0
	}
	r.ring.control.tail.Add(chunkHead + uint64(c.length))
	r.end.bell(&r.ring.control.sendWaits)
}

// Close implements pipe.Pipe.
func (r *receiver) Close() error {
	return r.close(func(c *control) {
		c.recvClosed.Store(1)
		r.end.bell(&c.sendWaits)
	})
}

// A ring is the memory of one direction: a page of control words, followed by a power of two of bytes. Both
// ends map it. head and tail only grow; the sender alone moves head, the receiver alone tail.
type ring struct {
	control *control
	data    []byte
}

// control is the first page of a ring. Words that different ends write are in different cache lines.
type control struct {
	head       atomic.Uint64 // bytes that were written
	sendClosed atomic.Uint32
	sendWaits  atomic.Uint32 // the sender asks for a bell when there is room
	_          [48]byte
	tail       atomic.Uint64 // bytes that were read
	recvClosed atomic.Uint32
	recvWaits  atomic.Uint32 // the receiver asks for a bell when there are bytes
}

// The sizes of a ring, in bytes.
const (
	controlSize = 4096
	minData     = 256 << 10 // more than any header
	maxData     = 1 << 30
)

func newRing(memory []byte) ring {
	return ring{(*control)(unsafe.Pointer(unsafe.SliceData(memory))), memory[controlSize:]} //nolint:gosec // a page is aligned
}

// used is how many bytes are written and not yet read. The other end may have written anything, so an
// impossible number is connector.ErrCorrupt.
func (r *ring) used() (int, error) {
	n := r.control.head.Load() - r.control.tail.Load()
	if n > uint64(len(r.data)) {
		return 0, fmt.Errorf("ring of %d bytes says it holds %d: %w", len(r.data), n, connector.ErrCorrupt)
	}
	return int(n), nil
}

// put copies b to byte at of the stream. The receiver does not see it before head moves.
func (r *ring) put(at uint64, b []byte) {
	i := int(at & uint64(len(r.data)-1))
	n := copy(r.data[i:], b)
	copy(r.data, b[n:])
}

// get copies from byte at of the stream.
func (r *ring) get(at uint64, b []byte) {
	i := int(at & uint64(len(r.data)-1))
	n := copy(b, r.data[i:])
	copy(b[n:], r.data)
}

// The stream consists of chunks: a word with the length, a word with the kind, and the bytes.
const (
	chunkHead  = 8
	frameHead  = 16        // a begin's: length of the header, 4 bytes of 0, length of the payload
	kindBegin  = 1         // frameHead, then the header
	kindMore   = 2         // a part of the payload
	kindAbort  = 3         // the frame ends here: its Send was given up
	reserve    = chunkHead // always left free by begin and more, so that an abort has room
	beginBytes = chunkHead + frameHead
)

// chunk is the head of a chunk.
type chunk struct {
	length int
	kind   uint32
}

func (c chunk) encode() (b [chunkHead]byte) {
	binary.LittleEndian.PutUint32(b[:], uint32(c.length))
	binary.LittleEndian.PutUint32(b[4:], c.kind)
	return b
}

// parseChunk reads the head of a chunk; no more than most bytes are written after it. left is how much is
// still to come of a frame that has begun. Errors wrap connector.ErrCorrupt.
func parseChunk(b []byte, most, left int) (chunk, error) {
	c := chunk{int(binary.LittleEndian.Uint32(b)), binary.LittleEndian.Uint32(b[4:])}
	bad := c.length > most
	switch c.kind {
	case kindBegin:
		bad = bad || left > 0 || c.length < frameHead || c.length > frameHead+pipe.MaxHeader
	case kindMore:
		bad = bad || c.length == 0 || c.length > left
	case kindAbort:
		bad = bad || left == 0 || c.length != 0
	default:
		bad = true
	}
	if bad {
		return chunk{}, fmt.Errorf("chunk of kind %d and %d bytes: %w", c.kind, c.length, connector.ErrCorrupt)
	}
	return c, nil
}

func encodeFrame(header, payload int) (b [frameHead]byte) {
	binary.LittleEndian.PutUint32(b[:], uint32(header))
	binary.LittleEndian.PutUint64(b[8:], uint64(payload))
	return b
}

// parseFrame reads the start of a begin chunk of length bytes. Errors wrap connector.ErrCorrupt or
// ErrIncompatible.
func parseFrame(b []byte, length int) (header, payload int, err error) {
	header = int(binary.LittleEndian.Uint32(b))
	size := binary.LittleEndian.Uint64(b[8:])
	if header+frameHead != length || binary.LittleEndian.Uint32(b[4:]) != 0 || size > pipe.MaxPayload {
		return 0, 0, fmt.Errorf("frame with a header of %d bytes and %d more in a chunk of %d: %w", header, size, length, connector.ErrCorrupt)
	}
	return header, int(size), pipe.Check(header, int64(size))
}
