package plugin

import (
	"bytes"
	"context"
	"errors"
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
	began := time.Now()
	if err, answered := runs(p.limit, p.waited, answer); answered {
		return err
	}
	took := time.Since(began)
	cancel()
	if err := <-answer; err != nil { // else it came in time after all
		return fmt.Errorf("no heartbeat within %s, waited %s: %w", p.limit, took.Round(time.Millisecond), err)
	}
	return nil
}

// runs waits until a plugin could have used all of limit, or for what comes before that. waited is the time for
// which the plugin has waited since the last call; nil: none.
func runs[T any](limit time.Duration, waited func() time.Duration, before <-chan T) (what T, came bool) {
	tick := max(limit/heartbeatTicks, 1)
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for last, counted := time.Now(), time.Duration(0); counted < limit; {
		select {
		case what = <-before:
			return what, true
		case <-ticker.C:
		}
		now, lost := time.Now(), time.Duration(0)
		if waited != nil {
			lost = waited()
		}
		counted += runnableTime(now.Sub(last), tick, lost)
		last = now
	}
	return what, false
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
	threads, longest := map[string]machine.SchedStat{}, time.Duration(0)
	for path, is := range machine.SchedStats(l.folders...) {
		threads[path] = is
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

// stateOf reads the state of a thread from /proc/PID/task/TID/stat, or of a process from /proc/PID/stat: R is ready to run, D waits for a disk,
// T is stopped; 0 if it is gone. The name before it may hold anything.
func stateOf(path string) byte {
	data, _ := os.ReadFile(path) //nolint:gosec // below /proc
	end := bytes.LastIndex(data, []byte(") "))
	if end < 0 || end+2 >= len(data) {
		return 0
	}
	return data[end+2]
}

// Patient is a context for a plugin's start and end. It ends when the plugin could have used all of limit, so that a
// busy machine delays them and does not fail them: see heartbeat, whose rules these are. Its cause is then
// DeadlineExceeded. waits may be nil.
func Patient(ctx context.Context, limit time.Duration, waits func() time.Duration) (context.Context, context.CancelFunc) {
	ctx, release := context.WithTimeout(ctx, heartbeatStretch*limit+max(limit/heartbeatTicks, 1))
	ctx, end := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if _, ended := runs(limit, waits, ctx.Done()); !ended {
			end(context.DeadlineExceeded)
		}
	}()
	return ctx, func() {
		end(context.Canceled)
		release()
		<-done
	}
}

// RanOut reports whether a patient context has ended because the plugin took too long.
func RanOut(ctx context.Context) bool {
	return ctx.Err() != nil && errors.Is(context.Cause(ctx), context.DeadlineExceeded)
}

// LateError says that a plugin made no handshake within a limit, and for how long it was waited for: for longer than the limit
// if its processes waited for a processor or a disk.
type LateError struct{ Limit, Waited time.Duration }

// Error implements error.
func (e *LateError) Error() string {
	return fmt.Sprintf("no handshake within %s, it was killed after %s", e.Limit, e.Waited)
}

// Longer says what to do about a start that took too long.
func Longer(err error, limit time.Duration) error {
	return fmt.Errorf("%w: raise kvport.deadlines.handshake (%s) if its start needs longer", err, limit)
}

// maxKin bounds the processes of a plugin that are looked at.
const maxKin = 64

// Waits says how long the processes of a plugin wait for a processor or a disk: its own, and
// those that it started and waits for. The result is for one goroutine.
func (p *Process) Waits() func() time.Duration { return waits(p.PID) }

// waits is Waits for the process that number gives; 0: it is not started yet.
func waits(number func() int) func() time.Duration {
	var l runQueue
	return func() time.Duration {
		pid := number()
		if pid == 0 {
			return 0
		}
		l.folders = append(l.folders[:0], taskFolder(pid))
		for _, kin := range machine.Descendants(maxKin, pid) {
			l.folders = append(l.folders, taskFolder(kin))
		}
		return l.waited()
	}
}

func taskFolder(pid int) string { return fmt.Sprintf("/proc/%d/task", pid) }
