package tracker

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// TestTranscripts plays the scenarios of testdata: what a host tells a Tracker, and what the Tracker decides. They
// are documentation first. Run with -rewrite after a change, then read the difference. Blocks have 16 tokens.
//
//	new [holder] [lossy] [role=NAME] [threshold=N]
//	address ID size=N tokens=N is=NAME   the address of a request's leading tokens in blocks of another size
//	ticket ID tokens=N [turn] [size=N] [last=NAME] [tail=NAME]   a genuine ticket; size: of an engine of another shape
//	ticket ID refused=WORD               one that could not be opened, or is not for us
//	ask ID tokens=N [computed=N]         the engine's question
//	matched tokens=N [later] [busy]      the plugin answers the last question; matched_unseen: the engine does not look
//	load ID blocks=N, preempt ID, end ID [tokens=N] [remote] [weak] [tail=NAME]
//	moved [corrupt=(N,...)] [gone=(N,...)] [error=gone|busy|corrupt]   the plugin's answer to its oldest call
//	held [id=N] [ttl=DURATION] [consumers=N] [weak]        the Holder's answer to its oldest Finish
//	brought ID
//	reset [within=DURATION], give_up     a reset of the caches; its caller goes away
//	reset_answered [kept] [error=gone|busy]   the plugin's answer to its oldest reset
//	down, up                             the plugin
//	pass DURATION
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		s := &script{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			s.out.Reset()
			s.run(t, d)
			if s.out.Len() == 0 {
				return "ok"
			}
			return s.out.String()
		})
	})
}

// script is one scenario.
type script struct {
	b         *Tracker
	now       time.Time
	out       strings.Builder
	addresses map[string]connector.BlockKey
	moves     []Move
	asks      []Ask
	finishes  []Finish
	resets    []CallID // that the plugin works on
	reset     CallID   // the last one
	step      uint64
}

func named(name string) (k connector.BlockKey) {
	copy(k[:], name)
	return k
}

func (s *script) begin(t *testing.T, d *datadriven.TestData) {
	*s = script{now: time.Unix(0, 0), addresses: map[string]connector.BlockKey{}}
	cfg := testConfig()
	role := ""
	cfg.Can = connector.CanReset
	if d.HasArg("holder") {
		cfg.Can = connector.CanHold
	}
	if d.MaybeScanArgs(t, "role", &role); role != "" {
		var err error
		cfg.Role, err = connector.ParseRole(role)
		require.NoError(t, err)
	}
	d.MaybeScanArgs(t, "threshold", &cfg.Threshold)
	cfg.Lossy = d.HasArg("lossy")
	cfg.Windows = 4
	cfg.Addresses = func(id connector.RequestID, blockTokens, tokens int) []connector.BlockKey {
		list := make([]connector.BlockKey, (tokens+blockTokens-1)/blockTokens)
		list[len(list)-1] = s.addresses[fmt.Sprint(id, blockTokens, tokens)]
		return list
	}
	s.b = New(cfg)
	s.b.Up(s.now, 1)
}

func (s *script) run(t *testing.T, d *datadriven.TestData) {
	id := ""
	if len(d.CmdArgs) > 0 && len(d.CmdArgs[0].Vals) == 0 {
		id = d.CmdArgs[0].Key
	}
	n := map[string]int{}
	for _, name := range []string{"tokens", "computed", "size", "blocks"} {
		v := 0
		d.MaybeScanArgs(t, name, &v)
		n[name] = v
	}
	switch d.Cmd {
	case "new":
		s.begin(t, d)
	case "address":
		is := ""
		d.ScanArgs(t, "is", &is)
		s.addresses[fmt.Sprint(id, n["size"], n["tokens"])] = named(is)
	case "ticket":
		s.ticket(t, d, connector.RequestID(id), n)
	case "ask":
		s.ask(connector.RequestID(id), n)
	case "brought":
		promised, refused := s.b.Brought(connector.RequestID(id))
		fmt.Fprintf(&s.out, "promises %d tokens, refused %q\n", promised, refused)
	case "reset", "give_up", "reset_answered", "down", "up":
		s.resetting(t, d)
	case "pass":
		by, err := time.ParseDuration(id)
		require.NoError(t, err)
		s.now = s.now.Add(by)
		s.do(s.b.Tick(s.now))
	default:
		s.answer(t, d, connector.RequestID(id), n)
	}
}

