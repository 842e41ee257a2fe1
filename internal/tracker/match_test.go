package tracker

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// A connector that is out of time has decided nothing, also where its error is heard of before the clock.
func TestErrorAfterLater(t *testing.T) {
	for _, c := range []struct {
		age       time.Duration // of the end of Later
		undecided int
	}{{-1, 0}, {0, 1}, {time.Minute, 1}} {
		b := newBench(t, nil)
		b.ask(prompt(4), 0)
		ask := one[Ask](b)
		require.True(t, b.Match(b.now, "r").Later)
		b.now = b.now.Add(b.cfg.Later + c.age)
		b.got(b.Matched(b.now, ask.ID, connector.Match{}, context.DeadlineExceeded))
		require.Equal(t, Answered, b.event().Kind)
		require.Equal(t, connector.Match{}, b.Match(b.now, "r"))
		require.Equal(t, c.undecided, b.Counters().Undecided)
	}
}

// An old answer is given while the question is asked again, but not for ever, and not where no plugin is
// up. The new answer then counts, even if it says that the blocks are gone.
func TestOldAnswerIsGivenOnceMore(t *testing.T) {
	old := func(age time.Duration) (*bench, Ask) {
		b := newBench(t, nil)
		b.ask(prompt(4), 0)
		b.got(b.Matched(b.now, one[Ask](b).ID, connector.Match{Tokens: 64}, nil))
		b.after(age)
		require.False(t, b.ask(prompt(4), 0))
		require.Equal(t, 64, b.Match(b.now, "r").Tokens)
		if age < b.cfg.Fresh {
			b.quiet()
			return b, Ask{}
		}
		return b, one[Ask](b)
	}
	fresh := testConfig().Fresh
	old(fresh - 1)
	b, ask := old(fresh)
	require.False(t, b.ask(prompt(4), 0), "it is asked again once")
	b.quiet()
	b.got(b.Matched(b.now, ask.ID, connector.Match{Tokens: 16}, nil))
	b.quiet()
	require.Equal(t, 16, b.Match(b.now, "r").Tokens)

	b, ask = old(fresh)
	b.after(fresh - 1)
	b.ask(prompt(4), 0)
	require.Equal(t, 64, b.Match(b.now, "r").Tokens)
	b.after(1)
	require.True(t, b.ask(prompt(4), 0), "the same call is waited for now")
	b.quiet()
	require.True(t, b.Match(b.now, "r").Later)
	b.got(b.Matched(b.now, ask.ID, connector.Match{Tokens: 32}, nil))
	require.Equal(t, Answered, b.event().Kind)
	require.Equal(t, 32, b.Match(b.now, "r").Tokens)

	for _, answer := range []struct {
		m   connector.Match
		err error
	}{{connector.Match{}, nil}, {connector.Match{}, connector.ErrCorrupt}, {connector.Match{Tokens: -1}, nil}} {
		b, ask = old(fresh)
		b.got(b.Matched(b.now, ask.ID, answer.m, answer.err))
		require.Equal(t, connector.Match{}, b.Match(b.now, "r"))
	}
	b, ask = old(fresh)
	b.got(b.Matched(b.now, ask.ID, connector.Match{}, connector.ErrBusy))
	require.True(t, b.Match(b.now, "r").Later)

	b, ask = old(fresh)
	b.got(b.Down(b.now, 1))
	b.ask(prompt(4), 0)
	require.True(t, b.Match(b.now, "r").Later, "nobody is there to ask")
	b.got(b.Up(b.now, 2))
	require.NotEqual(t, ask.ID, one[Ask](b).ID)
}

