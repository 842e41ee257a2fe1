// Package vllmtrace reads recorded calls of a real vLLM to a KV connector, turns them into kvport's
// contract the way an engine-side shim has to, and checks a sequence of calls against the numbered
// invariants of that API (docs/spec/vllm-invariants.md).
//
// A [Log] is what both halves of a connector saw, in one order. One is read from a trace; a [Shim]
// writes another while it replays the first through a host, so that the same checks judge vLLM's
// side and ours.
package vllmtrace

import (
	"encoding/json"
	"time"
)

// Side is the half of the connector that a call went to.
type Side uint8

// The sides, and Shim for what only a replay records.
const (
	SchedulerSide Side = 1 + iota
	WorkerSide
	ShimSide
)

// String is the side's name.
func (s Side) String() string {
	return [...]string{"no side", "scheduler", "worker", "shim"}[min(s, ShimSide)]
}

// Kind is the member of vLLM's connector class that was called.
type Kind string

// The kinds of calls a trace may hold, and those a log adds.
const (
	Init            Kind = "__init__"
	MemPool         Kind = "get_mem_pool_context"
	Register        Kind = "register_kv_caches"
	HostXferOps     Kind = "set_host_xfer_buffer_ops"
	GetHandshake    Kind = "get_handshake_metadata"
	SetHandshake    Kind = "set_xfer_handshake_metadata"
	FinishedCount   Kind = "get_finished_count"
	NewRequest      Kind = "on_new_request"
	Lookup          Kind = "get_num_new_matched_tokens"
	Alloc           Kind = "update_state_after_alloc"
	BuildMeta       Kind = "build_connector_meta"
	Output          Kind = "update_connector_output"
	RequestFinished Kind = "request_finished"
	Preemptions     Kind = "handle_preemptions"
	Bind            Kind = "bind_connector_metadata"
	StartLoad       Kind = "start_load_kv"
	WaitLayer       Kind = "wait_for_layer_load"
	SaveLayer       Kind = "save_kv_layer"
	WaitSave        Kind = "wait_for_save"
	GetFinished     Kind = "get_finished"
	TransferResults Kind = "get_transfer_results"
	LoadErrors      Kind = "get_block_ids_with_load_errors"
	Clear           Kind = "clear_connector_metadata"
	Shutdown        Kind = "shutdown"

	// SaveOver is the moment after which nothing reads the blocks of a save; only replays have it.
	SaveOver Kind = "save over"
	// Verified is a look at the bytes of loaded blocks; only replays have it.
	Verified Kind = "verified"
	// End closes a log.
	End Kind = "end of log"
)

// Call is one call, with its arguments and result in Body: a pointer to one of the types below, or
// nil for a call that has neither.
type Call struct {
	Side Side
	Kind Kind
	At   time.Duration // since the process began; the sides have different beginnings
	Took time.Duration
	Step int // the engine's step as far as that side knew
	Body any
}

// Log is the calls of both sides in the order in which they depend on each other.
type Log struct {
	Calls []Call
	// Async says that saves end with SaveOver; without it they end with WaitSave.
	Async bool
}

// InitCall is the construction of one side.
type InitCall struct {
	Role      string `json:"role"`
	BlockSize int    `json:"block_size"` // tokens
	NumBlocks int    `json:"num_blocks"`
	Groups    []struct {
		Layers int    `json:"layers"`
		Spec   string `json:"spec"`
	} `json:"groups"`
	HashBlockSize *int            `json:"hash_block_size"`
	MaxBatched    int             `json:"max_batched"`
	EngineID      string          `json:"engine_id"`
	Config        json.RawMessage `json:"cfg"`
}

// RegisterCall hands over the paged cache. Shape and strides are in elements of the first layer's
// tensor, offsets in elements of the storage.
type RegisterCall struct {
	PID          int      `json:"pid"`
	Layers       int      `json:"n"`
	First        []string `json:"first"`
	Shape        []int    `json:"shape"`
	Stride       []int    `json:"stride"`
	DType        string   `json:"dtype"`
	Device       string   `json:"device"`
	StorageBytes int64    `json:"storage_bytes"`
	OneStorage   bool     `json:"one_storage"`
	LayerOffsets []int64  `json:"layer_off"`
	BasePtr      uint64   `json:"base_ptr"`
	MemFD        *struct {
		FD    int   `json:"fd"`
		Bytes int64 `json:"bytes"`
	} `json:"memfd"`
	Shared bool `json:"shared"`
}

// RequestView is what the trace keeps of a vLLM Request.
type RequestView struct {
	ID          string          `json:"id"`
	Prompt      int             `json:"prompt"`
	Tokens      int             `json:"tokens"`
	Computed    int             `json:"computed"`
	Out         int             `json:"out"`
	Status      string          `json:"status"`
	Hashes      int             `json:"hashes"`
	Preemptions int             `json:"preempt"`
	Params      json.RawMessage `json:"kvp"` // kv_transfer_params
}

