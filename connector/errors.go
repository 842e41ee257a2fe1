package connector

import (
	"errors"
	"fmt"
)

// The errors that a caller can act on. They survive the wire: errors.Is finds them on both sides (rule
// ERR-01).
var (
	// ErrBusy asks the caller to try again within the deadline.
	ErrBusy = errors.New("busy, try again")
	// ErrGone says that the bytes or the peer will not come back, so the blocks must be recomputed.
	ErrGone = errors.New("gone")
	// ErrIncompatible says that model, shape, layout, protocol or config do not fit. A side refuses to open
	// with it.
	ErrIncompatible = errors.New("incompatible")
	// ErrCorrupt says that bytes are damaged and must be dropped and recomputed.
	ErrCorrupt = errors.New("corrupt")
	// ErrOutdated says that what is stored under the key is whole and not what this version stores: an earlier or later
	// version of kvport has stored it, with another length for example. The block is recomputed, which is no
	// failure, and saved again with Transfer.Replace.
	ErrOutdated = errors.New("outdated")
	// ErrDeclined says that a connector chose not to store a block, because of a quota or a threshold. It
	// is not a failure, and an immediate retry does not help.
	ErrDeclined = errors.New("declined")
)

// BlockError says which blocks of a Load or Save failed. All others succeeded.
type BlockError struct {
	Blocks []BlockID
	Err    error
}

// Error implements error.
func (e *BlockError) Error() string {
	return fmt.Sprintf("%d blocks %s: %v", len(e.Blocks), some(e.Blocks), e.Err)
}

// Unwrap returns the cause.
func (e *BlockError) Unwrap() error { return e.Err }

// ItemError says which items of a Store call failed, by index. All others succeeded.
type ItemError struct {
	Items []int
	Err   error
}

// Error implements error.
func (e *ItemError) Error() string {
	return fmt.Sprintf("%d items %s: %v", len(e.Items), some(e.Items), e.Err)
}

// Unwrap returns the cause.
func (e *ItemError) Unwrap() error { return e.Err }

// some shows the first few of a list that may be long.
func some[T any](list []T) string {
	const most = 8
	if len(list) <= most {
		return fmt.Sprint(list)
	}
	return fmt.Sprintf("%v and %d more", list[:most], len(list)-most)
}
