package host

import (
	"context"
	"fmt"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
)

// Blocks of an engine with another block size or other ranks. Their digests are of other blocks than ours,
// so nothing is there to check what arrives by, and their keys are others, so the prompt is compared by
// the address that the producer's own blocks would have.

// openReshape has our tickets made for engines of other shapes, and theirs accepted if kvport.unverified is
// true, where connector and engine can do it. It says so.
func (h *Host) openReshape() {
	const powers = connector.CanHold | connector.CanReshape
	if h.info.Capabilities&powers != powers || h.eng.Base == (connector.Fingerprint{}) || h.eng.Address == nil || h.lands != nil || len(h.cfg.Children) > 0 {
		return
	}
	h.cuts = true
	h.tickets.guard.Reshape(h.eng.Base, h.cfg.Settings.Unverified)
	if h.cfg.Role.Loads() && h.cfg.Settings.Unverified {
		h.log.Warn("blocks of engines with another block size or other ranks are loaded, too: no digest verifies their bytes (kvport.unverified)",
			"connector", h.info.Name, "base", h.eng.Base)
	}
}

// reshape has a worker load from an engine of another shape.
func reshape(ctx context.Context, r *rank, w connector.Worker, a *tracker.Move) error {
	reshaper, ok := connector.As[connector.Reshaper](w)
	if !ok || r.landing != nil {
		return fmt.Errorf("the connector cannot %v: %w", connector.CanReshape, connector.ErrIncompatible)
	}
	return reshaper.Reshape(ctx, a.Transfer, r.kv)
}

// unverified counts the blocks that arrived and that nothing is there to check by. They get no digests: that would
// say that they are right (rule TAINT-01).
func (h *Host) unverified(a *tracker.Move, err error) {
	reason := "lossy"
	if a.Reshaped {
		reason = "reshaped"
	}
	h.metrics.unchecked.WithLabelValues(h.metrics.name, reason).Add(float64(len(tracker.Arrived(a.Transfer.Blocks, err))))
}
