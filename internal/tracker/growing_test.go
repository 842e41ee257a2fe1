package tracker

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

func TestGrowingOfferIsLookedAtSoon(t *testing.T) {
	b := newBench(t, nil)
	b.ask(prompt(10), 160)
	for range 4 { // nothing yet: looks are farther and farther apart
		b.got(b.Matched(b.now, one[Ask](b).ID, connector.Match{}, nil))
		due, _ := b.Next()
		b.after(due.Sub(b.now))
	}
	for tokens := 32; tokens < 160; tokens += 32 {
		b.got(b.Matched(b.now, one[Ask](b).ID, connector.Match{Tokens: tokens}, nil))
		require.True(t, b.Match(b.now, "r").Later)
		b.after(b.cfg.BackoffMin)
	}
	b.got(b.Matched(b.now, one[Ask](b).ID, connector.Match{Tokens: 160}, nil))
	require.Equal(t, 160, b.Match(b.now, "r").Tokens)
}
