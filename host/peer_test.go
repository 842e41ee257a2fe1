package host

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
)

var flagPeerWrites = flag.Int("peer-writes", 0, "plugins that are killed while a peer writes into them; default 2, with KVPORT_SOAK=1 20")

// TestPeerOutlivesPlugin: a peer's process_vm_writev into a plugin goes on when the plugin is dead and reaped, and
// writes what it has left into the cache. The blocks of the plugin's loads come back when it is over, not
// before (rule HOST-05).
func TestPeerOutlivesPlugin(t *testing.T) {
	n := 2
	if os.Getenv("KVPORT_SOAK") != "" {
		n = 20
	}
	if *flagPeerWrites > 0 {
		n = *flagPeerWrites
	}
	outlived, longest := 0, time.Duration(0)
	for i := 0; outlived < n; i++ {
		require.Less(t, i, 10*n+10, "%d of %d writes outlived their plugin", outlived, i)
		if after := peerOutlives(t); after > 0 {
			outlived++
			longest = max(longest, after)
		}
	}
	t.Logf("%d writes outlived a reaped plugin, the longest by %v: 0 bytes in blocks that had come back", outlived, longest)
}

const (
	peerBlock = 1 << 20
	peerCount = 16
)

// peerOutlives is one such death. It returns by how much the write outlived the plugin, 0 if it did not.
func peerOutlives(t *testing.T) time.Duration {
	o := rigOptions{dir: t.TempDir(), extra: map[string]any{"fault": "hang_load", "at": 1, "once": true}}
	cfg, eng, opts := o.build(t)
	layout, size := WithDigests(connector.Layout{
		Name: "test", Blocks: peerCount, Groups: []connector.Group{{BlockTokens: blockTokens, Policy: connector.PolicyAll}},
		Segments: []connector.Segment{{BlockStride: peerBlock, Bytes: peerBlock}},
	})
	region, err := NewRegion(size)
	require.NoError(t, err)
	defer func() { require.NoError(t, region.Close()) }()
	eng.Layout, eng.Ranks = layout, []*Region{region}
	h, err := Open(t.Context(), cfg, eng, opts)
	require.NoError(t, err)
	r := &rig{Host: h, t: t}
	defer func() { require.NoError(t, r.closeNow()) }()
	pid := h.Health().PID
	at := mappedAt(t, pid, "kvport-cache")
	r.send(&connector.Step{Admitted: []connector.Transfer{transfer("a", keys(1, peerCount), 0)}})
	require.Eventually(t, func() bool { _, err := os.Stat(o.dir + "/happened"); return err == nil }, time.Minute, time.Millisecond)

	cache := region.Bytes()[:peerCount*peerBlock]
	ended := make(chan time.Time, 1)
	go func() {
		writeAsPeer(t, pid, at)
		ended <- time.Now()
	}()
	require.Eventually(t, func() bool { return cache[0] != 0 }, time.Minute, 10*time.Microsecond)
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	require.Eventually(t, func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }, time.Minute, 100*time.Microsecond, "a zombie still is there")
	reaped := time.Now()
	e := r.next(Loaded)
	require.Len(t, e.Failed, peerCount)
	clear(cache) // another request's
	over := <-ended
	require.Equal(t, -1, bytes.IndexFunc(cache, func(c rune) bool { return c != 0 }), "a block that had come back was written by a peer of the dead")
	return max(over.Sub(reaped), 0)
}

// writeAsPeer writes a gigabyte into the loading blocks of a process, in one call.
func writeAsPeer(t *testing.T, pid int, at uintptr) {
	data := bytes.Repeat([]byte{0xee}, peerBlock)
	var local []unix.Iovec
	var remote []unix.RemoteIovec
	for i := range 1024 {
		local = append(local, unix.Iovec{Base: &data[0], Len: peerBlock})
		remote = append(remote, unix.RemoteIovec{Base: at + uintptr(i%peerCount*peerBlock), Len: peerBlock})
	}
	if _, err := unix.ProcessVMWritev(pid, local, remote, 0); err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.EFAULT) {
		t.Errorf("process_vm_writev into a child of ours, which kernel.yama.ptrace_scope 0 or 1 allows: %v", err)
	}
}

// mappedAt is where a process has mapped memory of a name.
func mappedAt(t *testing.T, pid int, name string) (at uintptr) {
	t.Helper()
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	require.NoError(t, err)
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, name) {
			_, err := fmt.Sscanf(line, "%x-", &at)
			require.NoError(t, err)
			return at
		}
	}
	require.Fail(t, "not mapped", name)
	return 0
}
