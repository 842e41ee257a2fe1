package multiconnector

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// What a child does not offer any more it gets again, whatever it had once. What others have stays known.
func TestSeenAndAbsent(t *testing.T) {
	var s seen
	keys := []connector.BlockKey{{1}, {2}, {3}}
	s.add(0, keys)
	s.add(1, keys[:1])
	s.absent(0, keys[:2])
	require.True(t, s.any(keys[0]))
	require.False(t, s.any(keys[1]))
	require.True(t, s.any(keys[2]))
	s.absent(1, keys[:1])
	require.False(t, s.any(keys[0]))
	s.lost(0, []connector.Block{{Key: keys[2]}})
	require.False(t, s.any(keys[2]))
}
