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

	"github.com/kvport/kvport/connector"
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
