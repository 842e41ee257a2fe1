package nixl

import (
	"time"

	"github.com/kvport/kvport/connector"
)

const (
	// turnLease is how long the answer of a conversation may be asked for: as long as vLLM's decoder keeps
	// its blocks. Nothing keeps ours; what was reused meanwhile the consumer's host finds by its digests.
	turnLease = 480 * time.Second
	// maxTurns bounds the answers that are remembered, whose next turn may never come.
	maxTurns = 4096
)

// leaseOf is how long the blocks of an ended request can be asked for. The caller holds h.mu.
func (h *holds) leaseOf(e *connector.Ended) time.Duration {
	if !e.Weak {
		return h.lease
	}
	return max(h.lease, turnLease)
}

// remember keeps the number of answers within its bound: the oldest is forgotten. The caller holds h.mu.
func (h *holds) remember(id connector.HoldID) {
	h.turns = append(h.turns, id)
	if len(h.turns) > maxTurns {
		h.end(h.turns[0])
		h.turns = h.turns[1:]
	}
}
