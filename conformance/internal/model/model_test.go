package model

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

func everything() Options {
	return Options{Groups: true, Ranks: true, Reset: true, Peer: true, Restart: true, Kill: true, Twice: true, Room: 6 << 20}
}

// The same seed makes the same history, and each fits into its caches.
func TestHistories(t *testing.T) {
	most := Shape{}
	segments, bytes, batch, kinds := 0, int64(0), 0, map[Kind]bool{}
	near := map[int]bool{}
	for seed := range uint64(60) {
		for n := range Tour {
			h := Generate(seed, n, everything())
			require.Equal(t, h, Generate(seed, n, everything()))
			s := &h.Shape
			most.Ranks = max(most.Ranks, s.Ranks)
			for _, g := range s.Groups {
				segments, bytes = max(segments, g.Segments), max(bytes, g.Bytes)
				require.GreaterOrEqual(t, g.Bytes, int64(minBlock))
				total := int64(0)
				for i := range g.Segments {
					require.Positive(t, g.Segment(i))
					total += g.Segment(i)
				}
				require.LessOrEqual(t, total, g.Bytes)
			}
			require.True(t, slices.ContainsFunc(s.Groups, func(g Group) bool { return g.Trailing == 0 }))
			require.LessOrEqual(t, int64(s.Slots)*s.blockBytes()*int64(s.Ranks), int64(max(MaxCache, minSlots*2*(maxBlock+64<<10)*len(s.Groups))))
			require.LessOrEqual(t, h.Bytes(), everything().Room)
			for _, step := range h.Steps {
				need := 0
				for i := range step {
					c := &step[i]
					kinds[c.Kind] = true
					need += len(c.Blocks(s))
					batch = max(batch, len(c.Keys))
					require.LessOrEqual(t, c.Only, s.Ranks)
				}
				require.LessOrEqual(t, need, s.Slots)
			}
			for _, k := range h.Keys {
				near[k.Share] = true
			}
		}
	}
	require.Equal(t, MaxRanks, most.Ranks)
	require.Greater(t, segments, 1900)
	require.Greater(t, bytes, int64(2<<20))
	require.Greater(t, batch, 3500)
	require.Len(t, kinds, int(Kill), "all but Wait, which bounded histories have")
	require.Len(t, near, 1+28, "0, or 4 to 31 shared bytes")
}

func TestKeysShareBytes(t *testing.T) {
	h := &History{Keys: []Near{{}, {Of: 0, Share: 31}, {Of: 0, Share: 31}, {Of: 0, Share: 4, Last: true}}}
	keys := h.BlockKeys("salt")
	require.Equal(t, keys, h.BlockKeys("salt"))
	require.NotEqual(t, keys, h.BlockKeys("other"))
	require.Equal(t, keys[0][:31], keys[1][:31])
	require.Equal(t, keys[0][:31], keys[2][:31])
	require.Equal(t, keys[0][28:], keys[3][28:])
	seen := map[connector.BlockKey]bool{}
	for _, k := range keys {
		require.False(t, seen[k])
		seen[k] = true
	}
}

// store answers as a right store does, in an order of its own, except what change does.
type store struct {
	shape  Shape
	blocks map[place]int
	change func(c *Call, r *Result)
}

func (s *store) do(step Step) Outcome {
	o := Outcome{Results: make([]Result, len(step))}
	for i := range step {
		s.call(&step[i], &o.Results[i])
		if s.change != nil {
			s.change(&step[i], &o.Results[i])
		}
	}
	return o
}

func (s *store) call(c *Call, r *Result) {
	switch c.Kind {
	case Save, Load:
		for rank := range s.shape.Ranks {
			r.Ranks = append(r.Ranks, s.move(c, rank))
		}
	case Match:
		j := NewJudge(s.shape, 1<<40)
		for i := range c.Queries {
			n := j.longest(&c.Queries[i], func(p place) bool { _, is := s.blocks[p]; return is })
			r.Answers = append(r.Answers, n*BlockTokens)
		}
	case Reset:
		clear(s.blocks)
		r.Emptied = true
	case Reopen, Restart, Wait, Kill:
	}
}

func (s *store) move(c *Call, rank int) Moved {
	refs := c.Blocks(&s.shape)
	m := Moved{Called: c.Only == 0 || c.Only-1 == rank, Failed: make([]bool, len(refs)), Found: make([]Found, len(refs))}
	if !m.Called {
		return m
	}
	for n, ref := range refs {
		p := place{ref.Key, ref.Group, rank}
		v, is := s.blocks[p]
		switch {
		case c.Kind == Save && !ref.Tail && (!is || c.Replace):
			s.blocks[p] = c.Version
		case c.Kind == Load && (ref.Tail || !is):
			m.Failed[n], m.Err = true, connector.ErrGone
		case c.Kind == Load:
			m.Found[n] = Found{What: Exact, Ref: ref, Rank: rank, Version: v}
		}
	}
	return m
}

