package simulate

import (
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/sched"
	"github.com/kvport/kvport/internal/tracker"
)

// Loads layer by layer: a plugin writes one layer of all blocks after the other and says so, the host verifies each, and the
// engine computes with those that are right while others are on their way. A cell has one value for all of its layers, and
// remembers how many of the last ones are not in place.

// arrival is how far a load has come, as the engine sees it.
type arrival struct{ layers int }

// early is a chunk that is computed while its request's load is under way.
type early struct {
	misread bool // it has read a layer that was not in place
	well    bool // its load has ended, and brought everything
}

// overlapped is the model's way through the layers that early chunks depend on: it waits for each, and reads it. If one
// does not come in time, the early chunks are taken out of the step.
func (e *engine) overlapped(chunks []sched.Chunk) []sched.Chunk {
	e.early = map[connector.RequestID]*early{}
	for i := range chunks {
		if chunks[i].Early {
			e.early[chunks[i].Request] = &early{}
		}
	}
	for layer := range layers {
		for n := e.host.patience(e) / 2; n > 0; n-- { // the layers before take their time, too
			e.host.goOn()
		}
		for n := e.host.patience(e); n > 0 && !e.arrived(layer); n-- {
			e.host.goOn()
		}
		if !e.arrived(layer) {
			e.w.stats.Postponed += len(e.early)
			e.early = nil
			return e.sched.Postpone()
		}
		for i := range chunks {
			if chunks[i].Early {
				e.readLayer(&chunks[i], layer)
			}
		}
	}
	return chunks
}

// patience is for how many pieces of a plugin's work the engine waits, if there are early chunks.
func (h *host) patience(e *engine) int {
	if len(e.early) == 0 {
		return 0
	}
	if h.rng.n(2) == 0 {
		return h.rng.n(3)
	}
	return h.rng.n(24)
}

// arrived says whether a layer of all that early chunks depend on may be read.
func (e *engine) arrived(layer int) bool {
	if e.w.is(OverlapLayerEarly) {
		layer--
	}
	for id := range e.early {
		if a := e.arriving[id]; a == nil || a.layers <= layer {
			return false
		}
	}
	return true
}

// glance is a plugin at work just before the engine looks: it may find that layers have come of a load that goes on.
func (h *host) glance() {
	if !h.w.opt.Overlap {
		return
	}
	for n := len(h.own.moves); n > 0; n-- {
		h.workAlone(&h.rng)
	}
	if h.proc != nil {
		for n := h.rng.n(6); n > 0; n-- {
			h.proc.work(&h.rng, faultNone)
		}
		h.verifyLayers(h.proc)
	}
}

// goOn is a plugin at work while the engine waits, and what the host makes of that.
func (h *host) goOn() {
	if h.rng.n(4) == 0 {
		h.w.advance(time.Duration(h.rng.n(80)) * time.Millisecond)
	}
	h.workAlone(&h.rng)
	p, f := h.proc, faultNone
	if p == nil {
		return
	}
	if h.w.opt.Rough > 0 && !h.w.quiet {
		f = []Fault{faultBusy, faultCrash}[h.rng.n(2)]
		if h.rng.n(16) > 0 {
			f = faultNone
		}
	}
	p.work(&h.rng, f)
	h.verifyLayers(p)
	p.reply(&h.rng, faultNone)
}

// readLayer is a chunk's attention in one layer.
func (e *engine) readLayer(c *sched.Chunk, layer int) {
	st := e.streams[c.Request]
	for rank := range e.mem {
		for g, table := range c.Blocks {
			for at := e.w.opt.first(g, c.Start, e.size) * e.size; at < c.Start; at++ {
				b := &e.mem[rank][table[at/e.size]]
				slot := b.tags[at%e.size]
				stale := at%e.size == e.size-1 && slot.life == e.life && slot.gen < st.gen
				if slot.kv != kvOf(st.prefix[at], g, rank) || b.short > layers-1-layer || stale {
					e.early[c.Request].misread = true
				}
			}
		}
	}
}

