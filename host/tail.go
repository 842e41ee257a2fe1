package host

import (
	"slices"

	"github.com/kvport/kvport/connector"
)

// content gives partial blocks the address of what they hold, by which their digests are made and
// checked.
func content(blocks []connector.Block, tail connector.BlockKey) []connector.Block {
	named := slices.Clone(blocks)
	for i := range named {
		if named[i].Key == (connector.BlockKey{}) {
			named[i].Key = tail
		}
	}
	return named
}

// makeTails makes the digests of partial blocks that a Holder may keep. Those of full blocks were made
// when they were saved. The caller holds mu: the blocks are pinned, and there is one in each group.
func (h *Host) makeTails(ended []connector.Ended) {
	for i := range ended {
		e := &ended[i]
		if !e.Remote || e.Tail == (connector.BlockKey{}) {
			continue
		}
		partial := slices.DeleteFunc(slices.Clone(e.Blocks), func(b connector.Block) bool { return b.Key != connector.BlockKey{} })
		for _, r := range h.ranks {
			for _, b := range content(partial, e.Tail) {
				if err := r.hasher.Make(r.kv, b); err != nil {
					h.log.Error("a partial block has no digest, its consumer will compute it", "request", e.Request, "error", err)
				}
			}
		}
	}
}
