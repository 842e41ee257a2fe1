package tracker

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

func computing(id connector.RequestID) *connector.Step {
	return &connector.Step{ID: 7, Computing: []connector.Transfer{{
		Request: id, Tokens: 16, Blocks: []connector.Block{{Key: connector.BlockKey{1}, ID: 3}},
	}}}
}

// Rule LAYER-08: a save of what is being computed starts at once, and its time begins when that is done.
func TestComputingHasTime(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Ranks = 1 })
	b.got(b.Step(b.now, computing("a"), nil))
	m := one[Move](b)
	require.True(t, m.Computing)
	b.after(10 * b.cfg.Save)
	require.Empty(t, all[Kill](b), "the engine may take its time")
	require.Empty(t, all[CancelCall](b))
	b.got(b.Layers(b.now, 7, 1))
	require.Equal(t, Advance{ID: m.ID, Layers: 1}, one[Advance](b))
	b.after(10 * b.cfg.Save)
	require.Empty(t, all[CancelCall](b))
	b.got(b.Layers(b.now, 7, 2))
	require.Equal(t, Advance{ID: m.ID, Layers: 2}, one[Advance](b))
	b.got(b.GiveUp(b.now, 7))
	b.quiet() // the step is over
	b.after(b.cfg.Save - time.Second)
	require.Empty(t, all[CancelCall](b))
	b.after(time.Second)
	require.Equal(t, m.ID, one[CancelCall](b).ID)
	b.after(b.cfg.Grace)
	one[Kill](b)
	b.got(b.Reaped(b.now, 1))
	e := b.event()
	require.Equal(t, Saved, e.Kind)
	require.Len(t, e.Failed, 1)
	require.True(t, b.Idle())
}

// A plugin that dies gets the save again in its next life, as any other.
func TestComputingIsRetried(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Ranks = 1 })
	b.got(b.Step(b.now, computing("a"), nil))
	b.got(b.Layers(b.now, 7, 1))
	b.got(b.Reaped(b.now, 1))
	require.Empty(t, all[Tell](b))
	b.got(b.Up(b.now, 2))
	m := one[Move](b)
	require.True(t, m.Computing)
	require.Equal(t, 1, m.Layers, "what it was told before holds")
	b.got(b.Layers(b.now, 7, 2))
	b.got(b.Moved(b.now, m.ID, Outcome{Layers: 2}))
	require.Empty(t, b.event().Failed)
}

// Rule LAYER-02: a connector that answers before all layers were announced to it has not stored them. After GiveUp it cannot be.
func TestEarlyAnswerFails(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Ranks = 1 })
	b.got(b.Step(b.now, computing("a"), nil))
	b.got(b.Layers(b.now, 7, 1))
	b.got(b.Moved(b.now, one[Advance](b).ID, Outcome{Layers: 1}))
	require.ErrorIs(t, b.event().Err, connector.ErrIncompatible)
	require.True(t, b.Idle())

	b.got(b.Step(b.now, computing("b"), nil))
	m := one[Move](b)
	b.got(b.GiveUp(b.now, 7))
	require.Equal(t, Advance{ID: m.ID, GivenUp: true}, one[Advance](b))
	b.got(b.Reaped(b.now, 1))
	b.got(b.Up(b.now, 2))
	require.True(t, one[Move](b).GivenUp)
}

// computed ends the computing of the last step, or gives it up.
func (w *world) computed() {
	if w.rng.IntN(8) == 0 {
		w.do("given up", w.b.GiveUp(w.now, w.computing))
	}
	for n := range w.cfg.Layers {
		w.do("layers", w.b.Layers(w.now, w.computing, n+1))
	}
}

// save adds a save to a step, in one of three steps layer by layer.
func (w *world) save(s *connector.Step, t connector.Transfer) {
	if w.steps%3 == 0 {
		s.Computing = append(s.Computing, t)
	} else {
		s.Computed = append(s.Computed, t)
	}
}

// overlapped is a Tracker of an engine that uses layers of loads as they come.
func overlapped(t *testing.T, ranks int) *bench {
	return newBench(t, func(c *Config) { c.Ranks, c.Layers, c.Overlap = ranks, 2, true })
}

