package tracker

import (
	"maps"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

// HoldTable gives the holds of all lives of a child numbers of its own, because every process counts from 1. It alone knows
// which process keeps which hold; which children keep a part of a MultiConnector's hold is known to multiconnector's ledger
// alone.
type HoldTable struct {
	last connector.HoldID
	own  map[connector.HoldID]*openHold
	ids  map[plugHold]connector.HoldID
	over HoldsOver
	lost uint64 // the newest life whose end is known; lives grow

	refused []plugHold       // named by the last Renewals, and none of ours
	early   map[plugHold]int // reported before the answer that announces them came
	asked   bool             // Finish runs: what is reported now may be announced by it

	weak  int       // open ones
	swept time.Time // when those were last dropped whose time is over
}

// restSweep is how long at least expired holds are not looked for: a busy engine has thousands of weak ones.
const restSweep = time.Second

// plugHold is a hold as the plugin names it.
type plugHold struct {
	life uint64
	id   connector.HoldID
}

type openHold struct {
	plugHold
	consumers int
	weak      bool // nothing is kept, so nobody waits for its end
	expires   time.Time
}

// HoldsOver are ends of holds.
type HoldsOver struct {
	Fetched []connector.HoldID // each once for every consumer that has come
	Died    []connector.HoldID // each once: the process that kept it is gone
	Lost    []connector.HoldID // as Died, and somebody may use the blocks for ever
}

// NewHoldTable makes an empty one.
func NewHoldTable() *HoldTable {
	return &HoldTable{own: map[connector.HoldID]*openHold{}, ids: map[plugHold]connector.HoldID{}, early: map[plugHold]int{}}
}

// Ask notes that a Finish begins, or that all its holds were added: then what was reported and not announced was of a
// hold that is forgotten.
func (b *HoldTable) Ask(begins bool) {
	if b.asked = begins; !begins {
		clear(b.early)
	}
}

// Add takes on a hold and gives its own number; 0 for none, and for one of a life that is lost: its answer came too
// late. Too many weak holds are forgotten.
func (b *HoldTable) Add(now time.Time, life uint64, h *connector.Hold, longest time.Duration) connector.HoldID {
	if now.Sub(b.swept) >= restSweep {
		b.swept = now
		b.dropAll(func(o *openHold) bool { return now.After(o.expires) })
	}
	if h.ID == 0 || life <= b.lost {
		return 0
	}
	if h.Weak {
		if b.weak >= maxWeak {
			b.dropAll(func(o *openHold) bool { return o.weak })
		}
		b.weak++
	}
	b.last++
	o := &openHold{plugHold{life, h.ID}, max(h.Consumers, 1), h.Weak, now.Add(2 * longest)}
	b.own[b.last], b.ids[o.plugHold] = o, b.last
	own := b.last
	for range b.early[o.plugHold] {
		b.Consumed(life, []connector.HoldID{h.ID})
	}
	delete(b.early, o.plugHold)
	return own
}

func (b *HoldTable) drop(id connector.HoldID, o *openHold) {
	delete(b.own, id)
	delete(b.ids, o.plugHold)
	if o.weak {
		b.weak--
	}
}

func (b *HoldTable) dropAll(are func(*openHold) bool) {
	for id, o := range b.own {
		if are(o) {
			b.drop(id, o)
		}
	}
}

// Consumed says that a consumer has fetched each of these holds of a life.
func (b *HoldTable) Consumed(life uint64, ids []connector.HoldID) {
	for _, id := range ids {
		own := b.ids[plugHold{life, id}]
		o := b.own[own]
		if o == nil {
			if b.asked && life > b.lost && len(b.early) < maxEarly {
				b.early[plugHold{life, id}]++
			}
			continue
		}
		b.over.Fetched = append(b.over.Fetched, own)
		if o.consumers--; o.consumers == 0 {
			b.drop(own, o)
		}
	}
}

// Renewed gives our numbers of the holds that a life renews. What it names that is not one of them is
// refused by the next call: it must not take it for renewed (rule LEASE-02).
func (b *HoldTable) Renewed(life uint64, ids []connector.HoldID) (own []connector.HoldID) {
	b.refused = nil
	for _, id := range ids {
		named := plugHold{life, id}
		if o := b.ids[named]; o != 0 {
			own = append(own, o)
		} else {
			b.refused = append(b.refused, named)
		}
	}
	return own
}

// Ended gives a life's own numbers of the holds that it has to hear the end of.
func (b *HoldTable) Ended(life uint64, own []connector.HoldID) (ids []connector.HoldID) {
	for _, id := range own {
		if o := b.own[id]; o != nil && o.life == life {
			ids = append(ids, o.id)
		}
	}
	for _, named := range b.refused {
		if named.life == life {
			ids = append(ids, named.id)
		}
	}
	return ids
}

// Lose ends the holds of a life. abandoned says that it left somebody behind who may use their blocks for ever.
func (b *HoldTable) Lose(life uint64, abandoned bool) {
	b.lost = max(b.lost, life)
	over := &b.over.Died
	if abandoned {
		over = &b.over.Lost
	}
	for _, id := range slices.Sorted(maps.Keys(b.own)) {
		o := b.own[id]
		if o.life != life {
			continue
		}
		if !o.weak {
			*over = append(*over, id)
		}
		b.drop(id, o)
	}
	clear(b.early)
}

// Pending says whether Take has something to give.
func (b *HoldTable) Pending() bool { return len(b.over.Fetched)+len(b.over.Died)+len(b.over.Lost) > 0 }

// Take gives what has ended since the last call.
func (b *HoldTable) Take() HoldsOver {
	over := b.over
	b.over = HoldsOver{}
	return over
}
