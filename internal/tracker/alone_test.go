package tracker

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// placed is a bench whose connector places, and whose plugin is gone.
func placed(t *testing.T, change func(*Config)) *bench {
	b := newBench(t, func(c *Config) {
		c.Placed = true
		if change != nil {
			change(c)
		}
	})
	b.got(b.Reaped(b.now, 1))
	return b
}

func (b *bench) found(tokens int, whole, sure bool) bool {
	b.t.Helper()
	ask := one[Ask](b)
	require.Zero(b.t, ask.Gen)
	given, actions := b.Found(b.now, ask.ID, connector.Match{Tokens: tokens, Async: tokens > 0}, whole, sure)
	b.got(actions)
	return given
}

// Rule PLACE-28: while no plugin is up, what is resident is the answer if it is all that is needed, or all that there is; else when the time to wait
// is over, or if no plugin comes up for a while.
func TestAloneAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		broken, whole, sure, settled bool
		tokens, need                 int
	}{
		"all":                           {tokens: 64, whole: true, settled: true},
		"a part":                        {tokens: 32},
		"nothing":                       {},
		"nothing, and there is no more": {sure: true, settled: true},
		"a part, and there is no more":  {tokens: 32, sure: true, settled: true},
		"less than a ticket promises":   {tokens: 32, sure: true, need: 64},
		"all that a ticket promises":    {tokens: 32, sure: true, need: 32, settled: true},
		"broken, a part":                {broken: true, tokens: 16, settled: true},
		"broken, nothing":               {broken: true, settled: true},
		"broken, less than promised":    {broken: true, tokens: 16, need: 64, settled: true},
	} {
		t.Run(name, func(t *testing.T) {
			b := placed(t, nil)
			if c.broken {
				b.got(b.Broken(b.now))
			}
			require.True(t, b.ask(prompt(4), c.need), "an answer may come at any moment")
			require.Equal(t, c.settled, b.found(c.tokens, c.whole, c.sure))
			m := b.Match(b.now, "r")
			require.Equal(t, !c.settled, m.Later)
			if c.settled {
				require.Equal(t, c.tokens, m.Tokens)
			}
			require.Equal(t, c.sure && c.settled, b.Sure("r"))
			b.ask(prompt(4), 0)
			b.after(time.Millisecond)
			require.Empty(t, all[Ask](b), "what was not there does not come without a plugin")
			if c.settled {
				return
			}
			b.got(b.Up(b.now, 2))
			ask := one[Ask](b)
			require.Equal(t, uint64(2), ask.Gen)
			b.got(b.Matched(b.now, ask.ID, connector.Match{Tokens: 64}, nil))
			require.Equal(t, Answered, b.event().Kind)
			require.Equal(t, 64, b.Match(b.now, "r").Tokens)
		})
	}
}

// A part is offered when the time to wait for the next plugin is over, or when none comes.
func TestAlonePartIsTheBestSoFar(t *testing.T) {
	for _, breaks := range []bool{false, true} {
		b := placed(t, nil)
		b.ask(prompt(4), 0)
		require.False(t, b.found(32, false, false))
		require.True(t, b.Match(b.now, "r").Later)
		if breaks {
			b.got(b.Broken(b.now))
			require.True(t, b.found(16, false, false), "the host looks again")
		} else {
			b.after(b.cfg.Later)
		}
		require.Equal(t, Answered, b.event().Kind)
		want := 32
		if breaks {
			want = 16
		}
		require.Equal(t, want, b.Match(b.now, "r").Tokens)
		require.False(t, b.Sure("r"))
	}
}

// What a plugin has said that it has, it does not have any more when it is dead and none follows.
func TestBrokenForgetsAnswers(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Placed = true })
	b.ask(prompt(4), 0)
	b.got(b.Matched(b.now, one[Ask](b).ID, connector.Match{Tokens: 64}, nil))
	require.Equal(t, 64, b.Match(b.now, "r").Tokens)
	b.got(b.Reaped(b.now, 1))
	b.got(b.Broken(b.now))
	b.ask(prompt(4), 0)
	require.True(t, b.found(32, false, false))
	require.Equal(t, 32, b.Match(b.now, "r").Tokens)
}

