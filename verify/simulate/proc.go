package simulate

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
)

var (
	errCanceled = fmt.Errorf("canceled: %w", context.Canceled)
	errBackend  = errors.New("the backend is not well")
)

func isCorrupt(err error) bool { return errors.Is(err, connector.ErrCorrupt) }

// proc is one life of a plugin process. It works on any of its calls at any time, one call of the
// scheduler side after the other.
type proc struct {
	h     *host
	n     uint64 // generation
	jobs  []*job
	moves []*move
	holds []*kept
	last  connector.HoldID
	taken []connector.HoldID // fetched, not reported yet

	comp   *composite         // whose calls these are; nil: a plugin of its own
	child  *child             // of a composite, whose life this is; nil: the host's own plugin
	renews []connector.HoldID // holds that a child has to renew

	fetched map[connector.HoldID]int // consumers that were reported to the host

	hung   time.Time // since when it is stopped, zero: it is not
	dying  bool      // its end is certain; it, or a peer into its memory, may still write until reapAt
	isDown bool      // the host knows
	isOver bool      // wait has returned; only a mutant takes it for the end of all writing
	downAt time.Time
	overAt time.Time
	reapAt time.Time
}

// job is a call of the scheduler side.
type job struct {
	id       tracker.CallID
	ask      *tracker.Ask
	plan     *tracker.Plan
	finish   *tracker.Finish
	reset    *tracker.Reset
	deadline time.Time // zero: not begun
	begun    bool      // by a composite
	stuck    bool
	answered bool
	over     bool // a child's: the composition has the answer

	match   connector.Match
	planned *connector.Plan
	given   []connector.Hold
	emptied bool
	err     error
}

// move is a call of the worker side.
type move struct {
	tracker.Move
	grant    *grant
	begun    bool
	done     int // blocks
	missing  []connector.BlockID
	canceled bool
	stuck    bool
	answered bool
	lost     bool // the host knows that no answer will come
	reported bool // the host has been told its end before it came: a mutant's doing
	out      tracker.Outcome
	bad      []connector.BlockID // found before the copy: a mutant's doing
	told     bool                // that it is stored
	again    []connector.Block   // to be read for others
	of       *move               // a child's: the composite's call that it is part of
	over     bool                // a child's: the composition has the answer
	stop     func()              // a composite's: cancels it
	load     *tracker.Reshape    // from an engine with blocks of another size
	reads    []sourceBlock       // what that needs

	byLayer   bool         // one layer of all blocks after the other
	announced int          // layers that the plugin says are there
	verified  int          // of them
	doubted   bool         // what the plugin says was wrong once
	spoilt    map[int]bool // blocks of which a layer is not what it should be
}

// kept is a hold as the plugin remembers it. It does not learn that the host released it.
type kept struct {
	id     connector.HoldID
	blocks []connector.Block
	tokens int
}

// up starts a generation.
func (h *host) up() {
	h.n++
	if h.n > 1 && h.rng.n(8) == 0 && !h.w.quiet && h.w.opt.Rough > 0 {
		h.w.say("%s: its plugin does not start", h.e.name)
		h.died()
		return
	}
	h.proc = &proc{h: h, n: h.n, fetched: map[connector.HoldID]int{}}
	if h.w.opt.Children {
		h.proc.comp = newComposite(h)
	}
	h.since, h.startAt = h.w.now, time.Time{}
	if h.n > 1 {
		h.w.stats.Restarts++
	}
	h.w.say("%s: plugin generation %d is up", h.e.name, h.n)
	h.do(h.tracker.Up(h.w.now, h.n))
	if h.w.is(RetryUnpinned) {
		for _, m := range h.late {
			again := &move{Move: m.Move, grant: m.grant, reported: true}
			h.proc.moves = append(h.proc.moves, again)
		}
		h.late = nil
	}
}

// died waits for the next generation.
func (h *host) died() {
	wait, broken := h.breaker.Died(h.w.now)
	h.startAt = h.w.now.Add(wait + 5*time.Millisecond)
	if broken {
		h.w.say("%s: the plugin keeps dying and is left alone until %v", h.e.name, h.startAt.Sub(time.Unix(0, 0)))
		h.do(h.tracker.Broken(h.w.now))
	}
}

// vanish is the end of the host itself: the engine died.
func (h *host) vanish() {
	if h.proc != nil && h.proc.comp != nil {
		h.proc.comp.crew.end()
	}
	h.proc = nil
}

