package tracker

import (
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

// Computed says that the engine has computed a step's Computing blocks, or given them up: their saves
// have as long from now on as any other.
func (b *Tracker) Computed(now time.Time, step uint64) []Action {
	for _, o := range sorted(b.ops) {
		if o.layered && o.step == step {
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
