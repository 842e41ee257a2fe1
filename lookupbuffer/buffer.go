// Package lookupbuffer is where KV blocks wait between the engine that computed them and the one that
// loads them.
//
// A [Buffer] is filled and emptied by content: Insert puts a block in under its key, DropSelect takes
// it out. Package sdk makes a connector of a Buffer; that is the level for database-like connectors
// (rules BUFFER-01 and following). [Memory] is a Buffer in memory, [Piped] one whose ends are in two
// processes with a pipe between them, [Database] one on top of any key-value database. Package
// lookupbuffertest is the suite that a Buffer of one's own should pass.
package lookupbuffer

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvport/kvport/connector"
)

// ErrClosed says that the buffer was closed.
var ErrClosed = errors.New("buffer is closed")

// A Buffer keeps blocks until they are taken. Calls are made concurrently. Spans of items belong to
// the caller and are used only until the call returns.
type Buffer interface {
	// Lookup reports for each run how many leading keys are there. It has no side effects.
	Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error)
	// Insert puts blocks in. It never waits for somebody to take blocks out: at capacity an item fails
	// with connector.ErrBusy, or the oldest blocks go, as the Buffer's config says. A key that is there
	// already is no error, and with Item.Replace gets the new bytes. A *connector.ItemError names the
	// items that were not put in; all others can be found when Insert returns.
	Insert(ctx context.Context, items []connector.Item) error
	// DropSelect fills the spans of every item, waiting for blocks that are not there until ctx ends,
	// and removes each block only after it was placed: what failed or was cancelled can be selected
	// again. All selections of a block that began before it was removed get it. A *connector.ItemError
	// names the items that were not filled; nothing writes to any spans after the return.
	DropSelect(ctx context.Context, items []connector.Item) error
	// Close ends the calls that wait, with ErrClosed.
	Close() error
}

// failures collects what went wrong with some items of a call.
type failures struct {
	items []int
	err   error // the first
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

// fits wants spans for exactly size bytes.
func fits(it *connector.Item, size int) error {
	if n := it.Size(); n != size {
		return fmt.Errorf("block %v has %d bytes, there is room for %d: %w", it.Key, size, n, connector.ErrIncompatible)
	}
	return nil
}
