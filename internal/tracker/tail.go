package tracker

import (
	"slices"

	"github.com/kvport/kvport/connector"
)

// Tails are the addresses of what partial last blocks hold, by request: of blocks that are loaded, at their
// producer, or of an ended request's own. Full blocks have a key, which is that address (rule KEY-09).
type Tails = map[connector.RequestID]connector.BlockKey

// check gives the blocks of a call that are to be verified when they have arrived.
func (b *Tracker) check(c *call) []connector.Block {
	if c.op.kind != Load || !b.verifies() {
		return nil
	}
	return addressed(c.part.Blocks, c.op.tail)
}

// partial gives the partial blocks of an ended request that a Holder may keep, each under the address of what it
// holds.
func (e *ending) partial() []connector.Block {
	if !e.ended.Remote || e.tail == (connector.BlockKey{}) {
		return nil
	}
	return addressed(slices.DeleteFunc(slices.Clone(e.ended.Blocks), func(k connector.Block) bool { return k.Key != connector.BlockKey{} }), e.tail)
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
