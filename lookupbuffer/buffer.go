// Package lookupbuffer holds buffers in which KV blocks wait between the engine that computed them and the
// engine that loads them.
//
// A [Buffer] is addressed by content: Insert puts a block in under its key, and DropSelect takes it out.
// Package sdk makes a connector of a Buffer; that is the level for database-like connectors (rules
// BUFFER-01 and following). [Memory] is a Buffer in memory, [Piped] is a Buffer whose ends are in two
// processes with a pipe between them, and [Database] is a Buffer on top of any key-value database. Package
// lookupbuffertest is the suite that every other Buffer should pass, too.
package lookupbuffer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// ErrClosed says that the buffer was closed.
var ErrClosed = errors.New("buffer is closed")

// A Buffer keeps blocks until they are taken. Calls arrive concurrently. The spans of items belong to the
// caller; the Buffer uses them only until the call returns.
type Buffer interface {
	// Lookup reports for each run how many of its leading keys are present. It has no side effects.
	Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error)
	// Insert puts blocks in. It never waits until blocks are taken out: at capacity an item fails with
	// connector.ErrBusy, or the oldest blocks are dropped, depending on the Buffer's config. A key that is
	// already there is not an error, and with Item.Replace it gets the new bytes. A *connector.ItemError
	// names the items that were not put in; all others can be found when Insert returns.
	Insert(ctx context.Context, items []connector.Item) error
	// DropSelect fills the spans of every item. It waits for missing blocks until ctx ends, and removes
	// each block only after it has filled the spans: if that fails or is cancelled, the block can be
	// selected again. All selections of a block that began before it was removed get it. A
	// *connector.ItemError names the items that were not filled. Nothing writes to any spans after
	// DropSelect has returned.
	DropSelect(ctx context.Context, items []connector.Item) error
	// Close ends the calls that wait. They return ErrClosed.
	Close() error
}

// failures collects the errors of some items of a call.
type failures struct {
	items []int
	err   error // the first error
}

func (f *failures) add(item int, err error) {
	f.items = append(f.items, item)
	if f.err == nil {
		f.err = err
	}
}

// error is nil if nothing failed.
func (f *failures) error() error {
	if f.err == nil {
		return nil
	}
	return &connector.ItemError{Items: f.items, Err: f.err}
}

// fits returns an error unless the spans have room for exactly size bytes.
func fits(it *connector.Item, size int) error {
	if n := it.Size(); n != size {
		return fmt.Errorf("block %v has %d bytes, there is room for %d: %w", it.Key, size, n, connector.ErrIncompatible)
	}
	return nil
}

// patience is how long Insert waits for a full pipe: the other end may be stopped.
const patience = time.Second

// Piped is a Buffer whose two ends are in two processes: what is inserted at one end can be looked up and
// selected at the other. Frames that arrive go into a bounded Memory at once, whether anybody waits for
// them or not: a pipe that ended in the engine's blocks themselves would stall as soon as its first frame
// belonged to a request that has no blocks yet.
type Piped struct {
	out    pipe.Pipe
	memory *Memory
	cancel context.CancelFunc
	done   chan struct{}

	mu  sync.Mutex
	err error // set when nothing arrives any more
}

// NewPiped makes one end. out and in are the pipes to and from the other end. If out is nil, this end
// cannot insert; if in is nil, nothing arrives. m keeps what arrives. Close closes all three.
func NewPiped(out, in pipe.Pipe, m *Memory) *Piped {
	ctx, cancel := context.WithCancel(context.Background())
	p := &Piped{out: out, memory: m, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		if in == nil {
			return
		}
		err := errors.Join(Pump(ctx, in, m), in.Close())
		p.mu.Lock()
		defer p.mu.Unlock()
		p.err = err
	}()
	return p
}

// Lookup implements Buffer for the blocks that have arrived.
func (p *Piped) Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
	return p.memory.Lookup(ctx, runs)
}

