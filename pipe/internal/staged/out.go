package staged

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// closePatience is how long Close waits for what was sent to be on its way.
const closePatience = time.Second

// out is the sending end of a pipe.
type out struct {
	link  *link
	turn  chan struct{} // holds a token while a Send cuts its frame into pieces
	slots chan int      // free slots
	room  chan struct{} // a token for each frame that may begin
	queue chan *message // messages to send; never full, because slots and room limit it

	closing chan struct{} // closed by Close
	once    sync.Once
	idle    chan struct{} // closed when nothing is written any more

	ending
	used []bool // slots in use, guarded by mu
}

func newOut(l *link) *out {
	o := &out{
		link: l, turn: make(chan struct{}, 1), slots: make(chan int, l.o.Slots), room: make(chan struct{}, window),
		queue: make(chan *message, l.o.Slots+2*window+1), closing: make(chan struct{}), idle: make(chan struct{}), ending: ending{over: make(chan struct{})},
		used: make([]bool, l.o.Slots),
	}
	for i := range l.o.Slots {
		o.slots <- i
	}
	for range window {
		o.room <- struct{}{}
	}
	return o
}

// Recv implements pipe.Pipe.
func (*out) Recv(context.Context, pipe.Place) error {
	return fmt.Errorf("this end sends: %w", connector.ErrIncompatible)
}

// Send implements pipe.Pipe. It returns when the whole frame is in the pipe.
func (o *out) Send(ctx context.Context, header []byte, spans [][]byte) error {
	size := pipe.Size(spans)
	err := pipe.Check(len(header), int64(size))
	if err == nil {
		err = ctx.Err()
	}
	if err == nil {
		_, err = wait(ctx, o, o.turn, true)
	}
	if err != nil {
		return fmt.Errorf("send: %w", err)
	}
	defer func() { <-o.turn }()
	if _, err := wait(ctx, o, o.room, false); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	w := &message{kind: messageFrame, header: bytes.Clone(header), payload: size}
	d := newDigest(o.link.o.SeedOut, o.link.o.NoDigest)
	d.add(w.header)
	if w.inlined() {
		w.inline = bytes.Join(spans, nil)
		d.add(w.inline)
	}
	w.sum = d.sum()
	o.queue <- w
	if w.inlined() {
		return nil
	}
	if err := o.pieces(ctx, spans, size, d); err != nil {
		o.queue <- &message{kind: messageAbort}
		return fmt.Errorf("send: %w", err)
	}
	return nil
}

// wait receives from a channel (or, for a turn, sends to it), unless ctx or the pipe ends first.
func wait[T any](ctx context.Context, o *out, c chan T, put bool) (got T, err error) {
	var in, from chan T = nil, c
	if put {
		in, from = c, nil
	}
	select {
	case <-o.over: // the end of the pipe counts more than a token
		return got, o.reason()
	case <-o.closing:
		return got, pipe.ErrClosed
	default:
	}
	select {
	case in <- got:
		return got, nil
	case got = <-from:
		return got, nil
	case <-o.over:
		return got, o.reason()
	case <-o.closing:
		return got, pipe.ErrClosed
	case <-ctx.Done():
		return got, ctx.Err()
	}
}

// pieces copies a payload into slots, one after another, as they become free.
func (o *out) pieces(ctx context.Context, spans [][]byte, size int, d *digest) error {
	at := 0 // in spans[0]
	for size > 0 {
		i, err := wait(ctx, o, o.slots, false)
		if err != nil {
			return err
		}
		o.mu.Lock()
		o.used[i] = true
		o.mu.Unlock()
		slot := o.link.mover.Slot(i)
		n := 0
		for n < len(slot) && n < size {
			if at == len(spans[0]) {
				spans, at = spans[1:], 0
				continue
			}
			c := copy(slot[n:], spans[0][at:])
			n, at = n+c, at+c
		}
		d.reset()
		d.add(slot[:n])
		o.queue <- &message{kind: messagePiece, slot: i, n: n, sum: d.sum()}
		size -= n
	}
	return nil
}

// write sends the queued messages and moves the pieces.
func (o *out) write() {
	defer close(o.idle)
	for {
		select {
		case w := <-o.queue:
			if err := o.tell(w); err != nil {
				o.link.lose(err)
				return
			}
			if w.kind == messageClose {
				return
			}
		case <-o.over:
			return
		}
	}
}

func (o *out) tell(w *message) error {
	if w.kind != messagePiece {
		return o.link.say(w)
	}
	if o.link.o.Early {
		if err := o.link.say(w); err != nil {
			return err
		}
	}
	if err := o.link.mover.Put(o.link.ctx, w.slot, w.n); err != nil {
		o.link.soil()
		return fmt.Errorf("%w: %w", err, connector.ErrGone)
	}
	if !o.link.o.Early {
		return o.link.say(w)
	}
	return nil
}

// freed takes a slot back.
func (o *out) freed(i int) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if i >= len(o.used) || !o.used[i] {
		return fmt.Errorf("the peer frees slot %d, which it does not have: %w", i, connector.ErrIncompatible)
	}
	o.used[i] = false
	o.slots <- i
	return nil
}

// taken records that a frame is over.
func (o *out) taken() error {
	select {
	case o.room <- struct{}{}:
		return nil
	default:
		return fmt.Errorf("the peer ends a frame that was not sent to it: %w", connector.ErrIncompatible)
	}
}

// finish ends the pipe. Only the first reason counts.
func (o *out) finish(err error) {
	if o.end(err) {
		o.link.halfOver(halfOut)
	}
}

// Close implements pipe.Pipe.
func (o *out) Close() error {
	o.once.Do(func() {
		close(o.closing)
		timer := time.NewTimer(closePatience)
		defer timer.Stop()
		select {
		case o.turn <- struct{}{}: // from here on, no Send queues anything
			o.queue <- &message{kind: messageClose}
		case <-o.over:
			return
		}
		select {
		case <-o.idle:
		case <-o.over:
		case <-timer.C:
			o.link.lose(fmt.Errorf("the peer does not take what was sent: %w", connector.ErrGone))
		}
	})
	o.finish(pipe.ErrClosed)
	return nil
}
