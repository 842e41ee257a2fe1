package multiconnector_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/multiconnector"
)

// A store that has every full block does not make the host ask for a partial one, which a ticket's
// holder alone could give.
func TestTailIsHoldersOnly(t *testing.T) {
	ks := keys(3)
	store, holder := newShelf(ks...), newShelf()
	r := newRig(t, func(cs []multiconnector.Child) { cs[1].Info.Capabilities = connector.CanHold }, store, holder)
	q := connector.Query{Request: "r", Tokens: 3 * blockTokens, Keys: ks, Ticket: connector.Ticket{}}
	ask := func(q connector.Query) int {
		m, err := r.sched.Match(t.Context(), []connector.Query{q})
		require.NoError(t, err)
		return m[0].Tokens
	}
	require.Equal(t, 2*blockTokens, ask(q), "the last block would be asked for without its last token")
	q.Tokens++
	require.Equal(t, 3*blockTokens, ask(q))
	q.Tokens, q.Ticket = q.Tokens-1, nil
	require.Equal(t, 3*blockTokens, ask(q), "without a ticket the host cuts offers itself")

	partial := transfer("r", append(ks[:2:2], connector.BlockKey{}))
	partial.Tokens--
	var some *connector.BlockError
	require.ErrorAs(t, r.worker.Load(t.Context(), partial, r.kv), &some)
	require.Equal(t, []connector.BlockID{2}, some.Blocks)
	require.Len(t, store.loads[0].Blocks, 2)
	require.Len(t, holder.loads[0].Blocks, 1, "the partial block was asked of the one who may have it")
}

// A load of which nothing arrives fails as a whole, although each child names only those blocks that it was
// asked for: the partial one is asked of the holder alone.
func TestNothingArrives(t *testing.T) {
	ks := keys(3)
	holder, store := newShelf(), newShelf()
	holder.loadErr = connector.ErrGone
	r := newRig(t, func(cs []multiconnector.Child) { cs[0].Info.Capabilities = connector.CanHold }, holder, store)
	partial := transfer("r", append(ks[:2:2], connector.BlockKey{}))
	partial.Tokens--
	err := r.worker.Load(t.Context(), partial, r.kv)
	require.ErrorIs(t, err, connector.ErrGone)
	if some, ok := errors.AsType[*connector.BlockError](err); ok {
		require.ElementsMatch(t, []connector.BlockID{0, 1, 2}, some.Blocks)
	}
}
