package tracker

import (
	"slices"

	"github.com/kvport/kvport/connector"
)

// Full blocks have a key, which is the address of what they hold. A partial block has none: its address comes
// beside it, as the tail of its transfer or of its ended request (rule KEY-09).

// check gives the blocks of a call that are to be verified when they have arrived. Blocks of another shape come
// with digests of other blocks than ours, and lossy connectors with other bytes.
func (b *Tracker) check(c *call) []connector.Block {
	if c.op.kind != Load || c.op.reshaped || b.cfg.Lossy {
		return nil
	}
	return addressed(c.part.Blocks, c.part.Tail)
}

// Tail gives the partial blocks of an ended request that a Holder may keep, each under the address of what it
// holds. Digests of full blocks were made when they were saved.
func Tail(e *connector.Ended) []connector.Block {
	if !e.Remote || e.Tail == (connector.BlockKey{}) {
		return nil
	}
	return addressed(slices.DeleteFunc(slices.Clone(e.Blocks), func(k connector.Block) bool { return k.Key != connector.BlockKey{} }), e.Tail)
}

// addressed gives partial blocks the address of what they hold.
func addressed(blocks []connector.Block, tail connector.BlockKey) []connector.Block {
	partial := func(k connector.Block) bool { return k.Key == connector.BlockKey{} }
	if !slices.ContainsFunc(blocks, partial) {
		return blocks
	}
	named := slices.Clone(blocks)
	for i := range named {
		if partial(named[i]) {
			named[i].Key = tail
		}
	}
	return named
}
