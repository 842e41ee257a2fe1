package host

import (
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
)

// tails asks the engine for the addresses of the partial blocks of a step.
func (h *Host) tails(s *connector.Step) tracker.Tails {
	if h.eng.Tail == nil {
		return nil
	}
	tails := tracker.Tails{}
	for i := range s.Admitted {
		tails[s.Admitted[i].Request] = h.eng.Tail(s.Admitted[i].Request)
	}
	for i := range s.Ended {
		tails[s.Ended[i].Request] = h.eng.Tail(s.Ended[i].Request)
	}
	return tails
}

// makeTails makes the digests of partial blocks that a Holder may keep. The caller holds mu: the blocks are
// pinned, and there is one in each group.
func (h *Host) makeTails(partial []connector.Block) {
	for _, b := range partial {
		for _, r := range h.ranks {
			if err := r.hasher.Make(r.kv, b); err != nil {
				h.log.Error("a partial block has no digest, its consumer will compute it", "block", b.ID, "error", err)
			}
		}
	}
}
