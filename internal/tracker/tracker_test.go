package tracker

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// bench drives a Tracker by hand.
type bench struct {
	*Tracker
	t    *testing.T
	now  time.Time
	last []Action
}

func newBench(t *testing.T, change func(*Config)) *bench {
	cfg := testConfig()
	if change != nil {
		change(&cfg)
	}
	b := &bench{Tracker: New(cfg), t: t, now: time.Unix(1000, 0)}
	b.got(b.Up(b.now, 1))
	return b
}

func (b *bench) got(a []Action) []Action {
	b.last = a
	return a
}

func (b *bench) after(d time.Duration) []Action {
	b.now = b.now.Add(d)
	return b.got(b.Tick(b.now))
}

// all gives the last actions of one type.
func all[A Action](b *bench) (out []A) {
	for _, a := range b.last {
		if a, ok := a.(A); ok {
			out = append(out, a)
		}
	}
	return out
}

func one[A Action](b *bench) A {
	b.t.Helper()
	got := all[A](b)
	require.Len(b.t, got, 1, "%+v", b.last)
	return got[0]
}

func (b *bench) event() Event {
	b.t.Helper()
	return one[Tell](b).Event
}

func (b *bench) quiet() {
	b.t.Helper()
	require.Empty(b.t, b.last)
}

func blocks(n int) (out []connector.Block) {
	for i := range n {
		out = append(out, connector.Block{Key: connector.BlockKey{byte(i + 1)}, ID: connector.BlockID(i)})
	}
	return out
}

func (b *bench) start(kind Kind, n int) {
	t := connector.Transfer{Request: "r", Tokens: 16 * n, Blocks: blocks(n)}
	s := &connector.Step{ID: 9, Arrived: []connector.Query{{Request: "r"}}}
	if kind == Load {
		s.Admitted = []connector.Transfer{t}
	} else {
		s.Computed = []connector.Transfer{t}
	}
	b.got(b.Step(b.now, s, nil))
}

func (b *bench) done(m Move, out Outcome) { b.got(b.Moved(b.now, m.ID, out)) }

func TestAllRanksMustReport(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Ranks = 3 })
	b.start(Load, 2)
	moves := all[Move](b)
	require.Len(t, moves, 3)
	b.done(moves[2], Outcome{})
	b.quiet()
	b.done(moves[0], Outcome{Err: &connector.BlockError{Blocks: []connector.BlockID{1}, Err: connector.ErrGone}})
	b.quiet()
	require.Equal(t, 1, b.Pins()[1])
	b.done(moves[1], Outcome{})
	e := b.event()
	require.Equal(t, []connector.BlockID{0, 1}, e.Blocks)
	require.Equal(t, []connector.BlockID{1}, e.Failed)
	require.ErrorIs(t, e.Err, connector.ErrGone)
	require.Equal(t, int64(1<<20), e.Bytes)
	require.Empty(t, b.Pins())
	b.done(moves[1], Outcome{})
	b.quiet()
	require.Equal(t, 1, b.Counters().Unknown)
}

func TestBusyIsRetriedInsideTheDeadline(t *testing.T) {
	b := newBench(t, nil)
	b.start(Load, 1)
	began, tries := b.now, 1
	for m := one[Move](b); ; tries++ {
		b.done(m, Outcome{Err: connector.ErrBusy})
		if len(b.last) > 0 {
			break
		}
		due, ok := b.Next()
		require.True(t, ok)
		b.after(due.Sub(b.now))
		m = one[Move](b)
	}
	require.ErrorIs(t, b.event().Err, connector.ErrBusy)
	require.LessOrEqual(t, b.now.Sub(began), b.cfg.Transfer)
	require.Greater(t, b.now.Sub(began), b.cfg.Transfer-2*b.cfg.BackoffMax)
	require.Greater(t, tries, 20)
	require.Less(t, tries, 50)
}

