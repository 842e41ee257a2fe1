package tracker

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// slotted checks that no two calls that may touch landing memory have a slot in common.
func (w *world) slotted(m Move) {
	if w.cfg.Slots == 0 {
		require.Nil(w.t, m.Slots)
		return
	}
	require.Len(w.t, m.Slots, len(m.Transfer.Blocks))
	for i, s := range m.Slots {
		require.True(w.t, s >= 0 && int(s) < w.cfg.Slots && !slices.Contains(m.Slots[:i], s), "slots %v", m.Slots)
		for _, other := range w.moves {
			require.False(w.t, other.Rank == m.Rank && slices.Contains(other.Slots, s), "slot %d of call %d is given to call %d", s, other.ID, m.ID)
		}
	}
}

func TestDivide(t *testing.T) {
	groups := []connector.Group{
		{BlockTokens: 16, Policy: connector.PolicyAll},
		{BlockTokens: 32, Policy: connector.PolicyTrailing, Trailing: 2},
	}
	list := func(group uint16, first, n int) (out []connector.Block) {
		for i := range n {
			out = append(out, connector.Block{ID: connector.BlockID(first + i), Group: group})
		}
		return out
	}
	type part struct{ from, tokens, first, blocks int }
	for name, c := range map[string]struct {
		t    connector.Transfer
		most int
		want []part
	}{
		"small":   {connector.Transfer{From: 32, Tokens: 32, Blocks: list(0, 5, 2)}, 2, []part{{32, 32, 5, 2}}},
		"even":    {connector.Transfer{From: 32, Tokens: 64, Blocks: list(0, 5, 4)}, 2, []part{{32, 32, 5, 2}, {64, 32, 7, 2}}},
		"partial": {connector.Transfer{Tokens: 37, Blocks: list(0, 0, 3)}, 2, []part{{0, 32, 0, 2}, {32, 5, 2, 1}}},
		"groups": {
			connector.Transfer{Tokens: 128, Blocks: append(list(0, 0, 8), list(1, 20, 2)...)},
			6,
			[]part{{0, 96, 0, 6}, {96, 32, 6, 2}, {64, 64, 20, 2}},
		},
	} {
		var got []part
		for _, p := range Divide(&c.t, groups, c.most) {
			got = append(got, part{p.From, p.Tokens, int(p.Blocks[0].ID), len(p.Blocks)})
		}
		require.Equal(t, c.want, got, name)
	}
}

func TestLanding(t *testing.T) {
	l := NewLanding(2, 8)
	require.Equal(t, 6, l.Most())
	loads := l.Take(0, Load, 6)
	require.Len(t, loads, 6)
	require.Nil(t, l.Take(0, Load, 1), "a quarter is for saves")
	saves := l.Take(0, Save, 2)
	require.Equal(t, []connector.BlockID{6, 7}, saves)
	require.Nil(t, l.Take(0, Save, 1))
	require.Len(t, l.Take(1, Save, 6), 6, "another rank has slots of its own")
	l.Give(0, Save, saves)
	require.Equal(t, 12, l.Used())
	require.Equal(t, []connector.BlockID{6}, l.Take(0, Save, 1))
	l.Give(0, Load, loads)
	require.Equal(t, connector.BlockID(7), l.Take(0, Load, 1)[0], "the slot that was free for longest")
}

