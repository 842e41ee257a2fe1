package vllmtrace

import (
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
)

// script writes a short log by hand, behind the start of a recorded one.
type script struct {
	log  *Log
	step int
}

func newScript(t *testing.T) *script {
	t.Helper()
	start := readTrace(t, "async").Calls
	end := slices.IndexFunc(start, func(c Call) bool { return c.Kind == NewRequest })
	return &script{log: &Log{Calls: start[:end]}}
}

func (s *script) scheduler(k Kind, body any) {
	s.log.Calls = append(s.log.Calls, Call{Side: SchedulerSide, Kind: k, Step: s.step, Body: body})
}

// arrive brings a request that finds tokens elsewhere and gets a table.
func (s *script) arrive(id string, tokens, external int, table ...int) RequestView {
	r := RequestView{ID: id, Prompt: tokens, Tokens: tokens, Status: "WAITING", Hashes: tokens / 32}
	s.scheduler(NewRequest, &r)
	s.scheduler(Lookup, &LookupCall{Request: r, Tokens: external, Async: external > 0})
	s.scheduler(Alloc, &AllocCall{Request: r, Blocks: [][]int{table}, External: external})
	return r
}

func (s *script) end(r RequestView, status string, computed int, blocks ...int) {
	r.Status, r.Computed = status, computed
	s.scheduler(RequestFinished, &FinishedCall{Request: r, Blocks: blocks, Delay: true})
}

// run is one whole step of both sides.
func (s *script) run(m MetaCall, received ...string) {
	s.step++
	worker := func(k Kind, body any) {
		s.log.Calls = append(s.log.Calls, Call{Side: WorkerSide, Kind: k, Step: s.step, Body: body})
	}
	s.scheduler(BuildMeta, &m)
	worker(Preemptions, &PreemptionsCall{Step: s.step})
	worker(Bind, &BindCall{})
	worker(StartLoad, &StartLoadCall{})
	worker(WaitSave, &WaitSaveCall{})
	worker(TransferResults, &ResultsCall{FinishedRequests: m.Finished, Sending: m.Finished, Recving: received})
	worker(Clear, nil)
	s.scheduler(Output, &OutputCall{Sending: m.Finished, Recving: received})
}

func (s *script) replay(t *testing.T, chains Chains) (*Result, *rig) {
	t.Helper()
	s.log.Calls = append(s.log.Calls, Call{Side: ShimSide, Kind: End})
	require.Empty(t, Check(s.log))
	r := newRig(t, s.log, 1, 64)
	out, err := Replay(s.log, chains, r, r, Options{Model: r.eng.Model, Eager: true})
	require.NoError(t, err)
	for _, v := range Check(out.Log) {
		t.Error(v)
	}
	require.Empty(t, out.Offers)
	return out, r
}

// A block whose save still runs is given away by a preemption: handle_preemptions waits.
func TestPreemptedWhileSaving(t *testing.T) {
	s := newScript(t)
	a := s.arrive("a", 33, 0, 1, 2)
	s.run(MetaCall{New: []NewScheduled{{ID: "a", Prompt: 33, Blocks: [][]int{{1, 2}}}}, Scheduled: map[string]int{"a": 32}})
	d := s.arrive("d", 20, 0, 1)
	s.run(MetaCall{
		New: []NewScheduled{{ID: "d", Prompt: 20, Blocks: [][]int{{1}}}}, Scheduled: map[string]int{"d": 20}, Preempted: []string{"a"},
	})
	s.end(a, "FINISHED_ABORTED", 0)
	s.end(d, "FINISHED_STOPPED", 20, 1)
	s.run(MetaCall{Finished: []string{"a", "d"}})
	out, _ := s.replay(t, Chains{"a": {"h1"}})
	require.Equal(t, 1, out.Waits)
	require.Equal(t, 1, out.Saves)
}

// The same, and another request loads into the block: the load is held back until the save is over.
func TestLoadedWhileSaving(t *testing.T) {
	s := newScript(t)
	a := s.arrive("a", 33, 0, 1, 2)
	c := s.arrive("c", 33, 0, 3, 4)
	s.run(MetaCall{
		New:       []NewScheduled{{ID: "c", Prompt: 33, Blocks: [][]int{{3, 4}}}, {ID: "a", Prompt: 33, Blocks: [][]int{{1, 2}}}},
		Scheduled: map[string]int{"a": 32, "c": 32},
	})
	b := s.arrive("b", 33, 32, 1)
	s.run(MetaCall{Preempted: []string{"a"}, Loads: []LoadRef{{Request: "b", Blocks: []int{1}, Hashes: []string{"h2"}}}}, "b")
	b.Computed = 32
	s.scheduler(Alloc, &AllocCall{Request: b, Blocks: [][]int{{1, 5}}})
	s.run(MetaCall{New: []NewScheduled{{ID: "b", Prompt: 33, Blocks: [][]int{{1, 5}}, Computed: 32}}, Scheduled: map[string]int{"b": 1}})
	s.end(a, "FINISHED_ABORTED", 0)
	s.end(b, "FINISHED_LENGTH_CAPPED", 33, 1, 5)
	s.end(c, "FINISHED_LENGTH_CAPPED", 32, 3, 4)
	s.run(MetaCall{Finished: []string{"a", "b", "c"}})
	out, r := s.replay(t, Chains{"a": {"h1"}, "b": {"h2"}, "c": {"h2"}})
	require.Equal(t, 1, out.Loads)
	require.Equal(t, 3, out.Verified) // the load, and at their ends b's and c's blocks
	require.Equal(t, 1, r.seen[host.Loaded])
}

