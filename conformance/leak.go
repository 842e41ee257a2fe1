package conformance

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/kvport/kvport/internal/machine"
)

// snapshot is what a process held at one moment.
type snapshot struct {
	goroutines int
	fds        int
	children   int
}

// warmUp makes the runtime open what it opens once and keeps, such as its poller, and the
// goroutines that come with it.
func warmUp() {
	if r, w, err := os.Pipe(); err == nil {
		_, _ = r.Close(), w.Close()
	}
}

func takeSnapshot() snapshot {
	return snapshot{goroutines: runtime.NumGoroutine(), fds: openFiles(0), children: len(machine.Children(0))}
}

// waitForLeaks gives what is closed in the background time to go and says what stayed.
func (s snapshot) waitForLeaks(limit time.Duration) string {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	end := time.Now().Add(limit)
	for {
		leak := s.leaks(takeSnapshot())
		if leak == "" || time.Now().After(end) {
			return leak
		}
		<-tick.C
	}
}

func (s snapshot) leaks(now snapshot) string {
	var out []string
	for _, l := range []struct {
		what        string
		before, now int
	}{
		{"goroutines", s.goroutines, now.goroutines},
		{"file descriptors", s.fds, now.fds},
		{"processes", s.children, now.children},
	} {
		if l.now > l.before {
			out = append(out, fmt.Sprintf("%d %s more than before", l.now-l.before, l.what))
		}
	}
	return strings.Join(out, ", ")
}

// procOf is the folder that the kernel has for a process; pid 0 is this one.
func procOf(pid int) string {
	if pid == 0 {
		return "/proc/self"
	}
	return fmt.Sprintf("/proc/%d", pid)
}

// openFiles counts the descriptors of a process; pid 0 is this one.
func openFiles(pid int) int {
	entries, err := os.ReadDir(procOf(pid) + "/fd")
	if err != nil {
		return 0
	}
	return len(entries)
}
