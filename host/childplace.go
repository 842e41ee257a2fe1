package host

import (
	"context"

	"github.com/kvport/kvport/connector"
)

// childPlacing is what reads the placed blocks of a MultiConnector's children. Each child has an arena and an index of its own.
type childPlacing struct {
	ranks   []*rank
	metrics *metrics
	failed  func(child string, blocks, damaged int)
}

// placement is that of one child. p is nil where a host above this one verifies what is loaded: there nothing is placed.
func (p *childPlacing) placement(eng *Engine, child string) *placement {
	if p == nil {
		return nil
	}
	return newPlacement(&eng.Layout, eng.Shape, len(p.ranks), func(blocks, damaged int) { p.failed(child, blocks, damaged) })
}

// matchPlaced answers the queries that the index of the child's blocks says enough about; asked are the others. A child that is down
// is not read.
func (s childScheduler) matchPlaced(qs []connector.Query) (matches []connector.Match, asked []int) {
	matches = make([]connector.Match, len(qs))
	_, _, down := sideOf[connector.Scheduler](s.child, s.side)
	for i := range qs {
		m, ok := connector.Match{}, false
		if down == nil {
			m, ok = s.src.place.match(&qs[i])
		}
		if !ok {
			asked = append(asked, i)
			continue
		}
		matches[i] = m
		s.placing.metrics.placedMatches.Inc()
	}
	return matches, asked
}

// loadPlaced loads all blocks of a transfer without the plugin; over is false if it has to be asked for them. Those of a ticket are always
// the plugin's. A load that is not over at its deadline fails without a call: a plugin that knows nothing of it need not die for it
// (rule HOST-03). What came is verified, and the host above verifies it once more with what comes from other children.
func (w childWorker) loadPlaced(ctx context.Context, t *connector.Transfer, kv *connector.KV) (over bool, err error) {
	if w.placing == nil || len(t.Ticket) > 0 {
		return false, nil
	}
	if _, _, err := sideOf[connector.Worker](w.child, w.side); err != nil {
		return false, nil // the call says so
	}
	ctx, cancel := context.WithTimeout(ctx, w.loadLimit(t))
	defer cancel()
	into := *w.placing.ranks[w.number]
	into.kv = kv // the cache, or landing memory
	if !w.src.place.load(ctx, &into, w.number, t.Blocks) {
		return ctx.Err() != nil, ctx.Err()
	}
	w.metrics.moved("load", t, nil)
	w.placing.metrics.placed.Add(float64(len(t.Blocks)))
	return true, nil
}

// named makes a save or a load by message, and takes note of the slots that it names. Some may be of blocks that were loaded wrong: then the
// next load finds that out, and asks the plugin.
func (w childWorker) named(t *connector.Transfer, call func(*placement) ([]uint32, error)) (err error) {
	var r *rank // without a placement nobody looks at it
	if w.placing != nil {
		r = w.placing.ranks[w.number]
	}
	defer w.src.place.call(r)(&err)
	slots, err := call(w.src.place)
	w.learn(slots, len(t.Blocks))
	return err
}

// loadFrom has the plugin fill blocks.
func (w childWorker) loadFrom(ctx context.Context, side connector.Worker, t *connector.Transfer, kv *connector.KV) error {
	return w.named(t, func(p *placement) ([]uint32, error) { return p.loadBy(ctx, side, t, kv) })
}

// saveTo has the plugin read blocks.
func (w childWorker) saveTo(ctx context.Context, side connector.Worker, t *connector.Transfer, kv *connector.KV) error {
	return w.named(t, func(p *placement) ([]uint32, error) { return p.saveBy(ctx, side, t, kv) })
}

// learn takes note of slots that a save or a load of that many blocks has named.
func (w childWorker) learn(slots []uint32, moved int) {
	if wrong := w.src.place.learn(slots, moved); wrong != nil {
		w.src.complain("placement: " + wrong.Error())
	}
}
