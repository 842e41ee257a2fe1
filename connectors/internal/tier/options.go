package tier

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/kvport/kvport/connector"
)

// Options say how a Store works. Zero values are the defaults.
type Options struct {
	// SlotBytes is the size of the largest block, all spans of an Item together.
	SlotBytes int64
	// SameSize says that every block has SlotBytes, so that blocks can be fetched from Lower before
	// anybody has said how large they are.
	SameSize bool
	// Memory is what the memory tier lives in. Blocks that an earlier Store left in it are taken over.
	// The caller owns it and keeps it until Close has returned. nil: MemoryBytes of this process.
	Memory      []byte
	MemoryBytes int64
	// Policy is the memory tier's eviction policy: LRU, ARC, S3FIFO or FIFO; "": LRU.
	Policy string
	// StoreThreshold is how often a block is offered before it is stored; 0 and 1: at once.
	StoreThreshold int
	// Tracked is how many keys StoreThreshold tells apart; 0: 64000, vLLM's max_tracker_size.
	Tracked int
	// TTL is how long a block may be served after it was stored; 0: for ever.
	TTL time.Duration
	// TenantBytes limits what one tenant has in memory; 0: no limit.
	TenantBytes int64
	// PinAfter keeps a block from eviction once it was loaded that often; 0: never. At most PinShare
	// of all slots are kept, the earliest is let go for the next; 0: a tenth.
	PinAfter int
	PinShare float64
	// Lower is the tier below memory: a Disk, or a store elsewhere. What is written to it are blocks
	// of one span. The Store closes it, and resets it if it is a connector.Resetter. nil: none.
	Lower connector.Store
	// AdmitAfter is how often a block is stored or loaded before it is written to Lower; 0: twice, 1:
	// every block.
	AdmitAfter int
	// WriteBehind is how many blocks may wait to be written to Lower; 0: 1024. More are dropped.
	WriteBehind int
	// Prefetch is how many blocks of a run are fetched from Lower when Lookup has found them there; 0:
	// none.
	Prefetch int
	// Workers is how many goroutines copy the blocks of one call; 0: two.
	Workers int
	// Changed is told when a block appears in or leaves the memory tier. It must be quick and must not
	// call the Store; nil: nobody is.
	Changed func(k connector.StoreKey, stored bool)
	// Log is for what an operator should know; nil: nothing.
	Log *slog.Logger
}

// Validate reports the first option that cannot work. Errors wrap connector.ErrIncompatible.
func (o *Options) Validate() error {
	bad := func(what string, value any) error {
		return fmt.Errorf("tier: %s is %v: %w", what, value, connector.ErrIncompatible)
	}
	for _, n := range []int{o.PinAfter, o.Prefetch, o.WriteBehind, o.Workers, o.Tracked, int(min(o.TTL, 0)), int(min(o.TenantBytes, 0))} {
		if n < 0 {
			return bad("a limit", "negative")
		}
	}
	switch {
	case o.SlotBytes < 1:
		return bad("the largest block", o.SlotBytes)
	case o.Memory == nil && o.MemoryBytes < 1:
		return bad("the memory's size", o.MemoryBytes)
	case o.StoreThreshold < 0 || o.StoreThreshold > maxCount:
		return bad("the store threshold", o.StoreThreshold)
	case o.AdmitAfter < 0 || o.AdmitAfter > maxCount:
		return bad("the admission threshold", o.AdmitAfter)
	case o.PinShare < 0 || o.PinShare > 0.5:
		return bad("the share of pinned slots", o.PinShare)
	}
	return nil
}

// defaults of Options.
const (
	defaultTracked     = 64000
	defaultAdmitAfter  = 2
	defaultWriteBehind = 1024
	defaultWorkers     = 2
	defaultPinShare    = 0.1
)

func (o Options) withDefaults() Options {
	set := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	set(&o.Tracked, defaultTracked)
	set(&o.AdmitAfter, defaultAdmitAfter)
	set(&o.WriteBehind, defaultWriteBehind)
	set(&o.Workers, defaultWorkers)
	if o.PinShare == 0 {
		o.PinShare = defaultPinShare
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}
