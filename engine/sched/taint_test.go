package sched

import (
	"fmt"
	"slices"

	"github.com/kvport/kvport/connector"
)

// In a world some loads are unverified. What they fill is dirty, and so is what is computed from it: the world marks
// slots by what the model reads, and knows nothing of what the scheduler thinks of requests.

// brought marks what a load has filled in one slot of a block.
func (w *world) brought(c *client, b connector.BlockID, slot int, unverified bool) {
	w.dirty[b][slot] = unverified
	if unverified {
		c.dirty = true
	}
}

// reads says whether a chunk attends to dirty slots, which only the request that loaded them may.
func (w *world) reads(c *Chunk) (dirty bool, err error) {
	cl := w.clients[c.Request]
	for g, table := range c.Blocks {
		for at := w.reach(g, c.Start) * w.cfg.BlockTokens; at < c.Start; at++ {
			dirty = dirty || w.dirty[table[at/w.cfg.BlockTokens]][at%w.cfg.BlockTokens]
		}
	}
	if dirty && !cl.dirty {
		return true, fmt.Errorf("%s attends to what another request loaded unverified", c.Request)
	}
	if dirty {
		w.seen["computed from unverified KV"]++
	}
	return dirty, nil
}

// pure verifies that nothing dirty leaves its request: of blocks that hold its tokens up to end.
func (w *world) pure(what string, id connector.RequestID, end int, blocks []connector.Block) error {
	for k, first := range w.places(end, blocks) {
		for i, dirty := range w.dirty[blocks[k].ID] {
			if dirty && first+i < end {
				return fmt.Errorf("%s of %s: block %d is unverified, or computed from what is", what, id, blocks[k].ID)
			}
		}
	}
	return nil
}

// leaves verifies what a step lets out of its requests, and notes those that lose their blocks.
func (w *world) leaves(st *connector.Step) error {
	for _, id := range st.Preempted {
		w.clients[id].dirty = false
		clear(w.clients[id].unclean)
	}
	for _, t := range st.Computed {
		if err := w.pure("save", t.Request, t.From+t.Tokens, t.Blocks); err != nil {
			return err
		}
	}
	for i := range st.Ended {
		e := &st.Ended[i]
		if err := w.pure("end", e.Request, e.Tokens, e.Blocks); err != nil {
			return err
		}
		w.noteEnd(w.clients[e.Request], e)
	}
	return nil
}

// firstDirty is the first position of a client's tokens that a consumer must not get, or -1. What was loaded dirty and then
// computed from clean slots is clean. A window leaves blocks behind that a consumer of the first tokens needs, so where there
// is one, no position is before a dirty one.
func (w *world) firstDirty(c *client) int {
	first := -1
	for at, dirty := range c.unclean {
		if dirty && (first < 0 || at < first) {
			first = at
		}
	}
	if first > 0 && slices.Max(w.cfg.Trailing) > 0 {
		return 0
	}
	return first
}

// noteEnd notes what a tainted request leaves.
func (w *world) noteEnd(c *client, e *connector.Ended) {
	first := w.firstDirty(c)
	c.hasClean = first != 0
	switch {
	case c.dirty && first < 0 && e.Remote:
		w.seen["clean request that loaded dirty blocks and computed them again"]++
	case first < 0 || !c.req.Remote:
	case e.Remote:
		w.seen["tainted request that hands over its first tokens"]++
	default:
		w.seen["tainted request that hands over nothing"]++
	}
}
