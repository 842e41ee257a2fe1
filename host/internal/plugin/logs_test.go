package plugin

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestLogRate(t *testing.T) {
	p := newPluginLog(nil, "x")
	now := p.others.filled
	for range logBurst {
		_, ok := p.admit(slog.LevelInfo, now)
		require.True(t, ok)
	}
	for range 10 {
		_, ok := p.admit(slog.LevelError, now)
		require.False(t, ok)
	}
	dropped, ok := p.admit(slog.LevelInfo, now.Add(time.Second))
	require.True(t, ok)
	require.Equal(t, 10, dropped)
}

// How many lines of an operator's levels are written does not depend on whether those of level debug are.
func TestDebugLinesDropNoOthers(t *testing.T) {
	synctest.Test(t, testDebugLines) // no time passes, so that nothing refills
}

func testDebugLines(t *testing.T) {
	written := func(level slog.Level) (lines []string) {
		var out bytes.Buffer
		p := newPluginLog(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: level})), "x")
		for n := range 3 * logBurst {
			p.write(slog.LevelDebug, "detail", nil)
			if n%2 == 0 {
				p.write(slog.LevelInfo, fmt.Sprint("line ", n), nil)
			}
		}
		p.debug.tokens = 1 // what was dropped is told
		p.write(slog.LevelDebug, "detail", nil)
		for line := range strings.Lines(out.String()) {
			if !strings.Contains(line, "level=DEBUG") {
				lines = append(lines, line[strings.Index(line, "level="):])
			}
		}
		return lines
	}
	require.Equal(t, written(slog.LevelInfo), written(slog.LevelDebug))
	require.Len(t, written(slog.LevelDebug), logBurst)
}