// Rule OVERLAP-03: the engine is told about a layer when it is verified on every rank, and of none once a block has failed.
func TestVerifiedOnEveryRank(t *testing.T) {
	b := overlapped(t, 2)
	b.start(Load, 2)
	moves := all[Move](b)
	require.Len(t, moves, 2)
	require.True(t, moves[0].Overlap)
	b.got(b.Verified(b.now, moves[0].ID, 2))
	b.quiet()
	b.got(b.Verified(b.now, moves[1].ID, 1))
	e := b.event()
	require.Equal(t, Arriving, e.Kind)
	require.Equal(t, 1, e.Layers)
	b.got(b.Verified(b.now, moves[1].ID, 1))
	b.quiet()
	b.done(moves[0], Outcome{Corrupt: []connector.BlockID{1}})
	b.got(b.Verified(b.now, moves[1].ID, 2))
	b.quiet()
	b.done(moves[1], Outcome{})
	e = b.event()
	require.Equal(t, Loaded, e.Kind)
	require.Equal(t, []connector.BlockID{1}, e.Failed)
	b.got(b.Verified(b.now, moves[1].ID, 2))
	b.quiet()
}

// A call that announces nothing keeps the engine from the layers of the others only until it has ended: what it has loaded is verified then.
func TestEndOfASilentCall(t *testing.T) {
	b := overlapped(t, 2)
	b.start(Load, 1)
	moves := all[Move](b)
	b.got(b.Verified(b.now, moves[1].ID, 1))
	b.quiet()
	b.done(moves[0], Outcome{})
	e := b.event()
	require.Equal(t, Arriving, e.Kind)
	require.Equal(t, 1, e.Layers)
	require.False(t, b.Retract(moves[1].ID))
	b.done(moves[1], Outcome{})
	require.Equal(t, Loaded, b.event().Kind)

	b = overlapped(t, 2)
	b.start(Load, 1)
	moves = all[Move](b)
	b.done(moves[0], Outcome{})
	b.quiet()
	b.got(b.Verified(b.now, moves[1].ID, 2))
	require.Equal(t, 2, b.event().Layers)

	b = newBench(t, func(c *Config) { c.Ranks, c.Layers, c.Overlap, c.Slots, c.Placed = 1, 2, true, 8, true })
	b.start(Load, 5)
	moves = all[Move](b)
	require.Len(t, moves, 3, "parts of two blocks, and one")
	b.got(b.Verified(b.now, moves[0].ID, 1))
	b.got(b.Verified(b.now, moves[1].ID, 2))
	b.quiet()
	b.done(moves[2], Outcome{})
	require.Equal(t, 1, b.event().Layers)

	b = newBench(t, func(c *Config) { c.Ranks, c.Layers, c.Overlap, c.Slots, c.Placed = 1, 2, true, 8, true })
	b.start(Load, 7)
	moves = all[Move](b)
	require.Len(t, moves, 3, "six blocks have slots of landing memory, the last waits")
	b.done(moves[0], Outcome{})
	last := one[Move](b)
	b.done(moves[1], Outcome{})
	b.done(moves[2], Outcome{})
	b.quiet()
	b.got(b.Verified(b.now, last.ID, 1))
	require.Equal(t, 1, b.event().Layers)

	b = overlapped(t, 2)
	b.start(Load, 1)
	moves = all[Move](b)
	b.done(moves[0], Outcome{Err: connector.ErrBusy})
	b.done(moves[1], Outcome{})
	b.quiet()
	b.after(b.cfg.BackoffMax)
	b.got(b.Verified(b.now, one[Move](b).ID, 2))
	require.Equal(t, 2, b.event().Layers, "it was over when the other waited to be tried again")
}

// Rule OVERLAP-03: what the engine may be reading is not loaded again, neither after ErrBusy nor by the next process.
// A rank that has announced a layer and is tried again writes that layer again, so the engine does not learn of it before.
func TestOverlapWaitsForTheLastAttempt(t *testing.T) {
	b := overlapped(t, 2)
	b.start(Load, 1)
	moves := all[Move](b)
	b.got(b.Verified(b.now, moves[1].ID, 1))
	b.done(moves[1], Outcome{Err: connector.ErrBusy})
	b.got(b.Verified(b.now, moves[0].ID, 1))
	require.Empty(t, all[Tell](b))
	b.after(b.cfg.BackoffMax)
	again := one[Move](b)
	require.Equal(t, 1, again.Rank)
	require.Empty(t, all[Tell](b))
	b.got(b.Verified(b.now, again.ID, 1))
	require.Equal(t, Arriving, b.event().Kind)
}

