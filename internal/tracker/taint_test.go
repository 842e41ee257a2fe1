package tracker

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// run is a transfer of n blocks of request r from a block on.
func run(from, n int) connector.Transfer {
	return connector.Transfer{Request: "r", From: 16 * from, Tokens: 16 * n, Blocks: blocks(from + n)[from:]}
}

// loads gives request r n blocks from a block on, of which some fail, and says whether they are unverified.
func (b *bench) loads(from, n int, failed ...connector.BlockID) bool {
	b.t.Helper()
	b.got(b.Step(b.now, &connector.Step{ID: 9, Arrived: []connector.Query{{Request: "r"}}, Admitted: []connector.Transfer{run(from, n)}}, nil))
	out := Outcome{}
	if len(failed) > 0 {
		out.Err = &connector.BlockError{Blocks: failed, Err: connector.ErrGone}
	}
	b.done(one[Move](b), out)
	return b.event().Unverified
}

// saves says whether blocks of request r are saved.
func (b *bench) saves(from, n int) bool {
	b.t.Helper()
	b.got(b.Step(b.now, &connector.Step{ID: 10, Computed: []connector.Transfer{run(from, n)}}, nil))
	if len(all[Move](b)) > 0 {
		b.done(one[Move](b), Outcome{})
		require.Empty(b.t, b.event().Failed)
		return true
	}
	e := b.event()
	require.Len(b.t, e.Failed, n, "nobody may take them for stored")
	require.ErrorIs(b.t, e.Err, connector.ErrDeclined)
	return false
}

// ends is the end of request r with n tokens for a consumer.
func (b *bench) ends(n int) {
	b.t.Helper()
	b.got(b.Step(b.now, &connector.Step{ID: 11, Ended: []connector.Ended{{Request: "r", Tokens: n, Remote: true, Blocks: blocks((n + 15) / 16)}}}, nil))
}

// TestTaintIsNotSaved: what a request computes behind a load that nobody has verified is neither saved nor promised;
// what it had before is.
func TestTaintIsNotSaved(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Lossy = true })
	require.True(t, b.saves(0, 1))
	require.True(t, b.loads(1, 2))
	require.False(t, b.saves(3, 1))
	require.False(t, b.saves(0, 4), "though its first block is not tainted")
	require.True(t, b.saves(0, 1))
	b.ends(64)
	require.Equal(t, 16, b.event().Ticket.Tokens)
	require.True(t, b.Idle())
	require.True(t, b.saves(3, 1), "of another request with that id")
}

// TestTaintIsOfWhatArrived: a load that failed as a whole, or from its first block on, leaves nothing, and one that
// failed further on leaves what comes before.
func TestTaintIsOfWhatArrived(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Lossy = true })
	require.False(t, b.loads(0, 2, 0, 1))
	require.True(t, b.saves(0, 2))
	require.False(t, b.loads(0, 2, 0), "the engine computes what follows the first block, too")
	require.True(t, b.saves(0, 2))
	require.True(t, b.loads(2, 2, 3))
	require.False(t, b.saves(3, 1))
	require.True(t, b.loads(4, 1))
	require.False(t, b.saves(3, 1), "a second load does not begin behind the first")
	verified := newBench(t, nil)
	require.False(t, verified.loads(0, 2))
	require.True(t, verified.saves(2, 1))
}

// TestTaintOfGroups: so does a load of which one group failed from its first block on.
func TestTaintOfGroups(t *testing.T) {
	for failed, tainted := range map[connector.BlockID]bool{0: false, 1: true, 2: false, 3: true} {
		b := newBench(t, func(c *Config) {
			c.Lossy = true
			c.Groups = append(c.Groups, connector.Group{BlockTokens: 16, Policy: connector.PolicyTrailing, Trailing: 2})
		})
		both := connector.Transfer{Request: "r", Tokens: 32, Blocks: blocks(4)}
		both.Blocks[2].Group, both.Blocks[3].Group = 1, 1
		b.got(b.Step(b.now, &connector.Step{ID: 9, Arrived: []connector.Query{{Request: "r"}}, Admitted: []connector.Transfer{both}}, nil))
		b.done(one[Move](b), Outcome{Err: &connector.BlockError{Blocks: []connector.BlockID{failed}, Err: connector.ErrGone}})
		require.Equal(t, tainted, b.event().Unverified, "block %d", failed)
		b.got(b.Step(b.now, &connector.Step{ID: 10, Computed: []connector.Transfer{both}}, nil))
		require.Equal(t, tainted, len(all[Move](b)) == 0, "block %d", failed)
	}
}