// die is the beginning of the end of a process: it takes a while until the host notices and longer
// until nothing of it can write.
func (p *proc) die() {
	if p.dying || p.comp != nil { // a composite's children are killed by their own deadlines
		return
	}
	d := &p.h.rng
	p.dying = true
	p.downAt = p.h.w.now.Add(time.Duration(d.n(20)) * time.Millisecond)
	p.reapAt = p.downAt.Add(time.Duration(d.n(300)) * time.Millisecond)
	if d.n(8) == 0 {
		p.reapAt = p.reapAt.Add(2 * time.Second)
	}
	p.overAt = p.downAt.Add(p.reapAt.Sub(p.downAt) / 8)
}

// next is when fire has something to do.
func (h *host) next() (time.Time, bool) {
	first, found := h.tracker.Next()
	consider := func(t time.Time, ok bool) {
		if ok && (!found || t.Before(first)) {
			first, found = t, true
		}
	}
	p := h.proc
	if p == nil {
		consider(h.startAt, true)
		return first, found
	}
	if p.comp != nil {
		consider(p.comp.next())
		return first, found
	}
	consider(p.downAt, p.dying && !p.isDown)
	consider(p.overAt, p.isDown && !p.isOver && h.w.is(WriterForgotten))
	consider(p.reapAt, p.dying)
	if !h.w.is(NoDeadline) {
		consider(p.hung.Add(heartbeat), !p.hung.IsZero() && !p.dying)
		if len(p.jobs) > 0 && !p.dying {
			consider(p.begin(p.jobs[0]).Add(grace), true)
		}
	}
	return first, found
}

const (
	heartbeat = 2 * time.Second        // without an answer, then the plugin is killed
	grace     = 500 * time.Millisecond // for an answer after a deadline
)

// begin notes when the first job was called, and gives its deadline.
func (p *proc) begin(j *job) time.Time {
	if j.deadline.IsZero() {
		j.deadline = p.h.w.now.Add(2 * time.Second)
	}
	return j.deadline
}

// fire does everything whose time has come.
func (h *host) fire() {
	now := h.w.now
	if h.proc == nil {
		if !now.Before(h.startAt) {
			h.up()
		}
	} else {
		h.dueProc(h.proc)
	}
	if t, ok := h.tracker.Next(); ok && !now.Before(t) {
		h.do(h.tracker.Tick(now))
	}
	if h.w.is(FreeAtDeadline) && h.proc != nil {
		for _, m := range append([]*move(nil), h.proc.moves...) {
			if !m.reported && !now.Before(m.Deadline) {
				m.reported = true
				h.do(h.tracker.Moved(now, m.ID, tracker.Outcome{Err: context.DeadlineExceeded}))
			}
		}
	}
}

func (h *host) dueProc(p *proc) {
	if p.comp != nil {
		p.comp.fire()
		return
	}
	now := h.w.now
	h.forgetWriter(p)
	switch {
	case p.dying && !now.Before(p.reapAt):
		h.down(p)
		h.reap(p)
	case p.dying && !p.isDown && !now.Before(p.downAt):
		h.down(p)
	case p.dying || h.w.is(NoDeadline):
	case !p.hung.IsZero() && !now.Before(p.hung.Add(heartbeat)):
		h.w.stats.Kills++
		h.w.say("%s kills its plugin: no heartbeat", h.e.name)
		p.die()
	case len(p.jobs) > 0 && !now.Before(p.begin(p.jobs[0]).Add(grace)):
		h.w.stats.Kills++
		h.w.say("%s kills its plugin: a call has no answer", h.e.name)
		p.die()
	}
}

// down is the moment when the host knows that a process is at its end.
func (h *host) down(p *proc) {
	if p.isDown {
		return
	}
	p.isDown = true
	h.w.say("%s: plugin generation %d is gone", h.e.name, p.n)
	p.jobs = nil
	h.do(h.tracker.Down(h.w.now, p.n))
	if h.w.is(NoFence) {
		h.do(h.tracker.Reaped(h.w.now, p.n))
	}
}

