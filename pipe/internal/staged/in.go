package staged

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// in is the receiving end of a pipe.
type in struct {
	link  *link
	turn  chan struct{} // holds a token while a Recv runs
	words chan *word    // heard; never full if the peer keeps to its slots and frames
	ready chan *word    // taken, in the same order

	left int // bytes of a frame that was given up and still come, guarded by turn

	mu   sync.Mutex
	err  error         // why the pipe is over
	over chan struct{} // closed when err is set, by Close or at the end of what came
}

func newIn(l *link) *in {
	n := l.o.Slots + 2*window + 2
	return &in{link: l, turn: make(chan struct{}, 1), words: make(chan *word, n), ready: make(chan *word, n), over: make(chan struct{})}
}

// Send implements pipe.Pipe.
func (*in) Send(context.Context, []byte, [][]byte) error {
	return fmt.Errorf("this end receives: %w", connector.ErrIncompatible)
}

// heard queues a word of the peer's.
func (r *in) heard(w *word) error {
	if w.kind == wordPiece && (w.slot < 0 || w.slot >= r.link.o.Slots || w.n <= 0 || w.n > r.link.o.Piece) {
		return fmt.Errorf("a piece of %d bytes in slot %d: %w", w.n, w.slot, connector.ErrIncompatible)
	}
	select {
	case r.words <- w:
		return nil
	default:
		return fmt.Errorf("the peer sends more than there is room for: %w", connector.ErrIncompatible)
	}
}

// lost lets what has come be received, and then err.
func (r *in) lost(err error) {
	select {
	case r.words <- &word{err: err}:
	default:
		r.finish(err)
	}
}

// take takes pieces as they come, so that a peer that waits for that goes on.
func (r *in) take() {
	for {
		var w *word
		select {
		case w = <-r.words:
		case <-r.over:
			return
		}
		if w.kind == wordPiece && w.err == nil {
			var err error
			if w.data, err = r.link.mover.Take(r.link.ctx, w.slot, w.n); err != nil {
				w = &word{err: fmt.Errorf("%w: %w", err, connector.ErrGone)}
			}
		}
		select {
		case r.ready <- w: // there is room, if the peer keeps to its slots and frames
		default:
			w = &word{err: fmt.Errorf("the peer sends more than there is room for: %w", connector.ErrIncompatible)}
			r.finish(w.err)
		}
		if w.err != nil || w.kind == wordClose {
			return
		}
	}
}

// next waits for a word.
func (r *in) next(ctx context.Context) (*word, error) {
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
		case w.kind == wordClose:
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

// frame receives one frame. again says that its sender gave it up.
func (r *in) frame(ctx context.Context, place pipe.Place) (again bool, err error) {
	if err := r.skip(ctx); err != nil {
		return false, err
	}
	w, err := r.next(ctx)
	if err != nil {
		return false, err
	}
	if w.kind != wordFrame {
		return false, r.fail(fmt.Errorf("a word of kind %d came instead of a frame: %w", w.kind, connector.ErrIncompatible))
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
		case w.kind == wordAbort:
			r.taken()
			return true, nil
		case w.kind != wordPiece || w.n > size:
			return false, r.fail(fmt.Errorf("a word of kind %d came in a frame: %w", w.kind, connector.ErrIncompatible))
		}
		d.reset()
		to.put(w.data, d)
		if d.sum() != w.sum {
			return false, r.fail(errDamaged)
		}
		if err := r.link.say(&word{kind: wordFree, slot: w.slot}); err != nil {
			r.link.lose(err) // the frame may yet be whole
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

// put copies b to where the cursor is. What was copied, not what lies in memory that a peer may write,
// is what the digest is of.
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
		case w.kind == wordAbort:
			r.left = 0
		case w.kind == wordPiece && w.n <= r.left:
			r.left -= w.n
			if err := r.link.say(&word{kind: wordFree, slot: w.slot}); err != nil {
				r.link.lose(err)
			}
		default:
			return r.fail(fmt.Errorf("a word of kind %d came in a frame: %w", w.kind, connector.ErrIncompatible))
		}
		if r.left == 0 {
			r.taken()
		}
	}
	return nil
}

// taken tells the sender that a frame is over. That it cannot be told does not make the frame worse.
func (r *in) taken() {
	if err := r.link.say(&word{kind: wordTaken}); err != nil {
		r.link.lose(err)
	}
}

// errDamaged says that what came is not what was sent.
var errDamaged = fmt.Errorf("digest of what came differs: %w", connector.ErrCorrupt)

// fail ends the link.
func (r *in) fail(err error) error {
	r.finish(err)
	r.link.lose(err)
	return err
}

// finish ends the pipe; the first reason stays.
func (r *in) finish(err error) {
	r.mu.Lock()
	if r.err != nil {
		r.mu.Unlock()
		return
	}
	r.err = err
	close(r.over)
	r.mu.Unlock()
	r.link.halfOver(halfIn)
}

func (r *in) reason() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// Close implements pipe.Pipe.
func (r *in) Close() error {
	if r.reason() == nil {
		_ = r.link.say(&word{kind: wordClosed}) // who does not hear it finds the connection closed
	}
	r.finish(pipe.ErrClosed)
	return nil
}
