// Package engine runs a model: it takes requests, schedules them over the paged KV cache, asks the
// connector's host what it can load, and streams tokens back.
package engine

import (
	"errors"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/sample"
	"github.com/kvport/kvport/engine/sched"
)

// Errors that a front end turns into answers of its own.
var (
	// ErrTooLong says that prompt and MaxTokens exceed what the model or the cache can hold.
	ErrTooLong = errors.New("request is too long")
	// ErrOverloaded says that too many requests wait; the client may retry.
	ErrOverloaded = errors.New("too many requests")
	// ErrClosed says that the engine is shutting down.
	ErrClosed = errors.New("engine is shutting down")
	// ErrLoadFailed ends a request whose KV could not be loaded under load failure policy "fail".
	ErrLoadFailed = sched.ErrLoadFailed
	// ErrInvalid says that a request's fields make no sense; the message names the field.
	ErrInvalid = errors.New("invalid request")
	// ErrStop, as the cause with which the context of a Submit is cancelled, ends the request with
	// ReasonStop instead of ReasonAbort: the caller found a stop string and needs nothing more.
	ErrStop = errors.New("stopped by the caller")
	// ErrNotReset says that the prefix cache was reset, and that the connector cannot be.
	ErrNotReset = errors.New("the prefix cache is empty, the connector is not")
	// ErrKept says that the prefix cache was reset, and the connector not wholly.
	ErrKept = errors.New("the prefix cache is empty, the connector has kept some blocks")
)

// Request is one generation.
type Request struct {
	ID        connector.RequestID // unique among live requests; the engine refuses a duplicate
	Prompt    []int32             // at least one token; owned by the engine after Submit
	Params    sample.Params
	MaxTokens int  // generated tokens at most
	IgnoreEOS bool // go on after a stop token
	Salt      string
	Ticket    []byte // signed ticket of a producer (P/D, decode side); nil if none
	Remote    bool   // P/D, prefill side: a consumer will fetch the KV, give a ticket at the end
	Turn      bool   // P/D, decode side, with Remote: the ticket is for the next turn, and keeps nothing from being evicted
}

// Output is a piece of a generation. The last one has Reason set, and Err too if that is ReasonError.
type Output struct {
	Tokens []int32          // new tokens, in order; a stop token that ends the generation is the last of them
	Reason connector.Reason // 0 while the request runs
	Err    error            // set when Reason is ReasonError
	Usage  Usage            // complete in the last Output, running totals before
	Ticket []byte           // last Output of a Remote request, if there is anything to fetch
}

// Usage says where the KV of a request's prompt came from, in tokens.
type Usage struct {
	Prompt    int // length of the prompt
	Generated int
	Local     int // from the engine's own prefix cache
	External  int // loaded through the connector
	Handoff   Handoff
}
