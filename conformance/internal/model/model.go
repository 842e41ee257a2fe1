// Package model says what a connector that finds blocks by their keys may answer: it makes random histories of calls,
// judges what came of them by the rules of docs/spec, and makes a history that failed as short as a person can read.
// It does no I/O and knows no connector; whoever runs a history does.
package model

import (
	"encoding/binary"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

// Key is the number of a block's key in a history.
type Key int

// Group is what the blocks of one group consist of.
type Group struct {
	Segments int   // apart from the digests
	Bytes    int64 // of a block in all segments together, apart from the digests
	Trailing int   // 0: a group of policy all
	Cut      Cut   // into segments
}

// Cut is how the bytes of a block are distributed over its segments.
type Cut uint8

// The cuts.
const (
	CutUneven Cut = iota // segments have different lengths, unless they cannot
	CutEqual             // all have the same, a power of two
	CutTiny              // every other one has a few bytes only
)

// Shape is what the caches of a history's engines are like.
type Shape struct {
	Ranks  int
	Groups []Group
	Gaps   bool // bytes of nobody's lie between blocks and segments
	Tokens int  // of a block; 0: BlockTokens
	Slots  int  // blocks of each rank's cache
}

// Segment is the bytes of segment n of a group's block.
func (g *Group) Segment(n int) int64 {
	even := g.Bytes / int64(g.Segments)
	step := even / 4
	switch {
	case step == 0 || g.Segments == 1 || g.Cut == CutEqual:
		return even
	case g.Cut == CutTiny && n%2 == 1:
		return 1 + int64(n)/2%7
	case n == g.Segments-1 && g.Segments%2 == 1:
		return even
	case n%2 == 0:
		return even + step
	}
	return even - step
}

// blockBytes is the bytes of a block in all groups, with digests.
func (s *Shape) blockBytes() (n int64) {
	for _, g := range s.Groups {
		n += g.Bytes + 16*int64(g.Segments+1)
	}
	return n
}

// Kind is what a call does.
type Kind uint8

// The kinds.
const (
	Save    Kind = iota // a transfer, on every rank
	Load                // a transfer, on every rank
	Match               // a batch of queries
	Reset               // forgets everything
	Reopen              // closes and opens the sides of an engine, one after another
	Restart             // ends an engine's connector and starts it again
	Wait                // lets time pass
	Kill                // kills an engine's connector amid the other calls of its step, and starts it again
)

// Call is one call. The calls of a step run at the same time.
type Call struct {
	Kind    Kind
	Engine  int           // of two that share what is stored, 0 or 1
	Keys    []Key         // Save and Load: the blocks in prefix order; a key may come twice
	Skip    []int         // of each group, how many leading keys it leaves out; nil: none
	Tail    bool          // a partial block follows
	Version int           // Save: which bytes the blocks have
	Replace bool          // Save
	Only    int           // Save: 1 plus the rank that alone saves; 0: all ranks
	After   time.Duration // how long after the other calls of its step it begins
	Cancel  time.Duration // the context ends so long after the call began; 0: never, below 0: before; Wait: how long
	Queries []Query       // Match
	Tenant  int           // Save: whose blocks they are; 0: nobody's
}

// Query is one query of a Match.
type Query struct {
	Keys     []Key
	Computed int  // blocks that the engine has
	Probe    bool // no request
}

// Step is calls that run at the same time. All have returned when the next step begins.
type Step []Call

// Near says how a key is made: it shares bytes with an earlier one.
type Near struct {
	Of    Key
	Share int // 0: none
	Last  bool
}

// History is what is done.
type History struct {
	Shape  Shape
	Keys   []Near
	Steps  []Step
	Bounds *Bounds // nil: the connector has room for all blocks
}

// Calls is how many calls there are.
func (h *History) Calls() (n int) {
	for _, s := range h.Steps {
		n += len(s)
	}
	return n
}

// Engines is how many engines the history needs.
func (h *History) Engines() int {
	n := 1
	for _, s := range h.Steps {
		for i := range s {
			n = max(n, s[i].Engine+1)
		}
	}
	return n
}

// Versions is how many different bytes a block is saved with at most.
func (h *History) Versions() int {
	n := 0
	h.each(func(c *Call) { n = max(n, c.Version) })
	return n + 1
}

// Ref names one block of a transfer.
type Ref struct {
	Key   Key
	Group int
	Tail  bool // it is partial and has no key
}

// Blocks are the blocks of a transfer, group by group.
func (c *Call) Blocks(s *Shape) []Ref {
	var refs []Ref
	for g := range s.Groups {
		skip := 0
		if g < len(c.Skip) {
			skip = min(c.Skip[g], len(c.Keys))
		}
		for _, k := range c.Keys[skip:] {
			refs = append(refs, Ref{Key: k, Group: g})
		}
		if c.Tail {
			refs = append(refs, Ref{Group: g, Tail: true})
		}
	}
	return refs
}

// BlockKeys makes the keys of a history, all different, and those of other salts too.
func (h *History) BlockKeys(salt string) []connector.BlockKey {
	sum := fnv.New64a()
	_, _ = sum.Write([]byte(salt))
	random := rand.New(rand.NewPCG(sum.Sum64(), 1))
	made := map[connector.BlockKey]bool{{}: true}
	keys := make([]connector.BlockKey, len(h.Keys))
	for i, near := range h.Keys {
		k := &keys[i]
		for n := 0; n < len(k); n += 8 {
			binary.LittleEndian.PutUint64(k[n:], random.Uint64())
		}
		own := len(k) - 1 // a byte that is the key's own
		if near.Share > 0 && int(near.Of) < i {
			of := &keys[near.Of]
			if near.Last {
				own = 0
				copy(k[len(k)-near.Share:], of[len(k)-near.Share:])
			} else {
				copy(k[:near.Share], of[:near.Share])
			}
		}
		for made[*k] {
			k[own]++
		}
		made[*k] = true
	}
	return keys
}

// Result is what came of a call.
type Result struct {
	Ended   bool    // its context, or its connector's life, ended before it returned
	Err     error   // Match, Reset: as it came; others: what the driver could not do
	Answers []int   // Match: the tokens of each answer
	Emptied bool    // Reset
	Ranks   []Moved // Save, Load: of each rank
	Late    string  // not empty: it has not returned in its time, and this says so
}

// Moved is what came of a transfer on one rank.
type Moved struct {
	Called bool
	Err    error
	Whole  bool    // the error names no blocks: all of them failed
	Failed []bool  // of each block
	Odd    bool    // the error names a block that is not in the transfer
	Found  []Found // Load: of each block that did not fail
}

// Found is what lies in a block after a load.
type Found struct {
	What    What
	Ref     Ref // Exact
	Rank    int // Exact
	Version int // Exact
}

// What is a kind of content.
type What uint8

// The kinds of content.
const (
	Exact     What = iota // the bytes of one block that a history can save
	Untouched             // what lay there before the load
	Torn                  // bytes of two versions of the block, or of one and of what lay there before
	Digest                // right, except the digests
	Unknown
)

// Stray is a change of memory that nobody may make.
type Stray struct {
	Engine, Rank int
	What         StrayWhat
	Where        string
}

// StrayWhat is whose memory it was.
type StrayWhat uint8

// The kinds of strays.
const (
	OfNobody StrayWhat = iota // between blocks
	OfSaved                   // of a block that is being saved
	OfOthers                  // of a block that no call of the step names
	Later                     // of a block whose call has returned
)

// Outcome is what came of a step.
type Outcome struct {
	Results []Result
	Strays  []Stray
}

// clone copies a history as deep as shrinking changes it.
func (h *History) clone() *History {
	n := &History{Shape: h.Shape, Keys: h.Keys, Bounds: h.Bounds, Steps: make([]Step, len(h.Steps))}
	n.Shape.Groups = slices.Clone(h.Shape.Groups)
	for i, s := range h.Steps {
		n.Steps[i] = slices.Clone(s)
	}
	return n
}

// Bytes is how many bytes of different blocks the history saves.
func (h *History) Bytes() int64 {
	saved := map[Key]bool{}
	h.each(func(c *Call) {
		if c.Kind == Save {
			for _, k := range c.Keys {
				saved[k] = true
			}
		}
	})
	return int64(len(saved)) * h.Shape.blockBytes() * int64(h.Shape.Ranks)
}
