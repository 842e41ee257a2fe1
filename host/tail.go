package host

import (
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
)

// makeTails makes the digests of partial blocks that a Holder may keep. The caller holds mu: the blocks are
// pinned, and there is one in each group.
func (h *Host) makeTails(ended []connector.Ended) {
	for i := range ended {
		for _, b := range tracker.Tail(&ended[i]) {
			for _, r := range h.ranks {
				if err := r.hasher.Make(r.kv, b); err != nil {
					h.log.Error("a partial block has no digest, its consumer will compute it", "request", ended[i].Request, "error", err)
				}
			}
		}
	}
}
