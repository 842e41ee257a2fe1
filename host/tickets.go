package host

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/keyring"
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
		e.Cut = ticket.Cut{Base: h.eng.Base, BlockTokens: t.Cut.BlockTokens, Ranks: len(h.ranks), Last: t.Cut.Last, Tail: t.Cut.Tail}
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
	keys  *keyring.File
	peers []string // whose tickets are accepted; empty: all that have the key
	eng   Engine
	epoch uint64
	guard *ticket.Guard
}

func newTicketSigner(s *Settings, eng Engine, epoch uint64, keys *keyring.File) *ticketSigner {
	return &ticketSigner{keys: keys, peers: s.Peers, eng: eng, epoch: epoch, guard: ticket.NewGuard(eng.Model, eng.Shape)}
}

func (o *ticketSigner) seal(e *ticket.Envelope) ([]byte, error) {
	if err := fault.Point("host.ticket.seal"); err != nil {
		return nil, err
	}
	e.Engine, e.Epoch, e.Model, e.Shape = o.eng.ID, o.epoch, o.eng.Model, o.eng.Shape
	e.ShapeText = strings.ToValidUTF8(o.eng.ShapeText[:min(len(o.eng.ShapeText), ticket.MaxShape)], "")
	return ticket.Seal(o.keys.Ring(), e)
}

// verify opens the ticket that a request brought, or says why it is refused: in one word for
// metrics, and at length. A ticket that could be opened is returned with the refusal, too.
func (o *ticketSigner) verify(signed []byte, request connector.RequestID) (e *ticket.Envelope, reason string, err error) {
	if err = fault.Point("host.ticket.verify"); err != nil {
		return nil, "other", err
	}
	e, err = ticket.Open(o.keys.Ring(), signed)
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
	if _, is := errors.AsType[*ticket.ForeignKeyError](err); is {
		return "foreign_key", fmt.Errorf("%w: it is not in the ring of kvport.ticket_key_file, or was dropped before this ticket was used", err)
	}
	switch {
	case errors.Is(err, ticket.ErrForged):
		return "forged", fmt.Errorf("%w: the keys of both engines must be equal, see kvport.ticket_key_file", err)
	case errors.Is(err, ticket.ErrReplayed):
		return "replayed", err
	case errors.Is(err, ticket.ErrStale):
		return "stale", err
	case errors.Is(err, connector.ErrIncompatible):
		return "incompatible", err
	}
	return "other", err
}

// Fit is what has to agree at both ends of a hand-off: an engine's /health says it, so that a router can
// compare two engines before it makes a pair of them. Nothing of it is secret.
type Fit struct {
	Role      string `json:"role"` // kv_role; none: the engine has no connector
	EngineID  string `json:"engine_id,omitempty"`
	Connector string `json:"connector,omitempty"`
	Scope     string `json:"scope,omitempty"` // who sees what the connector stores: engine, node, shared
	Carries   bool   `json:"carries"`         // another engine can load what the connector has
	Model     string `json:"model"`           // fingerprint of the weights
	BlockSize int    `json:"block_size"`
	Shape     string `json:"shape"`                // fingerprint of a block's byte layout
	ShapeText string `json:"shape_text,omitempty"` // the same in words
	Base      string `json:"base,omitempty"`       // fingerprint of the shape apart from block size and ranks; empty: blocks of other shapes are refused
	TicketKey string `json:"ticket_key,omitempty"` // names the key that signs tickets, and does not reveal it
	// TicketKeys names all keys whose tickets are accepted, the one that signs first.
	TicketKeys []string `json:"ticket_keys,omitempty"`
	Tenant     string   `json:"tenant,omitempty"` // names the tenant secret likewise; none: there is none
	Digest     Digest   `json:"digest"`           // how digests are made
	// The ways by which blocks leave this engine, and by which they come to it. One hands blocks over to another if a
	// way of its Gives is in the other's Takes. Nil: not known.
	Gives []string `json:"gives"`
	Takes []string `json:"takes"`
}