func TestLateLoadKillsAndStaysPinned(t *testing.T) {
	b := newBench(t, nil)
	b.start(Load, 2)
	b.after(b.cfg.Transfer + 10*time.Millisecond) // two blocks take their time too
	b.quiet()
	b.after(b.cfg.Grace)
	require.Equal(t, uint64(1), one[Kill](b).Gen)
	b.after(time.Hour)
	b.quiet() // killed once
	b.got(b.Down(b.now, 1))
	b.quiet()
	require.Len(t, b.Pins(), 2, "pinned until the process is reaped")
	b.got(b.Reaped(b.now, 1))
	require.Len(t, b.event().Failed, 2)
	b.got(b.Up(b.now, 2))
	b.quiet() // the guilty one is not run again
}

func TestLostLoadRunsOnceMore(t *testing.T) {
	for _, kind := range []Kind{Load, Save} {
		b := newBench(t, nil)
		b.start(kind, 2)
		b.done(one[Move](b), Outcome{Lost: true, Err: connector.ErrGone})
		b.quiet()
		require.Len(t, b.Pins(), 2)
		b.got(b.Reaped(b.now, 1))
		b.quiet()
		b.got(b.Up(b.now, 2))
		require.Equal(t, uint64(2), one[Move](b).Gen)
		b.got(b.Reaped(b.now, 2))
		require.ErrorIs(t, b.event().Err, connector.ErrGone)
	}
}

func TestNothingWaitsForABrokenPlugin(t *testing.T) {
	b := newBench(t, nil)
	b.start(Load, 2)
	b.got(b.Reaped(b.now, 1))
	b.quiet()
	b.got(b.Broken(b.now))
	require.Len(t, b.event().Failed, 2)
	b.start(Save, 1)
	require.Len(t, b.event().Failed, 1)
	b.got(b.Up(b.now, 2))
	b.start(Save, 1)
	require.Equal(t, Save, one[Move](b).Kind)
}

func (b *bench) ask(q connector.Query, need int) bool {
	if b.WantsTicket(q.Request) && (q.Ticket != nil || need > 0) {
		b.Accept(&q, &Ticket{Tokens: need, Lease: time.Minute, Plugin: q.Ticket})
	}
	wait, actions := b.Query(b.now, q)
	b.got(actions)
	return wait
}

func prompt(n int) connector.Query {
	return connector.Query{Request: "r", Tokens: 16*n + 1, Keys: make([]connector.BlockKey, n)}
}

func TestMatchIsClamped(t *testing.T) {
	for _, c := range []struct {
		tokens, computed, answer, want int
	}{
		{tokens: 65, answer: 64, want: 64},
		{tokens: 64, answer: 64, want: 48},
		{tokens: 64, answer: 50, want: 48},
		{tokens: 64, computed: 32, answer: 32, want: 16},
		{tokens: 64, answer: 15, want: 0},
		{tokens: 64, answer: 65, want: 0}, // more than there is
		{tokens: 64, answer: -1, want: 0},
		{tokens: 16, answer: 16, want: 0}, // never asked
	} {
		b := newBench(t, nil)
		wait := b.ask(connector.Query{Request: "r", Tokens: c.tokens, Computed: c.computed, Keys: make([]connector.BlockKey, 4)}, 0)
		if wait {
			b.got(b.Matched(b.now, one[Ask](b).ID, connector.Match{Tokens: c.answer}, nil))
			b.quiet()
		}
		require.Equal(t, connector.Match{Tokens: c.want, Async: c.want > 0}, b.Match(b.now, "r"), "%+v", c)
	}
}