// What was answered without a plugin is asked again when it is old, and has not spent the time that the request may wait.
func TestAloneAnswerIsAskedAgain(t *testing.T) {
	b := placed(t, nil)
	b.ask(prompt(4), 0)
	b.found(32, false, true)
	b.after(b.cfg.Fresh)
	b.ask(prompt(4), 0)
	b.found(16, false, true)
	require.Equal(t, 16, b.Match(b.now, "r").Tokens)
	b.got(b.Up(b.now, 2))
	b.after(b.cfg.Fresh)
	b.ask(prompt(4), 0)
	require.Equal(t, uint64(2), one[Ask](b).Gen)
	require.Equal(t, 16, b.Match(b.now, "r").Tokens)
}

// A question that the plugin leaves without an answer is the host's, and one that the host has not answered when the next is up, the next
// plugin's. A ticket is always a plugin's.
func TestAloneAsksAreHandedOver(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Placed = true })
	b.ask(prompt(4), 0)
	first := one[Ask](b)
	require.Equal(t, uint64(1), first.Gen)
	b.got(b.Down(b.now, 1))
	own := one[Ask](b)
	require.Zero(t, own.Gen)
	b.got(b.Matched(b.now, first.ID, connector.Match{Tokens: 64}, nil))
	b.quiet()
	b.got(b.Up(b.now, 2))
	b.quiet()
	given, actions := b.Found(b.now, own.ID, connector.Match{Tokens: 16}, false, false)
	b.got(actions)
	require.False(t, given)
	require.Equal(t, uint64(2), one[Ask](b).Gen, "the plugin may have more")
	require.True(t, b.Match(b.now, "r").Later)

	b = placed(t, nil)
	q := prompt(4)
	q.Ticket = connector.Ticket("t")
	b.ask(q, 64)
	b.quiet()
	b.got(b.Broken(b.now))
	b.ask(q, 64)
	b.quiet()
	require.Equal(t, connector.Match{}, b.Match(b.now, "r"))
}

// Rule PLACE-28: a load goes on without a plugin, on each rank by itself; what is missing waits for the next one, and is not tried twice.
func TestAloneLoads(t *testing.T) {
	for _, slots := range []int{0, 2} {
		b := placed(t, func(c *Config) { c.Ranks, c.Slots = 2, slots })
		b.start(Load, 1)
		moves := all[Move](b)
		require.Len(t, moves, 2)
		require.Zero(t, moves[0].Gen)
		require.Empty(t, moves[0].Slots, "no plugin touches landing memory")
		b.done(moves[0], Outcome{})
		b.quiet()
		b.done(moves[1], Outcome{Absent: true})
		b.after(time.Millisecond)
		b.quiet()
		b.got(b.Up(b.now, 2))
		next := one[Move](b)
		require.Equal(t, uint64(2), next.Gen)
		require.Equal(t, moves[1].Rank, next.Rank)
		b.got(b.Reaped(b.now, 2))
		require.Zero(t, one[Move](b).Gen, "it may be placed by now")
		b.done(one[Move](b), Outcome{})
		require.Empty(t, b.event().Failed)
		require.Empty(t, b.Pins())
		require.Zero(t, b.LandingUsed())
	}
}

// A load that nobody can make any more fails at once, and one of the host's own ends neither a plugin nor another load.
func TestAloneLoadsEnd(t *testing.T) {
	absent := Outcome{Absent: true}
	for name, end := range map[string]func(b *bench, m Move){
		"broken": func(b *bench, m Move) { b.Broken(b.now); b.done(m, absent) },
		"closed": func(b *bench, m Move) { b.Close(b.now); b.done(m, absent) },
		"late":   func(b *bench, m Move) { b.after(b.cfg.Transfer + time.Second); b.done(m, absent) },
		"canceled": func(b *bench, m Move) {
			b.got(b.Step(b.now, &connector.Step{ID: 10, Preempted: []connector.RequestID{"r"}}, nil))
			require.Equal(b.t, m.ID, one[CancelCall](b).ID)
			b.done(m, absent)
		},
		"canceled, and heard": func(b *bench, m Move) {
			b.Step(b.now, &connector.Step{ID: 10, Preempted: []connector.RequestID{"r"}}, nil)
			b.done(m, Outcome{Err: context.Canceled})
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := placed(t, nil)
			b.start(Load, 2)
			end(b, one[Move](b))
			require.Len(t, b.event().Failed, 2)
			require.Empty(t, b.Pins())
		})
	}
	b := placed(t, nil)
	b.start(Load, 2)
	m := one[Move](b)
	b.got(b.Up(b.now, 2))
	b.after(b.cfg.Transfer + b.cfg.Grace + time.Second)
	b.quiet()
	require.Zero(t, b.Counters().Kills)
	b.got(b.Reaped(b.now, 2))
	b.quiet()
	b.done(m, Outcome{})
	require.Empty(t, b.event().Failed, "the end of a plugin is not that of the host's own load")
}