// Fit says what another engine must have in common with this one. Only its keys ever change.
func (h *Host) Fit() Fit {
	ring := h.keys.Ring()
	f := Fit{
		Role: h.cfg.Role.String(), EngineID: h.eng.ID, Connector: h.info.Name, Scope: h.info.Scope.String(), Carries: h.carries(),
		Model: h.eng.Model.String(), BlockSize: h.eng.Layout.Groups[0].BlockTokens,
		Shape: h.eng.Shape.String(), ShapeText: h.eng.ShapeText, TicketKey: ring.First().ID, TicketKeys: ring.IDs(), Tenant: h.tenant, Digest: h.cfg.Settings.Digest,
		Gives: h.ways(connector.Role.Saves), Takes: h.ways(connector.Role.Loads),
	}
	if h.cuts {
		f.Base = h.eng.Base.String()
	}
	return f
}

// ways are those by which blocks go from engine to engine, for connectors whose role takes part.
func (h *Host) ways(takesPart func(connector.Role) bool) []string {
	switch {
	case !takesPart(h.cfg.Role):
		return []string{}
	case h.composite != nil:
		return h.composite.ways(MultiName+"/", takesPart)
	case h.info.Name == MultiName:
		return nil // its children are its plugin's business
	}
	return waysOf(&h.info, h.info.Name)
}

// waysOf are those of one connector: a store that engines share, and tickets, which only connectors of that name read.
func waysOf(info *connector.Info, name string) []string {
	ways := []string{}
	if info.Scope == connector.ScopeShared {
		ways = append(ways, "a shared store")
	}
	if info.Scope >= connector.ScopeNode { // a shared store may have tiers
		ways = append(ways, "the node's "+info.Name)
	}
	if info.Capabilities&connector.CanHold != 0 {
		ways = append(ways, name)
	}
	return ways
}

// carries reports whether another engine can load what this one has saved: from a store that both see, or
// from this engine itself.
func (h *Host) carries() bool {
	return h.info.Scope != connector.ScopeEngine || h.info.Capabilities&connector.CanHold != 0
}

// warnScope says at the start that prefill and decode cannot work with this connector.
func (h *Host) warnScope() {
	if h.cfg.Role == connector.RoleBoth || h.carries() {
		return
	}
	h.log.Warn("this connector keeps blocks inside one engine: no other engine can load them, so a prefill and a decode engine both compute every prompt",
		"connector", h.info.Name, "kv_role", h.cfg.Role.String(), "remedy", "use kv_both, or a connector that hands blocks over")
}

// Brought says what the host made of the ticket that a live request brought: how many tokens it promises,
// or in one word why it was refused, or "gone" if a load by it brought nothing and it is forgotten. Both are zero before the first Match of the request and without a ticket.
func (h *Host) Brought(request connector.RequestID) (promised int, refused string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.tracker.Brought(request)
}

// mismatch says in one word what is wrong with a ticket, in terms of what an operator can change. e is nil if
// the ticket could not be opened.
func (h *Host) mismatch(e *ticket.Envelope, reason string, err error) string {
	if foreign, is := errors.AsType[*ticket.ForeignKeyError](err); is {
		return reason + "; key=" + foreign.ID
	}
	switch {
	case errors.Is(err, ticket.ErrForged):
		return "key"
	case errors.Is(err, ticket.ErrStale):
		return "gone" // the blocks ended with the producer's earlier life
	case e == nil || !errors.Is(err, connector.ErrIncompatible):
		return reason
	case e.Model != h.eng.Model:
		return "model"
	case blockTokensOf(e) != 0 && blockTokensOf(e) != h.eng.Layout.Groups[0].BlockTokens:
		return "block_size"
	}
	return "shape"
}

// shapeWords begins the words for a shape; blockTokensOf reads it again.
const shapeWords = "block_size %d"

// blockTokensOf is the block size of a ticket's engine, 0 if the ticket does not say.
func blockTokensOf(e *ticket.Envelope) (n int) {
	if e.Cut.BlockTokens != 0 {
		return e.Cut.BlockTokens
	}
	if _, err := fmt.Sscanf(e.ShapeText, shapeWords, &n); err != nil {
		return 0
	}
	return n
}
