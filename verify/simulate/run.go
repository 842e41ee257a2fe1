package simulate

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Result is how one seed went.
type Result struct {
	Seed      uint64
	Violation *Violation // nil: all invariants held
	Digest    uint64     // of everything that happened
	Steps     int        // of the script and after it
	Stats     Stats
}

// Play runs one seed: a script of the given number of steps and then, without faults, until everything has come to
// its end.
func Play(o Options, steps int) Result { return play(o, script(&o, steps)) }

// Draw makes the options of a seed: sizes, topology, medium and faults.
func Draw(seed uint64) Options { return draw(seed) }

func play(o Options, ops []Op) Result {
	w := newWorld(o)
	w.run(ops)
	defer w.vanish()
	for _, e := range w.engines {
		if e.host != nil {
			c := e.host.tracker.Counters()
			w.stats.BookRetries += c.Retries
			w.stats.TurnLoaded += c.TurnLoaded
			w.stats.TurnLost += c.TurnLost
		}
	}
	return Result{o.Seed, w.violation, w.digest, w.steps, w.stats}
}

// run applies the script and lets the world come to rest. A panic of the parts under test is a
// violation like any other.
func (w *World) run(ops []Op) {
	defer func() {
		if r := recover(); r != nil {
			w.fail('p', "%v at %s", r, culprit(string(debug.Stack())))
		}
	}()
	for _, op := range ops {
		w.apply(op)
		w.steps++
		if w.violation != nil {
			return
		}
	}
	w.settle()
}

// vanish ends what still waits in a world that is over.
func (w *World) vanish() {
	for _, e := range w.engines {
		if e.host != nil {
			e.host.vanish()
		}
	}
}

// culprit is the line of the first frame below a panic that is ours.
func culprit(stack string) string {
	_, below, _ := strings.Cut(stack, "panic(")
	lines := strings.Split(below, "\n")
	for i, line := range lines {
		if strings.Contains(line, "kvport/kvport/") && i+1 < len(lines) {
			place := strings.TrimSpace(lines[i+1])
			return place[strings.LastIndex(place, "/")+1:]
		}
	}
	return "an unknown place"
}

// apply does one step of a script and checks the invariants.
func (w *World) apply(op Op) {
	d := rng(op.Seed)
	e := w.engines[d.n(len(w.engines))]
	h := e.host
	switch op.Kind {
	case opTurn:
		n := d.n(8)
		if n == 0 {
			n = 1000
		}
		e.turn(n, d.n(3))
	case opTick:
		t := time.Duration(d.n(300)) * time.Millisecond
		if d.n(20) == 0 {
			t *= 20
		}
		w.advance(t)
	case opSubmit:
		w.router.submit(&d)
	case opRoute:
		w.router.route(&d, op.Fault)
	case opAbort:
		w.router.leave(&d)
	case opStore:
		w.misfortune(&d)
	case opReset:
		e.resetSoon(&d)
	case opRestart:
		if w.opt.Stale {
			e = w.engines[d.n(w.opt.Prefills)]
		}
		if d.n(3) == 0 {
			w.stats.EngineRestarts++
			w.say("%s dies and starts again", e.name)
			e.restart()
		}
	default:
		if h != nil {
			h.apply(op, &d)
		}
	}
	e.resetInTime(&d)
	w.after()
}

// apply does a step of one host's plugin.
func (h *host) apply(op Op, d *rng) {
	if op.Kind == opGhost {
		h.ghost(d)
		return
	}
	h.haunt(d)
	h.applyAlone(op, d)
	p := h.proc
	if p == nil {
		return
	}
	switch op.Kind {
	case opWork:
		for n := 1 + d.n(3); n > 0 && h.proc == p; n-- {
			p.work(d, op.Fault)
			h.verifyLayers(p)
		}
	case opAnswer:
		for n := 1 + d.n(3); n > 0 && h.proc == p; n-- {
			h.mistake(p)
			p.reply(d, op.Fault)
		}
	case opConsume:
		h.serveHolds(p, d, op.Fault)
	case opCrash:
		if p.comp != nil {
			p.comp.crash(d)
		} else if !h.loseCall(p, d) {
			p.crash()
		}
	default:
	}
}

