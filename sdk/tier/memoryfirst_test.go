package tier_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk/tier"
)

// What docs/write-a-connector.md shows keeps the rules, those of placement too.
func TestMemoryFirst(t *testing.T) {
	profiles := []conformance.Profile{conformance.Store, conformance.MultiRank, conformance.Groups, conformance.Place}
	conformance.Run(t, conformance.InProcess(plugin(), json.RawMessage(`{"memory_bytes": 16777216, "dir": "@TMP@/kv"}`)), profiles...)
}

// closing is a Store that says how often it was closed.
type closing struct {
	folder
	closed *int
}

func (c closing) Close() error {
	*c.closed++
	return nil
}

// Whoever hands over a lower tier has not to close it, whatever comes of it.
func TestOpenOwnsTheLowerTier(t *testing.T) {
	closed := 0
	lower := closing{folder{t.TempDir()}, &closed}
	_, err := tier.Open(tier.Options{SlotBytes: 16, MemoryBytes: 1, Lower: lower})
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.Equal(t, 1, closed)
	s, err := tier.Open(tier.Options{SlotBytes: 16, MemoryBytes: tier.ArenaBytes(1, 16), Lower: lower})
	require.NoError(t, err)
	require.NoError(t, s.Close())
	require.NoError(t, s.Close())
	require.Equal(t, 2, closed)
	_, err = tier.Open(tier.OptionsFor(&connector.Env{}))
	require.ErrorIs(t, err, connector.ErrIncompatible)
}
