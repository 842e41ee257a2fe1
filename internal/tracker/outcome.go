package tracker

import (
	"errors"
	"slices"

	"github.com/kvport/kvport/connector"
)

// judge records which blocks of a returned call failed.
func (b *Tracker) judge(c *call, out Outcome) {
	o := c.op
	if o.kind == Load && o.req.turn {
		out = b.reused(c.part, out)
	}
	if out.Err != nil {
		bad := c.part.Blocks
		var some *connector.BlockError
		if errors.As(out.Err, &some) && len(some.Blocks) > 0 {
			named, ok := pick(c.part.Blocks, some.Blocks)
			if ok {
				bad = named
			} else {
				b.counters.Violations++
				out.Err = errViolation
			}
		}
		o.fail(bad, out.Err)
		switch {
		case o.kind == Save:
		case errors.Is(out.Err, connector.ErrCorrupt):
			b.damaged(o, bad, out.Err)
		case errors.Is(out.Err, connector.ErrOutdated):
			b.unread(o, bad, &b.counters.Outdated)
		}
	}
	if len(out.Corrupt) > 0 {
		bad, _ := pick(c.part.Blocks, out.Corrupt)
		o.fail(bad, connector.ErrCorrupt)
		b.damaged(o, bad, out.Damage)
	}
	if len(out.Foreign) > 0 {
		bad, _ := pick(c.part.Blocks, out.Foreign)
		o.fail(bad, ErrForeignKey)
		b.unread(o, bad, &b.counters.Foreign)
	}
	if len(out.Outdated) > 0 {
		bad, _ := pick(c.part.Blocks, out.Outdated)
		o.fail(bad, connector.ErrOutdated)
		b.unread(o, bad, &b.counters.Outdated)
	}
}

// damaged counts blocks that are not what was saved, and remembers their keys.
func (b *Tracker) damaged(o *op, bad []connector.Block, why error) {
	o.damaged += len(bad)
	if o.damage == nil {
		o.damage = why
	}
	b.unread(o, bad, &b.counters.Damaged)
}

// unread counts blocks that cannot be used, and remembers their keys: they are computed, and their next save replaces them.
func (b *Tracker) unread(o *op, bad []connector.Block, count *int) {
	*count += len(bad)
	o.replace = o.replace || len(bad) > 0
	for _, k := range bad {
		b.corrupt.add(k.Key)
	}
}

// pick finds the blocks with the given ids; ok is false if one is not among them.
func pick(blocks []connector.Block, ids []connector.BlockID) (found []connector.Block, ok bool) {
	want := make(map[connector.BlockID]bool, len(ids))
	for _, id := range ids {
		want[id] = true
	}
	for _, k := range blocks {
		if want[k.ID] {
			found = append(found, k)
			want[k.ID] = false
		}
	}
	for _, missing := range want {
		if missing {
			return found, false
		}
	}
	return found, true
}

// settleLoad denies further offers to a request whose load left nothing valid: the engine would
// ask, get the same offer and fail for ever. If the load was by a ticket of another shape, only the ticket is forgotten:
// without it the request gets another offer.
func (b *Tracker) settleLoad(o *op) {
	b.forgetMatch(o.req)
	if len(o.t.Blocks) == 0 || o.canceled {
		return
	}
	switch {
	case !b.leftNothing(o):
	case o.source == nil:
		o.req.denied = true
	default:
		o.req.brought = brought{refused: "gone"}
	}
}

// leftNothing says that a request cannot go on from anything that a load brought: the first block of a
// group is missing, or one of a group that needs only the last ones.
func (b *Tracker) leftNothing(o *op) bool {
	var seen [connector.MaxGroups]bool
	for _, k := range o.t.Blocks {
		if int(k.Group) >= len(b.cfg.Groups) {
			continue
		}
		_, bad := o.failed[k.ID]
		if bad && (!seen[k.Group] || b.cfg.Groups[k.Group].Policy == connector.PolicyTrailing) {
			return true
		}
		seen[k.Group] = true
	}
	return false
}

// settleSave notes which tokens of the request a consumer will not find.
func (b *Tracker) settleSave(o *op) {
	o.waited()
	position := make([]int, len(b.cfg.Groups))
	for _, k := range o.t.Blocks {
		if int(k.Group) >= len(position) {
			continue
		}
		from := o.t.From + position[k.Group]
		position[k.Group] += b.cfg.Groups[k.Group].BlockTokens
		if o.refused && from >= o.req.clean {
			continue // no ticket promises it while the taint lasts, and then other blocks are there
		}
		_, bad := o.failed[k.ID]
		if _, skipped := o.skipped[k.ID]; bad || skipped || len(o.calls) == 0 {
			if o.req.unsaved == nil {
				o.req.unsaved = map[int]struct{}{}
			}
			o.req.unsaved[from] = struct{}{}
			continue
		}
		delete(o.req.unsaved, from)
		if b.corrupt.has(k.Key) && o.replaces(k) {
			b.corrupt.remove(k.Key)
		}
	}
}

// replaces says that a save has replaced what was stored of a block. One that had begun before the block was found to be
// useless may have left it alone, since its key was there.
func (o *op) replaces(k connector.Block) bool {
	for _, c := range o.calls {
		if !c.part.Replace && slices.Contains(c.part.Blocks, k) {
			return false
		}
	}
	return true
}
