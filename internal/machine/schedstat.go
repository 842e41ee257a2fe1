package machine

import (
	"fmt"
	"iter"
	"os"
	"path/filepath"
)

// SchedStat is what the kernel counts about a thread's time, in nanoseconds and counts.
type SchedStat struct {
	Ran, Waited, Slices uint64 // Waited: for a processor
}

// SchedStats reads, one after the other, the counts of the threads in folders like /proc/PID/task, by the path of their
// schedstat. A thread without counts (the kernel has none, /proc is hidden, the thread is gone) is left out.
func SchedStats(folders ...string) iter.Seq2[string, SchedStat] {
	return func(yield func(string, SchedStat) bool) {
		for _, folder := range folders {
			threads, _ := os.ReadDir(folder) // not by a pattern: that would list all that /proc has of each thread
			for _, thread := range threads {
				path := filepath.Join(folder, thread.Name(), "schedstat")
				data, _ := os.ReadFile(path) //nolint:gosec // below /proc
				var s SchedStat
				if _, err := fmt.Sscan(string(data), &s.Ran, &s.Waited, &s.Slices); err == nil && !yield(path, s) {
					return
				}
			}
		}
	}
}