// run plays a history on a store.
func run(h *History, change func(c *Call, r *Result)) ([]Outcome, *Violation) {
	s := &store{shape: h.Shape, blocks: map[place]int{}, change: change}
	j := NewJudge(h.Shape, 1<<40)
	var outcomes []Outcome
	for _, step := range h.Steps {
		o := s.do(step)
		outcomes = append(outcomes, o)
		if v := j.Step(step, &o); v != nil {
			return outcomes, v
		}
	}
	return outcomes, nil
}

func TestRightAnswersAreAllowed(t *testing.T) {
	seeds := uint64(100)
	if testing.Short() {
		seeds = 10
	}
	for seed := range seeds {
		for n := range Tour {
			h := Generate(seed, n, everything())
			_, v := run(h, nil)
			require.Nil(t, v, "seed %d, history %d", seed, n)
		}
	}
}

// Each wrong answer is found, breaks the right rule, and its history becomes short.
func TestWrongAnswers(t *testing.T) {
	each := func(change func(m *Moved, n int)) func(*Call, *Result) {
		return func(c *Call, r *Result) {
			for rank := range r.Ranks {
				for n := range r.Ranks[rank].Failed {
					if c.Kind == Load && !r.Ranks[rank].Failed[n] && r.Ranks[rank].Called {
						change(&r.Ranks[rank], n)
					}
				}
			}
		}
	}
	for name, wrong := range map[string]struct {
		rule   string
		change func(c *Call, r *Result)
	}{
		"a block that is not written": {"WORK-02", each(func(m *Moved, n int) { m.Found[n] = Found{What: Untouched} })},
		"another block":               {"KEY-06", each(func(m *Moved, n int) { m.Found[n].Ref.Key++ })},
		"another rank":                {"KEY-07", each(func(m *Moved, n int) { m.Found[n].Rank++ })},
		"another group":               {"KEY-08", each(func(m *Moved, n int) { m.Found[n].Ref.Group++ })},
		"other bytes":                 {"WORK-01", each(func(m *Moved, n int) { m.Found[n] = Found{What: Unknown} })},
		"other digests":               {"LAYOUT-03", each(func(m *Moved, n int) { m.Found[n] = Found{What: Digest} })},
		"a miss":                      {"WORK-01", each(func(m *Moved, n int) { m.Failed[n], m.Err = true, connector.ErrGone })},
		"half a token":                {"SCHED-04", func(_ *Call, r *Result) { add(r, 1) }},
		"one answer more":             {"SCHED-01", func(c *Call, r *Result) { r.Answers = more(c, r) }},
		"answers of other queries": {"SCHED-01", func(c *Call, r *Result) {
			if c.Kind == Match {
				slices.Reverse(r.Answers)
			}
		}},
		"nothing offered":   {"WORK-05", func(_ *Call, r *Result) { clear(r.Answers) }},
		"a save that fails": {"WORK-01", fails},
		"a call that hangs": {"WORK-07", func(_ *Call, r *Result) { r.Late = "hangs" }},
	} {
		t.Run(name, func(t *testing.T) {
			for n := 0; ; n++ {
				require.Less(t, n, 200, "nobody noticed")
				h := Generate(3, n, everything())
				_, first := run(h, wrong.change)
				if first == nil {
					continue
				}
				short := Shrink(h, func(h *History) (failed, stop bool) {
					_, v := run(h, wrong.change)
					return v != nil && v.Like(first), false
				})
				outcomes, v := run(short, wrong.change)
				require.LessOrEqual(t, short.Calls(), 3)
				lines := Transcript(short, outcomes, v)
				require.LessOrEqual(t, len(lines), 14)
				require.Contains(t, lines[len(lines)-1], "<- allowed: ")
				if v.Rule == wrong.rule {
					t.Log(Says(short, v), lines)
					return
				}
			}
		})
	}
}

func add(r *Result, tokens int) {
	for i := range r.Answers {
		r.Answers[i] += tokens
	}
}

func more(c *Call, r *Result) []int {
	if c.Kind == Match {
		return append(r.Answers, 0)
	}
	return r.Answers
}

func fails(c *Call, r *Result) {
	for rank := range r.Ranks {
		if m := &r.Ranks[rank]; c.Kind == Save && m.Called {
			m.Whole, m.Err = true, errors.New("disk on fire")
		}
	}
}

// What a store may forget is no violation, and what it makes up is.
func TestRoom(t *testing.T) {
	s := Shape{Ranks: 1, Groups: []Group{{Segments: 1, Bytes: 64}}, Slots: 8}
	save := Step{{Kind: Save, Keys: []Key{0, 1}}}
	miss := Step{{Kind: Match, Queries: []Query{{Keys: []Key{0, 1}}}}}
	saved := Outcome{Results: []Result{{Ranks: []Moved{{Called: true, Failed: make([]bool, 2)}}}}}
	for _, room := range []int64{-1, 1 << 20} {
		j := NewJudge(s, room)
		require.Nil(t, j.Step(save, &saved))
		v := j.Step(miss, &Outcome{Results: []Result{{Answers: []int{0}}}})
		require.Equal(t, room < 0, v == nil, fmt.Sprint(v))
	}
}

