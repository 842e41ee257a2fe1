// Package kvevents carries news of which KV blocks an engine has, in the format of vLLM's KV cache events: what goes
// over the wire, a publisher and a subscriber.
//
// Events are hints. A block that was reported may be gone when a request arrives, and what nobody reported may be
// there. Nothing waits for a reader: what one misses shows as a gap in the sequence numbers.
package kvevents

import (
	"encoding/binary"
	"encoding/hex"
	"strconv"
)

// Kind says what happened to blocks.
type Kind uint8

// The kinds of events.
const (
	Stored  Kind = 1 + iota // they are in the cache
	Removed                 // they are no longer in it
	Cleared                 // none is
)

// The media that vLLM names. Others are possible.
const (
	GPU     = "GPU" // the engine's own cache, whatever the engine computes on
	CPU     = "CPU"
	Storage = "STORAGE"
)

// The localities that vLLM names: whether blocks are beside the engine or in a store that others reach as well.
const (
	Local  = "LOCAL"
	Remote = "REMOTE"
)

// Hash names a block as its engine does: by some bytes, or by a number of 64 bits. The zero value is none. Hashes can
// be compared, and be keys of maps.
type Hash struct {
	text   string // of a number: 8 bytes, the most significant first
	number bool
}

// BytesHash is a hash of some bytes, at least one.
func BytesHash(b []byte) Hash { return Hash{text: string(b)} }

// NumberHash is a hash that is a number.
func NumberHash(n uint64) Hash {
	return Hash{text: string(binary.BigEndian.AppendUint64(nil, n)), number: true}
}

// IsZero reports whether there is no hash.
func (h Hash) IsZero() bool { return h.text == "" }

// AppendTo appends bytes that only this hash has.
func (h Hash) AppendTo(b []byte) []byte {
	kind := byte(0)
	if h.number {
		kind = 1
	}
	return append(append(b, kind), h.text...)
}

// String is the hash for messages.
func (h Hash) String() string {
	if h.number {
		return strconv.FormatUint(h.value(), 10)
	}
	return hex.EncodeToString([]byte(h.text))
}

func (h Hash) value() uint64 { return binary.BigEndian.Uint64([]byte(h.text)) }

// Event is one change of what an engine has. Which fields count depends on Kind; those of vLLM that nothing here
// needs are not kept.
type Event struct {
	Kind   Kind
	Hashes []Hash // not of Cleared

	Medium   string // of Stored and Removed: where the blocks are; empty: not said, the engine's own cache
	Locality string // of Stored and Removed: Local or Remote; empty: not said
	Group    int    // of Stored and Removed: the KV cache group; -1: not said

	// The following are of Stored alone. Each block is the parent of the next.
	Parent    Hash    // of the first block; none: it is the first of its prompt
	Tokens    []int32 // of all blocks; none: the engine does not tell
	BlockSize int     // tokens of a block
	LoRAName  string  // of the adapter; empty: none
	// Extra has for each block what it depends on apart from tokens: the adapter's name, images, the prompt's
	// cache_salt. Each value is as it goes over the wire. Nil: nothing for any block; else it has one entry for
	// each block, nil where there is nothing. An empty value stands for values that were too long or too many to be
	// read: nobody can say which prompts have that block.
	Extra [][]string
}

// Batch is what goes over the wire at once: the events of one step of an engine.
type Batch struct {
	Time   float64 // seconds since 1970
	Events []Event
}
