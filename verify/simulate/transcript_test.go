package simulate

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
)

// TestTranscripts plays the scenarios of testdata. They are documentation first: what everybody does
// and says when one thing goes wrong. Run with -rewrite after a change, then read the difference.
//
//	new medium=store|holds prefills=N decodes=N blocks=N size=N ranks=N groups=N window=N slots=N seqs=N batch=N [both planner fail nocache overlap] mutant=NAME
//	client prompt=(1,2,3) max=N      a client comes
//	route [fault=NAME]               the router takes the next step for everybody who waits for it
//	turn ENGINE [fast]               the engine's loop goes round; fast: the plugin answers questions at once
//	work ENGINE WHAT [blocks=N] [deaf] [fault=NAME]   the plugin works on its first ask, finish, plan, reset, load or save;
//	                                 deaf: whether or not it was told to stop
//	answer ENGINE [scheduler] [fault=NAME]     the plugin's answers reach the host, or only those of the scheduler side
//	consume ENGINE                   the plugin reports what was fetched
//	crash ENGINE, hang ENGINE        the plugin's process
//	scribble ENGINE                  the plugin writes where it likes in landing memory
//	leave N                          the client goes away
//	store WHAT                       lose, damage, swap: the oldest stored block, or the oldest two
//	reset ENGINE [leave], restart ENGINE      leave: who resets it goes away
//	ghost ENGINE                     answers that nobody waits for
//	pass DURATION
//	settle                           no more faults, until all is over
//	blocks ENGINE
func TestTranscripts(t *testing.T) {
	played := 0
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		played++
		s := &story{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			s.out.Reset()
			if d.Cmd == "new" {
				s.begin(t, d)
				return ""
			}
			s.command(t, d)
			if s.w.violation == nil {
				s.w.after()
			}
			if s.out.Len() == 0 {
				return "ok"
			}
			return s.out.String()
		})
		wanted := s.w.opt.Mutant != Sound
		require.Equal(t, wanted, s.w.violation != nil, "%v", s.w.violation)
	})
	require.GreaterOrEqual(t, played, 20)
}

// story is one scenario.
type story struct {
	w   *World
	out strings.Builder
}

func (s *story) begin(t *testing.T, d *datadriven.TestData) {
	o := Options{
		Medium: ThroughStore, Decodes: 1, BlockTokens: 2, Blocks: 12, Groups: 1, Ranks: 1, MaxBatchedTokens: 32, MaxSeqs: 4,
		PrefixCaching: !d.HasArg("nocache"), AllBoth: d.HasArg("both"), Planner: d.HasArg("planner"), FailLoads: d.HasArg("fail"), Overlap: d.HasArg("overlap"), Rough: 1,
	}
	medium, mutant := "store", ""
	d.MaybeScanArgs(t, "medium", &medium)
	d.MaybeScanArgs(t, "mutant", &mutant)
	for name, n := range map[string]*int{
		"prefills": &o.Prefills, "decodes": &o.Decodes, "blocks": &o.Blocks, "size": &o.BlockTokens, "ranks": &o.Ranks,
		"groups": &o.Groups, "window": &o.Window, "slots": &o.Slots, "seqs": &o.MaxSeqs, "batch": &o.MaxBatchedTokens,
	} {
		d.MaybeScanArgs(t, name, n)
	}
	if medium == "holds" {
		o.Medium = ThroughHolds
	}
	for _, m := range Mutants() {
		if m.Name == mutant {
			o.Mutant = m.Mutant
		}
	}
	require.Equal(t, mutant == "", o.Mutant == Sound)
	o.Trace = &s.out
	s.w = newWorld(o)
}

func (s *story) command(t *testing.T, d *datadriven.TestData) {
	w := s.w
	random := rng(1)
	fault := faultOf(t, d)
	switch d.Cmd {
	case "client":
		s.client(t, d)
	case "route":
		for range len(w.router.wants) {
			w.router.route(&random, fault)
		}
	case "leave":
		for _, c := range w.router.live {
			if fmt.Sprint(c.n) == d.CmdArgs[0].Key {
				w.router.live = append([]*client{c}, without(w.router.live, c)...)
			}
		}
		var first zero
		w.router.leave(first.rng())
	case "store":
		s.store(t, d.CmdArgs[0].Key)
	case "pass":
		by, err := time.ParseDuration(d.CmdArgs[0].Key)
		require.NoError(t, err)
		w.advance(by)
	case "settle":
		w.settle()
		a := &w.stats
		fmt.Fprintf(&s.out, "%d clients answered, %d broken off, %d left\n", a.Answered, a.Broken, a.Gone)
	default:
		s.engine(t, d, fault)
	}
}

// zero makes a generator that always gives 0, which is a list's first element, or a number close to it.
type zero struct{ d rng }

