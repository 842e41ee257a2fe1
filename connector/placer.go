package connector

import (
	"context"
	"fmt"
)

// Placer is a Worker that keeps blocks in slots of Env.Arena and says in which, so that the host finds and loads them without
// asking. The host calls SavePlaced instead of Save, and LoadPlaced instead of Load, if the side was opened with Env.Placement. It loads
// so what it did not find.
type Placer interface {
	// SavePlaced is Save, and names the slots in which blocks of t lie then. What is not named is loaded by LoadPlaced. A slot
	// that was named keeps its block until the connector gives it up as rule PLACE-21 says. At most 4,096 slots more are named than
	// t has blocks: those of blocks that calls before have moved, which answered with an error. used are slots that the host has read
	// since the last call, in the order of their last reads, and each as often as it was read, three times at most: each counts as a
	// use of what lies there. Both slices are the callee's and the caller's own.
	SavePlaced(ctx context.Context, t *Transfer, kv *KV, used []uint32) (placed []uint32, err error)
	// LoadPlaced is Load, and otherwise as SavePlaced: it names the slots of blocks that were there, and of those that it has
	// brought there from elsewhere (rule PLACE-25).
	LoadPlaced(ctx context.Context, t *Transfer, kv *KV, used []uint32) (placed []uint32, err error)
}

// Placement says how Env.Arena is divided into slots that the host reads: docs/spec/placement.md describes what lies where.
// It is for whoever lays the slots out; a Store of package sdk/tier is given it and does the rest.
type Placement struct {
	Slots     int
	SlotBytes int64  // the largest block of the layout
	Epoch     uint64 // of headers
	Serial    uint64 // the first one that this life may draw for its headers, of 2^40; what has one as high is not the life before's
}

// MaxSlots is the largest number of slots of a Placement.
const MaxSlots = 1 << 30

// Validate returns an error that wraps ErrIncompatible if there is no such placement.
func (p *Placement) Validate() error {
	if p.Slots < 1 || p.Slots > MaxSlots || p.SlotBytes < 1 || p.SlotBytes > 1<<32-1 || p.Epoch == 0 || p.Serial == 0 {
		return fmt.Errorf("placement of %d slots of %d bytes, epoch %d, serial %d: %w", p.Slots, p.SlotBytes, p.Epoch, p.Serial, ErrIncompatible)
	}
	return nil
}
