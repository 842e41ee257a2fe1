package placement

import (
	"fmt"

	"github.com/kvport/kvport/internal/place"
)

// patience is how many accesses a world may need to come to its end.
const patience = 20_000

// Play runs a world and returns what happened. The error is the first violation of an invariant: a read accepted wrong
// bytes, or something that was acknowledged is not there, a slot is lost, a slot gets another use while it is read, one
// end writes what is the other's or outside the memory, the host refuses an honest plugin, or somebody waits for ever.
func Play(o Options) (Stats, error) {
	w, err := newWorld(o)
	if err != nil {
		return Stats{}, err
	}
	defer w.close()
	for n := 0; w.violation == nil; n++ {
		w.ending = w.ending || n >= o.Steps
		if !w.turn() {
			break
		}
		if n > o.Steps+patience {
			w.fail("the world does not end: %s", w.waiting())
		}
		w.stats.Accesses++
	}
	if w.violation == nil {
		w.atEnd()
	}
	if w.violation != nil {
		return w.stats, fmt.Errorf("seed %d: %w", o.Seed, w.violation)
	}
	return w.stats, nil
}

// turn lets one actor go on; false if none can.
func (w *world) turn() bool {
	live := w.actors[:0]
	var ready []*actor
	for _, a := range w.actors {
		if a.alive {
			live = append(live, a)
			if a.ready() {
				ready = append(ready, a)
			}
		}
	}
	clear(w.actors[len(live):])
	w.actors = live
	if len(ready) == 0 {
		return false
	}
	a := ready[w.rng.IntN(len(ready))]
	for range 1 + w.rng.IntN(6) { // some in a row
		if !a.ready() || w.violation != nil {
			break
		}
		a.step()
	}
	return true
}

func (w *world) waiting() (names []string) {
	for _, a := range w.actors {
		names = append(names, a.name)
	}
	return names
}

func (w *world) close() {
	for _, a := range w.actors {
		a.kill()
	}
}

// atEnd checks what must be true when everybody has finished.
func (w *world) atEnd() {
	for _, a := range w.actors {
		if a != w.lane.actor {
			w.fail("%s waits for ever", a.name)
			return
		}
	}
	p := w.lane.p
	p.Settle()
	if left := p.Sweep(); left > 0 {
		w.fail("%d slots wait for readers that there are not", left)
	}
	c := p.Counts()
	if c.Lent+c.Filling+c.Retired > 0 || c.Free+c.Resident != w.g.Slots {
		w.fail("slots are lost: %+v of %d", c, w.g.Slots)
	}
	ready := 0
	for s := range place.Slot(w.g.Slots) {
		if w.state(s) == place.Ready {
			ready++
		}
		if n := w.words.Load(page + lineSize*int64(s)); n != 0 {
			w.fail("slot %d has %d pins", s, n)
		}
	}
	if ready != c.Resident {
		w.fail("%d slots are READY, resident are %d", ready, c.Resident)
	}
	for b := range w.acks {
		a := w.spawn("last reader", func(*actor) { w.readBlock(b) })
		for a.ready() {
			a.step()
		}
	}
}
