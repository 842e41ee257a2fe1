package loader

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestBeside: only a program of kvport's own wheel looks in its grandparent.
func TestBeside(t *testing.T) {
	require.Equal(t, []string{"/opt/.deps/nixl"}, beside("/opt/bin/kvport"))
	require.Equal(t, []string{"/site/kvport_agent/.deps/nixl", "/site"}, beside("/site/kvport_agent/bin/kvport"))
	require.Empty(t, Find(func(string) string { return "" }))
	require.Equal(t, "here", Find(func(string) string { return "here" }))
}
