package place

import (
	"errors"
	"fmt"
)

// What an operation may end with. None of them is a fault of the other end.
var (
	ErrMiss       = errors.New("not resident")                               // no index entry: ask by message
	ErrGone       = errors.New("given up meanwhile")                         // the slot has another use now
	ErrDeclined   = errors.New("declined")                                   // the plugin does not keep it
	ErrReset      = errors.New("older than the last reset")                  // what was saved before is dropped
	ErrVoid       = errors.New("from a former life of the plugin")           // the plugin died since
	ErrSaving     = errors.New("being saved already")                        // by another save of this host
	ErrWriting    = errors.New("slots of the former life are being written") // no next life yet
	ErrFull       = errors.New("no free slot")                               // the caller gives a block up first
	ErrKnown      = errors.New("known already")                              // a promotion that came too late
	ErrImpossible = errors.New("impossible parts")                           // no parts, too many, or too long
	ErrRefused    = errors.New("refused")                                    // what every RefusalError is
)

// Reason says what the host refuses in a slot that a plugin named (rule PLACE-09).
type Reason string

// The reasons. An honest plugin never meets one of them, except Pinned.
const (
	OutOfRange  Reason = "out of range"
	Count       Reason = "not one slot for each part"
	LentTwice   Reason = "lent twice"
	NotLent     Reason = "not LENT"
	Pinned      Reason = "pinned" // for a moment by a reader that came too late: no fault of the plugin
	WordChanged Reason = "its word changed while it was lent"
	HeaderLies  Reason = "its header is not what was written"
	SerialAhead Reason = "its serial was not drawn yet"
	SerialPast  Reason = "its serial is one of a former life"
	NoVerdict   Reason = "an answer without a verdict"
)

// RefusalError is an answer or a notice that the host does not believe. It wraps ErrRefused.
type RefusalError struct {
	Slot   Slot
	Reason Reason
}

// Error names the slot and the reason.
func (r *RefusalError) Error() string { return fmt.Sprintf("slot %d is refused: %s", r.Slot, r.Reason) }

// Unwrap is ErrRefused.
func (r *RefusalError) Unwrap() error { return ErrRefused }

// Fault says whether no honest plugin causes it.
func (r *RefusalError) Fault() bool { return r.Reason != Pinned }