func TestGroupsClampToTheirCommonMultiple(t *testing.T) {
	b := newBench(t, func(c *Config) {
		c.Groups = []connector.Group{{BlockTokens: 16}, {BlockTokens: 24}}
	})
	b.ask(connector.Query{Request: "r", Tokens: 150, Keys: make([]connector.BlockKey, 9)}, 0)
	b.got(b.Matched(b.now, one[Ask](b).ID, connector.Match{Tokens: 144, Groups: 3}, nil))
	require.Equal(t, connector.Match{Tokens: 144, Groups: 3, Async: true}, b.Match(b.now, "r"))
	b = newBench(t, nil)
	b.ask(prompt(4), 0)
	b.got(b.Matched(b.now, one[Ask](b).ID, connector.Match{Tokens: 64, Groups: 2}, nil))
	require.Equal(t, connector.Match{}, b.Match(b.now, "r"))
	require.Equal(t, 1, b.Counters().Violations)
}

func TestLaterEnds(t *testing.T) {
	b := newBench(t, nil)
	require.True(t, b.ask(prompt(4), 0))
	ask := one[Ask](b)
	require.True(t, b.Match(b.now, "r").Later)
	require.False(t, b.ask(prompt(4), 0), "asked once")
	b.quiet()
	b.after(b.cfg.Later)
	require.Equal(t, Answered, b.event().Kind)
	require.False(t, b.ask(prompt(4), 0))
	require.Equal(t, connector.Match{}, b.Match(b.now, "r"))
	b.got(b.Matched(b.now, ask.ID, connector.Match{Tokens: 64}, nil))
	require.Equal(t, connector.Match{}, b.Match(b.now, "r"), "too late")

	for _, answer := range []struct {
		m   connector.Match
		err error
	}{{connector.Match{Later: true}, nil}, {connector.Match{}, connector.ErrBusy}} {
		b = newBench(t, nil)
		b.ask(prompt(4), 0)
		began := b.now
		for asks := 1; ; asks++ {
			if got := all[Ask](b); len(got) == 0 {
				require.Greater(t, asks, 5)
				break
			}
			b.got(b.Matched(b.now, one[Ask](b).ID, answer.m, answer.err))
			require.True(t, b.Match(b.now, "r").Later)
			due, _ := b.Next()
			b.after(due.Sub(b.now))
		}
		require.Equal(t, b.cfg.Later, b.now.Sub(began))
		require.Equal(t, Answered, b.event().Kind)
	}
}

func TestTicketWaitsForWhatItPromises(t *testing.T) {
	b := newBench(t, nil)
	b.ask(prompt(4), 64)
	b.got(b.Matched(b.now, one[Ask](b).ID, connector.Match{Tokens: 32}, nil))
	require.True(t, b.Match(b.now, "r").Later)
	b.after(b.cfg.BackoffMin)
	b.got(b.Matched(b.now, one[Ask](b).ID, connector.Match{Tokens: 64}, nil))
	require.Equal(t, Answered, b.event().Kind)
	require.Equal(t, 64, b.Match(b.now, "r").Tokens)
}

func TestEmptyLoadIsNotOfferedAgain(t *testing.T) {
	for _, c := range []struct {
		failed []connector.BlockID
		denied bool
	}{{[]connector.BlockID{0}, true}, {[]connector.BlockID{1}, false}} {
		b := newBench(t, nil)
		b.start(Load, 2)
		b.done(one[Move](b), Outcome{Corrupt: c.failed})
		require.ErrorIs(t, b.event().Err, connector.ErrCorrupt)
		require.Equal(t, !c.denied, b.ask(prompt(4), 0))
	}
}

// TestSaveUnderWayReplacesNothing: a save that had begun before a block was found to be useless may have left it alone, so the next
// one replaces it.
func TestSaveUnderWayReplacesNothing(t *testing.T) {
	b := newBench(t, nil)
	b.start(Save, 2)
	begun := one[Move](b)
	b.start(Load, 2)
	b.done(one[Move](b), Outcome{Foreign: []connector.BlockID{1}})
	b.done(begun, Outcome{})
	for _, want := range []bool{true, false} {
		b.start(Save, 2)
		m := one[Move](b)
		require.Equal(t, want, m.Transfer.Replace)
		b.done(m, Outcome{})
	}
}

