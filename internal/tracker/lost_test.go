package tracker

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// What a generation had that left somebody behind never comes back; everything else goes on with the next
// one. Every transfer has its one event.
func TestAbandonedBlocksAreLost(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Ranks = 2 })
	b.start(Load, 2)
	moves := all[Move](b)
	require.Len(t, moves, 2)
	b.done(moves[0], Outcome{}) // one rank was faster
	b.done(moves[1], Outcome{Lost: true})
	b.quiet()
	b.got(b.Abandoned(b.now, 1))
	e := b.event()
	require.True(t, e.Lost)
	require.Equal(t, []connector.BlockID{0, 1}, e.Blocks)
	require.Equal(t, e.Blocks, e.Failed)
	require.ErrorIs(t, e.Err, connector.ErrGone)
	require.Equal(t, 2, b.Counters().Lost)
	require.True(t, b.Idle())
	b.got(b.Up(b.now, 2))
	b.quiet()
	b.start(Load, 1)
	require.Len(t, all[Move](b), 2)
	require.EqualValues(t, 2, all[Move](b)[0].Gen)
}

// One call of several may lose its blocks while the plugin, a composite, goes on. What the other calls of
// that transfer say later is nobody's business.
func TestLostCall(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Ranks = 2 })
	b.start(Load, 2)
	moves := all[Move](b)
	b.got(b.Lose(b.now, moves[0].ID))
	require.Len(t, all[CancelCall](b), 2)
	tells := all[Tell](b)
	require.Len(t, tells, 1)
	require.True(t, tells[0].Event.Lost)
	b.got(b.Lose(b.now, moves[1].ID))
	b.quiet()
	b.done(moves[1], Outcome{})
	b.quiet()
	require.Equal(t, 2, b.Counters().Lost)
	require.Zero(t, b.Counters().Violations)
}

// The blocks of a hold are lost with its generation, too, and the engine hears it: otherwise requests would wait for
// them. A request whose Finish was not answered is finished without a hold, since the plugin gave no ticket for it.
func TestHoldIsLost(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Can = connector.CanHold })
	b.end(40, true)
	b.got(b.FinishAnswered(b.now, one[Finish](b).ID, []connector.Hold{{ID: 7}}, nil))
	held := b.event()
	require.True(t, held.Held)
	b.end(16, true)
	require.Len(t, all[Finish](b), 1)
	b.got(b.Down(b.now, 1))
	e := b.event()
	require.Equal(t, Finished, e.Kind)
	require.False(t, e.Held || e.Lost)
	b.got(b.Abandoned(b.now, 1))
	e = b.event()
	require.Equal(t, Event{Kind: Released, Request: held.Request, Step: held.Step, Blocks: e.Blocks, Lost: true, Reason: ReleasedPluginDied}, e)
	require.Len(t, e.Blocks, 2)
	require.Equal(t, 2, b.Counters().Lost)
	require.True(t, b.Idle())
}

// Holds whose part of the connector died are over, and the engine hears whether their blocks are lost, also if that is
// known before the answer that announces them.
func TestHoldsDied(t *testing.T) {
	for name, lost := range map[string]bool{"died": false, "lost": true} {
		for _, early := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, early: %v", name, early), func(t *testing.T) {
				b := newBench(t, func(c *Config) { c.Can = connector.CanHold | connector.CanLease })
				b.end(40, true)
				finish := one[Finish](b)
				ends := func() { b.got(b.HoldsDied(1, []connector.HoldID{7}, lost)) }
				if early {
					ends()
					b.quiet()
				}
				b.got(b.FinishAnswered(b.now, finish.ID, []connector.Hold{{ID: 7}}, nil))
				if !early {
					b.event()
					ends()
				}
				tells := all[Tell](b)
				e := tells[len(tells)-1].Event
				require.Equal(t, Event{Kind: Released, Request: e.Request, Step: e.Step, Blocks: e.Blocks, Lost: lost, Reason: ReleasedPluginDied}, e)
				require.Len(t, e.Blocks, 2)
				require.Equal(t, lost, b.Counters().Lost == 2)
				require.Equal(t, []connector.HoldID{7}, b.Over(1), "its Leaser is told")
				require.True(t, b.Idle())
				ends()
				b.quiet()
				require.Equal(t, 1, b.Counters().Unknown)
			})
		}
	}
}

// TestAbandonedWindows: the next life of a plugin has other memory for source blocks, so the windows of an abandoned one
// come back with it, and no sooner.
func TestAbandonedWindows(t *testing.T) {
	b := reshapedBench(t, 4, nil)
	b.admit(0)
	b.admit(1)
	moves := all[Move](b)
	require.Len(t, moves, 1)
	b.admit(2)
	b.admit(3)
	b.quiet()
	b.got(b.Abandoned(b.now, 1))
	require.Len(t, all[Tell](b), 2)
	require.Empty(t, all[Move](b))
	b.got(b.Up(b.now, 2))
	require.Len(t, all[Move](b), 2)
}

// TestLostWindows: what a part of the connector leaves behind may write its window for ever, and the other parts keep that
// memory. When no window is left, loads that wait for one fail at once, and so do those that come later.
func TestLostWindows(t *testing.T) {
	b := reshapedBench(t, 5, nil)
	var moves []Move
	for i := range 4 {
		b.admit(i)
		moves = append(moves, all[Move](b)...)
	}
	require.Len(t, moves, 2)
	b.got(b.Lose(b.now, moves[0].ID))
	require.True(t, one[Tell](b).Event.Lost)
	require.Empty(t, all[Move](b))
	require.False(t, b.Windowless())
	b.got(b.Lose(b.now, moves[1].ID))
	require.True(t, b.Windowless())
	require.Len(t, all[Tell](b), 3)
	b.admit(4)
	e := one[Tell](b).Event
	require.ErrorIs(t, e.Err, errWindows)
	require.False(t, e.Lost)
	require.True(t, b.Idle())
}

// TestAllWindows: loads use every window.
func TestAllWindows(t *testing.T) {
	b := reshapedBench(t, 5, func(c *Config) { c.Windows = 4 })
	n := 0
	for i := range 5 {
		b.admit(i)
		n += len(all[Move](b))
	}
	require.Equal(t, 4, n)
}
