package plugin

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/kvport/kvport/internal/machine"
)

const (
	heartbeatTicks   = 8 // the limit of an answer is counted in this many parts
	heartbeatStretch = 4 // a busy machine stretches it at most by this factor
)

// heartbeat asks a plugin for signs of life. It counts only the time in which the plugin could have
// answered: neither the time for which it waited for a processor or a disk, nor the time in which the host
// itself did not run. On an overloaded machine a plugin therefore gets up to heartbeatStretch times the limit
// before it is killed. A plugin that is stopped or waits for a lock gets the limit only.
type heartbeat struct {
	limit  time.Duration
	ask    func(context.Context) error
	waited func() time.Duration // for a processor or a disk, since it was last called
}

// beat asks once. An error says why the plugin must be ended.
func (p *heartbeat) beat(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answer := make(chan error, 1)
	go func() { answer <- p.ask(ctx) }()
	tick := max(p.limit/heartbeatTicks, 1)
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	began := time.Now()
	for last, counted := began, time.Duration(0); counted < p.limit; {
		select {
		case err := <-answer:
			return err
		case <-ticker.C:
		}
		now := time.Now()
		counted += runnableTime(now.Sub(last), tick, p.waited())
		last = now
	}
	took := time.Since(began)
	cancel()
	if err := <-answer; err != nil { // else it came in time after all
		return fmt.Errorf("no heartbeat within %s, waited %s: %w", p.limit, took.Round(time.Millisecond), err)
	}
	return nil
}

// runnableTime is how much of the time since the last tick the plugin could have used. A host that comes late
// to its own tick was not run itself, and cannot say that the plugin was.
func runnableTime(passed, tick, waited time.Duration) time.Duration {
	return max(min(passed, 2*tick)-waited, tick/heartbeatStretch)
}

// runQueue measures how long the threads of some processes wait for a processor or a disk. Its zero value
// with folders is ready to use. Without schedstat (the kernel has none, /proc is hidden) it measures no wait.
type runQueue struct {
	folders []string // /proc/PID/task
	last    time.Time
	threads map[string]machine.SchedStat
}

// waited is the longest wait of a thread since the last call; 0 on the first.
func (l *runQueue) waited() time.Duration {
	now := time.Now()
	passed := now.Sub(l.last)
	threads, longest := machine.SchedStats(l.folders...), time.Duration(0)
	for path, is := range threads {
		was, known := l.threads[path]
		if !known {
			continue
		}
		longest = max(longest, time.Duration(is.Waited-was.Waited)) //nolint:gosec // it grows, by less than a life
		state := stateOf(filepath.Join(filepath.Dir(path), "stat"))
		if state == 'D' || state == 'R' && is == was { // the kernel adds a wait when it is over
			longest = max(longest, passed)
		}
	}
	l.last, l.threads = now, threads
	return longest
}

// stateOf reads a thread's state from /proc/PID/task/TID/stat: R is ready to run, D waits for a disk. The name before it may hold anything.
func stateOf(path string) byte {
	data, _ := os.ReadFile(path) //nolint:gosec // below /proc
	end := bytes.LastIndex(data, []byte(") "))
	if end < 0 || end+2 >= len(data) {
		return 0
	}
	return data[end+2]
}
