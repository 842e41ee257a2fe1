package tracker

import (
	"errors"
	"fmt"

	"github.com/kvport/kvport/connector"
)

// A load from an engine of another shape reads whole blocks of that engine, because its digests are of those, and only
// what they verify is cut into ours. What is decided here is which blocks that takes, and what becomes of ours when one
// of them is damaged or does not come.

var errBeyond = fmt.Errorf("the ticket promises fewer tokens: %w", connector.ErrGone)

// Source is an engine of another shape from which a ticket comes, and what is the same there.
type Source struct {
	Shape       connector.Fingerprint
	World       int // its ranks
	BlockTokens int // of its blocks
	// Tokens are the leading tokens of the prompt that are the same there, and Keys the addresses of its blocks that
	// hold them, in order: the last one may be partial. A Tracker finds them out.
	Tokens int
	Keys   []connector.BlockKey
}

// Read is a block of a Source that a load needs.
type Read struct {
	Group uint16
	Place int // in the prompt, from 0
}

// Reshape is a load from a Source.
type Reshape struct {
	*Source
	blocks []Target
}

// Target is one of our blocks, and the tokens that it gets.
type Target struct {
	connector.Block
	From, To int
}

// Reshape says what a load with a Source needs. groups are those of our cache.
func (m *Move) Reshape(groups []connector.Group) *Reshape {
	t := m.Transfer
	left := make([]int, len(groups)) // blocks of each group that are not dealt with yet
	for _, b := range t.Blocks {
		left[b.Group]++
	}
	r := &Reshape{Source: m.Source, blocks: make([]Target, len(t.Blocks))}
	end := t.From + t.Tokens
	for i, b := range t.Blocks {
		size := groups[b.Group].BlockTokens
		first := ((end+size-1)/size - left[b.Group]) * size // the blocks of each group end with the last token
		left[b.Group]--
		r.blocks[i] = Target{b, max(first, t.From), min(first+size, end)}
	}
	return r
}

// Targets are our blocks, in the order of the transfer.
func (r *Reshape) Targets() []Target { return r.blocks }

// places are those of the Source's blocks that one of ours needs: from the first to before the second.
func (r *Reshape) places(t *Target) (first, end int) {
	return t.From / r.BlockTokens, (t.To + r.BlockTokens - 1) / r.BlockTokens
}

// Reads lists what is needed of the Source, group by group and in prefix order, each block once. What the ticket does
// not promise is left out.
func (r *Reshape) Reads() (list []Read) {
	for i := range r.blocks {
		t := &r.blocks[i]
		first, end := r.places(t)
		if n := len(list); n > 0 && list[n-1].Group == t.Group {
			first = max(first, list[n-1].Place+1)
		}
		for place := first; place < min(end, len(r.Keys)); place++ {
			list = append(list, Read{t.Group, place})
		}
	}
	return list
}

// Batches are the Reads in groups, of which none has more than most, that follow one another in one group.
func (r *Reshape) Batches(most int) (list [][]Read) {
	for rest := r.Reads(); len(rest) > 0; {
		n := 1
		for n < min(len(rest), most) && rest[n] == (Read{rest[0].Group, rest[0].Place + n}) {
			n++
		}
		list, rest = append(list, rest[:n:n]), rest[n:]
	}
	return list
}

// End is the token before which a block of the Source ends.
func (r *Reshape) End(place int) int { return min((place+1)*r.BlockTokens, r.Tokens) }

// Partial says that a block of the Source is its last one and not full, so that it has no key there.
func (r *Reshape) Partial(place int) bool { return (place+1)*r.BlockTokens > r.Tokens }

// Outcome is what a load has come to. fault says why a block of the Source is not here, whole and verified, on all ranks;
// nil: it is. Each of our blocks that has a token of it fails with it.
func (r *Reshape) Outcome(fault func(Read) error) (out Outcome) {
	gone := &connector.BlockError{}
	for i := range r.blocks {
		t := &r.blocks[i]
		switch err := r.faultOf(t, fault); {
		case err == nil:
		case errors.Is(err, connector.ErrCorrupt):
			out.Corrupt = append(out.Corrupt, t.ID)
			if out.Damage == nil {
				out.Damage = err
			}
		case errors.Is(err, ErrForeignKey):
			out.Foreign = append(out.Foreign, t.ID)
		case errors.Is(err, connector.ErrOutdated):
			out.Outdated = append(out.Outdated, t.ID)
		default:
			gone.Blocks = append(gone.Blocks, t.ID)
			if gone.Err == nil {
				gone.Err = err
			}
		}
	}
	if len(gone.Blocks) > 0 {
		out.Err = gone
	}
	return out
}

// faultOf is the fault of one of our blocks: damage before absence.
func (r *Reshape) faultOf(t *Target, fault func(Read) error) (worst error) {
	first, end := r.places(t)
	for place := first; place < end; place++ {
		err := errBeyond
		if place < len(r.Keys) && min(t.To, (place+1)*r.BlockTokens) <= r.Tokens {
			err = fault(Read{t.Group, place})
		}
		if errors.Is(err, connector.ErrCorrupt) {
			return err
		}
		if worst == nil {
			worst = err
		}
	}
	return worst
}
