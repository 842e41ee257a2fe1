package tracker

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// promisedHold is what a HoldTable has numbered, as its children know it.
type promisedHold struct {
	life      uint64
	id        connector.HoldID
	consumers int
	told      int    // how often the table has reported a consumer
	ended     string // otherwise than by its last consumer: died, lost
}

// holdWorld is children that fail one by one: their processes announce holds, report consumers before and after that,
// renew, and die, and some answers come after the death.
type holdWorld struct {
	t     *testing.T
	rng   *rand.Rand
	b     *HoldTable
	now   time.Time
	life  uint64
	last  connector.HoldID // of the life
	own   map[connector.HoldID]*promisedHold
	early map[connector.HoldID]int // reported, not announced
	asked bool                     // a Finish runs
	met   map[string]int
}

func (w *holdWorld) add(life uint64) {
	w.b.Ask(true)
	w.asked = true
	w.last++
	p := &promisedHold{life: life, id: w.last, consumers: 1 + w.rng.IntN(3)}
	own := w.b.Add(w.now, life, &connector.Hold{ID: p.id, Consumers: p.consumers}, time.Hour)
	if life != w.life {
		require.Zero(w.t, own, "the process that keeps it is dead")
		w.met["late"]++
		return
	}
	require.NotZero(w.t, own)
	require.NotContains(w.t, w.own, own)
	w.own[own] = p
	w.take()
	require.Equal(w.t, min(w.early[p.id], p.consumers), p.told)
	w.met["early"] += p.told
	delete(w.early, p.id)
}

// take notes what the table reports.
func (w *holdWorld) take() {
	over := w.b.Take()
	for _, own := range over.Fetched {
		p := w.own[own]
		p.told++
		require.LessOrEqual(w.t, p.told, p.consumers)
		require.Empty(w.t, p.ended)
		w.met["told"]++
	}
	for ended, list := range map[string][]connector.HoldID{"died": over.Died, "lost": over.Lost} {
		for _, own := range list {
			p := w.own[own]
			require.Less(w.t, p.told, p.consumers, "it was over before its process died")
			require.Empty(w.t, p.ended)
			p.ended = ended
			w.met[ended]++
		}
	}
	require.False(w.t, w.b.Pending())
}

func (w *holdWorld) consume() {
	id := connector.HoldID(1 + w.rng.IntN(int(w.last)+2))
	w.b.Consumed(w.life, []connector.HoldID{id})
	if id > w.last && w.asked {
		w.early[id]++
	}
	w.take()
}

func (w *holdWorld) renew() {
	var named, open []connector.HoldID
	for own, p := range w.own {
		if p.life == w.life && p.told < p.consumers && w.rng.IntN(2) == 0 {
			named, open = append(named, p.id), append(open, own)
		}
	}
	require.ElementsMatch(w.t, open, w.b.Renewed(w.life, append(named, 9999)))
	require.ElementsMatch(w.t, append(named, 9999), w.b.Ended(w.life, append(open, 12345)), "9999 is refused")
	require.Empty(w.t, w.b.Ended(w.life+1, open), "another life's")
	w.met["renewed"] += len(open)
}

func (w *holdWorld) die() {
	ended, abandoned := "died", w.rng.IntN(2) == 0
	if abandoned {
		ended = "lost"
	}
	w.b.Lose(w.life, abandoned)
	w.take()
	for own, p := range w.own {
		switch {
		case p.told == p.consumers:
			require.Empty(w.t, p.ended)
		case p.life == w.life:
			require.Equal(w.t, ended, p.ended, "hold %d of a dead process", own)
		default:
			require.NotEmpty(w.t, p.ended, "hold %d of a dead process is not over", own)
		}
	}
	clear(w.early)
	w.life, w.last = w.life+1, 0
	w.met["lives"]++
}

// TestHoldTable: every hold gets a number that no other has, each consumer is reported once, and what a process kept
// is over with it, however late its answers are.
func TestHoldTable(t *testing.T) {
	met := map[string]int{}
	for seed := range uint64(300) {
		w := &holdWorld{
			t: t, rng: rand.New(rand.NewPCG(seed, 21)), b: NewHoldTable(), now: time.Unix(0, 0), life: 1,
			own: map[connector.HoldID]*promisedHold{}, early: map[connector.HoldID]int{}, met: met,
		}
		for range 200 {
			w.now = w.now.Add(time.Second)
			if w.rng.IntN(8) == 0 {
				w.asked = w.rng.IntN(2) == 0
				w.b.Ask(w.asked)
				if !w.asked {
					clear(w.early)
				}
			}
			switch n := w.rng.IntN(20); {
			case n < 6:
				w.add(w.life)
			case n < 15:
				w.consume()
			case n < 17:
				w.renew()
			case n == 17 && w.life > 1:
				w.add(w.life - 1)
				w.last--
			case n == 18:
				w.b.Consumed(w.life-1, []connector.HoldID{1})
				w.take()
			case n == 19:
				w.die()
			}
		}
		w.die()
	}
	for _, what := range []string{"told", "died", "lost", "early", "late", "renewed", "lives"} {
		require.Positive(t, met[what], what)
	}
	t.Log(met)
}

// TestWeakHoldsAreBounded: weak holds that nobody comes for push each other out, and a report of one that is forgotten
// leaves nothing behind that would keep an early report of another from being believed.
func TestWeakHoldsAreBounded(t *testing.T) {
	b, now := NewHoldTable(), time.Unix(0, 0)
	add := func(id connector.HoldID, weak bool) connector.HoldID {
		return b.Add(now, 1, &connector.Hold{ID: id, Consumers: 1, Weak: weak}, time.Hour)
	}
	strong := add(1, false)
	last := connector.HoldID(1)
	for range 3 * maxWeak {
		b.Ask(true)
		last++
		require.NotZero(t, add(last, true))
		b.Ask(false)
		require.LessOrEqual(t, len(b.own), maxWeak+1)
		require.Len(t, b.ids, len(b.own))
	}
	for id := range last {
		b.Consumed(1, []connector.HoldID{id + 1})
	}
	require.Contains(t, b.Take().Fetched, strong, "it was never forgotten")
	require.Empty(t, b.own)
	require.Zero(t, b.weak)
	b.Ask(true)
	b.Consumed(1, []connector.HoldID{last + 1})
	own := add(last+1, false)
	require.Equal(t, HoldsOver{Fetched: []connector.HoldID{own}}, b.Take())
	require.Empty(t, b.early)

	for range 5 {
		last++
		add(last+1, true)
	}
	now = now.Add(2*time.Hour + restSweep)
	add(last+2, true)
	require.Len(t, b.own, 1, "the time of the others is over")
	require.Equal(t, 1, b.weak)
}
