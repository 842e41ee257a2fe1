package tracker

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// TestRenewed: a renewal lengthens a hold, never shortens it, not for ever; what is over is told.
func TestRenewed(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Can = connector.CanHold | connector.CanLease })
	hold := func(id connector.HoldID, ttl time.Duration) {
		b.end(40, true)
		b.got(b.FinishAnswered(b.now, one[Finish](b).ID, []connector.Hold{{ID: id, TTL: ttl}}, nil))
		require.True(t, b.event().Held)
	}
	hold(7, 10*time.Second)
	hold(8, 20*time.Second)
	renewed := func(gen uint64, list []connector.HoldID) []connector.HoldID {
		b.Renewed(b.now, gen, list)
		return b.Over(gen)
	}
	require.Equal(t, []connector.HoldID{9}, renewed(1, []connector.HoldID{7, 9}), "9 never was")
	require.Empty(t, renewed(2, []connector.HoldID{7}), "another life's")
	require.Equal(t, []connector.HoldID{9}, b.Over(1), "the call failed: it is told again")
	b.after(9 * time.Second)
	require.Empty(t, renewed(1, []connector.HoldID{7}))
	b.after(9 * time.Second)
	b.quiet()
	require.Empty(t, renewed(1, []connector.HoldID{7}))
	b.after(2 * time.Second)
	require.Equal(t, 1, b.Held(), "8 was not renewed, 7 was")
	require.Equal(t, Released, b.event().Kind)
	require.Equal(t, []connector.HoldID{8}, renewed(1, []connector.HoldID{7}), "8 is over")
	for range 3 {
		b.after(9 * time.Second)
		require.Empty(t, renewed(1, []connector.HoldID{7}))
	}
	b.after(9 * time.Second)
	require.Equal(t, []connector.HoldID{7}, renewed(1, []connector.HoldID{7}), "56 s after it began it would stay longer than a minute")
	b.after(time.Second)
	require.Equal(t, ReleasedExpired, b.event().Reason)
	require.Equal(t, []connector.HoldID{7}, renewed(1, nil))
	require.Empty(t, renewed(1, nil), "once")
	hold(10, 0)
	b.got(b.Consumed(1, []connector.HoldID{10}))
	require.Equal(t, ReleasedConsumed, b.event().Reason)
	require.Empty(t, renewed(1, nil), "the connector said so itself")
	hold(11, 0)
	b.got(b.Reaped(b.now, 1))
	require.Equal(t, ReleasedPluginDied, b.event().Reason)
	b.got(b.Up(b.now, 2))
	require.Empty(t, renewed(2, nil), "the next life has its own")
}
