package connector

import (
	"context"
	"fmt"
)

// An EventSource reports which blocks come and go (capability CanEvents), for routers and caches that need
// to know where a prompt is cached without asking. It reports what the engine it is open for does, not what
// was stored before. Events are hints: a block that was reported as stored may be gone, and only a Match
// says what can be loaded.
type EventSource interface {
	// Events waits until there is at least one event that it has not reported yet, and returns all such
	// events in order (rules EVENT-01 to EVENT-04). It runs at the same time as other calls. A source that
	// cannot keep all events until they are fetched drops the oldest, which shows as a gap in Seq. The
	// caller owns the slice.
	Events(ctx context.Context) ([]BlockEvent, error)
}

// BlockEventKind says what happened to blocks.
type BlockEventKind uint8

// The kinds. The numbers are part of the wire protocol and never reused.
const (
	BlocksStored  BlockEventKind = 1 + iota // they can be matched
	BlocksRemoved                           // they can no longer be matched, or the source no longer watches whether they can
	BlocksCleared                           // no block reported so far can be matched
)

// String is the kind's name.
func (k BlockEventKind) String() string {
	switch k {
	case BlocksStored:
		return "stored"
	case BlocksRemoved:
		return "removed"
	case BlocksCleared:
		return "cleared"
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// The limits of an event.
const (
	MaxEvents = 1 << 12 // of one answer
	MaxMedium = 64      // bytes of BlockEvent.Medium
)

// BlockEvent is one change of what can be matched. A block counts as stored once all ranks have stored it.
type BlockEvent struct {
	Seq    uint64 // one more than that of the event before; the first may have any number
	Kind   BlockEventKind
	Keys   []BlockKey // none when Kind is BlocksCleared
	Medium string     // where the blocks are, or were: "memory", "disk", "remote"; at most MaxMedium bytes
	Scope  Scope      // who can see them
}
