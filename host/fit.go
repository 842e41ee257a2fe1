package host

import (
	"errors"
	"fmt"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/ticket"
)

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
}

// Fit says what another engine must have in common with this one. It never changes.
func (h *Host) Fit() Fit {
	f := Fit{
		Role: h.cfg.Role.String(), EngineID: h.eng.ID, Connector: h.info.Name, Carries: h.carries(),
		Model: h.eng.Model.String(), BlockSize: h.eng.Layout.Groups[0].BlockTokens,
		Shape: h.eng.Shape.String(), ShapeText: h.eng.ShapeText, TicketKey: ticket.KeyID(h.tickets.key),
	}
	if h.info.Scope != 0 { // connectors over a pipe do not say
		f.Scope = h.info.Scope.String()
	}
	if h.cuts && (h.cfg.Settings.Unverified || !h.cfg.Role.Loads()) {
		f.Base = h.eng.Base.String()
	}
	return f
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
// or in one word why it was refused. Both are zero before the first Match of the request and without a ticket.
func (h *Host) Brought(request connector.RequestID) (promised int, refused string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.tracker.Brought(request)
}

// mismatch says in one word what is wrong with a ticket, in terms of what an operator can change. e is nil if
// the ticket could not be opened.
func (h *Host) mismatch(e *ticket.Envelope, reason string, err error) string {
	switch {
	case errors.Is(err, ticket.ErrForged):
		return "key"
	case errors.Is(err, ticket.ErrStale):
		return "gone" // the blocks ended with the producer's earlier life
	case errors.Is(err, ticket.ErrUnverified):
		return "unverified" // all else fits
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
