package host

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/host/internal/leaktest"
)

// syncBuffer is a log that several goroutines write.
type syncBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// A plugin cannot bring its engine down by what it writes to standard error.
func TestHostileStderr(t *testing.T) {
	leaks := leaktest.Watch(t)
	var log syncBuffer
	p, err := Launch(t.Context(), alias(t, "kvport-badlog"), LaunchOptions{
		Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "msg=good") }, time.Minute, time.Millisecond)
	require.Contains(t, log.String(), `plugin: {\"@message\":1}`)
	require.NoError(t, p.Close(t.Context()))
	leaks()
}
