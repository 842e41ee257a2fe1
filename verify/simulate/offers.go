package simulate

import (
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
)

// A connector that has nothing by a ticket of another shape is asked without it, and what it offers then is no part of
// the ticket: it ends as other offers end, and its load is without the ticket as well.

// offers say which questions the connector's offers answer: ones by a ticket, or without one.
type offers struct {
	heard map[connector.RequestID]bool // by request: its last answer with tokens is by a ticket
	given map[connector.RequestID]bool // the same of what its engine was offered last
}

func newOffers() offers {
	return offers{map[connector.RequestID]bool{}, map[connector.RequestID]bool{}}
}

// answered notes an answer before the tracker hears it.
func (o *offers) answered(j *job) {
	if j.err == nil && j.match.Tokens > 0 {
		o.heard[j.ask.Query.Request] = j.ask.Query.Ticket != nil
	}
}

// offered notes that an engine is made an offer, and says whether it is by a ticket.
func (o *offers) offered(id connector.RequestID) (byTicket bool) {
	o.given[id] = o.heard[id]
	return o.given[id]
}

func (o *offers) forget(id connector.RequestID) {
	delete(o.heard, id)
	delete(o.given, id)
}

// checkTicketUse verifies that a load is by a ticket only if its offer is.
func (h *host) checkTicketUse(m *move) {
	if m.Kind != tracker.Load {
		return
	}
	if byTicket, is := h.offers.given[m.Transfer.Request]; is && byTicket != (m.Transfer.Ticket != nil) {
		h.w.fail('c', "%s: the offer to %s is by a ticket: %v, its load: %v", h.e.name, m.Transfer.Request, byTicket, !byTicket)
	}
}
