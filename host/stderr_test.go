package host

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/host/internal/leaktest"
	"github.com/kvport/kvport/verify/testkit"
)

// A plugin cannot bring its engine down by what it writes to standard error.
func TestHostileStderr(t *testing.T) {
	leaks := leaktest.Watch(t)
	var log testkit.Log
	p, err := Launch(t.Context(), alias(t, "kvport-badlog"), LaunchOptions{
		Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "msg=good") }, time.Minute, time.Millisecond)
	require.Contains(t, log.String(), `plugin: {\"@message\":1}`)
	require.NoError(t, p.Close(t.Context()))
	leaks()
}
