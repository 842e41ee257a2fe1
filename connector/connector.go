// Package connector is the contract between an inference engine and a KV connector.
//
// It imports only the standard library, starts no goroutine and does no I/O. Rule numbers such as
// SCHED-02 refer to docs/spec.
//
// A connector has two sides. The [Scheduler] side decides: how many tokens of a request's KV cache it could
// supply. The [Worker] side moves bytes between the engine's paged cache and wherever the connector keeps
// them. Both sides are blocking Go; the host, which sits between engine and connector, makes them
// asynchronous, pins the blocks of every running call, gives each call a deadline and checks every answer.
// A connector that is a plain key-value store implements [Store] alone and lets package sdk make both sides
// of it.
//
// Everything else is optional. Each optional power is one small interface that is tied to one [Capability]
// bit:
//
//	what the connector can do                                  interface   bit       side
//	choose what is loaded and saved                            Planner     CanPlan   scheduler
//	keep finished blocks until consumers have fetched them     Holder      CanHold   scheduler
//	forget everything on request                               Resetter    CanReset  scheduler
//	show numbers of its own among the host's metrics           StatsSource CanStat   scheduler
//	report which blocks come and go                            EventSource CanEvents scheduler
//	save blocks while their layers are computed                LayerWorker CanLayers worker
//	keep holds as long as their consumers are alive            Leaser      CanLease  scheduler
//	load what an engine with another block size holds          Reshaper    CanReshape worker
//
// A connector may also ask for memory that outlives its process ([Info.ArenaBytes]), and for its rank's cache before the
// first transfer ([Registerer]).
//
// Code that looks for one of these interfaces calls [As] instead of a type assertion, because a proxy has
// every method but may support only some of them. docs/powers.md says what every part of kvport does with each;
// [Powers] lists them.
package connector

import (
	"context"
	"fmt"
	"time"
)

type (
	// RequestID names one request inside one engine. Ids may be reused once the request has ended.
	RequestID string
	// BlockID is a slot of the engine's paged cache. The same ID means the same slot in every
	// segment of the block's group.
	BlockID int32
	// HoldID names one hold of one engine epoch.
	HoldID uint64
	// Ticket is what a consumer needs to find a producer's blocks: the plugin's own bytes, after
	// the host has verified and removed its signed envelope. Connectors must not trust more of it
	// than they would trust a peer that holds the ticket key.
	Ticket []byte
)

// Block names one block of one group. Key is zero while the block is partial: it then has no
// content address and cannot be stored by key (rule KEY-04).
type Block struct {
	Key   BlockKey
	ID    BlockID
	Group uint16
}

// Query asks what a connector could load for a request. An empty Request is a cache probe: it must
// leave no trace (rule SCHED-03).
type Query struct {
	Request  RequestID
	Tokens   int        // tokens of the request so far: its prompt, and after a preemption also its output
	Keys     []BlockKey // full blocks of those tokens, in order, from token 0; owned by the caller
	Computed int        // leading tokens the engine already has, a multiple of the block size
	Ticket   Ticket     // nil unless a router brought one
	// Reshaped is set when the ticket comes from an engine with another Shape and the connector has
	// CanReshape. It is the number of leading tokens that the host has found to be the same in both
	// engines. Keys belong to this engine's blocks and mean nothing in the other one (rule RESHAPE-02).
	Reshaped int
}

// Match answers one Query. The zero Match is a miss.
type Match struct {
	Tokens int    // tokens beyond Query.Computed that a Load would fill now
	Groups uint32 // bit g set: group g is part of the offer; 0 means all groups
	Async  bool   // the request waits outside the batch until its load is reported
	Later  bool   // the answer is not known yet, ask again; the host limits for how long (rule SCHED-05)
}

// Transfer moves blocks of one request. Blocks is in prefix order, group by group, and owned by the
// caller, which keeps the blocks pinned until the call that carries the Transfer has returned. The
// blocks of each group end with the last token; a group of PolicyTrailing may have fewer of them
// (rule GROUP-01).
type Transfer struct {
	Request RequestID
	From    int // first token that Blocks covers
	Tokens  int // tokens that Blocks covers; a partial last block holds fewer than BlockTokens
	Blocks  []Block
	Ticket  Ticket // loads only: the ticket of the Query that was matched
	Replace bool   // saves only: what is stored under these keys is damaged, so it must be written again
	Extra   []byte // from the Planner of this connector to its Worker; the host does not read it
	// Tenant identifies whose request this is, for quotas. It is a hash that is equal for equal tenants of
	// one engine and does not reveal the tenant. 0 means that the request belongs to no tenant.
	Tenant uint64
}