func TestCorruptKeysAreReplaced(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Ranks = 2 })
	b.start(Load, 2)
	moves := all[Move](b)
	b.done(moves[0], Outcome{})
	b.done(moves[1], Outcome{Corrupt: []connector.BlockID{1}})
	for _, want := range []bool{true, false} {
		b.start(Save, 2)
		for _, m := range all[Move](b) {
			require.Equal(t, want, m.Transfer.Replace)
			b.done(m, Outcome{})
		}
	}
	for i := range 100 { // the memory is bounded
		b.damaged(&op{}, []connector.Block{{Key: connector.BlockKey{1, byte(i)}}}, nil)
	}
	require.LessOrEqual(t, len(b.corrupt.keys), b.cfg.CorruptKeys)
	require.LessOrEqual(t, len(b.corrupt.order), 2*b.cfg.CorruptKeys)
}

// Blocks whose digests nobody here can check are misses, and the next save replaces them.
func TestUncheckedBlocksAreReplaced(t *testing.T) {
	outdated := fmt.Errorf("of another length: %w", connector.ErrOutdated)
	for _, c := range []struct {
		out  Outcome
		want Counters
	}{
		{Outcome{Foreign: []connector.BlockID{0, 1}}, Counters{Foreign: 2}},
		{Outcome{Outdated: []connector.BlockID{0, 1}}, Counters{Outdated: 2}},
		{Outcome{Foreign: []connector.BlockID{0}, Outdated: []connector.BlockID{1}}, Counters{Foreign: 1, Outdated: 1}},
		{Outcome{Err: &connector.BlockError{Blocks: []connector.BlockID{0, 1}, Err: outdated}}, Counters{Outdated: 2}},
	} {
		b := newBench(t, nil)
		b.start(Load, 2)
		b.done(one[Move](b), c.out)
		ev := b.event()
		require.Len(t, ev.Failed, 2)
		require.NotErrorIs(t, ev.Err, connector.ErrCorrupt)
		require.Zero(t, ev.Damaged)
		require.True(t, ev.Replace)
		require.Equal(t, c.want, b.Counters())
		for _, want := range []bool{true, false} {
			b.start(Save, 2)
			m := one[Move](b)
			require.Equal(t, want, m.Transfer.Replace)
			b.done(m, Outcome{})
			b.event()
		}
	}
}

func TestDamagedBlocksAreNotOffered(t *testing.T) {
	b := newBench(t, nil)
	keys := []connector.BlockKey{{1}, {2}, {3}}
	require.Equal(t, math.MaxInt, b.undamaged(keys))
	b.damaged(&op{}, []connector.Block{{Key: keys[2]}}, nil)
	require.Equal(t, 32, b.undamaged(keys))
	b.corrupt.remove(keys[2])
	require.Equal(t, math.MaxInt, b.undamaged(keys), "it was saved again")
}

func TestEndCancelsLoads(t *testing.T) {
	b := newBench(t, nil)
	b.start(Load, 2)
	m := one[Move](b)
	b.got(b.Step(b.now, &connector.Step{ID: 10, Ended: []connector.Ended{{Request: "r", Reason: connector.ReasonAbort}}}, nil))
	require.Equal(t, m.ID, one[CancelCall](b).ID)
	require.Equal(t, Finished, b.event().Kind)
	require.Len(t, b.Pins(), 2, "the load still writes")
	b.done(m, Outcome{Err: context.Canceled})
	require.Equal(t, Loaded, b.event().Kind)
	require.Empty(t, b.requests)
}

func (b *bench) end(tokens int, remote bool) {
	b.got(b.Step(b.now, &connector.Step{ID: 10, Ended: []connector.Ended{{
		Request: "r", Tokens: tokens, Remote: remote, Blocks: blocks(2),
	}}}, nil))
}