// awaitLoads waits for the ends of the loads that early chunks depend on.
func (e *engine) awaitLoads() {
	for n := e.host.patience(e); n > 0; n-- {
		waits := false
		for id := range e.early {
			waits = waits || e.arriving[id] != nil
		}
		if !waits {
			return
		}
		e.host.goOn()
		e.host.deliver(1)
	}
}

// loadEnded notes what has become of a load.
func (e *engine) loadEnded(id connector.RequestID, well bool) {
	delete(e.arriving, id)
	if c := e.early[id]; c != nil {
		c.well = well
	}
}

// commit completes a step, and verifies that exactly those early chunks count whose loads have ended well.
func (e *engine) commit(sampled []int32) *connector.Step {
	before, want := e.sched.Stats().Overlapped, 0
	for _, c := range e.early {
		if c.well {
			want++
		}
	}
	st := e.sched.Commit(sampled)
	n := e.sched.Stats().Overlapped - before
	if n != want {
		e.w.fail('b', "%s: %d chunks that were computed during a load count, %d of the loads have ended well", e.name, n, want)
	}
	e.w.stats.Overlapped += n
	e.w.stats.Dropped += len(e.early) - n
	e.early = nil
	return st
}

// garbled is what a chunk computes from what it has misread.
func (e *engine) garbled(c *sched.Chunk, kv uint64) uint64 {
	if c.Early && e.early[c.Request].misread {
		return kv ^ 1<<40
	}
	return kv
}

// beginLayers lets a plugin load layer by layer what it has whole.
func (p *proc) beginLayers(m *move) {
	if !m.Overlap || m.Kind != tracker.Load {
		return
	}
	for _, b := range m.Transfer.Blocks {
		if _, ok := p.source(m, b, -1); !ok {
			return
		}
	}
	m.byLayer = true
}

// doLayers writes up to n blocks, one layer after the other, and says which layers are there. Sometimes that is a lie. It
// returns true when all was there already, so that between the last layer and the answer there is time for a fault.
func (p *proc) doLayers(m *move, n int, d *rng, f Fault) bool {
	blocks := m.Transfer.Blocks
	if p.h.w.opt.Rough > 0 && !p.h.w.quiet && d.n(12) == 1 && !p.h.inPlace(m, layers) {
		m.announced = layers
	}
	if m.done == m.items() {
		return true
	}
	for ; n > 0 && m.done < m.items(); n-- {
		if !p.touchLayer(m, m.done%len(blocks), m.done/len(blocks), f) {
			return false
		}
		m.done++
		if len(m.missing) == 0 {
			m.announced = max(m.announced, m.done/len(blocks))
		}
	}
	return false
}

// touchLayer writes one layer of a block.
func (p *proc) touchLayer(m *move, i, layer int, f Fault) bool {
	b := m.Transfer.Blocks[i]
	if !p.mayTouch(m, b) {
		return false
	}
	c, last := p.h.seen(m, i), -1
	if layer == layers-1 {
		last = i
	}
	from, ok := p.source(m, b, last)
	switch {
	case m.spoilt[i]:
	case !ok || f == faultPartial:
		m.lacks(b)
		m.spoil(c, i, layer)
	case f == faultNothing || f == faultHalf || f == faultWrong || from.short > 0 || layer > 0 && !c.equal(from): // its source may have changed
		m.spoil(c, i, layer)
	case layer == 0:
		c.set(from)
		c.short = layers - 1
	default:
		c.short = min(c.short, layers-1-layer)
	}
	return true
}

// spoil is a layer that is not what it should be; nothing makes it better.
func (m *move) spoil(c *cell, i, layer int) {
	if layer == 0 {
		c.orphan()
	}
	c.short = layers - layer
	if m.spoilt == nil {
		m.spoilt = map[int]bool{}
	}
	m.spoilt[i] = true
}

// equal says whether a block has the content of another.
func (c *cell) equal(from *cell) bool {
	return slices.EqualFunc(c.tags, from.tags, func(a, b tag) bool { return a == b }) && c.sum == from.sum && c.foreign == from.foreign
}