// Saves wait for the next plugin, as they do without placement.
func TestAloneSavesWait(t *testing.T) {
	b := placed(t, nil)
	b.start(Save, 2)
	b.quiet()
	b.got(b.Up(b.now, 2))
	require.Equal(t, Save, one[Move](b).Kind)
}

// Broken does not end what the host goes on with.
func TestAloneWhileBroken(t *testing.T) {
	b := placed(t, nil)
	b.start(Load, 2)
	m := one[Move](b)
	b.ask(prompt(4), 0)
	ask := one[Ask](b)
	b.got(b.Broken(b.now))
	b.quiet()
	_, actions := b.Found(b.now, ask.ID, connector.Match{Tokens: 64}, false, false)
	b.got(actions)
	require.Equal(t, 64, b.Match(b.now, "r").Tokens)
	b.done(m, Outcome{})
	require.Empty(t, b.event().Failed)
	b.start(Load, 1)
	b.done(one[Move](b), Outcome{})
	require.Empty(t, b.event().Failed)
	b.start(Save, 1)
	require.Len(t, b.event().Failed, 1)
}

// A Planner divides loads. Where it makes no plan, because it is gone or does not answer, what is placed is loaded whole; what is missing fails, since
// the next life has not planned it.
func TestAloneWithoutAPlan(t *testing.T) {
	planner := func(c *Config) { c.Can = connector.CanPlan }
	for name, lose := range map[string]func(b *bench){
		"down before": func(b *bench) { b.got(b.Down(b.now, 1)); b.start(Load, 2) },
		"down amid":   func(b *bench) { b.start(Load, 2); one[Plan](b); b.got(b.Down(b.now, 1)) },
		"stopped":     func(b *bench) { b.start(Load, 2); one[Plan](b); b.after(b.cfg.Plan) },
		"broken":      func(b *bench) { b.got(b.Down(b.now, 1)); b.got(b.Broken(b.now)); b.start(Load, 2) },
	} {
		t.Run(name, func(t *testing.T) {
			for _, there := range []bool{true, false} {
				b := newBench(t, func(c *Config) { planner(c); c.Placed = true })
				lose(b)
				m := one[Move](b)
				require.Zero(t, m.Gen)
				require.False(t, m.Overlap, "this engine takes no layers")
				b.done(m, Outcome{Absent: !there})
				e := b.event()
				require.Equal(t, there, len(e.Failed) == 0)
				require.Empty(t, b.Pins())
			}
		})
	}
	b := newBench(t, func(c *Config) { planner(c); c.Placed = true })
	b.got(b.Down(b.now, 1))
	b.start(Save, 2)
	require.ErrorIs(t, b.event().Err, connector.ErrGone)
	b.got(b.Up(b.now, 2))
	b.start(Load, 2)
	plan := one[Plan](b)
	b.got(b.Planned(b.now, plan.ID, nil, connector.ErrBusy))
	require.Len(t, b.event().Failed, 2, "it has answered, and planned nothing")
}

// What is not placed does as it did.
func TestNothingAloneWithoutPlacement(t *testing.T) {
	b := newBench(t, nil)
	b.got(b.Reaped(b.now, 1))
	b.ask(prompt(4), 0)
	b.quiet()
	b.start(Load, 2)
	b.quiet()
	require.False(t, b.Taking())
}
