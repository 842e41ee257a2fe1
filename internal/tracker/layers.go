package tracker

import (
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

// computeLimit bounds how long the engine may compute what a save waits for. The deadline of the save
// itself begins then, so that a long step costs no plugin its life.
const computeLimit = time.Hour

// computing takes on the saves of blocks whose KV the engine begins to compute. They start at once: the
// connector gets the layers as they become final.
func (b *Tracker) computing(now time.Time, s *connector.Step) {
	for _, t := range s.Computing {
		o := b.addOp(now, Save, s.ID, t)
		if o == nil {
			continue
		}
		o.layered, o.deadline = true, now.Add(computeLimit)
		b.split(o, []*connector.Transfer{&o.t})
		b.startReady(o)
	}
}

// Layers says that the first n layers of a step's Computing blocks are final in the cache. With the last one the step
// is over: its saves have as long from then on as any other.
func (b *Tracker) Layers(now time.Time, step uint64, n int) []Action {
	return b.progress(now, step, func(o *op) { o.layers = max(o.layers, n) })
}

// GiveUp says that the rest of a step's layers will never be final. The step is over.
func (b *Tracker) GiveUp(now time.Time, step uint64) []Action {
	return b.progress(now, step, func(o *op) { o.givenUp = true })
}

// progress changes how far the saves of a step that is not over are, and tells their calls.
func (b *Tracker) progress(now time.Time, step uint64, change func(*op)) []Action {
	saves := map[uint64]*op{} // a step has few of all operations, and each of its layers asks
	for id, o := range b.ops {
		if o.layered && o.step == step && !o.computed {
			saves[id] = o
		}
	}
	for _, o := range sorted(saves) {
		change(o)
		for _, c := range o.calls {
			if c.state == running {
				b.emit(Advance{ID: c.id, Layers: o.layers, GivenUp: o.givenUp})
			}
		}
		if o.computed = o.givenUp || o.layers >= b.cfg.Layers; o.computed {
			o.deadline = now.Add(b.cfg.Save)
			b.wakes.at(o.deadline)
			b.wakes.at(o.deadline.Add(b.cfg.Grace))
		}
	}
	return b.take()
}

// cancelLate tells the calls of a layered save that their time is over. Other calls were given their
// deadline when they began.
func (b *Tracker) cancelLate(o *op) {
	if !o.layered || o.canceled {
		return
	}
	o.canceled = true
	for _, c := range o.calls {
		if c.state == running {
			b.emit(CancelCall{ID: c.id})
		}
	}
}

// overlaps says that the engine may begin with the first layers of a load: they can be verified one by one, in
// the cache itself, and the whole load is one attempt on each rank. With landing memory only what the host copies out of slots lies
// in the cache before the load is over.
func (b *Tracker) overlaps(c *call, check []connector.Block) bool {
	o := c.op
	return b.cfg.Overlap && o.kind == Load && o.source == nil && (b.landing == nil || b.cfg.Placed) && check != nil && !o.canceled
}

// Verified says that n layers of all that a call with Overlap loads have arrived and are right. The engine is told about a
// layer when every call has it. From then on the load is not tried again, since that would write the blocks while they
// are read: it ends well or it fails.
func (b *Tracker) Verified(_ time.Time, id CallID, n int) []Action {
	c := b.calls[id]
	if c == nil || !b.cfg.Overlap || c.op.kind != Load || c.op.canceled || c.op.planning {
		return nil
	}
	c.layers = max(c.layers, min(n, b.cfg.Layers))
	b.tellLayers(c.op)
	return b.take()
}

// whole notes that a call of a load is over, and that all it has loaded is verified: whether it has announced layers or not, it has all of
// them while others go on.
func (b *Tracker) whole(c *call) {
	o := c.op
	if !c.overlap || o.canceled {
		return
	}
	c.layers = b.cfg.Layers
	if slices.ContainsFunc(o.calls, func(c *call) bool { return c.state == running }) { // else its end is told, or another call is still to start
		b.tellLayers(o)
	}
}

// tellLayers tells the engine how many layers all calls of a load have, if that is news and nothing has failed.
func (b *Tracker) tellLayers(o *op) {
	all := b.cfg.Layers
	for _, c := range o.calls {
		if c.state != running && c.state != over {
			return // it is tried again, which writes all of its layers
		}
		all = min(all, c.layers)
	}
	if all > o.arrived && len(o.failed) == 0 {
		o.arrived = all
		b.emit(Tell{Event{Kind: Arriving, Request: o.t.Request, Step: o.step, Layers: all}})
	}
}

// Retract takes back what Verified has said of a call, so that its blocks may be written again. It is false, and takes nothing back, when the
// engine has learned of a layer of the load, or nobody waits for the call any more.
func (b *Tracker) Retract(id CallID) bool {
	c := b.calls[id]
	if c == nil || c.op.arrived > 0 {
		return false
	}
	c.layers = 0
	return true
}
