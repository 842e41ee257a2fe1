package host

import (
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvport/kvport/connector"
)

// Engine is what a host must know of the engine it serves.
type Engine struct {
	ID    string // unique in the deployment; empty: the host makes one
	Model connector.Fingerprint
	Shape connector.Fingerprint

	// Base is what Shape is made of, except block size and ranks; zero: blocks cannot be cut. See
	// connector.Env.
	Base connector.Fingerprint

	// Addresses are connector.KeySpace.Addresses of a request's leading tokens: they tell whether the ticket of an
	// engine with other blocks is for the same prompt, and its digests are checked by them. They are asked for in Match,
	// of that request, by the same goroutine. There are none where the request has fewer tokens. Nil: such tickets
	// are refused.
	Addresses func(request connector.RequestID, blockTokens, tokens int) []connector.BlockKey

	// Tail is the content address of a request's partial last block: of an Admitted transfer, what the block
	// holds at its producer, and of an Ended request, what it holds here. By it the host checks whether that
	// content arrived (rule KEY-09). It is asked in Step, of that step's requests, by the same goroutine. It is
	// zero where there is no partial block. Nil: partial blocks are not handed over.
	Tail func(request connector.RequestID) connector.BlockKey

	// ShapeText is what the shape is made of (dtype, layout, kernel), for messages; may be empty. At most
	// 1 KiB of it goes into tickets.
	ShapeText string

	Layout connector.Layout // with digest segments, see WithDigests
	Ranks  []*Region        // the paged cache of each rank
}

// Options are a host's dependencies.
type Options struct {
	PluginPath []string // folders in which to look for kvport-* binaries, in order
	Log        *slog.Logger
	Metrics    prometheus.Registerer
	// BlockEvents gets what a connector with CanEvents reports about its blocks; nil: it is not asked. The
	// host never waits for the reader: what finds no room in the channel is dropped and counted, and
	// the next report has Gap set. The host does not close it.
	BlockEvents chan<- BlockReport

	// Started, unless nil, is called for every process of the plugin before a side of it is opened, so
	// before it is asked to touch a block. pidfd is only lent for the call. An error ends the process,
	// and its start with that error.
	Started func(pid, pidfd int) error

	// Landed, unless nil, is told when the bytes of an admitted transfer are in a rank's cache, before
	// their digests are checked. Its Loaded follows, and only that says whether they are right. Not of
	// loads with a fault or without digests, nor of those of which a layer was verified before, because of Overlap, nor
	// of what the host loads by itself, nor where a Planner divides loads, nor at trust level staged. It must not call the host.
	Landed func(request connector.RequestID, rank int)

	// Overlap, unless nil, decides for an admitted transfer whether the engine takes its Arriving event, and may compute with
	// the first layers of its load while the others are on their way. It is asked before each attempt on each rank, for what the host loads by
	// itself (unless FailurePolicy is PolicyFail) and again for what a plugin loads, and may answer otherwise each time. It must not call the host.
	Overlap func(step uint64, request connector.RequestID) bool

	// Workers, unless nil, opens the worker sides of a connector in this process, in the order of the ranks, and no
	// plugin is started: package conformance runs connectors so. memory is what they may touch, one region for each
	// rank, and layout says where its blocks are. Every Match is a miss. Nothing can kill such a worker side: a call
	// that ignores its context keeps Close waiting.
	Workers func(memory []*Region, layout connector.Layout) ([]connector.Worker, error)
}

// EventKind says what happened.
type EventKind uint8

// The kinds of events. For every Transfer of a Step there is exactly one Loaded or Saved, for every
// Ended exactly one Finished, whatever faults occur (rule HOST-01).
const (
	Loaded   EventKind = 1 + iota // an Admitted transfer is over
	Saved                         // a Computed transfer is over
	Finished                      // an Ended request is dealt with; its blocks are free when none of its events is outstanding
	Released                      // the hold announced by an earlier Finished is over
	Answered                      // a Match that answered Later may know more now
	Stored                        // before Saved, sometimes: all that a ticket promises of a Computed transfer is stored, its blocks stay pinned
	Arriving                      // before Loaded, sometimes, with Options.Overlap: layers of an Admitted transfer are verified one by one, see Layers
)

// Event tells the engine's loop about the end of something it handed to the host. When it arrives
// nothing can write or read the blocks on behalf of that transfer any more.
type Event struct {
	Kind    EventKind
	Request connector.RequestID
	Step    uint64              // the Step.ID that started it
	Blocks  []connector.BlockID // no longer pinned by this transfer or hold
	Failed  []connector.BlockID // Loaded: to be recomputed. Saved: not stored
	Held    bool                // Finished: Blocks is empty and stays pinned until Released
	Ticket  []byte              // Finished of a Remote request: signed, for the consumer
	// Lost says that Blocks stay pinned for good, against what is said above: the plugin is dead, and somebody
	// that it left behind may write them for ever. It is set for Loaded, Saved and Released only.
	Lost bool
	// Unverified says that nobody has verified what a load brought, that of Failed apart. What the request's blocks hold
	// from the first loaded token on, and what is computed from it, is for that request alone: no other may find it
	// (rule TAINT-02). The host takes none of it to be saved or held.
	Unverified bool
	// Replace says that some of Failed is stored and cannot be used: it is damaged, or its digests cannot be checked. When it
	// is computed, its save has to replace it.
	Replace bool
	Err     error         // why Failed is not empty, for logs and metrics
	Took    time.Duration // Loaded, Saved: since its Step
	// Layers of Arriving says which layers of the transfer are verified on all ranks: the engine may read those. It fails
	// when the load does. What is computed so counts only when Loaded has come, without Failed (rule OVERLAP-03).
	Layers connector.Progress
}

// Health is what /health says about a host.
type Health struct {
	Connector string `json:"connector"`
	State     string `json:"state"` // ready, degraded (some children are not ready, or memory is lost), waiting_for_fence, restarting, broken
	PID       int    `json:"pid"`
	Restarts  int    `json:"restarts"`
	Error     string `json:"error,omitempty"`

	// StartFailures are failed starts after the first successful one.
	StartFailures int `json:"start_failures,omitempty"`

	Since   time.Duration `json:"since_ns"`
	Pending int           `json:"pending"` // transfers running
	Loading int           `json:"loading"` // loads among them that a plugin works for
	Held    int           `json:"held"`    // holds open
	Trust   Trust         `json:"trust"`

	// Sandbox says whether the plugin runs in one: on, partial (SandboxLacks says what the kernel cannot refuse it),
	// or off (SandboxLacks says why). Empty for a MultiConnector, whose children have it.
	Sandbox      string   `json:"sandbox,omitempty"`
	SandboxLacks []string `json:"sandbox_lacks,omitempty"`

	// Slots of landing memory on all ranks, and those that transfers have; 0 where the plugin maps
	// the cache.
	LandingSlots int `json:"landing_slots,omitempty"`
	LandingUsed  int `json:"landing_used,omitempty"`

	// Lost are the numbers of what dead plugins have left to somebody who may still write it: lives that did
	// not give their fences back, and blocks of the cache that are not used again.
	FencesLost int `json:"fences_lost,omitempty"`
	BlocksLost int `json:"blocks_lost,omitempty"`

	ArenaBytes int64    `json:"arena_bytes,omitempty"` // memory that the connector asked for
	Children   []Health `json:"children,omitempty"`    // of a MultiConnector, in order; Connector has the place too
}
