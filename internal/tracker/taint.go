package tracker

import (
	"fmt"
	"slices"

	"github.com/kvport/kvport/connector"
)

// What a load brought and no digest verified may be anything, and so may all that is computed from it. A digest that
// is made of it later would say that it is right, so it stays with its request: it is neither saved nor held nor
// promised (rule TAINT-01). The engine is told, and shares it with no other request (rule TAINT-02).

var errTainted = fmt.Errorf("they depend on bytes that nobody has verified: %w", connector.ErrDeclined)

// verifies says whether digests tell that loads bring what was saved. Lossy connectors bring other bytes.
func (b *Tracker) verifies() bool { return !b.cfg.Lossy }

// taint says whether a load brought what nobody has verified, and notes that. A canceled one is no longer its
// request's: that has ended, or has lost its blocks.
func (b *Tracker) taint(o *op) bool {
	if b.verifies() || len(o.t.Blocks) == 0 || o.failsFirst() {
		return false
	}
	if r := o.req; !o.canceled && !r.beyond(o.t.From) {
		r.tainted, r.clean = true, o.t.From
	}
	return true
}

// failsFirst says that a load has failed from the first block of a group on, so that the engine computes all of it. That
// is less than leftNothing: of a group that needs only its last blocks an engine may go on with a part of those.
func (o *op) failsFirst() bool {
	var seen [connector.MaxGroups]bool
	for _, k := range o.t.Blocks {
		if int(k.Group) >= len(seen) {
			continue
		}
		if _, bad := o.failed[k.ID]; bad && !seen[k.Group] {
			return true
		}
		seen[k.Group] = true
	}
	return false
}

// shed leaves out of a step what is not saved, so that nobody plans it, and ends the taint of requests that have lost
// their blocks: what is computed from now on does not depend on them.
func (b *Tracker) shed(s *connector.Step) {
	s.Computed = slices.DeleteFunc(s.Computed, func(t connector.Transfer) bool { return b.tainted(&t) })
	for _, id := range s.Preempted {
		if r := b.requests[id]; r != nil {
			r.tainted = false
		}
	}
}

// beyond says whether the first tokens of a request include one that is tainted.
func (r *request) beyond(tokens int) bool { return r.tainted && tokens > r.clean }

// tainted says whether a save has blocks that must not leave their request.
func (b *Tracker) tainted(t *connector.Transfer) bool {
	r := b.requests[t.Request]
	return r != nil && r.beyond(t.From+t.Tokens)
}