// TestLandedCall: the plugin sees slots; what it says about them is translated, and a slot that it was not given is nobody's.
func TestLandedCall(t *testing.T) {
	m := Move{
		Transfer: &connector.Transfer{Request: "a", Blocks: []connector.Block{{ID: 5}, {ID: 6, Group: 1}}},
		Slots:    []connector.BlockID{3, 1},
	}
	require.Equal(t, []connector.Block{{ID: 3}, {ID: 1, Group: 1}}, m.Seen().Blocks)
	require.Equal(t, []Copy{{0, 5, 3}, {1, 6, 1}}, m.Out())
	err := m.Back(&connector.BlockError{Blocks: []connector.BlockID{1, 5}, Err: connector.ErrGone})
	require.Equal(t, &connector.BlockError{Blocks: []connector.BlockID{6, noBlock}, Err: connector.ErrGone}, err)
	require.Equal(t, []Copy{{0, 5, 3}}, m.In(err))
	require.Equal(t, []connector.Block{{ID: 5}}, Arrived(m.Transfer.Blocks, err))
	require.Empty(t, m.In(connector.ErrGone), "an error without blocks means all of them")
	m.Slots = nil
	require.Equal(t, connector.ErrGone, m.Back(connector.ErrGone))
	require.Same(t, m.Transfer, m.Seen())
}

func moves(actions []Action) (out []Move) {
	for _, a := range actions {
		if m, ok := a.(Move); ok {
			out = append(out, m)
		}
	}
	return out
}

// TestLandingQueue: transfers larger than landing memory go in parts, others wait for their turn, and
// slots that a dead plugin may still touch are given out only when it is reaped.
func TestLandingQueue(t *testing.T) {
	cfg := testConfig()
	cfg.Slots = 4
	b, now := New(cfg), time.Unix(0, 0)
	b.Up(now, 1)
	transfer := func(id connector.RequestID, first, n int) connector.Transfer {
		tr := connector.Transfer{Request: id, Tokens: 16 * n}
		for i := range n {
			tr.Blocks = append(tr.Blocks, connector.Block{Key: connector.BlockKey{1}, ID: connector.BlockID(first + i)})
		}
		return tr
	}
	first := moves(b.Step(now, &connector.Step{ID: 1, Admitted: []connector.Transfer{transfer("a", 0, 5), transfer("b", 10, 1)}}, nil))
	require.Len(t, first, 3, "three slots are for loads")
	next := moves(b.Moved(now, first[0].ID, Outcome{}))
	require.Len(t, next, 1)
	require.Equal(t, connector.RequestID("a"), next[0].Transfer.Request)
	require.Equal(t, 48, next[0].Transfer.From)

	require.Empty(t, moves(b.Moved(now, first[1].ID, Outcome{Lost: true})), "the plugin may still write its slot")
	require.Empty(t, moves(b.Down(now, 1)))
	require.Equal(t, 3, b.LandingUsed())
	require.Empty(t, moves(b.Reaped(now, 1)))
	require.Zero(t, b.LandingUsed())
	again := moves(b.Up(now, 2))
	require.Len(t, again, 3)
	var events []Event
	for len(again) > 0 {
		actions := b.Moved(now, again[0].ID, Outcome{})
		again = append(again[1:], moves(actions)...)
		for _, a := range actions {
			if e, ok := a.(Tell); ok {
				events = append(events, e.Event)
			}
		}
	}
	require.Len(t, events, 2)
	for _, e := range events {
		require.Empty(t, e.Failed)
	}
	require.True(t, b.Idle())
}

// TestLandingTooSmall: what the connector planned as one must stay one, and fails if it cannot.
func TestLandingTooSmall(t *testing.T) {
	cfg := testConfig()
	cfg.Slots, cfg.Can = 2, connector.CanPlan
	b, now := New(cfg), time.Unix(0, 0)
	b.Up(now, 1)
	tr := connector.Transfer{Request: "a", Tokens: 48, Blocks: []connector.Block{{ID: 1}, {ID: 2}, {ID: 3}}}
	plan, ok := b.Step(now, &connector.Step{ID: 1, Admitted: []connector.Transfer{tr}}, nil)[0].(Plan)
	require.True(t, ok)
	tr.Extra = []byte("mine")
	told, ok := b.Planned(now, plan.ID, &connector.Plan{Loads: []connector.Transfer{tr}}, nil)[0].(Tell)
	require.True(t, ok)
	require.Len(t, told.Event.Failed, 3)
	require.ErrorContains(t, told.Event.Err, "landing_bytes")
	require.True(t, b.Idle())
}