// That there is nothing says nothing of the tokens that the engine had when it asked: if some of them have left its cache, the
// connector is asked for them before anything is offered.
func TestNothingIsSaidOfTheRest(t *testing.T) {
	had := prompt(4)
	had.Computed = 32
	b := newBench(t, nil)
	b.ask(had, 0)
	b.got(b.Matched(b.now, one[Ask](b).ID, connector.Match{}, nil))
	require.Equal(t, connector.Match{}, b.Match(b.now, "r"))
	b.ask(prompt(4), 0)
	require.True(t, b.Match(b.now, "r").Later)
	b.got(b.Matched(b.now, one[Ask](b).ID, connector.Match{Tokens: 64}, nil))
	require.Equal(t, Answered, b.event().Kind)
	require.Equal(t, 64, b.Match(b.now, "r").Tokens)

	b = newBench(t, nil) // the same while the question is on its way
	b.ask(had, 0)
	ask := one[Ask](b)
	b.ask(prompt(4), 0)
	b.got(b.Matched(b.now, ask.ID, connector.Match{}, nil))
	require.True(t, b.Match(b.now, "r").Later)
	require.Zero(t, one[Ask](b).Query.Computed)
}

// An error takes back nothing of what the connector has said that it has, while more was on its way.
func TestErrorKeepsTheBestSoFar(t *testing.T) {
	b := newBench(t, func(c *Config) { c.BackoffMin, c.BackoffMax = time.Millisecond, time.Millisecond })
	b.ask(prompt(4), 0)
	b.got(b.Matched(b.now, one[Ask](b).ID, connector.Match{Tokens: 32, Later: true}, nil))
	b.now = b.now.Add(2 * time.Millisecond)
	b.got(b.Tick(b.now))
	b.got(b.Matched(b.now, one[Ask](b).ID, connector.Match{}, connector.ErrGone))
	require.Equal(t, 32, b.Match(b.now, "r").Tokens)
	require.False(t, b.Sure("r"))
}

// What Match says is the connector's word only where it answered in time and without an error, or need not be asked.
func TestSure(t *testing.T) {
	for name, c := range map[string]struct {
		role connector.Role
		do   func(b *bench, ask Ask)
		sure bool
	}{
		"answered": {connector.RoleBoth, func(b *bench, ask Ask) { b.Matched(b.now, ask.ID, connector.Match{}, nil) }, true},
		"not yet":  {connector.RoleBoth, func(*bench, Ask) {}, false},
		"error":    {connector.RoleBoth, func(b *bench, ask Ask) { b.Matched(b.now, ask.ID, connector.Match{}, connector.ErrCorrupt) }, false},
		"wrong":    {connector.RoleBoth, func(b *bench, ask Ask) { b.Matched(b.now, ask.ID, connector.Match{Tokens: -1}, nil) }, false},
		"late":     {connector.RoleBoth, func(b *bench, _ Ask) { b.after(b.cfg.Later) }, false},
		"later, later": {connector.RoleBoth, func(b *bench, ask Ask) {
			b.Matched(b.now, ask.ID, connector.Match{Tokens: 16, Later: true}, nil)
			b.after(b.cfg.Later)
		}, false},
		"closed":      {connector.RoleBoth, func(b *bench, ask Ask) { b.Matched(b.now, ask.ID, connector.Match{}, nil); b.Close(b.now) }, false},
		"role is not": {connector.RoleProducer, func(*bench, Ask) {}, true},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, func(cfg *Config) { cfg.Role = c.role })
			require.False(t, b.Sure("r"), "nobody has asked")
			b.ask(prompt(4), 0)
			var ask Ask
			if c.role.Loads() {
				ask = one[Ask](b)
				b.Match(b.now, "r")
			}
			c.do(b, ask)
			require.Equal(t, c.sure, b.Sure("r"))
		})
	}
}