// verifyLayers is the host's look at the layers that the plugin says are there.
func (h *host) verifyLayers(p *proc) {
	for _, m := range slices.Clone(p.moves) {
		if m.announced <= m.verified || m.doubted || m.lost || m.reported {
			continue
		}
		if m.doubted = !h.w.is(OverlapUnchecked) && !h.inPlace(m, m.announced); !m.doubted {
			m.verified = m.announced
			h.tellVerified(p, m)
		}
	}
}

// inPlace says whether the first layers of all blocks of a load are what was saved.
func (h *host) inPlace(m *move, n int) bool {
	for i, b := range m.Check {
		c := h.cached(m, i)
		if c.short > layers-n || c.foreign || c.sum != h.sum(c, b, m.Rank) {
			return false
		}
	}
	return true
}

// tellVerified says which layers are right.
func (h *host) tellVerified(p *proc, m *move) {
	switch {
	case h.w.is(OverlapOneRank):
		for _, other := range p.moves {
			if other.grant == m.grant {
				h.do(h.tracker.Verified(h.w.now, other.ID, m.verified))
			}
		}
	case h.w.is(OverlapRetried):
		all := m.verified
		for _, other := range p.moves {
			if other.grant == m.grant {
				all = min(all, other.verified)
			}
		}
		if all > 0 && h.due[m.grant.obligation] != nil {
			h.arrives(&tracker.Event{Kind: tracker.Arriving, Request: m.grant.request, Step: m.grant.step, Layers: all})
		}
	default:
		h.do(h.tracker.Verified(h.w.now, m.ID, m.verified))
	}
}

// arrives tells the engine which layers of a load are there: by an event once, then it sees for itself.
func (h *host) arrives(ev *tracker.Event) {
	key := obligation{tracker.Loaded, ev.Request, ev.Step}
	if h.due[key] == nil {
		h.w.fail('d', "%s hears about layers of a load of %s, step %d, which is over", h.e.name, ev.Request, ev.Step)
		return
	}
	a := h.arriving[key]
	if a == nil {
		a = &arrival{}
		h.arriving[key] = a
		h.queue = append(h.queue, report{Event: *ev, arrival: a})
	}
	a.layers = max(a.layers, ev.Layers)
	h.w.mix('l', hash(string(ev.Request)), uint64(a.layers))
}

// onceAnnounced verifies that no load begins again of which the engine has been told layers: what it reads would be written.
func (h *host) onceAnnounced(m *move) {
	if m.Kind == tracker.Load && h.arriving[obligation{tracker.Loaded, m.Transfer.Request, m.Step}] != nil {
		h.w.fail('c', "%s: a load of %s is tried again, of which the engine was told layers", h.e.name, m.Transfer.Request)
	}
}

// endArriving says how a load ended of which the engine has been told layers.
func (h *host) endArriving(ev *tracker.Event) {
	key := obligation{tracker.Loaded, ev.Request, ev.Step}
	if a := h.arriving[key]; a != nil && len(ev.Failed) == 0 && !ev.Lost {
		a.layers = layers
	}
	delete(h.arriving, key)
}

// overlapMutants are those that let the engine use what it must not, or count what it has computed from that.
func overlapMutants() []MutantInfo {
	return []MutantInfo{
		{OverlapUnchecked, "overlap-unchecked", "the engine reads a layer when the plugin says that it is there", "rule OVERLAP-03"},
		{OverlapOneRank, "overlap-one-rank", "the engine reads a layer when one rank has it", "rule OVERLAP-03"},
		{OverlapRetried, "overlap-retried", "a load is tried again while the engine reads its layers", "rule OVERLAP-03"},
		{OverlapEndUnchecked, "overlap-end-unchecked", "a load is not checked at its end if a layer of it was verified", "rule OVERLAP-03"},
		{OverlapLayerEarly, "overlap-layer-early", "the engine reads a layer when the one before it is there", "rule OVERLAP-03"},
	}
}
