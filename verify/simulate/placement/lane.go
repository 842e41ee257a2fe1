package placement

import (
	"github.com/kvport/kvport/internal/place"
)

// lane is one life of the plugin: its calls run one after the other.
type lane struct {
	*actor
	w *world
	p *place.Plugin
	v *view
}

// openLane starts a life of the plugin.
func (w *world) openLane() {
	l := &lane{w: w}
	w.lane = l
	opening, lies := w.opening, w.liars
	l.actor = w.spawn("plugin", func(a *actor) {
		l.actor = a
		arena, words := w.views(true)
		l.v = arena
		if opening.Epoch > w.told {
			clear(w.disk)
			w.told = opening.Epoch
		}
		a.opens = true
		p, err := place.Open(arena, words, w.g, opening, w.now)
		a.opens = false
		if err != nil {
			w.fail("a life does not open: %v", err)
			return
		}
		l.p = p
		c := p.Counts()
		w.stats.Adopted += c.Resident
		if sum := c.Free + c.Resident + c.Retired; sum != w.g.Slots {
			w.fail("%d of %d slots after a start", sum, w.g.Slots)
		}
		for _, n := range p.Notices() {
			l.tell(n)
		}
		l.run(lies)
	})
	w.actors = append(w.actors, l.actor)
}

// tell brings the host a notice.
func (l *lane) tell(n place.Notice) {
	w, from := l.w, l.w.source()
	w.worker("notice", func() { w.check("notice", w.host.Notice(&n, w.now), from) })
}

func (l *lane) run(lies bool) {
	w := l.w
	for {
		l.before(access{wait: func() bool { return len(w.requests) > 0 || !w.ending }})
		switch {
		case lies:
			l.lie()
		case len(w.requests) > 0:
			m := w.requests[0]
			w.requests = w.requests[1:]
			l.handle(&m)
		case w.rng.IntN(4) == 0:
			l.promote(w.rng.IntN(blocks))
		case w.rng.IntN(4) == 0:
			l.evict()
		case w.rng.IntN(2) == 0:
			l.p.Settle()
		default:
			l.p.Sweep()
		}
	}
}

func (l *lane) handle(m *message) {
	w := l.w
	switch {
	case m.request != nil:
		expires := int64(0)
		if w.rng.IntN(4) == 0 {
			expires = w.now + int64(w.rng.IntN(100))
		}
		if m.request.Replace {
			delete(w.disk, m.block)
		}
		answer := l.p.Lend(m.request, expires)
		if answer.Verdict == place.Declined {
			l.evict()
			answer = l.p.Lend(m.request, expires)
		}
		w.answers[m.request.Serial] = answer
	case m.back != nil:
		l.p.Returned(*m.back)
	default:
		clear(w.disk)
		w.told = m.reset
		l.p.Reset(m.reset)
	}
}

// blockOf is the block of a set.
func blockOf(s *place.Set) int { return int(s.Parts[0].Key[0]) }

// evict gives a block up, and often keeps it on disk.
func (l *lane) evict() {
	sets := l.p.Resident()
	if len(sets) == 0 {
		return
	}
	w, s := l.w, sets[l.w.rng.IntN(len(sets))]
	w.stats.Evicted++
	b := blockOf(s)
	if w.rng.IntN(3) > 0 {
		kept := stored{serial: s.Serial}
		for i, slot := range s.Slots {
			kept.tags[i] = w.readTag(slot, 0)
		}
		w.disk[b] = kept
	}
	w.takeBack(b)
	w.evicted[b]++
	l.p.Retire(s)
	w.takeBack(b)
	w.evicted[b]++
	if w.rng.IntN(4) == 0 { // before anybody has looked
		l.promote(b)
	}
}

// promote brings a block back from disk.
func (l *lane) promote(block int) {
	w := l.w
	kept, ok := w.disk[block]
	if !ok {
		return
	}
	if w.rng.IntN(2) == 0 {
		kept.serial = 0
	}
	f, err := l.p.Fill(place.Set{Serial: kept.serial, Parts: partsOf(block), Tenant: 1})
	if err != nil {
		return
	}
	var n place.Notice
	if w.o.Mutant == FillBeforeBytes {
		if n, err = f.Publish(); err != nil {
			return
		}
		l.tell(n)
		for i, slot := range n.Slots {
			l.v.writeTag(slot, 0, kept.tags[i])
			l.v.writeTag(slot, 1, kept.tags[i])
		}
		return
	}
	for i := range partsOf(block) {
		slot := w.slotOfBytes(f.Bytes(i))
		l.v.writeTag(slot, 0, kept.tags[i])
		l.v.writeTag(slot, 1, kept.tags[i])
	}
	if w.rng.IntN(10) == 0 {
		f.Cancel()
		return
	}
	if n, err = f.Publish(); err == nil {
		w.stats.Promoted++
		l.tell(n)
	}
}
