package sched

import (
	"errors"

	"github.com/kvport/kvport/connector"
)

// Why a request ended with connector.ReasonError.
var (
	// ErrLoadFailed says that KV could not be loaded and Config.FailLoads is set.
	ErrLoadFailed = errors.New("KV load failed")
	// ErrNoRoom says that too many blocks are lost for the request to fit.
	ErrNoRoom = errors.New("too many blocks of the KV cache are lost")
	// ErrCompute says that the model's Forward failed.
	ErrCompute = errors.New("computing failed")
)

// Request is one generation, as the scheduler sees it. All slices belong to the scheduler.
type Request struct {
	ID        connector.RequestID
	Prompt    []int32
	Space     *connector.KeySpace  // nil: its blocks have no keys
	Keys      []connector.BlockKey // of the prompt's full blocks in Space
	MaxTokens int                  // generated tokens at most, at least 1
	Stops     []int32              // tokens that end the generation
	Ticket    []byte               // signed, nil if none
	Remote    bool                 // withhold the last output until the host has a ticket for it
	Turn      bool                 // with Remote: the ticket is for the next turn of the conversation, if there is one
	Query     bool                 // a cache query: say what there is and compute nothing; with Remote and Turn, hold it
}

// Output is news of one request. The last one has Reason set.
type Output struct {
	Request   connector.RequestID
	Tokens    []int32
	Reason    connector.Reason
	Err       error // with connector.ReasonError
	Ticket    []byte
	Generated int // tokens so far
	Local     int // prompt tokens found in the prefix cache
	External  int // prompt tokens loaded
}

// state is where a request is in its life. Requests that hold blocks are loading, ready or running.
type state uint8

const (
	waiting  state = iota // in the queue, without blocks
	loading               // in the queue, parked until its load is over
	ready                 // in the queue, loaded, until there is a place in the batch
	running               // in the batch
	withheld              // ended, but its last output waits for the host
	gone
)

// none marks a block in a block table that its group no longer needs.
const none connector.BlockID = -1

// seq is the scheduler's side of a request.
type seq struct {
	Request
	arrival uint64 // order of arrival; the oldest is never preempted for a younger one
	state   state

	tokens   []int32 // prompt and generated
	table    [][]connector.BlockID
	computed int // leading tokens whose KV is in the table's blocks
	full     int // leading blocks that were complete already: found, loaded or reported as computed
	handed   int // leading blocks that the step under way completes and that were handed over to be saved

	asked    int                // Computed of the question that match answers, -1: none
	match    connector.Match    // the connector's offer
	barred   bool               // a load left nothing valid: asking again would end the same way
	replace  int                // tokens before this one were found damaged in the store
	tail     connector.BlockKey // see Scheduler.Tail
	arriving *handover          // the load under way, if the request can be computed while it lasts
	private  bool               // the load under way began before Forget: what it brings is not published
	clean    int                // tokens behind these are not saved, published or handed over: nobody has verified what they depend on (rule TAINT-02)

	local, external int

	// Once withheld: what the last output waits for.
	saves    int // saves in flight, counted all life long
	finished bool
	last     Output
}

// todo is the number of tokens to compute before the next one can be sampled.
func (r *seq) todo() int { return len(r.tokens) - r.computed }

// generated is the number of tokens sampled so far.
func (r *seq) generated() int { return len(r.tokens) - len(r.Prompt) }

// extendKeys gives keys to the blocks that generated tokens have filled.
func (r *seq) extendKeys(blockTokens int) {
	if r.Space == nil {
		return
	}
	for n := len(r.Keys); (n+1)*blockTokens <= len(r.tokens); n++ {
		r.Keys = append(r.Keys, r.address(n, r.tokens[n*blockTokens:(n+1)*blockTokens]))
	}
}

// address is the content address of a block that holds some tokens behind the blocks before it.
func (r *seq) address(block int, tokens []int32) connector.BlockKey {
	parent := r.Space.Root()
	if block > 0 {
		parent = r.Keys[block-1]
	}
	return r.Space.Next(parent, tokens)
}

// tailOf is the content address of the block that holds the last of some leading tokens, if they fill it in
// part: of its tokens before held. It is zero if the request's blocks have no keys.
func (r *seq) tailOf(tokens, held, blockTokens int) connector.BlockKey {
	block := tokens / blockTokens
	if r.Space == nil || tokens%blockTokens == 0 || block > len(r.Keys) {
		return connector.BlockKey{}
	}
	return r.address(block, r.tokens[block*blockTokens:min(held, (block+1)*blockTokens)])
}

// Tail is the content address of the partial last block of what a request began to load last, or, once it has
// ended, of what it has computed. It is zero without one.
func (s *Scheduler) Tail(id connector.RequestID) connector.BlockKey {
	if r := s.live[id]; r != nil {
		return r.tail
	}
	return connector.BlockKey{}
}

// Addresses are the content addresses of a request's leading tokens in blocks of another size, block by block; none if
// the request is not there, has fewer tokens, or its blocks have no keys.
func (s *Scheduler) Addresses(id connector.RequestID, blockTokens, tokens int) []connector.BlockKey {
	r := s.live[id]
	if r == nil || r.Space == nil || tokens <= 0 || tokens > len(r.tokens) {
		return nil
	}
	return r.Space.Addresses(r.tokens[:tokens], blockTokens)
}

// output is the request's news: some tokens, with totals.
func (r *seq) output(tokens ...int32) Output {
	return Output{Request: r.ID, Tokens: tokens, Generated: r.generated(), Local: r.local, External: r.external}
}