// Bounded histories save more than the bounds, for tenants, with waits and resets, and the same again for the same seed.
func TestBoundedHistories(t *testing.T) {
	kinds := map[Kind]bool{}
	for seed := range uint64(40) {
		for n := range Tour {
			h := GenerateBounded(seed, n, Bounded{Blocks: true, Tenant: true, Seconds: true}, Options{Reset: true})
			require.Equal(t, h, GenerateBounded(seed, n, Bounded{Blocks: true, Tenant: true, Seconds: true}, Options{Reset: true}))
			require.Positive(t, h.Bounds.Blocks)
			for _, step := range h.Steps {
				need := 0
				for i := range step {
					kinds[step[i].Kind] = true
					need += len(step[i].Blocks(&h.Shape))
				}
				require.LessOrEqual(t, need, h.Shape.Slots)
			}
		}
	}
	require.Equal(t, map[Kind]bool{Save: true, Load: true, Match: true, Reset: true, Wait: true}, kinds)
}

// The judge of a bounded connector lets it forget, and not more than that.
func TestBoundedJudge(t *testing.T) {
	shape := Shape{Ranks: 1, Groups: []Group{{Segments: 1, Bytes: 64}}, Slots: 64}
	limits := Limits{All: 2, Tenant: 2, Fits: 2, Time: time.Second}
	census := Call{Kind: Match, Queries: []Query{{Keys: []Key{0}}, {Keys: []Key{1}}, {Keys: []Key{2}}}}
	save := func(tenant int, keys ...Key) Call { return Call{Kind: Save, Keys: keys, Tenant: tenant} }
	saved := Result{Ranks: []Moved{{Called: true}}}
	offers := func(n ...int) Result {
		r := Result{}
		for _, blocks := range n {
			r.Answers = append(r.Answers, blocks*BlockTokens)
		}
		return r
	}
	for what, c := range map[string]struct {
		limits  Limits
		calls   []Call
		results []Result
		want    string
	}{
		"forgets an old block":   {Limits{All: 2}, []Call{save(1, 0, 1), save(1, 2), census}, []Result{saved, saved, offers(0, 1, 1)}, ""},
		"has too many":           {limits, []Call{save(1, 0, 1), save(2, 2), census}, []Result{saved, saved, offers(1, 1, 1)}, "OFF-02"},
		"has too many of one":    {Limits{Tenant: 1}, []Call{save(1, 0, 1), census}, []Result{saved, offers(1, 1, 0)}, "OFF-09"},
		"lost what it just took": {Limits{All: 2}, []Call{save(1, 0, 1), census}, []Result{saved, offers(1, 0, 0)}, "OFF-05"},
		"has one too old":        {limits, []Call{save(1, 0), {Kind: Wait, Cancel: 2 * time.Second}, census}, []Result{saved, {}, offers(1, 0, 0)}, "OFF-10"},
		"has one young enough":   {limits, []Call{save(1, 0), {Kind: Wait, Cancel: time.Second}, census}, []Result{saved, {}, offers(1, 0, 0)}, ""},
		"declines what fits":     {limits, []Call{save(1, 0)}, []Result{{Ranks: []Moved{{Called: true, Err: errors.New("no"), Whole: true}}}}, "OFF-05"},
		"declines what may not":  {limits, []Call{save(1, 0), save(1, 1)}, []Result{saved, {Ranks: []Moved{{Called: true, Err: errors.New("no"), Whole: true}}}}, ""},
	} {
		j := NewJudge(shape, 0)
		j.Bound(c.limits)
		var v *Violation
		for i := range c.calls {
			if v = j.Step(Step{c.calls[i]}, &Outcome{Results: []Result{c.results[i]}}); v != nil {
				require.Equal(t, len(c.calls)-1, i, what)
			}
		}
		if c.want == "" {
			require.Nil(t, v, what)
			continue
		}
		require.NotNil(t, v, what)
		require.Equal(t, c.want, v.Rule, what)
	}
}

// A store of slots gets no block that is larger than they are.
func TestBlocksFitIntoSlots(t *testing.T) {
	for _, block := range []int64{128, 4 << 10} {
		for seed := range uint64(20) {
			for n := range Tour {
				h := Generate(seed, n, Options{Twice: true, Room: 2 << 20, Most: 256, Block: block})
				require.LessOrEqual(t, h.Shape.blockBytes(), block)
				saved := map[Key]bool{}
				h.each(func(c *Call) {
					if c.Kind == Save {
						for _, k := range c.Keys {
							saved[k] = true
						}
					}
				})
				require.LessOrEqual(t, len(saved), 1024)
			}
		}
	}
}