// applyAlone does a piece of the host's own work where a step is one of work or of an answer.
func (h *host) applyAlone(op Op, d *rng) {
	if op.Kind == opWork || op.Kind == opAnswer {
		h.workAlone(d)
	}
}

// mistake is a host that takes the answer of a former generation for one of the present.
func (h *host) mistake(p *proc) {
	if !h.w.is(OldAnswers) {
		return
	}
	for i, old := range h.late {
		for _, m := range p.moves {
			if m.Kind == old.Kind && m.Transfer.Request == old.Transfer.Request && m.Rank == old.Rank && !m.reported && !m.answered {
				h.late = append(h.late[:i], h.late[i+1:]...)
				m.out = old.out
				m.reported = true
				m.out.Corrupt, m.out.Foreign = h.checkDigests(m, h.cached)
				h.do(h.tracker.Moved(h.w.now, m.ID, m.out))
				return
			}
		}
	}
}

func (w *World) after() {
	w.pump()
	if w.violation == nil {
		w.checkAll()
	}
}

// rounds is how long a world may take to come to rest.
const rounds = 12000

// settle stops all faults and lets everything come to its end.
func (w *World) settle() {
	w.quiet = true
	w.say("no more faults")
	for n := range rounds {
		w.steps++
		busy := w.round(n)
		if w.violation != nil {
			return
		}
		if busy {
			w.advance(time.Millisecond)
			continue
		}
		if w.atRest() {
			w.over()
			return
		}
		t, ok := w.idleUntil()
		if !ok {
			break
		}
		w.advance(max(t.Sub(w.now), time.Millisecond))
	}
	w.fail('i', "%s", w.unfinished())
}

// round lets everybody do everything there is to do. It reports whether anything was done.
func (w *World) round(n int) (busy bool) {
	w.router.probe()
	d := rng(n)
	for len(w.router.wants) > 0 && w.violation == nil {
		busy = true
		w.router.route(&d, faultNone)
	}
	for _, e := range w.engines {
		if h := e.host; h != nil {
			busy = busy || len(h.queue) > 0 || h.own.busy()
			for h.workAlone(&d) {
			}
			h.workOff(&d)
		}
		busy = e.turn(1000, n%3) || busy
		if e.host != nil {
			busy = busy || e.host.proc.busy()
		}
		if w.pump(); w.violation == nil {
			e.check()
		}
	}
	return busy || len(w.router.wants) > 0
}

// workOff lets a plugin do what it can.
func (h *host) workOff(d *rng) {
	for range 64 {
		p := h.proc
		if p == nil {
			return
		}
		before := h.w.digest
		todo := len(p.jobs) + len(p.moves)
		p.work(d, faultNone)
		h.verifyLayers(p)
		h.mistake(p)
		p.reply(d, faultNone)
		p.consume(faultNone)
		if h.w.digest == before && len(p.jobs)+len(p.moves) == todo && d.n(8) == 0 {
			return
		}
	}
}

// busy reports whether a plugin can go on with something.
func (p *proc) busy() bool {
	if p == nil || p.dying || !p.hung.IsZero() {
		return false
	}
	if p.comp != nil {
		return p.comp.busy()
	}
	for _, m := range p.moves {
		if !m.stuck {
			return true
		}
	}
	return len(p.jobs) > 0 && !p.jobs[0].stuck
}

// atRest reports whether nothing is left to wait for.
func (w *World) atRest() bool {
	if len(w.router.live) > 0 {
		return false
	}
	for _, e := range w.engines {
		if e.forget || e.sched.Live() > 0 || len(e.streams) > 0 {
			return false
		}
		if h := e.host; h != nil && (!h.tracker.Idle() || len(h.queue) > 0 || len(h.due) > 0 || h.reset != 0) {
			return false
		}
	}
	return true
}

