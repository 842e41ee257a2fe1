package tracker

import (
	"time"

	"github.com/kvport/kvport/connector"
)

// planning is a step that waits for the connector's plan. Its transfers pin their blocks meanwhile,
// but no call touches them.
type planning struct {
	ops      []*op
	deadline time.Time
}

// planOrStart starts new transfers, or asks a Planner first.
func (b *Tracker) planOrStart(now time.Time, s *connector.Step, ops []*op) {
	if b.cfg.Can&connector.CanPlan == 0 {
		for _, o := range ops {
			b.split(o, []*connector.Transfer{&o.t})
			b.startReady(o)
			b.endIfOver(now, o)
		}
		return
	}
	if empty(s) {
		return
	}
	if b.state != up || b.closed {
		for _, o := range ops {
			b.unplan(now, o, connector.ErrGone)
		}
		return
	}
	id := CallID(b.id())
	p := &planning{ops: ops, deadline: now.Add(b.cfg.Plan)}
	for _, o := range ops {
		o.planning = true
	}
	b.plans[id] = p
	b.wakes.at(p.deadline)
	b.emit(Plan{ID: id, Gen: b.gen, Step: s, Deadline: p.deadline})
}

func empty(s *connector.Step) bool {
	return len(s.Arrived)+len(s.Admitted)+len(s.Computed)+len(s.Preempted)+len(s.Ended) == 0
}

// Planned brings a Planner's answer. What the plan leaves out is not loaded or not saved; what it
// makes up is dropped and counted (rule PLAN-01).
func (b *Tracker) Planned(now time.Time, id CallID, plan *connector.Plan, err error) []Action {
	p := b.plans[id]
	if p == nil {
		b.counters.Unknown++
		return nil
	}
	if err != nil || plan == nil {
		b.planFailed(now, id, err)
		return b.take()
	}
	delete(b.plans, id)
	parts := map[*op][]*connector.Transfer{}
	used := map[*op]map[connector.BlockID]struct{}{}
	for _, list := range []struct {
		kind      Kind
		transfers []connector.Transfer
	}{{Load, plan.Loads}, {Save, plan.Saves}} {
		for i := range list.transfers {
			o, part := b.place(p.ops, list.kind, &list.transfers[i], used)
			if part == nil {
				b.counters.Violations++
				continue
			}
			parts[o] = append(parts[o], part)
		}
	}
	for _, o := range p.ops {
		o.planning = false
		b.split(o, parts[o])
		for _, k := range o.t.Blocks {
			if _, chosen := used[o][k.ID]; !chosen {
				o.leaveOut(k)
			}
		}
		if o.canceled || b.closed {
			b.failReady(now, o, connector.ErrGone)
			continue
		}
		b.startReady(o)
		b.endIfOver(now, o)
	}
	return b.take()
}

// leaveOut notes a block that no planned transfer carries.
func (o *op) leaveOut(k connector.Block) {
	if o.kind == Load {
		o.fail([]connector.Block{k}, errNotPlanned)
		return
	}
	if o.skipped == nil {
		o.skipped = map[connector.BlockID]struct{}{}
	}
	o.skipped[k.ID] = struct{}{}
}

// place finds the op that a planned transfer belongs to and rebuilds it from the engine's own
// blocks: nothing that the plugin says about keys or slots is used. It marks the blocks as used.
func (b *Tracker) place(ops []*op, kind Kind, t *connector.Transfer, used map[*op]map[connector.BlockID]struct{}) (*op, *connector.Transfer) {
	for _, o := range ops {
		if o.kind != kind || o.t.Request != t.Request || len(t.Blocks) == 0 {
			continue
		}
		if t.From < o.t.From || t.Tokens < 0 || t.From-o.t.From > o.t.Tokens-t.Tokens {
			continue
		}
		blocks := subset(o.t.Blocks, t.Blocks, used[o])
		if blocks == nil {
			continue
		}
		if used[o] == nil {
			used[o] = map[connector.BlockID]struct{}{}
		}
		for _, k := range blocks {
			used[o][k.ID] = struct{}{}
		}
		part := o.t
		part.From, part.Tokens, part.Blocks, part.Extra = t.From, t.Tokens, blocks, t.Extra
		return o, &part
	}
	return nil, nil
}

// subset gives the blocks of have that want names, in order, or nil if one is foreign, out of order
// or used before.
func subset(have, want []connector.Block, used map[connector.BlockID]struct{}) []connector.Block {
	out := make([]connector.Block, 0, len(want))
	i := 0
	for _, w := range want {
		for i < len(have) && (have[i].ID != w.ID || have[i].Group != w.Group) {
			i++
		}
		if i == len(have) {
			return nil
		}
		if _, twice := used[w.ID]; twice {
			return nil
		}
		out = append(out, have[i])
		i++
	}
	return out
}

// planLost ends the wait for a plan that does not come.
func (b *Tracker) planLost(now time.Time, id CallID, err error) {
	p := b.plans[id]
	delete(b.plans, id)
	for _, o := range p.ops {
		b.unplan(now, o, err)
	}
}

// planFailed ends the transfers of a step that got no plan. Nothing has touched their blocks.
func (b *Tracker) planFailed(now time.Time, id CallID, err error) {
	p := b.plans[id]
	delete(b.plans, id)
	if err == nil {
		err = errViolation
	}
	for _, o := range p.ops {
		o.planning = false
		o.fail(o.t.Blocks, err)
		b.endOp(now, o)
	}
}
