package sched

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/kvcache"
)

// TestInteraction plays the scenarios of testdata, transcripts of what the loop tells the scheduler
// and what the scheduler decides. Run with -rewrite after a change, then read the difference.
func TestInteraction(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		var s *script
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "new" {
				s = newScript(t, d)
				return ""
			}
			s.out.Reset()
			s.run(t, d)
			require.NoError(t, s.pool.Check())
			if s.out.Len() == 0 {
				return "ok"
			}
			return s.out.String()
		})
	})
}

// script is one scenario.
type script struct {
	s       *Scheduler
	pool    *kvcache.Pool
	out     strings.Builder
	answers map[string]connector.Match // what the connector says, a miss otherwise
	steps   map[string]uint64          // last step that gave the host a load, save or end of a request
}

func newScript(t *testing.T, d *datadriven.TestData) *script {
	cfg := Config{BlockTokens: 4, MaxBatchedTokens: 16, MaxSeqs: 4}
	blocks, role := 16, ""
	d.MaybeScanArgs(t, "budget", &cfg.MaxBatchedTokens)
	d.MaybeScanArgs(t, "seqs", &cfg.MaxSeqs)
	d.MaybeScanArgs(t, "blocks", &blocks)
	d.MaybeScanArgs(t, "groups", &cfg.Groups)
	cfg.PrefixCaching, cfg.FailLoads = d.HasArg("cache"), d.HasArg("fail")
	if d.MaybeScanArgs(t, "role", &role); role != "" {
		var err error
		cfg.Role, err = connector.ParseRole(role)
		require.NoError(t, err)
	}
	s := &script{pool: kvcache.New(blocks), answers: map[string]connector.Match{}, steps: map[string]uint64{}}
	s.s = New(cfg, s.pool)
	return s
}

func (s *script) run(t *testing.T, d *datadriven.TestData) {
	rid := subject(d)
	id := string(rid)
	switch d.Cmd {
	case "add":
		s.add(t, d, rid)
	case "offer": // the connector's answer from now on
		m := connector.Match{Later: d.HasArg("later")}
		var groups int
		d.MaybeScanArgs(t, "tokens", &m.Tokens)
		d.MaybeScanArgs(t, "groups", &groups)
		m.Groups = uint32(groups)
		s.answers[id] = m
	case "step":
		s.step(d.HasArg("broken"))
	case "abort":
		s.s.Abort(rid, connector.ReasonAbort, nil)
	case "forget":
		s.s.Forget()
	case "blocks":
		n := s.pool.Counts()
		fmt.Fprintf(&s.out, "free %d used %d pinned %d held %d\n", n[0], n[1], n[2], n[3])
	default:
		s.event(t, d, rid)
	}
	if d.Cmd != "step" {
		s.outputs()
	}
}

// event is what the host reports about something that was handed to it.
func (s *script) event(t *testing.T, d *datadriven.TestData, rid connector.RequestID) {
	id := string(rid)
	switch d.Cmd {
	case "loaded":
		s.s.Loaded(s.steps["load "+id], rid, blockIDs(t, d, "failed"), d.HasArg("corrupt"), d.HasArg("unverified"))
	case "lost":
		if d.HasArg("hold") {
			s.s.LostHold(s.steps["end "+id], rid)
		} else {
			s.lost(rid, d.HasArg("load"))
		}
	case "saved":
		s.s.Saved(s.steps["save "+id], rid)
	case "stored":
		s.s.Stored(s.steps["save "+id], rid)
	case "finished":
		s.s.Finished(s.steps["end "+id], rid, d.HasArg("held"), []byte("ticket"))
	case "released":
		s.s.Released(s.steps["end "+id], rid)
	case "answered":
		s.s.Answered(rid)
	default:
		t.Fatalf("unknown command %s", d.Cmd)
	}
}

func (s *script) lost(id connector.RequestID, load bool) {
	step := s.steps["save "+string(id)]
	if load {
		step = s.steps["load "+string(id)]
	}
	s.s.Lost(step, id, load)
}

func blockIDs(t *testing.T, d *datadriven.TestData, arg string) (ids []connector.BlockID) {
	var list []int
	d.MaybeScanArgs(t, arg, &list)
	for _, b := range list {
		ids = append(ids, connector.BlockID(b))
	}
	return ids
}

// tables shows block tables, one after the other.
func tables(list [][]connector.BlockID) string {
	var text []string
	for _, t := range list {
		text = append(text, fmt.Sprint(t))
	}
	return strings.Join(text, "")
}