// Insert implements Buffer: it sends to the other end. If the pipe stays full for a second, the error is
// ErrBusy.
func (p *Piped) Insert(ctx context.Context, items []connector.Item) error {
	if p.out == nil {
		return fmt.Errorf("this end of the buffer only receives: %w", connector.ErrIncompatible)
	}
	var failed failures
	for i := range items {
		err := failed.err // if one item finds the pipe full or closed, so would those after it
		if err == nil {
			err = p.send(ctx, &items[i])
		}
		if err != nil {
			failed.add(i, err)
		}
	}
	return failed.error()
}

func (p *Piped) send(ctx context.Context, it *connector.Item) error {
	waiting, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err := SendItem(waiting, p.out, it)
	switch {
	case err != nil && ctx.Err() == nil && waiting.Err() != nil:
		return fmt.Errorf("the other end does not receive: %w", connector.ErrBusy)
	case errors.Is(err, pipe.ErrClosed):
		return fmt.Errorf("%w: %w", err, ErrClosed)
	}
	return err
}

// DropSelect implements Buffer for the blocks that have arrived or will arrive.
func (p *Piped) DropSelect(ctx context.Context, items []connector.Item) error {
	return p.memory.DropSelect(ctx, items)
}

// Err returns why nothing arrives any more, or nil as long as frames can arrive.
func (p *Piped) Err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// Close implements Buffer.
func (p *Piped) Close() error {
	p.cancel()
	var err error
	if p.out != nil {
		err = p.out.Close()
	}
	<-p.done
	return errors.Join(err, p.memory.Close())
}

// A frame's header on a pipe between two buffers: version, flags, key.
const (
	itemVersion   = 1
	itemReplace   = 1 // flag
	itemKeyAt     = 2
	itemHeaderLen = itemKeyAt + len(connector.StoreKey{})
)

// itemHeader encodes the header of an item.
func itemHeader(k connector.StoreKey, replace bool) []byte {
	h := make([]byte, itemHeaderLen)
	h[0] = itemVersion
	if replace {
		h[1] = itemReplace
	}
	copy(h[itemKeyAt:], k[:])
	return h
}

// parseItemHeader reads the header of an item. Errors wrap connector.ErrIncompatible.
func parseItemHeader(h []byte) (k connector.StoreKey, replace bool, err error) {
	if len(h) != itemHeaderLen || h[0] != itemVersion || h[1]&^itemReplace != 0 {
		return k, false, fmt.Errorf("frame with a header of %d bytes is not a block: %w", len(h), connector.ErrIncompatible)
	}
	return connector.StoreKey(h[itemKeyAt:]), h[1] == itemReplace, nil
}

// SendItem sends one block from its place to the Pump at the other end.
func SendItem(ctx context.Context, out pipe.Pipe, it *connector.Item) error {
	return out.Send(ctx, itemHeader(it.Key, it.Replace), it.Spans)
}

// Pump puts the blocks that arrive into m until ctx or the pipe ends. It drops a block that is already
// there or for which there is no room; its consumer then recomputes it. If Close ends the pipe, that is not
// an error.
func Pump(ctx context.Context, in pipe.Pipe, m *Memory) error {
	for {
		err := pump(ctx, in, m)
		switch {
		case err == nil, errors.Is(err, errDropped):
		case errors.Is(err, pipe.ErrClosed), ctx.Err() != nil:
			return nil //nolint:nilerr // the pipe was closed
		default:
			return err
		}
	}
}

// errDropped refuses a frame for which a buffer has no use.
var errDropped = errors.New("dropped")

// pump receives one frame in place, into memory that m has reserved for it.
func pump(ctx context.Context, in pipe.Pipe, m *Memory) error {
	var slot *Slot
	err := in.Recv(ctx, func(h []byte, size int) ([][]byte, error) {
		if slot != nil { // from a frame that the pipe lost half way
			_ = slot.Done(errDropped)
			slot = nil
		}
		k, replace, err := parseItemHeader(h)
		if err != nil {
			return nil, err
		}
		if !replace && m.has(k) {
			return nil, errDropped
		}
		if slot, err = m.Reserve(k, size); err != nil {
			return nil, fmt.Errorf("%w: %w", errDropped, err)
		}
		return [][]byte{slot.Bytes()}, nil
	})
	if slot == nil {
		return err
	}
	return slot.Done(err)
}
