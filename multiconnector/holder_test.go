package multiconnector_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/multiconnector"
)

// A child that has blocks sent as soon as it is asked for them is asked only for what those before it
// do not have.
func TestHolderIsAskedForTheRest(t *testing.T) {
	ks := keys(6)
	holds := func(at int) func([]multiconnector.Child) {
		return func(cs []multiconnector.Child) { cs[at].Info.Capabilities |= connector.CanHold }
	}
	for name, c := range map[string]struct {
		before, after []connector.BlockKey // children around the holder
		asked         int
	}{
		"another has all":        {before: ks, asked: 0},
		"another has some":       {before: ks[:4], asked: 2},
		"another has none":       {asked: 6},
		"one behind it has some": {after: ks[:4], asked: 6},
	} {
		t.Run(name, func(t *testing.T) {
			holder, before, after := newShelf(ks...), newShelf(c.before...), newShelf(c.after...)
			r := newRig(t, holds(1), before, holder, after)
			require.Equal(t, 6*blockTokens, r.match("r", ks).Tokens)
			require.Equal(t, c.asked, holder.asked)
			require.NoError(t, r.worker.Load(t.Context(), transfer("r", ks), r.kv))
			require.Len(t, loadedOf(holder), c.asked, "it loads what it was asked for")
		})
	}
}

// A child that hangs does not keep the holder behind it from being asked.
func TestHolderBehindASlowChild(t *testing.T) {
	ks := keys(2)
	slow, holder := newShelf(ks...), newShelf(ks...)
	slow.hang = make(chan struct{})
	defer close(slow.hang)
	r := newRig(t, func(cs []multiconnector.Child) { cs[1].Info.Capabilities |= connector.CanHold }, slow, holder)
	require.Equal(t, 2*blockTokens, r.match("r", ks).Tokens)
}