func (z *zero) rng() *rng {
	for seed := rng(0); ; seed++ {
		probe := seed
		if probe.next()%(2*3*4*5*7) == 0 {
			z.d = seed
			return &z.d
		}
	}
}

func (s *story) engine(t *testing.T, d *datadriven.TestData, fault Fault) {
	i := slices.IndexFunc(s.w.engines, func(e *engine) bool { return e.name == d.CmdArgs[0].Key })
	require.GreaterOrEqual(t, i, 0, "no engine %s", d.CmdArgs[0].Key)
	e := s.w.engines[i]
	switch d.Cmd {
	case "turn":
		fast := 0
		if d.HasArg("fast") {
			fast = 100
		}
		e.turn(1000, fast)
	case "work":
		s.work(t, d, e.host.proc, fault)
	case "answer":
		s.answer(e.host, d.HasArg("scheduler"), fault)
	case "consume":
		e.host.proc.consume(fault)
	case "crash":
		e.host.proc.crash()
	case "reset":
		if d.HasArg("leave") {
			e.leaveReset()
			return
		}
		e.reset(new(zero).rng())
	case "restart":
		s.w.say("%s dies and starts again", e.name)
		e.restart()
	default:
		s.misbehave(t, d.Cmd, e)
	}
}

// misbehave is a plugin that does what none should, and a look at the blocks.
func (s *story) misbehave(t *testing.T, what string, e *engine) {
	switch what {
	case "scribble":
		for slot := range e.landing[0] {
			e.landing[0][slot].tags[0].kv ^= 1
		}
		s.w.say("%s: the plugin writes all over landing memory", e.name)
	case "hang":
		e.host.proc.hung = s.w.now
		s.w.say("%s: plugin hangs", e.name)
	case "ghost":
		before := e.host.tracker.Counters().Unknown
		for seed := range rng(100) {
			e.host.ghost(&seed)
		}
		fmt.Fprintf(&s.out, "%d answers dropped\n", e.host.tracker.Counters().Unknown-before)
	case "blocks":
		n := e.pool.Counts()
		fmt.Fprintf(&s.out, "%s: %d free, %d used, %d pinned, %d held\n", e.name, n[0], n[1], n[2], n[3])
	default:
		t.Fatalf("unknown command %s", what)
	}
}

func faultOf(t *testing.T, d *datadriven.TestData) Fault {
	name := ""
	d.MaybeScanArgs(t, "fault", &name)
	i := slices.Index(faultNames[:], name)
	require.GreaterOrEqual(t, i, 0, "no fault %s", name)
	return Fault(i)
}

func (s *story) client(t *testing.T, d *datadriven.TestData) {
	var prompt []int
	n, salt := 1, ""
	d.ScanArgs(t, "prompt", &prompt)
	d.MaybeScanArgs(t, "max", &n)
	d.MaybeScanArgs(t, "salt", &salt)
	tokens := make([]int32, len(prompt))
	for i, p := range prompt {
		tokens[i] = int32(p)
	}
	s.w.router.enter(tokens, salt, n)
}

// work lets the plugin do its first job, or its first move of a kind, the whole of it unless told.
func (s *story) work(t *testing.T, d *datadriven.TestData, p *proc, fault Fault) {
	if fault == faultCrash {
		p.crash()
		return
	}
	what, n := d.CmdArgs[1].Key, 1000
	d.MaybeScanArgs(t, "blocks", &n)
	var z zero
	if what != "load" && what != "save" {
		require.NotEmpty(t, p.jobs, "the plugin has nothing to do")
		p.doJob(p.jobs[0], z.rng(), fault)
		return
	}
	for _, m := range p.moves {
		if m.Kind.String() == what && !m.answered && !m.stuck {
			m.canceled = m.canceled && !d.HasArg("deaf")
			p.doMove(m, n, z.rng(), fault)
			return
		}
	}
	t.Fatalf("the plugin has no %s to do", what)
}

func (s *story) answer(h *host, scheduler bool, fault Fault) {
	p := h.proc
	for len(p.jobs) > 0 && p.jobs[0].answered {
		p.answerJob(fault)
	}
	if scheduler {
		return
	}
	var z zero
	for _, m := range slices.Clone(p.moves) {
		if m.answered {
			p.replyMove(m, z.rng(), fault)
		}
	}
}

func (s *story) store(t *testing.T, what string) {
	st := s.w.store
	switch what {
	case "lose":
		st.lose(0)
	case "damage":
		st.cells[st.order[0]].tags[0].kv ^= 1
	case "swap":
		st.cells[st.order[0]], st.cells[st.order[1]] = st.cells[st.order[1]], st.cells[st.order[0]]
	default:
		t.Fatalf("unknown misfortune %s", what)
	}
}