func TestRemoteEndWaitsForItsSaves(t *testing.T) {
	b := newBench(t, nil)
	b.start(Save, 4)
	m := one[Move](b)
	b.end(70, true)
	b.quiet()
	b.done(m, Outcome{Err: &connector.BlockError{Blocks: []connector.BlockID{2}, Err: connector.ErrBusy}})
	b.quiet() // run again
	b.after(b.cfg.BackoffMin)
	b.done(one[Move](b), Outcome{Err: &connector.BlockError{Blocks: []connector.BlockID{2}, Err: errors.New("full")}})
	require.Equal(t, Saved, b.last[0].(Tell).Event.Kind)
	fin := b.last[1].(Tell).Event
	require.Equal(t, Finished, fin.Kind)
	require.Equal(t, 32, fin.Ticket.Tokens, "up to the block that was not stored")

	b = newBench(t, nil)
	b.start(Save, 4)
	b.end(70, true)
	b.after(b.cfg.Finish)
	require.Equal(t, 64, b.event().Ticket.Tokens, "past the deadline what is under way is promised: consumers wait for it")

	b = newBench(t, nil)
	b.start(Save, 4)
	b.end(70, false)
	require.Equal(t, Finished, b.event().Kind, "nobody waits")
}

func TestHoldWithoutConsumerIsRefused(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Can = connector.CanHold })
	b.end(40, false)
	b.got(b.FinishAnswered(b.now, one[Finish](b).ID, []connector.Hold{{ID: 7}}, nil))
	require.False(t, b.event().Held)
	require.Equal(t, 1, b.Counters().Violations)
	require.True(t, b.Idle())
}

func TestHoldIsReleasedOnce(t *testing.T) {
	holding := func(c *Config) { c.Can = connector.CanHold }
	hold := connector.Hold{ID: 7, Consumers: 2, Ticket: []byte("t")}
	begin := func() *bench {
		b := newBench(t, holding)
		b.end(40, true)
		b.got(b.FinishAnswered(b.now, one[Finish](b).ID, []connector.Hold{hold}, nil))
		e := b.event()
		require.True(t, e.Held)
		require.Equal(t, 40, e.Ticket.Tokens)
		require.Equal(t, b.cfg.Hold, e.Hold.TTL)
		require.Len(t, b.Pins(), 2)
		return b
	}
	for reason, release := range map[string]func(b *bench){
		ReleasedConsumed: func(b *bench) {
			b.got(b.Consumed(1, []connector.HoldID{7, 8}))
			b.quiet()
			b.got(b.Consumed(1, []connector.HoldID{7}))
		},
		ReleasedExpired:    func(b *bench) { b.after(b.cfg.Hold) },
		ReleasedPluginDied: func(b *bench) { b.got(b.Reaped(b.now, 1)) },
		ReleasedShutdown:   func(b *bench) { b.got(b.Close(b.now)) },
	} {
		b := begin()
		release(b)
		e := b.event()
		require.Equal(t, Released, e.Kind)
		require.Equal(t, reason, e.Reason)
		require.Equal(t, []connector.BlockID{0, 1}, e.Blocks)
		require.True(t, b.Idle())
	}

	b := begin() // an id that is in use
	b.end(40, true)
	b.got(b.FinishAnswered(b.now, one[Finish](b).ID, []connector.Hold{hold}, nil))
	require.False(t, b.event().Held)
	require.Equal(t, 1, b.Counters().Violations)

	b = newBench(t, holding) // no answer
	b.end(40, true)
	call := one[Finish](b).ID
	b.after(b.cfg.Finish)
	require.Nil(t, b.event().Ticket)
	b.got(b.FinishAnswered(b.now, call, []connector.Hold{hold}, nil))
	b.quiet()
}