// answer is what the engine decides, or the plugin answers.
func (s *script) answer(t *testing.T, d *datadriven.TestData, id connector.RequestID, n map[string]int) {
	s.step++
	st, tails := &connector.Step{ID: s.step}, Tails{}
	switch d.Cmd {
	case "matched", "matched_unseen":
		var err error
		if d.HasArg("busy") {
			err = connector.ErrBusy
		}
		a := s.asks[len(s.asks)-1]
		s.do(s.b.Matched(s.now, a.ID, connector.Match{Tokens: n["tokens"], Later: d.HasArg("later")}, err))
		if d.Cmd == "matched" {
			s.offer(a.Query.Request)
		}
		return
	case "moved":
		m := s.moves[0]
		s.moves = s.moves[1:]
		s.do(s.b.Moved(s.now, m.ID, outcome(t, d)))
		return
	case "held":
		f := s.finishes[0]
		s.finishes = s.finishes[1:]
		s.do(s.b.FinishAnswered(s.now, f.ID, []connector.Hold{answeredHold(t, d)}, nil))
		return
	case "load":
		st.Admitted = []connector.Transfer{{Request: id, Tokens: 16 * n["blocks"], Blocks: blocks(n["blocks"])}}
	case "save":
		st.Computed = []connector.Transfer{{Request: id, Tokens: 16 * n["blocks"], Blocks: blocks(n["blocks"])}}
	case "preempt":
		st.Preempted = []connector.RequestID{id}
	case "end":
		tail := ""
		d.MaybeScanArgs(t, "tail", &tail)
		tails[id] = named(tail)
		st.Ended = []connector.Ended{{
			Request: id, Reason: connector.ReasonLength, Tokens: n["tokens"], Remote: d.HasArg("remote") || d.HasArg("weak"),
			Weak: d.HasArg("weak"), Blocks: blocks((n["tokens"] + 15) / 16),
		}}
	default:
		t.Fatalf("unknown command %s", d.Cmd)
	}
	s.do(s.b.Step(s.now, st, tails))
}

// resetting is what concerns resets.
func (s *script) resetting(t *testing.T, d *datadriven.TestData) {
	switch d.Cmd {
	case "reset":
		var deadline time.Time
		within := ""
		if d.MaybeScanArgs(t, "within", &within); within != "" {
			by, err := time.ParseDuration(within)
			require.NoError(t, err)
			deadline = s.now.Add(by)
		}
		var actions []Action
		s.reset, actions = s.b.Reset(s.now, deadline)
		s.do(actions)
	case "give_up":
		s.do(s.b.GiveUpReset(s.now, s.reset, context.Canceled))
	case "reset_answered":
		id := s.resets[0]
		s.resets = s.resets[1:]
		s.do(s.b.ResetAnswered(s.now, id, !d.HasArg("kept"), outcome(t, d).Err))
	case "down":
		s.moves = nil
		s.do(s.b.Down(s.now, 1))
		s.do(s.b.Reaped(s.now, 1))
	default:
		s.do(s.b.Up(s.now, 2))
	}
}

func (s *script) ticket(t *testing.T, d *datadriven.TestData, id connector.RequestID, n map[string]int) {
	if !s.b.WantsTicket(id) {
		fmt.Fprintln(&s.out, "not wanted")
		return
	}
	refused, last, tail := "", "", ""
	if d.MaybeScanArgs(t, "refused", &refused); refused != "" {
		s.b.Refuse(id, refused)
		return
	}
	d.MaybeScanArgs(t, "last", &last)
	d.MaybeScanArgs(t, "tail", &tail)
	in := &Ticket{
		Tokens: n["tokens"], Lease: time.Minute,
		Cut: Cut{BlockTokens: n["size"], Last: named(last), Tail: named(tail)},
	}
	if n["size"] > 0 {
		in.Source = &Source{World: 1}
	}
	if d.HasArg("turn") {
		in.Lease = 0
	}
	if !s.b.Accept(&connector.Query{Request: id, Tokens: 1000}, in) {
		fmt.Fprintln(&s.out, "for another prompt")
		s.b.Refuse(id, "prompt")
	}
}

func (s *script) ask(id connector.RequestID, n map[string]int) {
	q := connector.Query{Request: id, Tokens: n["tokens"], Computed: n["computed"], Keys: make([]connector.BlockKey, n["tokens"]/16)}
	_, actions := s.b.Query(s.now, q)
	s.do(actions)
	s.offer(id)
}

