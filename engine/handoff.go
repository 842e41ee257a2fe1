package engine

import (
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/sched"
)

// Handoff says what became of the ticket that a request brought. The zero value: it brought none.
type Handoff struct {
	Result string // one of the Handoff constants
	Reason string // why it is not HandoffLoaded, in one word; empty where there is nothing to explain
}

// The results of a hand-off.
const (
	HandoffLoaded  = "loaded"  // all that the ticket promised and that was not here already
	HandoffPartial = "partial" // some of it, the rest was computed; reason load_failed or gone
	HandoffLocal   = "local"   // nothing was loaded since all of it was here already
	HandoffRefused = "refused" // the ticket was not accepted; reason key, model, block_size, shape, role, replayed, gone, peer, prompt, unverified, unsupported, other
	HandoffNone    = "none"    // the ticket was accepted and nothing could be loaded; reason load_failed or gone
)

// brought is what is known of a request's ticket.
type brought struct {
	any      bool   // there is one
	promised int    // tokens that it speaks of; 0 until the host has looked at it
	refused  string // why the host does not use it
	failed   bool   // a load failed, or a part of one
}

// noteTicket remembers what the host made of a request's ticket.
func (l *loop) noteTicket(id connector.RequestID) {
	if st := l.streams[id]; st != nil && st.brought.any && st.brought.promised == 0 {
		st.brought.promised, st.brought.refused = l.e.host.Brought(id)
	}
}

// noteLoaded remembers that a load failed, or a part of one. A lost load, whose blocks nobody can use again, has failed.
func (l *loop) noteLoaded(id connector.RequestID, failed bool) {
	if st := l.streams[id]; st != nil && failed {
		st.brought.failed = true
	}
}

// handoff says what became of a request's ticket so far. From the first token on it does not change.
func (l *loop) handoff(st *stream, o sched.Output) Handoff {
	b := &st.brought
	lost := "gone"
	if b.failed {
		lost = "load_failed"
	}
	size := l.e.cfg.BlockSize
	want := max(0, min(b.promised, st.prompt-1)) / size * size
	here := o.Local+o.External >= want
	switch {
	case !b.any:
		return Handoff{}
	case l.e.host == nil:
		return Handoff{HandoffRefused, "unsupported"}
	case !l.e.cfg.Connector.Role.Loads():
		return Handoff{HandoffRefused, "role"}
	case b.refused != "":
		return Handoff{HandoffRefused, b.refused}
	case o.External > 0 && here:
		return Handoff{Result: HandoffLoaded}
	case o.External > 0:
		return Handoff{HandoffPartial, lost}
	case here && o.Local > 0:
		return Handoff{Result: HandoffLocal}
	}
	return Handoff{HandoffNone, lost}
}