// Step tells a Planner what the engine has decided and what it has computed. An engine that learns the two
// at different times sends several Steps for each step of its own: first the decisions, and later Computed,
// once the blocks are computed. So a Planner must not assume that one Step is one forward pass. Computed
// may come in any later Step as long as the blocks keep their content, also after a preemption: a
// preemption does not end a save.
type Step struct {
	ID       uint64     // ascends and has no other meaning
	Arrived  []Query    // requests that entered the engine
	Admitted []Transfer // blocks allocated for matches: where a load would write
	Computed []Transfer // blocks whose KV this step completed
	// Computing lists the blocks whose KV the engine begins to compute now, layer by layer. Only a host
	// that is LayerWise gets any. They do not appear in a later Computed, and no Planner sees them.
	Computing []Transfer
	Preempted []RequestID // requests that lost their blocks and will be matched again
	Ended     []Ended
}

// Plan is a Planner's answer: the transfers to run. Each must be one of the Step's transfers, or cover a
// prefix, a suffix or a subset of the blocks of one; the host drops and counts anything else (rule
// PLAN-01).
type Plan struct {
	Loads, Saves []Transfer
}

// Reason says why a request ended.
type Reason uint8

// The reasons. The numbers are part of the wire protocol and never reused.
const (
	ReasonStop   Reason = 1 + iota // an end-of-sequence token or a stop string
	ReasonLength                   // the token limit
	ReasonAbort                    // the client went away or cancelled
	ReasonError                    // the engine gave up on it
)

// Ended reports the end of a request. Each request that arrived ends exactly once, even if it never had a
// block (rule STEP-02).
type Ended struct {
	Request RequestID
	Reason  Reason
	Tokens  int  // tokens whose KV is valid in Blocks
	Remote  bool // a consumer was announced: a Holder keeps the blocks and gives a ticket
	// Weak is set only together with Remote. It says that the consumer, the next turn of a conversation,
	// may never come. The hold is then weak, whatever the Holder answers (rule TURN-01).
	Weak   bool
	Blocks []Block
}

// Hold is a Holder's request to keep the blocks of one ended request. The zero Hold frees them at once. The
// host owns the hold and releases it when all Consumers have fetched the blocks, when TTL has passed
// without a renewal, or at shutdown.
type Hold struct {
	ID        HoldID
	TTL       time.Duration // 0: the host's default
	Consumers int           // how often Consumed must report the hold before it is over, and how many requests its ticket serves; 0 means 1
	Weak      bool          // blocks may be evicted meanwhile; consumers notice by digest
	Ticket    []byte        // what a consumer's connector needs; the host signs it
}

// A Scheduler decides what could be loaded. The host calls it from one goroutine at a time and it
// must not touch KV bytes.
type Scheduler interface {
	// Match answers every query, in order (rule SCHED-01). It has no side effects that a later Match could
	// observe (SCHED-02) and may be called many times for one request. A miss is the zero Match, not an
	// error. ErrBusy counts as Later and any other error as a miss, for all queries.
	Match(ctx context.Context, queries []Query) ([]Match, error)
	// Close releases what the side holds. The host calls it once, after the last call has returned.
	Close() error
}

// A Worker moves bytes. Calls arrive concurrently, one per Transfer.
type Worker interface {
	// Load fills the blocks of t. It returns only when nothing can write them any more (rule WORK-04); ctx
	// ends the wait, not the pin. A *BlockError names the blocks that did not arrive; all others arrived.
	// Any other error fails the whole Transfer.
	Load(ctx context.Context, t *Transfer, kv *KV) error
	// Save stores the blocks of t. When it returns nil they can be matched (rule WORK-05). It may
	// be cancelled at any moment.
	Save(ctx context.Context, t *Transfer, kv *KV) error
	// Close releases what the side holds. The host calls it once, after the last call has returned.
	Close() error
}

