package tracker

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// A save that has stored what a ticket promises holds the ticket back no longer. Its blocks stay pinned until
// it is over, on every rank.
func TestStoredEndsTheWait(t *testing.T) {
	for name, holds := range map[string]bool{"store": false, "holder": true} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, func(c *Config) {
				c.Ranks = 2
				if c.Can &^= connector.CanHold; holds {
					c.Can |= connector.CanHold
				}
			})
			b.start(Save, 2)
			moves := all[Move](b)
			require.Len(t, moves, 2)
			b.got(b.Step(b.now, &connector.Step{ID: 10, Ended: []connector.Ended{{Request: "r", Tokens: 32, Remote: true, Blocks: blocks(2)}}}, nil))
			b.quiet()
			b.got(b.Stored(b.now, moves[0].ID))
			b.quiet()
			b.got(b.Stored(b.now, moves[1].ID))
			require.Equal(t, Stored, all[Tell](b)[0].Event.Kind)
			if holds {
				b.got(b.FinishAnswered(b.now, one[Finish](b).ID, []connector.Hold{{ID: 1}}, nil))
			}
			e := all[Tell](b)[len(all[Tell](b))-1].Event
			require.Equal(t, Finished, e.Kind)
			require.Equal(t, 32, e.Ticket.Tokens)
			require.Equal(t, holds, e.Held)
			require.True(t, b.Saving())
			require.Positive(t, b.Pins()[1])
			b.got(b.Stored(b.now, moves[1].ID))
			b.quiet()
			b.done(moves[0], Outcome{})
			b.quiet()
			b.done(moves[1], Outcome{})
			require.Equal(t, Saved, b.event().Kind)
			require.False(t, b.Saving())
			b.got(b.Stored(b.now, moves[1].ID))
			b.quiet()
		})
	}
}

// What has failed on one rank is not promised by another.
func TestStoredAfterAFailure(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Ranks, c.Can = 2, 0 })
	b.start(Save, 2)
	moves := all[Move](b)
	b.got(b.Step(b.now, &connector.Step{ID: 10, Ended: []connector.Ended{{Request: "r", Tokens: 32, Remote: true, Blocks: blocks(2)}}}, nil))
	b.done(moves[0], Outcome{Err: &connector.BlockError{Blocks: []connector.BlockID{1}, Err: connector.ErrGone}})
	b.got(b.Stored(b.now, moves[1].ID))
	b.quiet()
	b.done(moves[1], Outcome{})
	require.Equal(t, 16, all[Tell](b)[1].Event.Ticket.Tokens)
}

// perhapsStored says that a save has stored what a ticket promises before it answers, also twice.
func (w *world) perhapsStored(id CallID) {
	for range w.rng.IntN(3) {
		w.do("stored", w.b.Stored(w.now, id))
	}
}

// perhapsAgain answers a second time.
func (w *world) perhapsAgain(id CallID) {
	if w.rng.IntN(5) == 0 {
		w.do("stored late", w.b.Stored(w.now, id))
		w.do("moved again", w.b.Moved(w.now, id, Outcome{}))
	}
}
