package conformance

import (
	"bufio"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/internal/machine"
)

// What a connector starts is watched as it is itself: a plugin made of others is late when they are.
func TestLoadOfDescendants(t *testing.T) {
	theirs, ours, err := os.Pipe()
	require.NoError(t, err)
	defer ours.Close()
	plugin := exec.CommandContext(t.Context(), "sh", "-c", `sh -c 'echo $$; read line <&3; :' & wait`)
	plugin.ExtraFiles = []*os.File{theirs}
	out, err := plugin.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, plugin.Start())
	require.NoError(t, theirs.Close())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	child, err := strconv.Atoi(strings.TrimSpace(line))
	require.NoError(t, err)

	var l load
	require.Equal(t, []string{"/proc/self/task"}, l.folders())
	l.watch(plugin.Process.Pid)
	require.Equal(t, []string{"/proc/self/task", procOf(plugin.Process.Pid) + "/task", procOf(child) + "/task"}, l.folders())
	require.NoError(t, ours.Close())
	require.NoError(t, plugin.Wait())
}

// The first sample knows only what threads have waited in all, and later ones what they have waited since; a thread that was not there before
// has begun since. Nobody waits for longer than has passed.
func TestSamples(t *testing.T) {
	at := time.Now()
	l := &load{marks: []mark{{at: at}}}
	next := func(waited map[string]time.Duration) time.Duration {
		threads := map[string]machine.SchedStat{}
		for path, d := range waited {
			threads[path] = machine.SchedStat{Waited: uint64(d)} //nolint:gosec // not negative
		}
		at = at.Add(loadTick)
		before := l.marks[len(l.marks)-1].lost
		l.add(at, threads)
		return l.marks[len(l.marks)-1].lost - before
	}
	const ms = time.Millisecond
	require.Zero(t, next(map[string]time.Duration{"a": time.Hour}))
	require.Equal(t, 30*ms, next(map[string]time.Duration{"a": time.Hour + 30*ms}))
	require.Equal(t, 40*ms, next(map[string]time.Duration{"a": time.Hour + 31*ms, "b": 40 * ms}))
	require.Equal(t, loadTick, next(map[string]time.Duration{"a": time.Hour + 31*ms, "c": time.Second}))
	require.Zero(t, next(nil))
}
