package conformance

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/internal/machine"
	"github.com/kvport/kvport/verify/testkit"
)

// What a connector starts is watched as it is itself: a plugin made of others is late when they are.
func TestLoadOfDescendants(t *testing.T) {
	plugin, child, end := testkit.Family(t)
	require.Equal(t, []string{"/proc/self/task"}, foldersOf(nil))
	require.Equal(t, []string{"/proc/self/task", procOf(plugin) + "/task", procOf(child) + "/task"}, foldersOf([]int{plugin}))
	end()
}

// What threads have waited before is known, and later samples count what they have waited since; a thread that was not seen before has begun since,
// and one that was missed for a while has not. Nobody waits for longer than has passed, and a sample that takes long makes the next one late.
func TestSamples(t *testing.T) {
	const ms = time.Millisecond
	at := time.Now()
	waited := func(d time.Duration) machine.SchedStat { return machine.SchedStat{Waited: uint64(d)} } //nolint:gosec // not negative
	l := &load{marks: []mark{{at: at}}, threads: map[string]machine.SchedStat{"a": waited(time.Hour)}}
	next := func(passed time.Duration, threads map[string]machine.SchedStat) time.Duration {
		at = at.Add(passed)
		before := l.marks[len(l.marks)-1].lost
		l.add(at, threads)
		return l.marks[len(l.marks)-1].lost - before
	}
	require.Zero(t, next(loadTick, map[string]machine.SchedStat{"a": waited(time.Hour)}))
	require.Equal(t, 30*ms, next(loadTick, map[string]machine.SchedStat{"a": waited(time.Hour + 30*ms)}))
	require.Equal(t, 40*ms, next(loadTick, map[string]machine.SchedStat{"b": waited(40 * ms)}))
	require.Equal(t, loadTick, next(loadTick, map[string]machine.SchedStat{"a": waited(time.Hour + 30*ms), "c": waited(time.Second)}))
	require.Zero(t, next(loadTick, map[string]machine.SchedStat{"a": waited(time.Hour + 30*ms)}))
	require.Equal(t, 50*ms, next(loadTick+50*ms, nil))
	l.took = loadTick + 50*ms
	require.Zero(t, next(loadTick+50*ms, nil))
}