// TestTaintEndsWithItsBlocks: a request that has lost its blocks starts over with others.
func TestTaintEndsWithItsBlocks(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Lossy = true })
	require.True(t, b.loads(0, 2))
	require.False(t, b.saves(2, 1))
	b.got(b.Step(b.now, &connector.Step{ID: 10, Preempted: []connector.RequestID{"r"}}, nil))
	require.True(t, b.saves(0, 3))
	b.ends(48)
	require.Equal(t, 48, b.event().Ticket.Tokens)
	again := newBench(t, func(c *Config) { c.Lossy = true })
	require.True(t, again.loads(1, 1))
	require.False(t, again.saves(2, 2))
	again.got(again.Step(again.now, &connector.Step{ID: 10, Preempted: []connector.RequestID{"r"}}, nil))
	require.True(t, again.saves(0, 2))
	again.ends(64)
	require.Equal(t, 64, again.event().Ticket.Tokens, "the rest was found in the prefix cache, since another request has saved it")
}

// TestTaintIsNotPlanned: a Planner does not learn of saves that it must not plan.
func TestTaintIsNotPlanned(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Lossy, c.Can = true, connector.CanPlan })
	b.got(b.Step(b.now, &connector.Step{ID: 9, Arrived: []connector.Query{{Request: "r"}}, Admitted: []connector.Transfer{run(0, 2)}}, nil))
	b.got(b.Planned(b.now, one[Plan](b).ID, &connector.Plan{Loads: []connector.Transfer{run(0, 2)}}, nil))
	b.done(one[Move](b), Outcome{})
	require.True(t, b.event().Unverified)
	other := run(0, 1)
	other.Request = "s"
	b.got(b.Step(b.now, &connector.Step{ID: 10, Computed: []connector.Transfer{run(2, 1), other}}, nil))
	require.Equal(t, []connector.Transfer{other}, one[Plan](b).Step.Computed)
	require.Equal(t, connector.RequestID("r"), b.event().Request)
	b.got(b.Planned(b.now, one[Plan](b).ID, &connector.Plan{Saves: []connector.Transfer{run(2, 1)}}, nil))
	require.Empty(t, all[Move](b), "whatever it plans")
	require.Equal(t, 1, b.Counters().Violations)
}

// TestTaintIsNotHeld: a Holder is not asked to keep a tainted request, for the next turn either, unless it ends before
// the taint.
func TestTaintIsNotHeld(t *testing.T) {
	for _, weak := range []bool{false, true} {
		b := newBench(t, func(c *Config) { c.Lossy, c.Can = true, connector.CanHold })
		require.True(t, b.loads(1, 2))
		b.got(b.Step(b.now, &connector.Step{ID: 11, Ended: []connector.Ended{{Request: "r", Tokens: 50, Remote: true, Weak: weak, Blocks: blocks(4)}}}, nil))
		f := one[Finish](b)
		require.False(t, f.Ended[0].Remote || f.Ended[0].Weak)
		require.Empty(t, f.Partial)
		b.got(b.FinishAnswered(b.now, f.ID, []connector.Hold{{ID: 7}}, nil))
		e := b.event()
		require.False(t, e.Held)
		require.Nil(t, e.Ticket)
		require.Len(t, e.Blocks, 4)
		require.Empty(t, b.Pins())
	}
	b := newBench(t, func(c *Config) { c.Lossy, c.Can = true, connector.CanHold })
	require.True(t, b.loads(1, 2))
	b.ends(16)
	f := one[Finish](b)
	require.True(t, f.Ended[0].Remote)
	b.got(b.FinishAnswered(b.now, f.ID, []connector.Hold{{ID: 7}}, nil))
	require.Equal(t, 16, b.event().Ticket.Tokens)
}

// TestTaintOfLayers: saves that are handed over before they are computed are no exception.
func TestTaintOfLayers(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Lossy, c.Can = true, connector.CanLayers })
	require.True(t, b.loads(0, 2))
	b.got(b.Step(b.now, &connector.Step{ID: 10, Computing: []connector.Transfer{run(2, 1)}}, nil))
	require.Empty(t, all[Move](b))
	require.ErrorIs(t, b.event().Err, connector.ErrDeclined)
}
