package staged

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// in is the receiving end of a pipe.
type in struct {
	link     *link
	turn     chan struct{} // holds a token while a Recv runs
	messages chan *message // received; never full if the peer keeps to its slots and frames
	ready    chan *message // messages whose piece was taken, in the same order

	left int // bytes still to come of a frame that was given up, guarded by turn

	ending // by Close or after the last message
}

func newIn(l *link) *in {
	n := l.o.Slots + 2*window + 2
	return &in{link: l, turn: make(chan struct{}, 1), messages: make(chan *message, n), ready: make(chan *message, n), ending: ending{over: make(chan struct{})}}
}

// Send implements pipe.Pipe.
func (*in) Send(context.Context, []byte, [][]byte) error {
	return fmt.Errorf("this end receives: %w", connector.ErrIncompatible)
}

// heard queues a message from the peer.
func (r *in) heard(w *message) error {
	if w.kind == messagePiece && (w.slot < 0 || w.slot >= r.link.o.Slots || w.n <= 0 || w.n > r.link.o.Piece) {
		return fmt.Errorf("a piece of %d bytes in slot %d: %w", w.n, w.slot, connector.ErrIncompatible)
	}
	select {
	case r.messages <- w:
		return nil
	default:
		return fmt.Errorf("the peer sends more than there is room for: %w", connector.ErrIncompatible)
	}
}

// lost lets Recv return what has come, and after that err.
func (r *in) lost(err error) {
	select {
	case r.messages <- &message{err: err}:
	default:
		r.finish(err)
	}
}

// take takes pieces as they come, so that a peer that waits for that can continue.
func (r *in) take() {
	for {
		var w *message
		select {
		case w = <-r.messages:
		case <-r.over:
			return
		}
		if w.kind == messagePiece && w.err == nil {
			var err error
			if w.data, err = r.link.mover.Take(r.link.ctx, w.slot, w.n); err != nil {
				w = &message{err: fmt.Errorf("%w: %w", err, connector.ErrGone)}
			}
		}
		select {
		case r.ready <- w: // there is room, if the peer keeps to its slots and frames
		default:
			w = &message{err: fmt.Errorf("the peer sends more than there is room for: %w", connector.ErrIncompatible)}
			r.finish(w.err)
		}
		if w.err != nil || w.kind == messageClose {
			return
		}
	}
}

// next waits for a message.
func (r *in) next(ctx context.Context) (*message, error) {
	select {
	case <-r.over:
		return nil, r.reason()
	default:
	}
	select {
	case w := <-r.ready:
		switch {
		case w.err != nil:
			r.finish(w.err)
		case w.kind == messageClose:
			r.finish(pipe.ErrClosed)
		default:
			return w, nil
		}
		return nil, r.reason()
	case <-r.over:
		return nil, r.reason()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Recv implements pipe.Pipe.
func (r *in) Recv(ctx context.Context, place pipe.Place) error {
	err := ctx.Err()
	if err == nil {
		select {
		case r.turn <- struct{}{}:
			defer func() { <-r.turn }()
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	for again := true; again && err == nil; {
		again, err = r.frame(ctx, place)
	}
	if err != nil {
		return fmt.Errorf("receive: %w", err)
	}
	return nil
}

// frame receives one frame. again says that its sender gave it up, so the caller tries the next one.
func (r *in) frame(ctx context.Context, place pipe.Place) (again bool, err error) {
	if err := r.skip(ctx); err != nil {
		return false, err
	}
	w, err := r.next(ctx)
	if err != nil {
		return false, err
	}
	if w.kind != messageFrame {
		return false, r.fail(fmt.Errorf("a message of kind %d came instead of a frame: %w", w.kind, connector.ErrIncompatible))
	}
	d := newDigest(r.link.o.SeedIn, r.link.o.NoDigest)
	d.add(w.header)
	d.add(w.inline)
	if d.sum() != w.sum {
		return false, r.fail(errDamaged)
	}
	spans, refused := pipe.Ask(place, w.header, w.payload)
	switch {
	case w.inlined():
		if refused == nil {
			pipe.Copy(spans, [][]byte{w.inline})
		}
		r.taken()
		return false, refused
	case refused != nil:
		r.left = w.payload
		return false, errors.Join(refused, r.skip(ctx))
	}
	return r.fill(ctx, spans, w.payload, d)
}

// fill receives the pieces of a frame.
func (r *in) fill(ctx context.Context, spans [][]byte, size int, d *digest) (again bool, err error) {
	to := cursor{spans: spans}
	for size > 0 {
		w, err := r.next(ctx)
		if err != nil {
			r.left = size
			return false, err
		}
		switch {
		case w.kind == messageAbort:
			r.taken()
			return true, nil
		case w.kind != messagePiece || w.n > size:
			return false, r.fail(fmt.Errorf("a message of kind %d came inside a frame: %w", w.kind, connector.ErrIncompatible))
		}
		d.reset()
		to.put(w.data, d)
		if d.sum() != w.sum {
			return false, r.fail(errDamaged)
		}
		if err := r.link.say(&message{kind: messageFree, slot: w.slot}); err != nil {
			r.link.lose(err) // the frame may still be complete
		}
		size -= w.n
	}
	r.taken()
	return false, nil
}

// cursor is a place in spans.
type cursor struct {
	spans [][]byte
	at    int
}

// put copies b to the cursor. The digest covers the copy, not the memory that a peer may still write.
func (c *cursor) put(b []byte, d *digest) {
	for len(b) > 0 {
		if c.at == len(c.spans[0]) {
			c.spans, c.at = c.spans[1:], 0
			continue
		}
		n := copy(c.spans[0][c.at:], b)
		d.add(c.spans[0][c.at : c.at+n])
		b, c.at = b[n:], c.at+n
	}
}

// skip drops what is left of a frame that was refused, or whose Recv was cancelled.
func (r *in) skip(ctx context.Context) error {
	for r.left > 0 {
		w, err := r.next(ctx)
		if err != nil {
			return err
		}
		switch {
		case w.kind == messageAbort:
			r.left = 0
		case w.kind == messagePiece && w.n <= r.left:
			r.left -= w.n
			if err := r.link.say(&message{kind: messageFree, slot: w.slot}); err != nil {
				r.link.lose(err)
			}
		default:
			return r.fail(fmt.Errorf("a message of kind %d came inside a frame: %w", w.kind, connector.ErrIncompatible))
		}
		if r.left == 0 {
			r.taken()
		}
	}
	return nil
}

// taken tells the sender that a frame is over. The frame is valid even if that fails.
func (r *in) taken() {
	if err := r.link.say(&message{kind: messageTaken}); err != nil {
		r.link.lose(err)
	}
}

// errDamaged says that the received bytes are not those that were sent.
var errDamaged = fmt.Errorf("the digest of the received bytes differs: %w", connector.ErrCorrupt)

// fail ends the link.
func (r *in) fail(err error) error {
	r.finish(err)
	r.link.lose(err)
	return err
}

// finish ends the pipe. Only the first reason counts.
func (r *in) finish(err error) {
	if r.end(err) {
		r.link.halfOver(halfIn)
	}
}

// Close implements pipe.Pipe.
func (r *in) Close() error {
	if r.reason() == nil {
		_ = r.link.say(&message{kind: messageClosed}) // a sender that misses it finds the connection closed
	}
	r.finish(pipe.ErrClosed)
	return nil
}