// over checks that nothing is left.
func (w *World) over() {
	w.checkAll()
	for _, e := range w.engines {
		h, lost := e.host, 0
		if h != nil {
			lost = h.tracker.Counters().Lost
		}
		if e.pool.Available() != e.pool.Size()-lost || e.pool.Lost() != lost {
			w.fail('f', "%s: %d of %d blocks are free in the end, %d are lost, %d for the engine", e.name, e.pool.Available(), e.pool.Size(), lost, e.pool.Lost())
		}
		if h == nil {
			continue
		}
		if n := len(h.tracker.Pins()) + h.tracker.Pending() + h.tracker.Held(); n > 0 {
			w.fail('f', "%s: %d pins, transfers and holds are left in the end", e.name, n)
		}
		if n := len(h.open) + len(h.holds); n > 0 {
			w.fail('f', "%s: %d grants and leases are remembered in the end", e.name, n)
		}
	}
}

func (w *World) unfinished() string {
	var parts []string
	for _, c := range w.router.live {
		parts = append(parts, fmt.Sprintf("client %d waits (phase %d, %d of %d tokens)", c.n, c.phase, len(c.got), c.max))
	}
	for _, e := range w.engines {
		parts = append(parts, fmt.Sprintf("%s: %d live, %d waiting, %d running", e.name, e.sched.Live(), e.sched.Waiting(), e.sched.Running()))
		if h := e.host; h != nil {
			parts = append(parts, fmt.Sprintf("%d transfers, %d holds, %d not told", h.tracker.Pending(), h.tracker.Held(), len(h.due)))
		}
	}
	return "not at rest long after the last fault: " + strings.Join(parts, "; ")
}

// Report sums up many seeds.
type Report struct {
	Seeds, Steps int
	Failed       []Result // in the order of their seeds
	Digest       uint64   // of all seeds' digests
	Stats        Stats
}

// Run plays seeds [first, first+n), several at once: every seed is still one loop in one goroutine.
// It stops early once failed, if positive, have failed.
func Run(first uint64, n, steps, failed int) Report {
	results := make([]Result, n)
	played := make([]bool, n)
	var next, bad atomic.Int64
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= n || failed > 0 && int(bad.Load()) >= failed {
					return
				}
				results[i], played[i] = Play(draw(first+uint64(i)), steps), true
				if results[i].Violation != nil {
					bad.Add(1)
				}
			}
		})
	}
	wg.Wait()
	var r Report
	for i := range results {
		if !played[i] {
			continue
		}
		r.Seeds++
		r.Steps += results[i].Steps
		r.Digest += (results[i].Digest ^ results[i].Seed) * prime
		r.Stats.add(&results[i].Stats)
		if results[i].Violation != nil {
			r.Failed = append(r.Failed, results[i])
		}
	}
	return r
}

// Add sums up two reports of different seeds.
func (r *Report) Add(t *Report) {
	r.Seeds += t.Seeds
	r.Steps += t.Steps
	r.Failed = append(r.Failed, t.Failed...)
	r.Digest += t.Digest
	r.Stats.add(&t.Stats)
}

// Map gives how often what happened, by name.
func (s *Stats) Map() map[string]int {
	m := map[string]int{}
	for _, f := range s.fields() {
		m[f.name] = *f.n
	}
	return m
}

// String lists what happened, for people.
func (s *Stats) String() string {
	var b strings.Builder
	for i, f := range s.fields() {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s %d", f.name, *f.n)
	}
	return b.String()
}

// Kill says how soon the simulation notices a mutant.
type Kill struct {
	MutantInfo
	Seeds  int        // played
	Killed int        // of them
	First  *Violation // nil: it survived
	Seed   uint64     // of First
}

// worldsOf is how many worlds are drawn for each that Hunt may play: the others lack the power that the mutant has wrong.
const worldsOf = 64

// Hunt plays n worlds with a mutant, and if none notices it, more, up to limit. Worlds that cannot show it are not played.
func Hunt(m MutantInfo, n, limit, steps int) Kill {
	k := Kill{MutantInfo: m}
	for seed := range uint64(limit) * worldsOf {
		if k.Seeds >= n && k.First != nil || k.Seeds >= limit {
			break
		}
		o := draw(seed)
		if !o.shows(m.Mutant) {
			continue
		}
		o.Mutant = m.Mutant
		r := Play(o, steps)
		k.Seeds++
		if r.Violation == nil {
			continue
		}
		if k.Killed++; k.First == nil {
			k.First, k.Seed = r.Violation, seed
		}
	}
	return k
}