// A question that comes ahead spends nothing: when the time for its answer is over it was never asked, and once the engine asks
// it has all of that time.
func TestAheadSpendsNothing(t *testing.T) {
	ahead := func(b *bench) bool {
		wait, actions := b.Ahead(b.now, prompt(4))
		b.got(actions)
		return wait
	}
	b := newBench(t, nil)
	require.True(t, ahead(b))
	first := one[Ask](b)
	require.True(t, b.Match(b.now, "r").Later)
	b.after(b.cfg.Later - 1)
	b.quiet()
	require.False(t, ahead(b), "it is under way")
	b.after(b.cfg.Later - 1)
	b.quiet()
	b.after(1)
	require.Equal(t, first.ID, one[CancelCall](b).ID)
	require.Equal(t, Answered, b.event().Kind, "it was told Later")
	require.Zero(t, b.Counters().Undecided)

	require.True(t, ahead(b), "it is asked again")
	second := one[Ask](b)
	b.after(b.cfg.Later - 1)
	require.True(t, b.ask(prompt(4), 0), "nobody has waited for its answer yet")
	require.False(t, b.ask(prompt(4), 0), "the engine was told Later")
	b.after(b.cfg.Later - 1)
	b.quiet()
	b.got(b.Matched(b.now, second.ID, connector.Match{Tokens: 64}, nil))
	require.Equal(t, 64, b.Match(b.now, "r").Tokens)

	b = newBench(t, nil)
	ahead(b)
	b.ask(prompt(4), 0)
	require.False(t, ahead(b))
	b.after(b.cfg.Later)
	require.Equal(t, 1, b.Counters().Undecided, "the engine has asked, and waits no longer")
	require.Equal(t, connector.Match{}, b.Match(b.now, "r"))

	b = newBench(t, nil) // the engine has had an answer, which is old, and would have more by now
	had := prompt(4)
	had.Computed = 16
	b.ask(had, 0)
	b.got(b.Matched(b.now, one[Ask](b).ID, connector.Match{Tokens: 16}, nil))
	b.after(b.cfg.Fresh)
	require.True(t, ahead(b))
	require.True(t, one[Ask](b).Ahead)
	b.after(b.cfg.Later)
	require.Zero(t, b.Counters().Undecided)
	require.True(t, b.ask(prompt(4), 0))
	require.False(t, one[Ask](b).Ahead)
}

// What is answered ahead is the answer to the engine's question too, and may be loaded without another.
func TestAheadIsAnAnswer(t *testing.T) {
	b := newBench(t, nil)
	_, actions := b.Ahead(b.now, prompt(4))
	b.got(actions)
	b.got(b.Matched(b.now, one[Ask](b).ID, connector.Match{Tokens: 32}, nil))
	b.quiet()
	require.Equal(t, 32, b.Match(b.now, "r").Tokens)
	require.False(t, b.ask(prompt(4), 0))
	b.quiet()
	require.Equal(t, 32, b.Match(b.now, "r").Tokens)
	b.start(Load, 2)
	b.done(one[Move](b), Outcome{})
	require.Equal(t, Loaded, b.event().Kind)
}

// An answer says nothing of the blocks that the engine had when it asked: once it has fewer, the connector is asked again.
func TestMatchFromEarlier(t *testing.T) {
	had := prompt(4)
	had.Computed = 32
	b := newBench(t, nil)
	b.ask(had, 0)
	b.got(b.Matched(b.now, one[Ask](b).ID, connector.Match{Tokens: 32}, nil))
	require.Equal(t, 32, b.Match(b.now, "r").Tokens)
	require.True(t, b.ask(prompt(4), 0))
	ask := one[Ask](b)
	require.Zero(t, ask.Query.Computed)
	require.True(t, b.Match(b.now, "r").Later)
	b.got(b.Matched(b.now, ask.ID, connector.Match{Tokens: 48}, nil))
	require.Equal(t, Answered, b.event().Kind)
	require.Equal(t, 48, b.Match(b.now, "r").Tokens)

	b = newBench(t, nil) // the engine has less while the answer is on its way
	b.ask(had, 0)
	first := one[Ask](b)
	b.ask(prompt(4), 0)
	b.quiet()
	b.got(b.Matched(b.now, first.ID, connector.Match{Tokens: 32}, nil))
	ask = one[Ask](b)
	require.Zero(t, ask.Query.Computed)
	b.got(b.Matched(b.now, ask.ID, connector.Match{}, nil))
	require.Equal(t, connector.Match{}, b.Match(b.now, "r"))

	b = newBench(t, nil) // or while an old answer is asked for again
	b.ask(prompt(4), 0)
	b.got(b.Matched(b.now, one[Ask](b).ID, connector.Match{Tokens: 16}, nil))
	b.after(b.cfg.Fresh)
	b.ask(had, 0)
	renewal := one[Ask](b)
	b.ask(prompt(4), 0)
	b.got(b.Matched(b.now, renewal.ID, connector.Match{Tokens: 32}, nil))
	b.quiet()
	require.Equal(t, 16, b.Match(b.now, "r").Tokens, "of what is before 32 the new answer says nothing")
}