// reap is the moment from which nothing of the process can touch a block.
func (h *host) reap(p *proc) {
	for _, m := range p.moves {
		if !m.lost && !m.reported {
			h.do(h.tracker.Moved(h.w.now, m.ID, tracker.Outcome{Err: connector.ErrGone, Lost: true}))
		}
	}
	if h.w.is(OldAnswers) || h.w.is(RetryUnpinned) {
		h.late = append(h.late, p.moves...)
	}
	moves := p.moves
	p.moves, h.proc = nil, nil
	h.w.say("%s: plugin generation %d is reaped", h.e.name, p.n)
	if h.mayLose(moves, h.holds) && h.rng.n(4) > 0 {
		h.abandon(moves)
	} else {
		h.do(h.tracker.Reaped(h.w.now, p.n))
	}
	if h.w.now.Sub(h.since) > h.breaker.Window {
		h.breaker.Proved()
	}
	h.died()
}

// work does one piece of what the plugin has to do.
func (p *proc) work(d *rng, f Fault) {
	if p.comp != nil {
		p.comp.work(d, f)
		return
	}
	if !p.hung.IsZero() {
		return
	}
	todo := p.todo()
	n := len(todo)
	head := len(p.jobs) > 0 && !p.jobs[0].answered && !p.jobs[0].stuck && !p.dying
	if head {
		n++
	}
	if n == 0 {
		return
	}
	if f != faultNone {
		p.h.w.stats.Faults++
	}
	i := d.n(n)
	p.scribbleAtTimes(d, f)
	switch f {
	case faultCrash:
		p.crash()
		return
	case faultHang:
		p.h.w.stats.Hangs++
		p.hung = p.h.w.now
		p.h.w.say("%s: plugin hangs", p.h.e.name)
		return
	default:
	}
	if i == len(todo) {
		p.doJob(p.jobs[0], d, f)
		return
	}
	m := todo[i]
	p.doMove(m, 1+d.n(len(m.Transfer.Blocks)), d, f)
}

// todo lists the calls of the worker side that the plugin can go on with.
func (p *proc) todo() (list []*move) {
	for _, m := range p.moves {
		if !m.answered && !m.stuck && !m.waits() {
			list = append(list, m)
		}
	}
	return list
}

func (p *proc) crash() {
	if !p.dying {
		p.h.w.stats.Crashes++
		p.h.w.say("%s: plugin crashes", p.h.e.name)
		p.die()
	}
}

// reply lets one answer reach the host.
func (p *proc) reply(d *rng, f Fault) {
	if p.comp != nil {
		p.comp.reply(d, f)
		f = faultNone
	}
	var ready []*move
	for _, m := range p.moves {
		if (m.answered || p.dying) && !m.lost {
			ready = append(ready, m)
		}
	}
	n := len(ready)
	if len(p.jobs) > 0 && p.jobs[0].answered {
		n++
	}
	if n == 0 {
		return
	}
	if f == faultCrash {
		p.crash()
		return
	}
	i := d.n(n)
	if i == len(ready) {
		p.answerJob(f)
		return
	}
	p.replyMove(ready[i], d, f)
}

func (p *proc) replyMove(m *move, d *rng, f Fault) {
	if p.child != nil {
		p.answerPart(m, f)
		return
	}
	if f == faultLost { // as good as a call that never answers
		m.answered, m.stuck = false, true
		return
	}
	if !m.answered {
		if d.n(4) > 0 && !m.reported {
			m.lost = true
			p.h.do(p.h.tracker.Moved(p.h.w.now, m.ID, tracker.Outcome{Err: connector.ErrGone, Lost: !p.h.w.is(LostIsOver)}))
		}
		return
	}
	p.h.moved(p, m)
	if f == faultTwice && !m.reported {
		p.h.do(p.h.tracker.Moved(p.h.w.now, m.ID, m.out))
	}
}

// ghost is an answer that nobody waits for: to a call that was answered, or that never was.
func (h *host) ghost(d *rng) {
	h.w.stats.Unknown++
	id := tracker.CallID(1<<40 + d.n(1000))
	if len(h.answer) > 0 && d.n(2) == 0 {
		id = h.answer[d.n(len(h.answer))]
	}
	switch d.n(5) {
	case 0:
		h.do(h.tracker.Matched(h.w.now, id, connector.Match{Tokens: d.n(50)}, nil))
	case 1:
		h.do(h.tracker.Planned(h.w.now, id, &connector.Plan{}, nil))
	case 2:
		h.do(h.tracker.FinishAnswered(h.w.now, id, nil, nil))
	case 3:
		h.do(h.tracker.Consumed(h.n, []connector.HoldID{connector.HoldID(1000 + d.n(100))}))
	default:
		h.do(h.tracker.Moved(h.w.now, id, tracker.Outcome{Lost: d.n(2) == 0, Corrupt: []connector.BlockID{1 << 20}}))
	}
}
