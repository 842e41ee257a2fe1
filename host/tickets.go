package host

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/ticket"
	"github.com/kvport/kvport/internal/tracker"
)

// seal signs what a consumer is promised, nil if it is nothing.
func (h *Host) seal(request connector.RequestID, t *tracker.Ticket) []byte {
	if t == nil {
		return nil
	}
	e := &ticket.Envelope{Hold: t.Hold, Tokens: t.Tokens, Lease: t.Lease, Consumers: t.Consumers, Plugin: t.Plugin}
	if t.Cut.BlockTokens > 0 {
		e.Cut = ticket.Cut{Base: h.eng.Base, BlockTokens: t.Cut.BlockTokens, Last: t.Cut.Last, Tail: t.Cut.Tail}
	}
	signed, err := h.tickets.seal(e)
	if err != nil {
		h.log.Error("ticket cannot be signed, the consumer will compute", "request", request, "error", err)
		return nil
	}
	return signed
}

// Ticket makes the ticket of a request that is about to end and has a consumer, before its saves are
// over: it promises all full blocks that are valid, and the consumer's host waits for them, within its
// own limits. It must be called before the Step that ends the request. It is nil where there is nothing to
// promise: for a role that does not save, and for a connector that holds blocks, whose ticket comes
// with Finished.
func (h *Host) Ticket(e *connector.Ended) []byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.seal(e.Request, h.tracker.Promise(e))
}

// ticketSigner signs and verifies tickets for one engine.
type ticketSigner struct {
	key   []byte
	peers []string // whose tickets are accepted; empty: all that have the key
	eng   Engine
	epoch uint64
	guard *ticket.Guard
}

func newTicketSigner(s *Settings, eng Engine, epoch uint64) (*ticketSigner, error) {
	o := &ticketSigner{peers: s.Peers, eng: eng, epoch: epoch, guard: ticket.NewGuard(eng.Model, eng.Shape)}
	var err error
	if s.TicketKeyFile != "" {
		o.key, err = ticket.LoadKey(s.TicketKeyFile)
	} else {
		o.key, err = ticket.SharedKey()
	}
	return o, err
}

func (o *ticketSigner) seal(e *ticket.Envelope) ([]byte, error) {
	if err := fault.Point("host.ticket.seal"); err != nil {
		return nil, err
	}
	e.Engine, e.Epoch, e.Model, e.Shape = o.eng.ID, o.epoch, o.eng.Model, o.eng.Shape
	e.ShapeText = strings.ToValidUTF8(o.eng.ShapeText[:min(len(o.eng.ShapeText), ticket.MaxShape)], "")
	return ticket.Seal(o.key, e)
}

// verify opens the ticket that a request brought, or says why it is refused: in one word for
// metrics, and at length. A ticket that could be opened is returned with the refusal, too.
func (o *ticketSigner) verify(signed []byte, request connector.RequestID) (e *ticket.Envelope, reason string, err error) {
	if err = fault.Point("host.ticket.verify"); err != nil {
		return nil, "other", err
	}
	e, err = ticket.Open(o.key, signed)
	if err == nil && len(o.peers) > 0 && !slices.Contains(o.peers, e.Engine) {
		return e, "peer", fmt.Errorf("engine %q is not among kvport.peers", e.Engine)
	}
	if err == nil {
		err = o.guard.Check(e, request)
		if err != nil && e.Model == o.eng.Model && e.Shape != o.eng.Shape && e.ShapeText+o.eng.ShapeText != "" {
			err = fmt.Errorf("%w: its blocks are made as %q, ours as %q", err, e.ShapeText, o.eng.ShapeText)
		}
	}
	if err == nil {
		return e, "", nil
	}
	reason, err = refusal(err)
	return e, reason, err
}

// refusal says in one word why a ticket is refused, and at length.
func refusal(err error) (reason string, because error) {
	switch {
	case errors.Is(err, ticket.ErrForged):
		return "forged", fmt.Errorf("%w: the keys of both engines must be equal, see kvport.ticket_key_file", err)
	case errors.Is(err, ticket.ErrReplayed):
		return "replayed", err
	case errors.Is(err, ticket.ErrStale):
		return "stale", err
	case errors.Is(err, ticket.ErrUnverified):
		return "unverified", fmt.Errorf("%w: set kvport.unverified to true to accept that", err)
	case errors.Is(err, connector.ErrIncompatible):
		return "incompatible", err
	}
	return "other", err
}
