package nixl

import (
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
