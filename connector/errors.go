package connector

import (
	"errors"
	"fmt"
)

// What a caller can act on. Each survives the wire: errors.Is holds on both sides (rule ERR-01).
var (
	// ErrBusy asks for a retry inside the deadline.
	ErrBusy = errors.New("busy, try again")
	// ErrGone says that the bytes or the peer will not come back: recompute.
	ErrGone = errors.New("gone")
	// ErrIncompatible says that model, shape, layout, protocol or config do not fit: refuse at open.
	ErrIncompatible = errors.New("incompatible")
	// ErrCorrupt says that bytes are damaged: drop them and recompute.
	ErrCorrupt = errors.New("corrupt")
	// ErrDeclined says that a connector chose not to store a block, by a quota or a threshold: it is
	// no failure, and trying again at once is of no use.
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

// Unwrap gives the cause.
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

// Unwrap gives the cause.
func (e *ItemError) Unwrap() error { return e.Err }

// some shows the first few of a list that may be long.
func some[T any](list []T) string {
	const most = 8
	if len(list) <= most {
		return fmt.Sprint(list)
	}
	return fmt.Sprintf("%v and %d more", list[:most], len(list)-most)
}
