package main

import (
	"bytes"
	"errors"
	"flag"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

var flagNixlWriters = flag.Int("nixlwriters", 0, "plugins of NixlConnector that are killed while a peer writes into them; default 1, in soak 20")

// TestNixlWriterOutlivesPlugin: D's plugin dies while a peer is in the middle of process_vm_writev into it. The
// peer writes on, into the cache of an engine that goes on: no token is wrong, since the blocks of the load
// come back only when the peer's call is over. A load may have been answered just before its plugin was stopped: then
// the test has written over the blocks of a request that runs, which shows nothing.
func TestNixlWriterOutlivesPlugin(t *testing.T) {
	rig.Need(t, "nixl")
	f := newNixlFleet(t, "sim", rig.Unhurried)
	n := rig.Count(t, "nixlwriters", *flagNixlWriters, 1, 20)
	var longest time.Duration
	for done, try := 0, uint64(0); done < n; try++ {
		require.Less(t, try, uint64(10*n+10), "%d writes have outlived their plugin, of %d", done, try)
		f.ready()
		retries := [2]float64{f.retries(f.d[0]), f.retries(f.d[1])}
		c, prompt, answer := f.caughtAnew(100 + try)
		at, size := rig.CacheOf(t, c.plugin)
		ended := make(chan time.Time, 1)
		began := make(chan struct{})
		go func() {
			close(began)
			scribble(t, c.plugin, at, size)
			ended <- time.Now()
		}()
		<-began
		require.NoError(t, syscall.Kill(c.plugin, syscall.SIGKILL))
		require.Eventually(t, func() bool { return errors.Is(syscall.Kill(c.plugin, 0), syscall.ESRCH) }, time.Minute, 100*time.Microsecond)
		reaped := time.Now()
		got := <-answer
		require.NotNil(t, got)
		after := (<-ended).Sub(reaped)
		if met := f.retries(f.d[c.d]) > retries[c.d]; met {
			rig.Same(t, "a peer that outlives D's plugin", f.All(f.node.URL, []string{prompt}, 1), []*cluster.Completion{got})
			if after > 0 {
				done++
				longest = max(longest, after)
			}
		}
		f.d[c.d].Kill() // what else it had in its cache is scribbled over
		f.again("kv_consumer", c.d, &f.d[c.d])
	}
	t.Logf("%d writes outlived a reaped plugin, the longest by %v; 0 wrong tokens", n, longest.Round(time.Millisecond))
}

// retries is how many calls of an engine's transfers were made again, as those are whose plugin dies.
func (f *nixlFleet) retries(e *cluster.Process) float64 {
	return f.Metrics(e).Sum("kvport_transfer_retries_total")
}

// scribble writes a gigabyte over memory of a process, again and again over the same, in one call.
func scribble(t *testing.T, pid int, at, size uintptr) {
	const chunk = 1 << 20
	data := bytes.Repeat([]byte{0xee}, chunk)
	var local []unix.Iovec
	var remote []unix.RemoteIovec
	for i := range uintptr(1024) {
		part := min(size, chunk)
		local = append(local, unix.Iovec{Base: &data[0], Len: uint64(part)})
		remote = append(remote, unix.RemoteIovec{Base: at + i%(size/part)*part, Len: int(part)})
	}
	if _, err := unix.ProcessVMWritev(pid, local, remote, 0); err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.EFAULT) {
		t.Errorf("process_vm_writev, which kernel.yama.ptrace_scope 0 or 1 allows: %v", err)
	}
}