func TestOverlapIsOneAttempt(t *testing.T) {
	for name, end := range map[string]func(b *bench, m Move){
		"busy": func(b *bench, m Move) { b.done(m, Outcome{Err: connector.ErrBusy}) },
		"death": func(b *bench, _ Move) {
			b.got(b.Reaped(b.now, 1))
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := overlapped(t, 1)
			b.start(Load, 1)
			m := one[Move](b)
			b.got(b.Verified(b.now, m.ID, 1))
			require.Equal(t, Arriving, b.event().Kind)
			end(b, m)
			require.Len(t, b.event().Failed, 1)
			require.True(t, b.Idle())

			b = overlapped(t, 1)
			b.start(Load, 1)
			end(b, one[Move](b))
			require.Empty(t, all[Tell](b), "nobody has used a layer: it is tried again")
			require.False(t, b.Idle())
		})
	}
}

// Rule PLACE-36: until the engine has learned of a layer, what a call has verified is taken back, and the call may write its blocks once more.
func TestRetract(t *testing.T) {
	b := overlapped(t, 2)
	b.start(Load, 1)
	moves := all[Move](b)
	b.got(b.Verified(b.now, moves[0].ID, 2))
	b.quiet()
	require.True(t, b.Retract(moves[0].ID))
	b.got(b.Verified(b.now, moves[1].ID, 1))
	b.quiet()
	b.got(b.Verified(b.now, moves[0].ID, 1))
	require.Equal(t, Arriving, b.event().Kind)
	require.False(t, b.Retract(moves[0].ID), "the engine may be reading it")
	require.False(t, b.Retract(moves[1].ID))
	b.got(b.Reaped(b.now, 1))
	require.False(t, b.Retract(moves[0].ID), "it is over")
}

// Where a load is not verified in the cache, block by block and in one attempt, nothing is used before its end.
func TestOverlapIsForVerifiedLoads(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"off": func(c *Config) { c.Overlap = false }, "lossy": func(c *Config) { c.Lossy = true }, "staged": func(c *Config) { c.Slots = 8 },
	} {
		b := newBench(t, func(c *Config) {
			c.Ranks, c.Layers, c.Overlap = 1, 2, true
			change(c)
		})
		b.start(Load, 1)
		require.False(t, one[Move](b).Overlap, name)
	}
	b := newBench(t, func(c *Config) { c.Ranks, c.Layers, c.Overlap, c.Slots, c.Placed = 1, 2, true, 8, true })
	b.start(Load, 1)
	require.True(t, one[Move](b).Overlap, "the host may copy it out of slots")
}

// Rule PLACE-36: the engine uses layers of what the host loads while no plugin is up, too. The next life is not asked for what fails then.
func TestAloneLayers(t *testing.T) {
	b := placed(t, func(c *Config) { c.Ranks, c.Layers, c.Overlap = 2, 2, true })
	b.start(Load, 2)
	moves := all[Move](b)
	require.Len(t, moves, 2)
	for _, m := range moves {
		require.Zero(t, m.Gen)
		require.True(t, m.Overlap)
	}
	b.got(b.Verified(b.now, moves[0].ID, 1))
	b.quiet()
	b.got(b.Verified(b.now, moves[1].ID, 1))
	require.Equal(t, Arriving, b.event().Kind)
	b.got(b.Up(b.now, 2))
	b.quiet()
	b.done(moves[0], Outcome{})
	b.done(moves[1], Outcome{Err: &connector.BlockError{Blocks: []connector.BlockID{1}, Err: connector.ErrGone}})
	e := b.event()
	require.Equal(t, Loaded, e.Kind)
	require.Equal(t, []connector.BlockID{1}, e.Failed)
	require.Empty(t, b.Pins())
}
