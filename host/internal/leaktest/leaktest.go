// Package leaktest finds what a test of plugin processes leaves behind: goroutines, descriptors, processes and the
// folders of sockets.
package leaktest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvport/kvport/internal/machine"
)

// Watch notes what is there now; the result fails the test if anything is left over.
func Watch(t *testing.T) func() {
	t.Helper()
	before := goleak.IgnoreCurrent()
	fds, children, sockets := countFDs(t), len(machine.Children(0)), countSockets(t)
	return func() {
		t.Helper()
		require.NoError(t, running(before))
		require.Eventually(t, func() bool { return countFDs(t) <= fds }, time.Minute, 10*time.Millisecond, "descriptors: %d, had %d", countFDs(t), fds)
		require.Len(t, machine.Children(0), children, "processes")
		require.LessOrEqual(t, countSockets(t), sockets, "socket folders") // a host also removes those of killed ones
	}
}

// running gives the goroutines that are not in before, once they have had a minute to end: goleak waits half a second,
// in which a busy machine may not run them.
func running(before goleak.Option) (err error) {
	for until := time.Now().Add(time.Minute); ; {
		if err = goleak.Find(before); err == nil || time.Now().After(until) {
			return err
		}
	}
}

func countFDs(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	n := 0
	for _, e := range entries {
		target, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err == nil && !strings.Contains(target, "kvport-cache") {
			n++
		}
	}
	return n
}

func countSockets(t *testing.T) int {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(os.TempDir(), "kvport-plugin-*"))
	require.NoError(t, err)
	return len(dirs)
}
