package multiconnector

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// What a child could not load is forgotten. What others have stays known.
func TestSeenAndLost(t *testing.T) {
	var s seen
	blocks := []connector.Block{{Key: connector.BlockKey{1}}, {Key: connector.BlockKey{2}}, {Key: connector.BlockKey{3}}}
	keys := []connector.BlockKey{{1}, {2}, {3}}
	s.add(0, keys)
	s.add(1, keys[:2])
	require.Equal(t, 3, s.prefix(0, blocks))
	s.lost(0, blocks[1:2])
	require.Equal(t, 1, s.prefix(0, blocks))
	require.Equal(t, 2, s.prefix(1, blocks))
	s.clear()
	require.Zero(t, s.prefix(1, blocks))
}
