package multiconnector_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/multiconnector"
)

func fetches(at ...int) func([]multiconnector.Child) {
	return func(cs []multiconnector.Child) {
		for _, i := range at {
			cs[i].Info.MatchFetches = true
		}
	}
}

// A child that has blocks sent as soon as it is asked for them is asked only for what no other child has,
// wherever it is in the list.
func TestMatchFetches(t *testing.T) {
	ks := keys(6)
	for name, c := range map[string]struct {
		before, after []connector.BlockKey // children around it
		asked         int
	}{
		"one before it has all":   {before: ks, asked: 0},
		"one before it has some":  {before: ks[:4], asked: 2},
		"nobody else has any":     {asked: 6},
		"one after it has all":    {after: ks, asked: 0},
		"one after it has some":   {after: ks[:4], asked: 2},
		"both together have all":  {before: ks[:3], after: ks, asked: 0},
		"both have only some":     {before: ks[:5], after: ks[:4], asked: 1},
		"one has it from a block": {after: ks[3:], asked: 6},
	} {
		t.Run(name, func(t *testing.T) {
			peer, before, after := newShelf(ks...), newShelf(c.before...), newShelf(c.after...)
			r := newRig(t, fetches(1), before, peer, after)
			require.True(t, r.multi.Info().MatchFetches, "a composite of such a child is such a child")
			require.Equal(t, 6*blockTokens, r.match("r", ks).Tokens)
			require.Equal(t, c.asked, peer.asked)
			require.NoError(t, r.worker.Load(t.Context(), transfer("r", ks), r.kv))
			require.Len(t, loadedOf(peer), c.asked, "it loads what it was asked for")
		})
	}
}

// Several such children are asked one after the other, each for the rest.
func TestMatchFetchesInTurn(t *testing.T) {
	ks := keys(6)
	first, second, store := newShelf(ks[:5]...), newShelf(ks...), newShelf(ks[:2]...)
	r := newRig(t, fetches(0, 1), first, second, store)
	require.Equal(t, 6*blockTokens, r.match("r", ks).Tokens)
	require.Equal(t, []int{4, 1}, []int{first.asked, second.asked})
}

// One that only saves is never asked, so that a composite of it is none that fetches.
func TestMatchFetchesOfProducer(t *testing.T) {
	ks := keys(2)
	peer, store := newShelf(ks...), newShelf(ks...)
	r := newRig(t, func(cs []multiconnector.Child) {
		cs[0].Info.MatchFetches, cs[0].Role = true, connector.RoleProducer
	}, peer, store)
	require.False(t, r.multi.Info().MatchFetches)
	require.Equal(t, 2*blockTokens, r.match("r", ks).Tokens)
	require.Zero(t, peer.asked)
}

// A child that hangs does not keep such a child from being asked.
func TestMatchFetchesBesideSlowChild(t *testing.T) {
	ks := keys(2)
	slow, peer := newShelf(ks...), newShelf(ks...)
	slow.hang = make(chan struct{})
	defer close(slow.hang)
	r := newRig(t, func(cs []multiconnector.Child) {
		fetches(1)(cs)
		cs[0].Patience = 50 * time.Millisecond
	}, slow, peer)
	require.Equal(t, 2*blockTokens, r.match("r", ks).Tokens)
}
