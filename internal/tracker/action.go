package tracker

import (
	"time"

	"github.com/kvport/kvport/connector"
)

// CallID names one call to the plugin: one attempt, never used again.
type CallID uint64

// Kind says which way a transfer goes.
type Kind uint8

// The kinds of transfers.
const (
	Load Kind = 1 + iota
	Save
)

// String is the kind's name.
func (k Kind) String() string {
	if k == Load {
		return "load"
	}
	return "save"
}

// Action is something the host has to do.
type Action interface{ action() }

type (
	// Ask sends a query to the scheduler side; Matched brings the answer. Without a generation the host answers it from what
	// is placed, and Found brings that.
	Ask struct {
		ID    CallID
		Gen   uint64 // 0: none takes calls
		Query connector.Query
		Ahead bool // the engine has not asked it yet
	}
	// Plan sends a step to the scheduler side; Planned brings the answer.
	Plan struct {
		ID       CallID
		Gen      uint64
		Step     *connector.Step
		Deadline time.Time
	}
	// Move starts a load or save on the worker side of one rank; Moved brings the answer. The
	// transfer is shared by all ranks and must not be changed. Without a generation the host loads what is placed, all
	// of it or nothing.
	Move struct {
		ID       CallID
		Gen      uint64 // 0: none takes calls, or none has made a plan for the load
		Kind     Kind
		Rank     int
		Transfer *connector.Transfer
		Slots    []connector.BlockID // the landing slot of each block; nil without landing memory
		// Check are the blocks of a load to be verified when they have arrived, each under the address of what
		// it holds. Nil: nothing is there to verify them by.
		Check    []connector.Block
		Deadline time.Time
		// Source is the engine of another shape from which the ticket of the load comes; nil: it is of ours. Such a
		// load is one Move for all ranks: what is read is cut for all of them. Check says no more than that
		// there is something to verify it by.
		Source *Source
		Window int // with Source: the part of the memory for source blocks that is the call's alone
		// Computing says that the save's blocks are being computed, or were. Layers of them are final so far, and
		// GivenUp says that no more will be; Advance tells the rest.
		Computing bool
		Layers    int
		GivenUp   bool
		// Overlap says that the engine may use layers of the load before it is over: Verified reports each, and Arriving
		// names the load by its step.
		Overlap bool
		Step    uint64
	}
	// Advance says that more layers are final of what a call with Computing saves, or that no more will be.
	Advance struct {
		ID      CallID
		Layers  int
		GivenUp bool
	}
	// Finish sends ended requests to the scheduler side; FinishAnswered brings the holds.
	Finish struct {
		ID    CallID
		Gen   uint64
		Ended []connector.Ended
		// Partial are the partial blocks that may be kept, each under the address of what it holds. Their digests
		// are made before the requests are sent; those of full blocks were made when they were saved.
		Partial  []connector.Block
		Deadline time.Time
	}
	// Reset makes the scheduler side forget every block; ResetAnswered brings the answer.
	Reset struct {
		ID       CallID
		Gen      uint64
		Deadline time.Time
	}
	// ResetOver ends a Reset of the Tracker, once. Emptied is true only if no block that was ever saved can be
	// matched any more; it is false for a connector that cannot reset.
	ResetOver struct {
		ID      CallID
		Emptied bool
		Err     error
	}
	// CancelCall ends the wait of a call. Its answer is awaited nevertheless.
	CancelCall struct{ ID CallID }
	// Kill ends the process of a generation; Down and Reaped follow.
	Kill struct {
		Gen    uint64
		Reason string
	}
	// Tell reports to the engine.
	Tell struct{ Event Event }
)

func (Ask) action()        {}
func (Plan) action()       {}
func (Move) action()       {}
func (Advance) action()    {}
func (Finish) action()     {}
func (Reset) action()      {}
func (ResetOver) action()  {}
func (CancelCall) action() {}
func (Kill) action()       {}
func (Tell) action()       {}

// EventKind says what an Event reports.
type EventKind uint8

// The kinds of events, as in package host.
const (
	Loaded EventKind = 1 + iota
	Saved
	Finished
	Released
	Answered
	Stored   // before Saved, sometimes: all that a ticket promises of the save is stored, its blocks stay pinned
	Arriving // before Loaded, sometimes: the first layers of what is loaded are verified, see Layers
)

// Why a hold was released.
const (
	ReleasedConsumed   = "consumed"
	ReleasedExpired    = "expired"
	ReleasedPluginDied = "plugin_died"
	ReleasedShutdown   = "shutdown"
)

// Event is one report to the engine.
type Event struct {
	Kind       EventKind
	Request    connector.RequestID
	Step       uint64
	Blocks     []connector.BlockID // unpinned
	Failed     []connector.BlockID
	Err        error
	Tokens     int            // Loaded, Saved: of the transfer. 0 otherwise
	Bytes      int64          // Loaded, Saved: of the blocks that did not fail, on all ranks
	Unverified bool           // Loaded: nobody has verified what it brought
	Refused    bool           // Saved: no call was made, because the blocks are tainted
	Damaged    int            // Loaded: blocks that were not what was saved, counted on every rank
	Replace    bool           // Loaded: some of Failed is stored and cannot be used: it is damaged, or nobody here can check it
	Damage     error          // Loaded: what was found out about the first of them; nil: nothing more
	Lost       bool           // Loaded, Saved, Released: the blocks stay pinned for good
	Held       bool           // Finished: the blocks stay pinned until Released
	Hold       connector.Hold // Finished: what the Holder answered
	Ticket     *Ticket        // Finished: for the consumer, nil: there is nothing to promise
	Reason     string         // Released: why
	Took       time.Duration  // Loaded, Saved: since the step
	Layers     int            // Arriving: how many layers of all blocks are verified on every rank
	ByLayer    int            // Loaded: blocks, by rank, that were Placed, of a load with Arriving
}

// Outcome is how a call of the worker side ended.
type Outcome struct {
	Err     error               // what the plugin said
	Corrupt []connector.BlockID // loads: blocks whose digest was wrong
	Damage  error               // which digest was wrong, if there is more to say than in Corrupt
	// Loads: blocks whose digests nobody here can check, because they were made with a key that the ring lacks, or in an
	// edition that is not read. They are misses, and nobody's fault.
	Foreign, Outdated []connector.BlockID
	Layers            int  // saves with Computing: how many layers the plugin was told to be final
	Lost              bool // the connection went away: the plugin may still touch the blocks
	Absent            bool // of a Move without a generation: not all of it is placed
	Placed            int  // loads: blocks that the host has brought without the plugin
}