func (s *script) offer(id connector.RequestID) {
	switch m := s.b.Match(s.now, id); {
	case m.Later:
		fmt.Fprintf(&s.out, "%s: later\n", id)
	case m.Tokens == 0:
		fmt.Fprintf(&s.out, "%s: nothing\n", id)
	default:
		fmt.Fprintf(&s.out, "%s: %d more tokens\n", id, m.Tokens)
	}
}

func blockList(t *testing.T, d *datadriven.TestData, name string) (list []connector.BlockID) {
	var ids []int
	d.MaybeScanArgs(t, name, &ids)
	for _, id := range ids {
		list = append(list, connector.BlockID(id))
	}
	return list
}

func outcome(t *testing.T, d *datadriven.TestData) Outcome {
	out := Outcome{Corrupt: blockList(t, d, "corrupt")}
	if gone := blockList(t, d, "gone"); gone != nil {
		out.Err = &connector.BlockError{Blocks: gone, Err: connector.ErrGone}
	}
	why := ""
	if d.MaybeScanArgs(t, "error", &why); why != "" {
		out.Err = map[string]error{"gone": connector.ErrGone, "busy": connector.ErrBusy, "corrupt": connector.ErrCorrupt}[why]
	}
	return out
}

func answeredHold(t *testing.T, d *datadriven.TestData) connector.Hold {
	var id int
	h := connector.Hold{Weak: d.HasArg("weak")}
	d.MaybeScanArgs(t, "id", &id)
	d.MaybeScanArgs(t, "consumers", &h.Consumers)
	ttl := ""
	if d.MaybeScanArgs(t, "ttl", &ttl); ttl != "" {
		var err error
		h.TTL, err = time.ParseDuration(ttl)
		require.NoError(t, err)
	}
	h.ID = connector.HoldID(id)
	return h
}

// do prints what the Tracker asks for.
func (s *script) do(actions []Action) {
	for _, a := range actions {
		switch a := a.(type) {
		case Ask:
			s.asks = append(s.asks, a)
			fmt.Fprintf(&s.out, "asks the plugin about %s: %d tokens, %d computed", a.Query.Request, a.Query.Tokens, a.Query.Computed)
			if a.Query.Ticket != nil {
				fmt.Fprint(&s.out, ", with a ticket")
			}
			if a.Query.Reshaped > 0 {
				fmt.Fprintf(&s.out, ", of which %d are the same there", a.Query.Reshaped)
			}
			fmt.Fprintln(&s.out)
		case Move:
			s.moves = append(s.moves, a)
			fmt.Fprintf(&s.out, "%ss blocks of %s", a.Kind, a.Transfer.Request)
			if a.Source != nil {
				fmt.Fprint(&s.out, ", reshaped")
			}
			fmt.Fprintln(&s.out)
		case Finish:
			s.finishes = append(s.finishes, a)
			fmt.Fprintf(&s.out, "asks the plugin whether to keep %s\n", a.Ended[0].Request)
		case Reset:
			s.resets = append(s.resets, a.ID)
			fmt.Fprintln(&s.out, "resets the connector")
		case ResetOver:
			fmt.Fprintf(&s.out, "the reset is over: emptied %v, error %v\n", a.Emptied, a.Err)
		case CancelCall:
			fmt.Fprintln(&s.out, "cancels a call")
		case Tell:
			fmt.Fprintln(&s.out, told(&a.Event))
		default:
			fmt.Fprintf(&s.out, "%T\n", a)
		}
	}
}

func told(e *Event) string {
	kinds := [...]string{"", "loaded", "saved", "finished", "released", "answered", "stored"}
	s := fmt.Sprintf("tells: %s %s", kinds[e.Kind], e.Request)
	switch {
	case errors.Is(e.Err, connector.ErrCorrupt):
		s += fmt.Sprintf(", blocks %v are damaged", e.Failed)
	case len(e.Failed) > 0:
		s += fmt.Sprintf(", blocks %v failed: %v", e.Failed, e.Err)
	case e.Held:
		s += fmt.Sprintf(", held for %v", e.Hold.TTL)
	}
	if e.Ticket != nil {
		s += fmt.Sprintf(", with a ticket of %v", e.Ticket)
	}
	return s
}
