package peer

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/lookupbuffer"
)

// A block of another length was sent by a peer of another version: it is no damage.
func TestGetOutdated(t *testing.T) {
	s := &Store{memory: lookupbuffer.NewMemory(lookupbuffer.Options{Bytes: 1 << 20, Keep: true})}
	defer func() { require.NoError(t, s.memory.Close()) }()
	it := connector.Item{Key: connector.StoreKey{1}, Spans: [][]byte{make([]byte, 32)}}
	require.NoError(t, s.Put(t.Context(), []connector.Item{it}))
	require.NoError(t, s.Get(t.Context(), []connector.Item{it}))
	it.Spans = append(it.Spans, make([]byte, 16))
	require.ErrorIs(t, s.Get(t.Context(), []connector.Item{it}), connector.ErrOutdated)
}
