package nixl

import (
	"context"

	"github.com/kvport/kvport/connector"
)

// minStage is how much is read at least before layers are announced: each read costs its start.
const minStage = 1 << 20

// stage is a part of a plan after which some layers are in place.
type stage struct {
	end    int // behind its last descriptor
	layers int // that are in place then
}

// LoadLayers implements connector.LayerLoader. Where the producer writes, the layers come as they come, and none is
// announced.
func (w *worker) LoadLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, arrived connector.Arrivals) error {
	return w.load(ctx, t, kv, arrived)
}

// addStages adds the digests first, then one layer after the other, and notes where a stage ends.
func (p *reads) addStages(kv *connector.KV, stageBytes uint64, add func(group uint16, segment int)) {
	l := kv.Layout()
	last := l.Layers()
	for i := range l.Segments {
		if l.Segments[i].Layer == connector.DigestLayer {
			add(l.Segments[i].Group, i)
		}
	}
	for n := range last {
		for i := range l.Segments {
			if l.Segments[i].Layer == n {
				add(l.Segments[i].Group, i)
			}
		}
		if total(p.local[p.first:]) >= stageBytes || n == last-1 {
			p.stages = append(p.stages, stage{end: len(p.local), layers: n + 1})
			p.first = len(p.local)
		}
	}
}

// pullStages reads the stages of a plan one after the other, and announces what is there after each.
func (l *landing) pullStages(ctx context.Context, at *pendingQuestion, p *reads, m *read) error {
	if len(p.stages) == 0 {
		return l.pull(ctx, m)
	}
	from := 0
	for _, s := range p.stages {
		if err := ctx.Err(); err != nil {
			return err // nothing is being written here
		}
		part := *l
		part.local, part.remote = l.local[from:s.end], l.remote[from:s.end]
		one := read{mode: m.mode, transport: m.transport}
		err := part.pull(ctx, &one)
		m.transport = one.transport
		m.bytes, m.descriptors, m.post, m.took = m.bytes+one.bytes, m.descriptors+one.descriptors, m.post+one.post, m.took+one.took
		if err == nil {
			err = part.untouched()
		}
		if err != nil {
			return err
		}
		from, at.told = s.end, true
		at.arrived.Advance(s.layers)
	}
	return nil
}
