package conformance

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvport/kvport/conformance/internal/model"
	"github.com/kvport/kvport/connector"
)

// Room is how many bytes of blocks a connector must be able to keep for the random cases, digests included.
const Room = 12 << 20

// The times of random cases.
const (
	defaultBudget = time.Second
	mostShrinking = 20 * time.Second
	slack         = 2               // a case takes twice its budget at most, before it shortens anything
	long          = 5 * time.Second // with less, batches have quickly keys at most
	quickly       = 1024
	settling      = 300 * time.Millisecond // in which a call that has returned may be caught writing
)

// budgeted is a case that plays random histories for Options.Budget.
func budgeted(c Case) Case {
	c.budgeted = true
	return c
}

func randomCases() []Case {
	random := storeCase("random", "WORK-01", "Random histories of saves, loads, matches and more, at once and in all shapes: each answer is one that the rules allow.", randomHistories)
	random.Profiles = []Profile{Store}
	kills := faultCase("random-kills", "FAULT-01", "Random histories in which the plugin is killed again and again: each answer is one that the rules allow.", randomKills)
	growth := storeCase("random-growth", "WORK-10", "Thousands of calls hit, miss, fail and are cancelled: what the connector holds does not grow with them.", randomGrowth)
	growth.Profiles = []Profile{Store}
	return []Case{budgeted(random), budgeted(growth), budgeted(kills)}
}

func randomHistories(r *rig) { r.playRandom(r.abilities()) }

func randomKills(r *rig) {
	e := r.engine(setup{})
	e.process()
	e.end()
	o := r.abilities()
	if !o.Restart {
		r.playRandom(o) // its store ends with its process
		return
	}
	o.Kill = true
	r.playRandom(o)
}

// abilities are what histories may ask of the connector.
func (r *rig) abilities() model.Options {
	beyond := r.info.Scope != connector.ScopeEngine
	return model.Options{
		Groups: r.info.Groups, Ranks: true, Reset: r.info.Capabilities&connector.CanReset != 0, Peer: beyond, Restart: beyond, Twice: true, Room: Room / 2,
	}
}

// playRandom plays histories for the budget, and to the end of one tour if that does not take much longer.
func (r *rig) playRandom(o model.Options) {
	if r.settings.fresh == nil {
		r.Skipf("random histories need a connector that can be started afresh")
	}
	if r.settings.budget < long {
		o.Most = quickly
	}
	r.theatre(&theatre{rig: r, options: o})
}

// theatre plays histories one after another until one fails or the budget is over.
func (r *rig) theatre(t *theatre) {
	t.began = time.Now()
	defer t.shut()
	for n := 0; ; n++ {
		if spent := time.Since(t.began); r.Context().Err() != nil || spent > r.settings.budget && (n >= model.Tour || spent > slack*r.settings.budget) {
			return
		}
		h := t.generate(n)
		if f := t.play(h, 0); f != nil {
			t.report(h, n, f)
			return
		}
	}
}

func (t *theatre) generate(n int) *model.History {
	if t.bounds != nil {
		return model.GenerateBounded(t.settings.seed, n, t.bounds.kinds(), t.options)
	}
	return model.Generate(t.settings.seed, n, t.options)
}

// theatre plays histories, several on one stage if they fit.
type theatre struct {
	*rig
	bounds  *bounding // nil: there is room for all that histories save
	options model.Options
	began   time.Time
	stage   *stage
	judge   *model.Judge
	played  int
	waited  time.Duration // for what comes late

	shortening bool // of a history that failed
}

// failure is a history that failed, as far as it went.
type failure struct {
	violation *model.Violation
	outcomes  []model.Outcome
	words     []string
	settled   bool // it showed only a while after the last call
}

func (t *theatre) shut() {
	if t.stage == nil {
		return
	}
	s := t.stage
	t.stage = nil
	if err := errors.Join(s.end(), s.shut()); err != nil {
		t.check(err, "close")
	}
}

// drop leaves a stage on which something went wrong: what its end says adds nothing.
func (t *theatre) drop() {
	s := t.stage
	t.stage = nil
	if s == nil {
		return
	}
	for _, i := range s.instances {
		i.killed = true
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = s.end()
		_ = s.shut()
	}()
	select {
	case <-ended:
	case <-time.After(soon):
	}
}

// play plays a history and gives what failed, nil if nothing did. It waits at the end for what comes late.
func (t *theatre) play(h *model.History, wait time.Duration) *failure {
	t.ready(h)
	t.judge = model.NewJudge(h.Shape, Room)
	t.played++
	s := t.stage
	err := s.begin(h, fmt.Sprint(t.played))
	if t.bounds != nil {
		t.judge.Bound(s.limits)
	}
	var f *failure
	if err != nil {
		f = &failure{violation: &model.Violation{Rule: "OPEN-01", Text: err.Error(), Call: -1, Allowed: "sides that open"}}
	} else {
		f = t.steps(h, wait)
	}
	if f != nil {
		f.words = s.words()
		t.drop()
		return f
	}
	if err := s.end(); err != nil {
		t.drop()
		return &failure{violation: &model.Violation{Rule: "LIFE-04", Text: err.Error(), Call: -1, Allowed: "no error"}}
	}
	return nil
}

