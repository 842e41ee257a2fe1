package nixl

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// TestTurnsLast: an answer can be asked for longer than a prompt, and the oldest goes when there are too many.
func TestTurnsLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHolds(1, time.Second, newTally())
		prompt, secret := h.add(connector.Ended{Request: "p", Remote: true})
		answer, key := h.add(connector.Ended{Request: "d", Remote: true, Weak: true})
		<-time.After(2 * time.Second)
		_, err := h.find(prompt, secret)
		require.ErrorIs(t, err, connector.ErrGone)
		_, err = h.find(answer, key)
		require.NoError(t, err)
		for range maxTurns {
			h.add(connector.Ended{Request: "d", Remote: true, Weak: true})
		}
		_, err = h.find(answer, key)
		require.ErrorIs(t, err, connector.ErrGone, "the oldest was forgotten")
		require.Len(t, h.open, maxTurns)
		<-time.After(turnLease)
		last, key := h.add(connector.Ended{Request: "d", Remote: true, Weak: true})
		require.Len(t, h.open, 1, "expired ones are dropped")
		_, err = h.find(last, key)
		require.NoError(t, err)
	})
}

// TestTurnServesMany: an answer serves as many loads as its hold says, also when the ranks of several consumers read at
// the same time; each is reported once, and it counts as one hold.
func TestTurnServesMany(t *testing.T) {
	const ranks = 2
	h := newHolds(ranks, time.Minute, newTally())
	id, secret := h.add(connector.Ended{Request: "d", Remote: true, Weak: true})
	read := func(load, rank int) error {
		q := &question{Hold: id, Secret: secret, Rank: rank, Load: fmt.Sprint(load), World: ranks}
		return h.done(q, time.Now())
	}
	require.NoError(t, read(0, 0))
	require.NoError(t, read(1, 0))
	require.Empty(t, h.take(), "no load is whole")
	require.NoError(t, read(1, 1))
	require.NoError(t, read(1, 1), "said again")
	require.Len(t, h.take(), 1)
	require.NoError(t, read(0, 1))
	require.Len(t, h.take(), 1)
	for load := 2; load < turnLoads; load++ {
		require.NoError(t, read(load, 1))
		require.NoError(t, read(load, 0))
	}
	require.Len(t, h.take(), turnLoads-2)
	require.ErrorIs(t, read(turnLoads, 0), connector.ErrGone)
	require.InDelta(t, 1, h.tally.values[series{name: "holds_consumed_total"}], 0)
	require.Zero(t, h.tally.values[series{name: "holds_expired_total"}])
}

// TestTurnFits: a ticket of an earlier turn is for any prompt: its blocks are told apart by their keys.
func TestTurnFits(t *testing.T) {
	q := &connector.Query{Tokens: 40, Keys: []connector.BlockKey{{1}, {2}}}
	for _, c := range []struct {
		ticket ticket
		fits   bool
	}{
		{ticket{Tokens: 40, Last: key(2)}, true},
		{ticket{Tokens: 40, Last: key(3)}, false},
		{ticket{Tokens: 400, Last: key(3)}, false},
		{ticket{Tokens: 400, Last: key(3), Turn: true}, true},
	} {
		require.Equal(t, c.fits, c.ticket.fits(q, 16))
	}
}

func key(n byte) []byte {
	k := connector.BlockKey{n}
	return k[:]
}
