package tracker

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

// Ticket is what a ticket says. Whoever signs and opens it has other fields, too: they say for whom it is,
// which is decided before a Tracker receives it.
type Ticket struct {
	Hold      connector.HoldID // 0: no hold keeps the blocks
	Tokens    int              // leading tokens that a consumer can get
	Lease     time.Duration    // how long its producer keeps the blocks; 0: nothing keeps them, they are of an earlier turn
	Consumers int              // how often it may be used
	Plugin    []byte           // for the consumer's connector
	Cut       Cut              // for engines of another shape; zero: they cannot use it
	// Source says that a ticket which a request brought is of an engine of another shape, and of which: its blocks
	// are cut to fit ours, and the prompt is compared by Cut. Nil: it is of our shape.
	Source *Source
}

// String says what is promised, and for how long.
func (t *Ticket) String() string {
	return fmt.Sprintf("%d tokens for %d, lease %v", t.Tokens, t.Consumers, t.Lease)
}

// Cut says which prompt a ticket's tokens belong to, by the addresses of the producer's own blocks.
type Cut struct {
	BlockTokens int
	Last        connector.BlockKey // of the last full block; zero without one
	Tail        connector.BlockKey // of all tokens, if the last block is partial; zero: not known
}

// brought is what became of the ticket that a request brought.
type brought struct {
	plugin   connector.Ticket // not nil: the ticket is used
	promised int              // tokens that it speaks of
	need     int              // of them those that a store must have
	source   *Source          // not nil: the ticket is of another shape
	turn     bool             // it is of an earlier turn: nothing keeps its blocks, and it serves one load
	refused  string           // why it is not used, in one word
}

// WantsTicket says whether a ticket that comes with a question must be opened: the one that a request brings
// with its first question, to a role that loads. Accept or Refuse follows, then Query.
func (b *Tracker) WantsTicket(id connector.RequestID) bool {
	r := b.requests[id]
	return b.cfg.Role.Loads() && (r == nil || !r.queried)
}

// Accept takes a ticket that was opened and is for us. It reports false, and takes nothing, if the ticket is of
// another shape and for another prompt (rule RESHAPE-01).
func (b *Tracker) Accept(q *connector.Query, t *Ticket) bool {
	in := brought{promised: t.Tokens, plugin: slices.Clone(t.Plugin)}
	if t.Source != nil {
		if in.source = b.agreed(q, t); in.source == nil {
			return false
		}
	}
	if in.plugin == nil {
		in.plugin = connector.Ticket{}
	}
	if b.isHolder() {
		in.turn = t.Lease == 0
	} else {
		in.need = t.Tokens
	}
	b.request(q.Request).brought = in
	return true
}

// Refuse notes that a ticket is not used, and why in one word. The connector is asked without it: a store may have the
// blocks all the same, and a composite may have a store among its children.
func (b *Tracker) Refuse(id connector.RequestID, why string) {
	b.request(id).brought = brought{refused: why}
}

// Brought says what became of the ticket of a live request: how many tokens it promises, or why it is refused, or forgotten
// because a load by it brought nothing. Both are zero without a ticket.
func (b *Tracker) Brought(id connector.RequestID) (promised int, refused string) {
	if r := b.requests[id]; r != nil {
		return r.promised, r.refused
	}
	return 0, ""
}

// agreed says for which leading tokens of a request a ticket of another shape is; nil: for none.
func (b *Tracker) agreed(q *connector.Query, t *Ticket) *Source {
	c := &t.Cut
	if b.cfg.Addresses == nil || c.BlockTokens <= 0 || t.Source.World <= 0 {
		return nil
	}
	same := func(tokens int, want connector.BlockKey) *Source {
		if want == (connector.BlockKey{}) || tokens <= 0 || tokens > q.Tokens {
			return nil
		}
		keys := b.cfg.Addresses(q.Request, c.BlockTokens, tokens)
		if len(keys) == 0 || keys[len(keys)-1] != want {
			return nil
		}
		s := *t.Source
		s.BlockTokens, s.Tokens, s.Keys = c.BlockTokens, tokens, keys
		return &s
	}
	if s := same(t.Tokens, c.Tail); s != nil {
		return s
	}
	return same(t.Tokens-t.Tokens%c.BlockTokens, c.Last)
}

// ticket is what a consumer of an ended request is promised, nil if nothing is. tail is the address of its
// partial last block. Connectors that may change bytes
// give none for the next turn: what is reused could not be told from what was kept.
func (b *Tracker) ticket(r *request, ended *connector.Ended, tail connector.BlockKey, h connector.Hold) *Ticket {
	t := &Ticket{Hold: h.ID, Tokens: b.available(r, ended, h), Lease: h.TTL, Consumers: max(h.Consumers, 1), Plugin: h.Ticket}
	if t.Tokens <= 0 || ended.Weak && b.cfg.Lossy {
		return nil
	}
	if t.Lease == 0 {
		t.Lease = b.cfg.HoldMax
	}
	if ended.Weak {
		t.Lease = 0
	}
	if b.cfg.Reshape && !h.Weak && !ended.Weak { // nothing but digests tells whether a weak hold's blocks are still there
		t.Cut.BlockTokens = b.cfg.Groups[0].BlockTokens
		t.Cut.Last = b.lastFull(ended, t.Tokens)
		if t.Tokens == ended.Tokens && t.Tokens%t.Cut.BlockTokens != 0 {
			t.Cut.Tail = tail
		}
	}
	return t
}

// isHolder says that the connector keeps the blocks of ended requests.
func (b *Tracker) isHolder() bool { return b.cfg.Can&connector.CanHold != 0 }

// reused is the outcome of a load from where nothing keeps the blocks: those that hold something else by now
// are gone, not damaged (rule TURN-02).
func (b *Tracker) reused(part *connector.Transfer, out Outcome) Outcome {
	missing := slices.Concat(out.Corrupt, out.Foreign, out.Outdated)
	if out.Err != nil {
		var some *connector.BlockError
		if !errors.As(out.Err, &some) || len(some.Blocks) == 0 {
			b.counters.TurnLost += len(part.Blocks)
			return out
		}
		missing = append(slices.Clone(some.Blocks), missing...)
	}
	b.counters.TurnLost += len(missing)
	b.counters.TurnLoaded += len(part.Blocks) - len(missing)
	if len(missing) == 0 {
		return out
	}
	return Outcome{Err: &connector.BlockError{Blocks: missing, Err: errReused}}
}
