// Package mem is a pipe inside one process: for tests, and for engines that share a process.
package mem

import (
	"context"
	"fmt"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// Pipe is both ends of a pipe. Send copies a frame in, and Recv copies it out; the frames in between take
// at most the limit of New in bytes.
type Pipe struct {
	limit int

	mu     sync.Mutex
	frames []frame
	bytes  int
	closed bool
	dead   bool          // the peer is gone: what was sent is lost
	change chan struct{} // closed and replaced whenever a field above changes
}

type frame struct {
	header, payload []byte
}

// New makes a pipe that holds up to limit bytes of frames. A frame larger than that passes alone.
func New(limit int) *Pipe { return &Pipe{limit: limit, change: make(chan struct{})} }

// NewLink makes the two ends of a link whose pipes hold up to limit bytes each.
func NewLink(limit int) (a, b pipe.Link) {
	there, back := New(limit), New(limit)
	return pipe.Link{Out: there, In: back}, pipe.Link{Out: back, In: there}
}

// changed wakes everybody who waits. The caller holds mu.
func (p *Pipe) changed() {
	close(p.change)
	p.change = make(chan struct{})
}

// wait releases mu and waits until something changes or ctx ends.
func (p *Pipe) wait(ctx context.Context) error {
	change := p.change
	p.mu.Unlock()
	defer p.mu.Lock()
	select {
	case <-change:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// over returns why the pipe cannot be used any more. The caller holds mu.
func (p *Pipe) over() error {
	switch {
	case p.dead:
		return fmt.Errorf("the peer is gone: %w", connector.ErrGone)
	case p.closed:
		return pipe.ErrClosed
	}
	return nil
}

// Send implements pipe.Pipe.
func (p *Pipe) Send(ctx context.Context, header []byte, spans [][]byte) error {
	size := pipe.Size(spans)
	if err := pipe.Check(len(header), int64(size)); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		err := p.over()
		if err == nil {
			err = ctx.Err()
		}
		if err == nil && p.bytes > 0 && p.bytes+len(header)+size > p.limit {
			if err = p.wait(ctx); err == nil {
				continue
			}
		}
		if err != nil {
			return fmt.Errorf("send: %w", err)
		}
		break
	}
	f := frame{append([]byte(nil), header...), make([]byte, size)}
	pipe.Copy([][]byte{f.payload}, spans)
	p.frames = append(p.frames, f)
	p.bytes += f.size()
	p.changed()
	return nil
}

func (f *frame) size() int { return len(f.header) + len(f.payload) }

// Recv implements pipe.Pipe.
func (p *Pipe) Recv(ctx context.Context, place pipe.Place) error {
	f, err := p.take(ctx)
	if err != nil {
		return fmt.Errorf("receive: %w", err)
	}
	spans, err := pipe.Ask(place, f.header, len(f.payload))
	if err != nil {
		return fmt.Errorf("receive: %w", err)
	}
	pipe.Copy(spans, [][]byte{f.payload})
	return nil
}

func (p *Pipe) take(ctx context.Context) (frame, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.frames) == 0 || p.dead {
		if err := p.over(); err != nil {
			return frame{}, err
		}
		if err := p.wait(ctx); err != nil {
			return frame{}, err
		}
	}
	if err := ctx.Err(); err != nil {
		return frame{}, err
	}
	f := p.frames[0]
	p.frames[0] = frame{}
	p.frames = p.frames[1:]
	p.bytes -= f.size()
	p.changed()
	return f, nil
}

// Close implements pipe.Pipe. What was sent before can still be received.
func (p *Pipe) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		p.closed = true
		p.changed()
	}
	return nil
}

// Kill ends the pipe like the death of a peer: what was sent and not yet received is lost, and every call
// returns connector.ErrGone.
func (p *Pipe) Kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dead, p.frames = true, nil
	p.changed()
}