// An unknown kind of call is no call that was mapped.
func TestReplayRefusesUnknownCalls(t *testing.T) {
	s := newScript(t)
	s.scheduler("has_pending_magic", nil)
	r := newRig(t, s.log, 1, 64)
	_, err := Replay(s.log, nil, r, r, Options{Model: r.eng.Model})
	require.ErrorIs(t, err, ErrReplay)
	require.ErrorContains(t, err, "has_pending_magic")
}

// badHost is a host with one fault.
type badHost struct {
	*rig
	match func(q connector.Query, m connector.Match) connector.Match
	next  func(e Event) (again bool, changed Event)
	more  []Event
}

func (h *badHost) Match(q connector.Query, ticket []byte) connector.Match {
	m := h.rig.Match(q, ticket)
	if h.match != nil {
		m = h.match(q, m)
	}
	return m
}

func (h *badHost) Next() (Event, error) {
	if len(h.more) > 0 {
		e := h.more[0]
		h.more = h.more[1:]
		return e, nil
	}
	e, err := h.rig.Next()
	if err != nil || h.next == nil {
		return e, err
	}
	again, changed := h.next(e)
	if again {
		h.more = append(h.more, changed)
	}
	return changed, nil
}

// wrongHost is a fault and how it shows.
type wrongHost struct {
	host   badHost
	number int    // of the invariant, or
	stops  string // why the replay ends
}

func wrongAnswers() map[string]wrongHost {
	return map[string]wrongHost{
		"negative offer": {number: 11, host: badHost{match: func(_ connector.Query, m connector.Match) connector.Match {
			if !m.Later && m.Tokens == 0 {
				m.Tokens = -32
			}
			return m
		}}},
		"async nothing": {number: 13, host: badHost{match: func(_ connector.Query, m connector.Match) connector.Match {
			m.Async = !m.Later || m.Async
			return m
		}}},
		"whole prompt": {number: 16, host: badHost{match: func(q connector.Query, m connector.Match) connector.Match {
			if m.Tokens > 0 {
				m.Tokens = q.Tokens - q.Computed
			}
			return m
		}}},
		"fickle": {number: 10, host: badHost{match: func() func(connector.Query, connector.Match) connector.Match {
			n := 0
			return func(_ connector.Query, m connector.Match) connector.Match {
				if n++; m.Tokens > 32 && n%2 == 0 {
					m.Tokens -= 32
				}
				return m
			}
		}()}},
		"nothing denied": {number: 45, host: badHost{match: func(q connector.Query, m connector.Match) connector.Match {
			if !m.Later && m.Tokens == 0 && len(q.Keys) == 21 && q.Computed == 0 {
				return connector.Match{Tokens: 640, Async: true}
			}
			return m
		}}},
	}
}

func wrongEvents() map[string]wrongHost {
	return map[string]wrongHost{
		"reported twice": {stops: "finished", host: badHost{next: func(e Event) (bool, Event) { return e.Kind == Finished, e }}},
		"saved twice":    {stops: "a save of", host: badHost{next: func(e Event) (bool, Event) { return e.Kind == Saved, e }}},
		"loaded twice":   {stops: "a load of", host: badHost{next: func(e Event) (bool, Event) { return e.Kind == Loaded, e }}},
		"other blocks": {stops: "a save of", host: badHost{next: func(e Event) (bool, Event) {
			if e.Kind == Saved {
				e.Blocks = e.Blocks[1:]
			}
			return false, e
		}}},
		"unknown request": {stops: "has not ended", host: badHost{next: func(e Event) (bool, Event) {
			if e.Kind == Finished {
				e.Request = "nobody"
			}
			return false, e
		}}},
		"hides a failure": {stops: "should have failed", host: badHost{next: func(e Event) (bool, Event) {
			if e.Kind == Loaded && len(e.Failed) > 1 {
				e.Failed = e.Failed[1:]
			}
			return false, e
		}}},
	}
}

// What a host does wrong is found too: by the check of an invariant, or because the replay cannot go on.
func TestBadHostsAreCaught(t *testing.T) {
	all := wrongAnswers()
	maps.Copy(all, wrongEvents())
	for i, name := range slices.Sorted(maps.Keys(all)) {
		c := all[name]
		t.Run(name, func(t *testing.T) {
			if testing.Short() && i%8 > 0 {
				t.Skip("with -short, which the race stage uses, one in eight; make test runs all")
			}
			log := readTrace(t, "serve")
			chains, err := ChainsOf(log)
			require.NoError(t, err)
			c.host.rig = newRig(t, log, 1, 64)
			c.host.tolerant = true
			out, err := Replay(log, chains, &c.host, c.host.rig, Options{Model: c.host.eng.Model})
			if c.stops != "" {
				require.ErrorIs(t, err, ErrReplay)
				require.ErrorContains(t, err, c.stops)
				return
			}
			numbers := map[int]bool{}
			for _, v := range Check(out.Log) {
				numbers[v.Number] = true
			}
			require.True(t, numbers[c.number], "not caught, violations are of %v, error %v", numbers, err)
		})
	}
	t.Logf("%d wrong hosts, all caught", len(all))
}
