package plugin

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestLogRate(t *testing.T) {
	p := newPluginLog(nil, "x")
	now := p.filled
	for range logBurst {
		_, ok := p.admit(now)
		require.True(t, ok)
	}
	for range 10 {
		_, ok := p.admit(now)
		require.False(t, ok)
	}
	dropped, ok := p.admit(now.Add(time.Second))
	require.True(t, ok)
	require.Equal(t, 10, dropped)
}