// A Registerer is a Worker that needs the cache of its rank before the first transfer, for example because a library registers the
// memory, or because peers ask where it is. Package sdk looks for it; it is not a power, so hosts and the protocol do not know it.
type Registerer interface {
	// RegisterKV is called once, when the side is opened and before any Load or Save. kv is what these get, and is valid until
	// Close has returned. After an error the side is closed, and the host gets the error as that of its opening.
	RegisterKV(ctx context.Context, kv *KV) error
}

// A Planner chooses what is loaded and saved (capability CanPlan). Without it the host loads what
// was admitted and saves what was computed.
type Planner interface {
	// Plan answers one Step. Steps arrive in order; empty ones are left out.
	Plan(ctx context.Context, s *Step) (*Plan, error)
}

// A Holder keeps blocks of ended requests for consumers (capability CanHold).
type Holder interface {
	// Finish answers each Ended with a Hold, in order.
	Finish(ctx context.Context, ended []Ended) ([]Hold, error)
	// Consumed waits until at least one hold was fetched by a consumer and reports it, once for
	// each consumer.
	Consumed(ctx context.Context) ([]HoldID, error)
}

// A Leaser renews its holds while their consumers are at work (capability CanLease, with CanHold).
type Leaser interface {
	// Renewals returns the holds whose TTL starts again; ended tells it which holds are over. It answers at
	// once if there is a hold to renew, and otherwise after at most one second (rule LEASE-01). The host
	// calls it again and again, and ends a call early only to close the side. A hold that an answer names
	// is renewed when the next call does not list it in ended (LEASE-03); until then its previous end
	// applies. The caller owns ended.
	Renewals(ctx context.Context, ended []HoldID) ([]HoldID, error)
}

// A Resetter forgets all cached blocks (capability CanReset).
type Resetter interface {
	// Reset reports whether every block is gone. After (true, nil) no earlier block matches.
	Reset(ctx context.Context) (emptied bool, err error)
}

// A Store is the easy level of the contract: it keeps blocks by content address. Package sdk makes a
// Scheduler and a Worker of it, so an author writes these four methods and nothing else.
//
// Calls arrive concurrently. The sdk opens one Store per plugin process and engine; both sides and
// all ranks share it.
type Store interface {
	// Lookup reports for each run how many of its leading keys are present: the count stops at the first
	// absent key (rule STORE-02). It has no side effects.
	Lookup(ctx context.Context, runs [][]StoreKey) ([]int, error)
	// Get fills the spans of every item. An *ItemError names the items that could not be filled; all others
	// are filled. After any other error none of them is reliable.
	Get(ctx context.Context, items []Item) error
	// Put stores every item; once it has returned nil, Lookup finds them. A key that is already there is
	// not an error: equal keys mean equal bytes (rule STORE-05). An *ItemError names the items that were
	// not stored; ErrDeclined in it means that the connector chose not to store them.
	Put(ctx context.Context, items []Item) error
	// Close releases what the store holds. No other call is running, and none follows.
	Close() error
}

// Item is one block of a Store call, in place: Spans point into the engine's cache, one for each segment in
// layout order. The last span is the host's digest, which is as opaque as the rest. Lengths are those of
// the Layout and are the same on every call for the same key. The slices are valid until the call returns.
type Item struct {
	Key     StoreKey
	Replace bool   // Put only: what is stored under Key is damaged, so it must be written again (rule STORE-06)
	Tenant  uint64 // as in Transfer
	Spans   [][]byte
}

// Size is the total length of the item's spans in bytes.
func (it Item) Size() int {
	n := 0
	for _, s := range it.Spans {
		n += len(s)
	}
	return n
}

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

// The media that engines know by name; a connector may use a word of its own.
const (
	MediumMemory = "memory"
	MediumDisk   = "disk"
	MediumRemote = "remote"
)

// BlockEvent is one change of what can be matched. A block counts as stored once all ranks have stored it.
type BlockEvent struct {
	Seq    uint64 // one more than that of the event before; the first may have any number
	Kind   BlockEventKind
	Keys   []BlockKey // none when Kind is BlocksCleared
	Medium string     // where the blocks are, or were: MediumMemory, MediumDisk, MediumRemote; at most MaxMedium bytes
	Scope  Scope      // who can see them
}
