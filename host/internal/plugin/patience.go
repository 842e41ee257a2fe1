package plugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// Patient is a context for a plugin's start. It ends when the plugin could have used all of limit, so that a
// busy machine delays a start and does not fail it: see heartbeat, whose rules these are. Its cause is then
// DeadlineExceeded. waits may be nil.
func Patient(ctx context.Context, limit time.Duration, waits func() time.Duration) (context.Context, context.CancelFunc) {
	tick := max(limit/heartbeatTicks, 1)
	ctx, release := context.WithTimeout(ctx, heartbeatStretch*limit+tick)
	ctx, end := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		ticker := time.NewTicker(tick)
		defer ticker.Stop()
		for last, counted := time.Now(), time.Duration(0); counted < limit; {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
			now, waited := time.Now(), time.Duration(0)
			if waits != nil {
				waited = waits()
			}
			counted += runnableTime(now.Sub(last), tick, waited)
			last = now
		}
		end(context.DeadlineExceeded)
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

// Longer says what to do about a start that took too long.
func Longer(err error, limit time.Duration) error {
	return fmt.Errorf("%w: raise kvport.deadlines.handshake (%s) if its start needs longer", err, limit)
}

// maxKin bounds the processes of a plugin that are looked at.
const maxKin = 64

// Waits says how long the processes of a plugin wait for a processor or a disk: its own, and
// those that it started and waits for. The result is for one goroutine.
func (p *Process) Waits() func() time.Duration {
	var l runQueue
	return func() time.Duration {
		pid := p.PID()
		if pid == 0 {
			return 0 // not started yet
		}
		l.folders = l.folders[:0]
		for kin := []int{pid}; len(kin) > 0 && len(l.folders) < maxKin; kin = kin[1:] {
			l.folders = append(l.folders, taskFolder(kin[0]))
			kin = append(kin, childrenOfProcess(kin[0])...)
		}
		return l.waited()
	}
}

func taskFolder(pid int) string { return fmt.Sprintf("/proc/%d/task", pid) }

// childrenOfProcess are the processes that the threads of one have started. None where the kernel does not say.
func childrenOfProcess(pid int) []int {
	var pids []int
	tasks, _ := os.ReadDir(taskFolder(pid))
	for _, task := range tasks {
		data, _ := os.ReadFile(taskFolder(pid) + "/" + task.Name() + "/children") //nolint:gosec // below /proc
		for text := range strings.FieldsSeq(string(data)) {
			if child, err := strconv.Atoi(text); err == nil {
				pids = append(pids, child)
			}
		}
	}
	return pids
}