// LookupCall asks for external tokens beyond Computed.
type LookupCall struct {
	Request  RequestView `json:"req"`
	Computed int         `json:"num_computed_tokens"`

	Tokens int  `json:"-"` // the answer
	Async  bool `json:"-"`
	Later  bool `json:"-"` // the answer None
}

// AllocCall says which blocks a request got. External of their tokens are to be loaded.
type AllocCall struct {
	Request  RequestView `json:"req"`
	Blocks   [][]int     `json:"block_ids"` // by group, the whole table
	External int         `json:"num_external_tokens"`
}

// NewScheduled is a request scheduled for the first time.
type NewScheduled struct {
	ID       string  `json:"id"`
	Prompt   int     `json:"prompt"`
	Blocks   [][]int `json:"blocks"`
	Computed int     `json:"computed"`
}

// CachedScheduled is a request scheduled again. NewBlocks extend its table, or replace it if Resumed.
type CachedScheduled struct {
	ID        string  `json:"id"`
	Resumed   bool    `json:"resumed"`
	NewBlocks [][]int `json:"new_blocks"`
	Computed  int     `json:"computed"`
	Out       int     `json:"out"`
}

// LoadRef is one load that a step's metadata carries to the worker.
type LoadRef struct {
	Request string
	Blocks  []int
	Hashes  []string
}

// SaveRef is one block that a step's metadata tells the worker to save.
type SaveRef struct {
	Request string
	Block   int
	Hash    string
}

// MetaCall is one scheduling step and the metadata made of it.
type MetaCall struct {
	New       []NewScheduled    `json:"new"`
	Cached    []CachedScheduled `json:"cached"`
	Scheduled map[string]int    `json:"scheduled"` // tokens by request
	Finished  []string          `json:"finished"`
	Preempted []string          `json:"preempted"`
	SyncLoads bool              `json:"sync_loads"`

	Loads []LoadRef `json:"-"` // the answer
	Saves []SaveRef `json:"-"`
}

// OutputCall brings what the workers reported to the scheduler side.
type OutputCall struct {
	Sending  []string `json:"finished_sending"`
	Recving  []string `json:"finished_recving"`
	Failed   []string `json:"failed_recving,omitempty"`
	Invalid  []int    `json:"invalid_block_ids"`
	Saved    int      `json:"saved"`
	Expected int      `json:"expected_finished_count"`
}

// FinishedCall ends a request. With Delay the engine keeps the blocks until finished_sending.
type FinishedCall struct {
	Request RequestView `json:"req"`
	Blocks  []int       `json:"block_ids"`

	Delay  bool            `json:"-"` // the answer
	Params json.RawMessage `json:"-"`
}

// HandshakeCall brings the workers' handshake metadata.
type HandshakeCall struct {
	Ranks []int `json:"ranks"`
}

// OpsCall names the host copy function.
type OpsCall struct {
	Op string `json:"op"`
}

// PreemptionsCall comes before the step may overwrite anything.
type PreemptionsCall struct {
	Step int `json:"step"`
}

// BindCall makes a step's metadata visible to the worker side.
type BindCall struct {
	Loads []LoadRef `json:"loads"`
	Saves int       `json:"saves"`
}

// StartLoadCall starts the loads of a step.
type StartLoadCall struct {
	AttnMeta bool     `json:"attn_meta"`
	Kwargs   []string `json:"kwargs"`

	Bytes int64 `json:"-"` // moved before it returned
}

// WaitLayerCall waits for one layer's loads.
type WaitLayerCall struct {
	Layer string `json:"layer"`
}

// SaveLayerCall offers one layer's cache. Traces keep the first layer's only.
type SaveLayerCall struct {
	Layer  string `json:"layer"`
	Shape  []int  `json:"shape"`
	Tokens int    `json:"tokens"`
}

// WaitSaveCall ends the saves of a step.
type WaitSaveCall struct {
	LayersSeen int `json:"layers_seen"`

	Bytes int64 `json:"-"`
}

// ResultsCall is get_finished or get_transfer_results.
type ResultsCall struct {
	FinishedRequests []string `json:"finished_req_ids"`

	Sending []string `json:"-"`
	Recving []string `json:"-"`
	Failed  []string `json:"-"` // get_transfer_results only
}

// BlocksCall names blocks: the answer of LoadErrors, or what SaveOver and Verified are about.
type BlocksCall struct {
	Request string
	Blocks  []int
	Wrong   []int // Verified: those with other bytes than belong there
}