// subject is the request that a command is about: its first argument.
func subject(d *datadriven.TestData) connector.RequestID {
	if len(d.CmdArgs) > 0 && len(d.CmdArgs[0].Vals) == 0 {
		return connector.RequestID(d.CmdArgs[0].Key)
	}
	return ""
}

// add submits a prompt: letters, one token each.
func (s *script) add(t *testing.T, d *datadriven.TestData, id connector.RequestID) {
	req := Request{ID: id, Space: &connector.KeySpace{}, MaxTokens: 8, Remote: d.HasArg("remote"), Query: d.HasArg("query")}
	req.Turn = req.Query && req.Remote
	for _, c := range strings.TrimSpace(d.Input) {
		req.Prompt = append(req.Prompt, c)
	}
	req.Keys = req.Space.Keys(req.Prompt, 4)
	d.MaybeScanArgs(t, "max", &req.MaxTokens)
	if d.HasArg("ticket") {
		req.Ticket = []byte("ticket")
	}
	if err := s.s.Add(req); err != nil {
		fmt.Fprintln(&s.out, err)
	}
}

// step is one round of the loop. The model's next token is the upper case of the last one.
func (s *script) step(broken bool) {
	for _, q := range s.s.Questions() {
		m := s.answers[string(q.Query.Request)]
		fmt.Fprintf(&s.out, "ask %s beyond %d of %d: ", q.Query.Request, q.Query.Computed, q.Query.Tokens)
		if m.Later {
			fmt.Fprintln(&s.out, "later")
		} else {
			fmt.Fprintln(&s.out, m.Tokens)
		}
		s.s.Answer(q.Query.Request, q.Query.Computed, m)
	}
	chunks, st := s.s.Schedule()
	s.tell(st)
	var sampled []int32
	for _, c := range chunks {
		text := string(c.Tokens)
		next := ""
		if c.Sample {
			next = " ->"
		}
		fmt.Fprintf(&s.out, "compute %s @%d %s %v%s\n", c.Request, c.Start, text, tables(c.Blocks), next)
		sampled = append(sampled, unicode.ToUpper(c.Tokens[len(c.Tokens)-1]))
	}
	switch {
	case len(chunks) == 0:
		fmt.Fprintln(&s.out, "idle")
	case broken:
		s.tell(s.s.Fail(errors.New("broken")))
	default:
		s.tell(s.s.Commit(sampled))
	}
	s.outputs()
}

func (s *script) tell(st *connector.Step) {
	if st == nil {
		return
	}
	ids := func(blocks []connector.Block) string {
		var list []string
		for _, b := range blocks {
			text := fmt.Sprint(b.ID)
			if b.Key == (connector.BlockKey{}) {
				text += "?"
			}
			list = append(list, text)
		}
		return "[" + strings.Join(list, " ") + "]"
	}
	for _, q := range st.Arrived {
		fmt.Fprintf(&s.out, "  host: %s arrived\n", q.Request)
	}
	for _, r := range st.Preempted {
		fmt.Fprintf(&s.out, "  host: %s preempted\n", r)
	}
	for _, x := range st.Admitted {
		s.steps["load "+string(x.Request)] = st.ID
		fmt.Fprintf(&s.out, "  host: load %s %d..%d %s\n", x.Request, x.From, x.From+x.Tokens, ids(x.Blocks))
	}
	for _, x := range st.Computed {
		s.steps["save "+string(x.Request)] = st.ID
		how := "save"
		if x.Replace {
			how = "save again"
		}
		fmt.Fprintf(&s.out, "  host: %s %s %d..%d %s\n", how, x.Request, x.From, x.From+x.Tokens, ids(x.Blocks))
	}
	for _, e := range st.Ended {
		s.steps["end "+string(e.Request)] = st.ID
		remote := ""
		if e.Remote {
			remote = " for a consumer"
			if e.Weak {
				remote += " that may not come"
			}
		}
		fmt.Fprintf(&s.out, "  host: %s ended, reason %d, %d tokens %s%s\n", e.Request, e.Reason, e.Tokens, ids(e.Blocks), remote)
	}
}

func (s *script) outputs() {
	for _, o := range s.s.Outputs() {
		fmt.Fprintf(&s.out, "  %s: ", o.Request)
		for _, t := range o.Tokens {
			fmt.Fprintf(&s.out, "%c ", t)
		}
		if o.Reason != 0 {
			fmt.Fprintf(&s.out, "end, reason %d, %d generated, %d local, %d external", o.Reason, o.Generated, o.Local, o.External)
		}
		if o.Err != nil {
			fmt.Fprintf(&s.out, ", %v", o.Err)
		}
		if o.Ticket != nil {
			fmt.Fprintf(&s.out, ", %s", o.Ticket)
		}
		fmt.Fprintln(&s.out)
	}
}
