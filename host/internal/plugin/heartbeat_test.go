package plugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

const limit = 2 * time.Second

// after is a plugin that answers after a time, unless nobody waits for it any more.
func after(d time.Duration) func(context.Context) error {
	return func(ctx context.Context) error {
		select {
		case <-time.After(d):
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func TestHeartbeat(t *testing.T) {
	const tick = limit / heartbeatTicks
	idle := func() time.Duration { return 0 }
	starved := func() time.Duration { return time.Hour }
	half := func() time.Duration { return tick / 2 }
	for _, c := range []struct {
		name   string
		ask    func(context.Context) error
		waited func() time.Duration
		alive  bool
		took   time.Duration
	}{
		{"at once", after(0), idle, true, 0},
		{"in time", after(1900 * time.Millisecond), idle, true, 1900 * time.Millisecond},
		{"never", after(time.Hour), idle, false, limit},
		{"late without a reason", after(limit + tick), idle, false, limit},
		{"late, had half a processor", after(2*limit - tick), half, true, 2*limit - tick},
		{"never, had half a processor", after(time.Hour), half, false, 2 * limit},
		{"late, had no processor", after(heartbeatStretch*limit - tick), starved, true, heartbeatStretch*limit - tick},
		{"never, had no processor", after(time.Hour), starved, false, heartbeatStretch * limit},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				err := (&heartbeat{limit: limit, ask: c.ask, waited: c.waited}).beat(t.Context())
				require.Equal(t, c.took, time.Since(began))
				if c.alive {
					require.NoError(t, err)
					return
				}
				require.ErrorIs(t, err, context.Canceled)
				require.ErrorContains(t, err, fmt.Sprintf("no heartbeat within 2s, waited %s", c.took))
			})
		})
	}
}

// A host that was not run for a minute has not seen that the plugin had a minute.
func TestHeartbeatOfLateHost(t *testing.T) {
	for _, c := range []struct {
		name  string
		times int // that the host comes a minute late
		alive bool
	}{{"once", 1, true}, {"thrice", 3, true}, {"again and again", 4, false}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				late := 0
				asleep := make(chan struct{})
				p := &heartbeat{limit: limit, ask: func(ctx context.Context) error {
					select {
					case <-asleep: // it answers when the host runs again
						return after(limit / heartbeatTicks / 2)(ctx)
					case <-ctx.Done():
						return ctx.Err()
					}
				}, waited: func() time.Duration {
					if late++; late <= c.times {
						<-time.After(time.Minute)
					}
					if late == c.times+1 && c.alive {
						close(asleep)
					}
					return 0
				}}
				err := p.beat(t.Context())
				if c.alive {
					require.NoError(t, err)
				} else {
					require.ErrorContains(t, err, "no heartbeat within 2s, waited 4m0")
				}
			})
		})
	}
}

func TestHeartbeatOfGonePlugin(t *testing.T) {
	gone := errors.New("connection closed")
	p := &heartbeat{limit: limit, ask: func(context.Context) error { return gone }, waited: func() time.Duration { return 0 }}
	require.ErrorIs(t, p.beat(t.Context()), gone)
}

func TestRunQueue(t *testing.T) {
	folder := t.TempDir()
	write := func(tid, name, text string) {
		require.NoError(t, os.MkdirAll(filepath.Join(folder, tid), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(folder, tid, name), []byte(text), 0o600))
	}
	l := runQueue{folders: []string{folder}}
	require.Zero(t, l.waited(), "no such process")
	write("7", "schedstat", "100 1000000000 5\n")
	write("7", "stat", "7 (a (b) R) S 1 2 3\n")
	require.Zero(t, l.waited(), "what was before is not counted")
	write("7", "schedstat", "150 1250000000 6\n")
	require.Equal(t, 250*time.Millisecond, l.waited())
	require.Zero(t, l.waited(), "it sleeps")
	write("7", "stat", "7 (a (b) S) R 1 2 3\n")
	began := l.last
	waited := l.waited()
	require.Positive(t, waited, "it waits for a processor and has not run at all")
	require.Equal(t, l.last.Sub(began), waited)
	write("7", "schedstat", "151 1250000000 7\n")
	write("7", "stat", "7 (a) D 1 2 3\n")
	began = l.last
	waited = l.waited()
	require.Equal(t, l.last.Sub(began), waited, "it waits for a disk")
	write("8", "schedstat", "1 9000000000 1\n")
	write("7", "stat", "7 (a) T 1 2 3\n")
	require.Zero(t, l.waited(), "one thread is new, one is stopped")
	write("7", "schedstat", "151 1250000001 8\n")
	write("8", "schedstat", "2 9000000003 2\n")
	require.Equal(t, 3*time.Nanosecond, l.waited(), "the longest")
	for _, bad := range []string{"", "1 2", "a b c", "-1 -2 -3"} {
		write("7", "schedstat", bad)
		write("8", "schedstat", bad)
		require.Zero(t, l.waited(), bad)
	}
}

// Of two processes on one processor the polite one waits for it; one that is stopped never does.
func TestRunQueueOfProcess(t *testing.T) {
	if _, err := os.Stat("/proc/self/schedstat"); err != nil {
		t.Skip("this kernel counts no waits: plugins have the heartbeat's limit alone")
	}
	runtime.LockOSThread() // its affinity is what children inherit
	defer runtime.UnlockOSThread()
	var before, one unix.CPUSet
	require.NoError(t, unix.SchedGetaffinity(0, &before))
	for cpu := range 1024 {
		if before.IsSet(cpu) {
			one.Set(cpu)
			break
		}
	}
	require.NoError(t, unix.SchedSetaffinity(0, &one))
	defer func() { require.NoError(t, unix.SchedSetaffinity(0, &before)) }()
	spin := func() int {
		cmd := exec.CommandContext(t.Context(), "sh", "-c", "while :; do :; done")
		require.NoError(t, cmd.Start())
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		return cmd.Process.Pid
	}
	polite := spin()
	require.NoError(t, unix.Setpriority(unix.PRIO_PROCESS, polite, 10))
	spin()
	l := runQueue{folders: []string{fmt.Sprintf("/proc/%d/task", polite)}}
	l.waited()
	waited := time.Duration(0)
	require.Eventually(t, func() bool {
		waited += l.waited()
		return waited > 200*time.Millisecond
	}, time.Minute, 20*time.Millisecond)
	require.NoError(t, unix.Kill(polite, unix.SIGSTOP))
	require.Eventually(t, func() bool { return l.waited() == 0 && stateOf(fmt.Sprintf("/proc/%d/stat", polite)) == 'T' }, time.Minute, 20*time.Millisecond)
	for range 3 {
		require.Zero(t, l.waited())
	}
}
