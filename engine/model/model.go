// Package model computes tokens from tokens: it defines what the engine needs from a model and holds
// the Llama family ([Load], [Tiny]). The sim model is in package sim below it.
//
// Every model here is bitwise reproducible: the logits of a position depend on the tokens before it
// and on nothing else, not on batch, chunk, block size, threads or instruction set.
package model

import "github.com/kvport/kvport/connector"

// Spec says what an engine must know of a model.
type Spec struct {
	Name      string
	Vocab     int // size of a logits vector
	MaxTokens int // longest sequence the model can handle
	Layers    int
	Ranks     int                   // caches over which the KV is spread; 0 means 1, more only for a Sharded model
	Weights   connector.Fingerprint // weights, dtype, rope: becomes Env.Model
	ByteShape string                // byte-layout id of a block, apart from its size: goes into Env.Shape
}

// Model is a language model over a paged KV cache. Forward is called from one goroutine.
type Model interface {
	// Spec describes the model. It never changes.
	Spec() Spec
	// Layout lays out a cache of blocks slots in one region. It has no digest segments: the engine
	// appends them.
	Layout(blockTokens, blocks int) connector.Layout
	// Forward computes the KV of every chunk into the cache and the wanted logits into each
	// chunk's Logits. Errors leave the chunks' KV undefined and the rest of the cache untouched.
	Forward(batch *Batch, kv *connector.KV) error
	// Close frees the weights.
	Close() error
}

// Sharded is a Model that can be spread over several ranks. Each has a cache of its own, all with the
// same layout and the same block tables, and holds its share of every token's KV.
type Sharded interface {
	Model
	// ForwardRanks is Forward over the caches of all ranks, in order of rank.
	ForwardRanks(batch *Batch, ranks []*connector.KV) error
}

// Batch is one step's work.
type Batch struct {
	Chunks []Chunk
	// BeforeLayer, if set, is called for each layer before its KV is first read, AfterLayer when
	// its KV is final. An error ends Forward.
	BeforeLayer, AfterLayer func(layer int) error
}

// Chunk is a run of consecutive tokens of one sequence.
type Chunk struct {
	Tokens []int32 // the new tokens; not empty
	Start  int     // position of Tokens[0]; the KV of all earlier positions is in Blocks
	// Blocks is the block table of each group, covering Start+len(Tokens) positions. Blocks that a
	// group of policy trailing does not need any more at Start may be -1.
	Blocks [][]connector.BlockID
	// Logits is where the logits of the chunk's last len(Logits) positions go, Vocab floats each;
	// empty when none are wanted.
	Logits [][]float32
}
