package shm

import (
	"context"
	"fmt"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

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
