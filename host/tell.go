package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/ticket"
	"github.com/kvport/kvport/internal/tracker"
)

// tell passes an event of the book on to the engine. The caller holds mu.
func (h *Host) tell(b *tracker.Event) {
	e := Event{
		Request: b.Request, Step: b.Step, Blocks: b.Blocks, Failed: b.Failed, Held: b.Held, Lost: b.Lost, Err: b.Err,
	}
	switch b.Kind {
	case tracker.Loaded:
		e.Kind = Loaded
		h.metrics.moved("load", b)
		if b.Damaged > 0 {
			h.log.Warn("damaged blocks, they are computed again", "connector", h.info.Name, "request", b.Request, "blocks", b.Damaged)
		}
		h.complain("load", &h.badLoads, b)
	case tracker.Saved:
		e.Kind = Saved
		h.endProgress(b.Step)
		h.metrics.moved("save", b)
		h.complain("save", &h.badSaves, b)
	case tracker.Finished:
		e.Kind = Finished
		e.Ticket = h.seal(b.Request, b.Ticket)
	case tracker.Released:
		fault.Crash("host.hold.release")
		e.Kind = Released
		h.metrics.released.WithLabelValues(b.Reason).Inc()
	case tracker.Answered:
		e.Kind = Answered
	case tracker.Stored:
		e.Kind = Stored
	}
	h.events.put(e)
}

// complaints says how often failed transfers of one direction were logged.
type complaints struct {
	next    time.Time // not before
	dropped int       // since the last that was logged
}

// complain logs a transfer that failed, but not more than one a second: what fails once often fails
// for every request. The end of a request that nobody waits
// for is no failure, nor is what a connector chose not to store. The caller holds mu.
func (h *Host) complain(direction string, c *complaints, b *tracker.Event) {
	if len(b.Failed) == 0 || b.Err == nil || errors.Is(b.Err, context.Canceled) || errors.Is(b.Err, connector.ErrDeclined) {
		return
	}
	now := time.Now()
	if now.Before(c.next) {
		c.dropped++
		return
	}
	h.log.Warn("transfer failed", "connector", h.info.Name, "direction", direction, "request", b.Request,
		"blocks", len(b.Failed), "error", b.Err, "not_logged", c.dropped)
	*c = complaints{next: now.Add(time.Second)}
}

// missed logs that matches stayed undecided, which looks like a cold cache otherwise, but not more often than
// missedEvery: a slow store is slow for every request. The caller holds mu.
func (h *Host) missed(matches int) {
	now, c := time.Now(), &h.misses
	if now.Before(c.next) {
		c.dropped += matches
		return
	}
	later := h.cfg.Settings.Deadlines.Later
	h.log.Warn(fmt.Sprintf("match undecided after %s, counted as a miss; raise kvport.deadlines.later if the connector's store is that slow", later),
		"connector", h.info.Name, "matches", matches, "not_logged", c.dropped)
	*c = complaints{next: now.Add(missedEvery)}
}

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
// own limits. To be called before the Step that ends the request. It is nil where there is nothing to
// promise: for a role that does not save, and for a connector that holds blocks, whose ticket comes
// with Finished.
func (h *Host) Ticket(e *connector.Ended) []byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.seal(e.Request, h.book.Promise(e))
}

// ticketOffice signs and verifies tickets for one engine.
type ticketOffice struct {
	key   []byte
	peers []string // whose tickets are accepted; empty: of all who have the key
	eng   Engine
	epoch uint64
	guard *ticket.Guard
}

func openTicketOffice(s *Settings, eng Engine, epoch uint64) (*ticketOffice, error) {
	o := &ticketOffice{peers: s.Peers, eng: eng, epoch: epoch, guard: ticket.NewGuard(eng.Model, eng.Shape)}
	var err error
	if s.TicketKeyFile != "" {
		o.key, err = ticket.LoadKey(s.TicketKeyFile)
	} else {
		o.key, err = ticket.SharedKey()
	}
	return o, err
}

func (o *ticketOffice) seal(e *ticket.Envelope) ([]byte, error) {
	if err := fault.Point("host.ticket.seal"); err != nil {
		return nil, err
	}
	e.Engine, e.Epoch, e.Model, e.Shape = o.eng.ID, o.epoch, o.eng.Model, o.eng.Shape
	e.ShapeText = strings.ToValidUTF8(o.eng.ShapeText[:min(len(o.eng.ShapeText), ticket.MaxShape)], "")
	return ticket.Seal(o.key, e)
}

// verify opens the ticket that a request brought, or says why it is refused: in one word for
// metrics, and at length. A ticket that could be opened is returned with the refusal, too.
func (o *ticketOffice) verify(signed []byte, request connector.RequestID) (e *ticket.Envelope, reason string, err error) {
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
