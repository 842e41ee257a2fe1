package peer

import (
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// A block that was asked for and has come over another link meanwhile takes no second place, and counts as arrived.
func TestAskedForAndThere(t *testing.T) {
	s := newStore(pipe.Peers{Bytes: 64, Wait: time.Minute}, nil, slog.New(slog.DiscardHandler))
	defer func() { require.NoError(t, s.Close()) }()
	k := connector.StoreKey{1}
	p := &producer{store: s, asked: map[connector.StoreKey]asking{k: {at: time.Now()}}}
	require.NoError(t, s.Put(t.Context(), []connector.Item{{Key: k, Spans: [][]byte{make([]byte, 64)}}}))
	_, err := p.room(k, 64)
	require.ErrorIs(t, err, errUnwanted)
	require.Empty(t, p.asked)
	require.True(t, s.has(k))
}
