package conformance

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
)

// stepping is a kind of random histories: lists of steps, each of which can be left out.
type stepping struct {
	id, rule string
	needs    connector.Capability
	tour     int // histories that are played even if the budget is over by then, unless they take much longer and something has come back
	generate func(seed uint64, n int) []step
	// open begins a history on a connector that was started for it. The game says by now which rule its next check is about.
	open    func(r *rig, stage *stepStage, now func(rule string)) game
	allowed func(rule string) string // what would have been right
}

// step is one step of a history.
type step interface {
	words() string
	left() bool // the history as it was played did without it
}

// game is one history as it is played, and what is known by then.
type game interface {
	do(step)
	settle()   // after the last step
	met() bool // something that was kept or stored has come back
}

// playSteps plays histories, each with a connector of its own, until one fails or the budget is over.
func (r *rig) playSteps(k *stepping) {
	if r.settings.fresh == nil {
		r.Skipf("random histories need a connector that can be started afresh")
	}
	began := time.Now()
	without, idle := 0, 0 // histories without a verdict; idle: since nothing has come back in them
	s := &stepStage{rig: r, stepping: k, limit: began.Add(slack * r.settings.budget)}
	for n := 0; ; n++ {
		if s.enough(began, n, idle) {
			if n > 0 && idle == n && !r.watched().busy(began) {
				r.Skipf("in none of %d histories anything that was kept or stored came back, which this case is about", n)
			}
			if without == n {
				r.inconclusive("no history had a verdict: the machine was busy")
			}
			return
		}
		steps := k.generate(r.settings.seed, n)
		switch f := s.play(steps); f.Status {
		case Fail:
			s.tell(steps, n, f)
			return
		case Inconclusive:
			without++
		case Skip:
			without++
			idle++
		case Pass:
		}
	}
}

// stepStage plays histories of steps.
type stepStage struct {
	*rig
	*stepping

	runs   int
	limit  time.Time // nobody waits for a lease beyond it, but once; zero: any time
	waited bool
}

// enough reports whether no further history is played: n were, and in the idle ones nothing has come back.
func (r *stepStage) enough(began time.Time, n, idle int) bool {
	budget, spent := r.settings.budget, time.Since(began)
	return r.Context().Err() != nil || spent > budget && (n >= r.tour || spent > slack*budget && idle < n)
}

// late reports whether there is no time to wait for so long.
func (r *stepStage) late(wait time.Duration) bool {
	return r.waited && !r.limit.IsZero() && time.Until(r.limit) < wait
}

// shortening reports whether parts of a history that failed are played.
func (r *stepStage) shortening() bool { return r.limit.IsZero() }

// played is what came of a history of steps.
type played struct {
	Result

	step int    // the one that failed
	rule string // which it broke
}

// play plays a history on a connector that is started for it.
func (r *stepStage) play(steps []step) played {
	r.Helper()
	r.runs++
	var at atomic.Pointer[played]
	at.Store(&played{rule: r.rule})
	settings := r.settings
	settings.salt += fmt.Sprint(r.runs) // what an earlier history left somewhere is another's
	c := Case{ID: r.id, Rule: r.rule, Run: rigged(r.needs, false, func(sub *rig) {
		rec, _ := sub.T.(*recorder)
		n := 0
		now := func(rule string) { at.Store(&played{step: n, rule: rule}) }
		g := r.open(sub, r, now)
		for n = range steps {
			now(r.rule)
			if g.do(steps[n]); !rec.is(Pass) {
				return
			}
		}
		if g.settle(); rec.is(Pass) && !g.met() {
			sub.Skipf("nothing has come back")
		}
	})}
	result := checkCase(r.Context(), c, r.settings.fresh, settings)
	return played{result, at.Load().step, at.Load().rule}
}

// mostStepLines is how many lines of a transcript are steps.
const mostStepLines = 12

// tell makes a history that failed short and fails the case with it.
func (r *stepStage) tell(steps []step, n int, f played) {
	r.Helper()
	before, ran := len(steps), r.runs
	limit := time.Now().Add(min(mostShrinking, r.settings.deadline/4))
	r.limit = time.Time{}
	short := slices.DeleteFunc(slices.Clone(steps[:min(f.step+1, before)]), step.left)
	for size := len(short); size > 0; size /= 2 {
		for to := len(short); to > 0 && time.Now().Before(limit); to -= size {
			less := slices.Delete(slices.Clone(short), max(0, to-size), to)
			if len(less) == 0 {
				continue
			}
			if got := r.play(less); got.Status == Fail && got.rule == f.rule {
				f, short = got, less[:got.step+1]
				to = min(to, len(short))
			}
		}
	}
	var transcript []string
	for i := range short {
		transcript = append(transcript, fmt.Sprintf("%3d %s", i+1, short[i].words()))
	}
	if more := len(transcript) - mostStepLines; more > 0 {
		transcript = append([]string{fmt.Sprintf("    ... %d steps before", more)}, transcript[more:]...)
	}
	transcript = append(transcript, fmt.Sprintf("seed %d, history %d: shortened from %d steps to %d in %d runs", r.settings.seed, n+1, before, len(short), r.runs-ran))
	text := f.rule + ": " + strings.Join(f.Log, "; ")
	if rec, ok := r.T.(*recorder); ok {
		rec.broken(f.rule, r.allowed(f.rule), transcript, f.LastWords)
	} else {
		text += "\n" + strings.Join(transcript, "\n")
	}
	r.Errorf("%s", text)
}

// counted is a number of things in words.
func counted(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}

// numbered are the names of prompts or saves: a letter and a number each.
func numbered(letter string, numbers []int) string {
	var names []string
	for _, n := range numbers {
		names = append(names, fmt.Sprintf("%s%d", letter, n))
	}
	return strings.Join(names, " ")
}