func (t *theatre) steps(h *model.History, wait time.Duration) *failure {
	var outcomes []model.Outcome
	cut := false // a load ended early
	for _, step := range h.Steps {
		began := time.Now()
		o := t.stage.do(step)
		outcomes = append(outcomes, o)
		cut = cut || slices.ContainsFunc(o.Results, func(r model.Result) bool { return r.Ended && r.Ranks != nil })
		v := t.judge.Step(step, &o)
		if v != nil && v.Short {
			v = t.askAgain(step, &outcomes[len(outcomes)-1], v, began)
		}
		if v != nil && v.Declined {
			v = t.saveAgain(step, &outcomes[len(outcomes)-1], cut)
		}
		if v != nil {
			t.excuse(v, began)
			return &failure{violation: v, outcomes: outcomes}
		}
	}
	if cut && !t.shortening && t.waited < t.settings.budget/2 {
		wait = settling
		t.waited += wait
	}
	if wait > 0 {
		t.wait(wait)
	}
	for _, p := range t.stage.players {
		if strays := p.strays(nil); len(strays) > 0 {
			return &failure{violation: t.judge.Step(nil, &model.Outcome{Strays: strays}), outcomes: outcomes, settled: true}
		}
	}
	return nil
}

// askAgain asks again what a Match offered too little for. What comes too late on a busy machine has no verdict.
func (t *theatre) askAgain(step model.Step, o *model.Outcome, v *model.Violation, began time.Time) *model.Violation {
	if v.Call < 0 {
		return v
	}
	c := step[v.Call]
	c.Cancel = 0
	limit := soon
	if t.shortening {
		limit = 5 * askAgain
	}
	p := t.stage.players[c.Engine]
	for w := t.patience(limit); !w.over(); t.wait(askAgain) {
		if t.Context().Err() != nil {
			return v
		}
		again := p.call(&c, nil)
		later := model.Outcome{Results: slices.Clone(o.Results)}
		later.Results[v.Call] = again
		if t.judge.Step(step, &later) == nil {
			if t.watched().busy(began) {
				o.Results[v.Call] = again
				return nil
			}
			v.Text += ", and the rest only later"
			return v
		}
	}
	return v
}

// offers is how often a block is saved before it is said to be declined: options may ask for more than one offer (OFF-08).
const offers = 8

// saveAgain saves again what was declined, for a while if loads ended early: what still works behind those may hold blocks until it has ended.
func (t *theatre) saveAgain(step model.Step, o *model.Outcome, cut bool) (v *model.Violation) {
	limit := soon
	if t.shortening {
		limit = 5 * askAgain
	}
	w := t.patience(limit)
	for n := 0; n < offers || cut && !w.over(); n++ {
		if n >= offers {
			t.wait(askAgain)
		}
		*o = t.stage.do(step)
		if v = t.judge.Step(step, o); v == nil || !v.Declined {
			return v
		}
	}
	return v
}

// excuse ends the case without a verdict where the machine explains what failed.
func (t *theatre) excuse(v *model.Violation, began time.Time) {
	if (v.Rule == "WORK-07" || t.Context().Err() != nil) && t.watched().busy(began) {
		t.drop()
		t.inconclusive("%s; the machine was busy", v.Text)
	}
}

// ready gives a history a stage on which it fits.
func (t *theatre) ready(h *model.History) {
	layout := layoutOf(&h.Shape)
	size := end(&layout)
	arena := t.info.ArenaBytes > 0 || t.info.ArenaBlocks > 0 // each life of an engine begins with an empty one
	if s := t.stage; s != nil && (arena || t.bounds != nil || s.ranks < h.Shape.Ranks || s.size < size || s.bytes+t.options.Room > Room) {
		t.shut()
	}
	if t.stage == nil {
		t.stage = t.rig.stage(h.Shape.Ranks, size)
		t.stage.bounds = t.bounds
	}
	t.stage.bytes += h.Bytes()
}

// report makes a failure short and tells it.
func (t *theatre) report(h *model.History, n int, f *failure) {
	wait := time.Duration(0)
	if f.settled {
		wait = settling
	}
	before := h.Calls()
	t.shortening = true
	limit := min(mostShrinking, t.settings.deadline/2)
	best := f
	short, runs := model.ShrinkWithin(t.Context(), h, limit, t.tries(f), func(h *model.History) bool {
		got := t.again(h, wait)
		if got == nil || !got.violation.Like(best.violation) {
			return false
		}
		best = got
		return true
	})
	note := fmt.Sprintf("seed %d, history %d: shortened from %d calls to %d in %d runs", t.settings.seed, n+1, before, short.Calls(), runs)
	if best == f {
		note = fmt.Sprintf("seed %d, history %d: it did not fail again in %d runs, so that this is all of it", t.settings.seed, n+1, runs)
		short = h
	}
	t.tell(short, best, note)
}

// tries is how often a history is played that may fail by chance.
func (t *theatre) tries(f *failure) int {
	if f.violation.Rule == "WORK-07" {
		return 1
	}
	return 3
}

// again plays a history on a stage of its own.
func (t *theatre) again(h *model.History, wait time.Duration) *failure {
	t.drop()
	defer t.drop()
	return t.play(h, wait)
}

// tell fails the case.
func (t *theatre) tell(h *model.History, f *failure, note string) {
	t.Helper()
	transcript := append(model.Transcript(h, f.outcomes, f.violation), note)
	var text strings.Builder
	text.WriteString(model.Says(h, f.violation))
	rec, ok := t.T.(*recorder)
	if !ok {
		for _, line := range transcript {
			text.WriteString("\n" + line)
		}
		t.Errorf("%s", text.String())
		return
	}
	rec.broken(f.violation.Rule, model.Allows(h, f.violation), transcript, f.words)
	t.Errorf("%s", text.String())
}