func TestBreakerOpensAndTriesAgain(t *testing.T) {
	b := &Breaker{Deaths: 4, Window: 30 * time.Second, Cooldown: time.Minute, BackoffMin: 10 * time.Millisecond, BackoffMax: 30 * time.Millisecond}
	now := time.Unix(0, 0)
	for _, want := range []time.Duration{10 * time.Millisecond, 20 * time.Millisecond, 30 * time.Millisecond} {
		wait, broken := b.Died(now)
		require.False(t, broken)
		require.Equal(t, want, wait)
	}
	wait, broken := b.Died(now.Add(29 * time.Second))
	require.True(t, broken)
	require.Equal(t, time.Minute, wait)
	_, broken = b.Died(now.Add(90 * time.Second))
	require.True(t, broken, "one more death after the pause is enough")
	b.Proved()
	_, broken = b.Died(now.Add(91 * time.Second))
	require.False(t, broken)
}

func TestLostPlanEndsItsTransfers(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Can = connector.CanPlan })
	b.start(Load, 2)
	id := one[Plan](b).ID
	b.got(b.Down(b.now, 1))
	require.Len(t, b.event().Failed, 2)
	b.got(b.Planned(b.now, id, &connector.Plan{}, nil))
	b.quiet()
	b.got(b.Up(b.now, 2))
	b.start(Load, 2)
	b.after(b.cfg.Plan)
	require.ErrorIs(t, all[Tell](b)[0].Event.Err, context.DeadlineExceeded)
}

func TestReapedConcernsOneGeneration(t *testing.T) {
	b := newBench(t, nil)
	b.got(b.Down(b.now, 1))
	b.got(b.Up(b.now, 2))
	b.start(Load, 2)
	m := one[Move](b)
	b.got(b.Reaped(b.now, 1))
	b.quiet()
	require.Len(t, b.Pins(), 2)
	b.done(m, Outcome{})
	require.Empty(t, b.event().Failed)
}

// A consumer's connector finds the producer's blocks by the ticket of the query that was matched.
func TestLoadsCarryTheTicket(t *testing.T) {
	b := newBench(t, nil)
	q := connector.Query{Request: "r", Tokens: 33}
	require.True(t, b.Accept(&q, &Ticket{Lease: time.Second, Plugin: []byte("found at p")}))
	_, actions := b.Query(b.now, q)
	b.got(actions)
	b.got(b.Matched(b.now, one[Ask](b).ID, connector.Match{Tokens: 32}, nil))
	b.start(Load, 2)
	require.Equal(t, connector.Ticket("found at p"), one[Move](b).Transfer.Ticket)
	b.done(one[Move](b), Outcome{})
	b.start(Save, 1)
	require.Nil(t, one[Move](b).Transfer.Ticket)
}

// Rule MULTI-08: what lies in a block that is being loaded is nobody's yet.
func TestNotSavedWhileLoading(t *testing.T) {
	b := newBench(t, nil)
	b.start(Load, 2)
	load := one[Move](b)
	b.start(Save, 1)
	e := b.event()
	require.Equal(t, Saved, e.Kind)
	require.Equal(t, e.Blocks, e.Failed)
	require.ErrorIs(t, e.Err, errLoading)
	b.done(load, Outcome{})
	b.start(Save, 1)
	require.Equal(t, Save, one[Move](b).Kind)
}

// Of a load that fails in several ways the error says that something was damaged, whichever came first.
func TestDamageIsNamed(t *testing.T) {
	b := newBench(t, nil)
	b.start(Load, 2)
	b.done(one[Move](b), Outcome{Err: &connector.BlockError{Blocks: []connector.BlockID{0}, Err: connector.ErrGone}, Corrupt: []connector.BlockID{1}})
	ev := b.event()
	require.ErrorIs(t, ev.Err, connector.ErrGone)
	require.ErrorIs(t, ev.Err, connector.ErrCorrupt)
	require.True(t, ev.Replace)

	b.start(Load, 2)
	b.done(one[Move](b), Outcome{Err: connector.ErrGone})
	require.False(t, b.event().Replace, "there is nothing to replace")
}
