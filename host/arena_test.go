package host

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/leaktest"
	"github.com/kvport/kvport/internal/machine"
)

// countArenas counts this process's descriptors of arenas.
func countArenas(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	n := 0
	for _, e := range entries {
		if target, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.Contains(target, "kvport-arena") {
			n++
		}
	}
	return n
}

// Rule ARENA-05: the size that was asked for, zeroed, sealed, the same bytes for all sides, at both
// trust levels, and nothing left behind.
func TestArena(t *testing.T) {
	const size = 3<<12 + 5
	for _, trust := range []Trust{TrustInPlace, TrustStaged} {
		t.Run(string(trust), func(t *testing.T) {
			before := countArenas(t)
			r := newRig(t, rigOptions{
				ranks: 2, extra: map[string]any{"arena": size},
				settings: map[string]any{"trust": trust, "landing_bytes": landingBytes(12)},
			})
			want := make([]byte, size)
			want[0], want[1], want[2] = 1, 1, 1 // scheduler, rank 0, rank 1
			require.Equal(t, want, r.src.arena.Bytes())
			require.EqualValues(t, size, r.Info().ArenaBytes)
			require.EqualValues(t, size, r.Health().ArenaBytes)
			require.InDelta(t, size, r.metric("kvport_arena_bytes"), 0)
			require.ErrorIs(t, r.src.arena.file.Truncate(size+1), os.ErrPermission)
			require.Error(t, r.src.arena.Fit(size), "once")
			require.Equal(t, before+2, countArenas(t), "the host's, and the one that the fence looks for mappings with")
			require.NoError(t, r.closeNow())
			require.Equal(t, before, countArenas(t))
		})
	}
}

// A connector that asks for none gets none.
func TestNoArena(t *testing.T) {
	r := newRig(t, rigOptions{})
	require.Nil(t, r.src.arena.Bytes())
	require.Zero(t, r.Health().ArenaBytes)
	require.Zero(t, r.metric("kvport_arena_bytes"))
}

// Rule ARENA-05: every plugin of the engine's life finds what the ones before it wrote.
func TestArenaOutlivesPlugins(t *testing.T) {
	r := newRig(t, rigOptions{extra: map[string]any{"arena": 4096}, settings: map[string]any{"breaker": map[string]any{"deaths": 1000}}})
	for life := 2; life <= 4; life++ {
		pid := r.Health().PID
		require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
		require.Eventually(t, func() bool {
			now := r.Health()
			return now.State == "ready" && now.PID != pid
		}, time.Minute, time.Millisecond)
		require.EqualValues(t, life, r.src.arena.Bytes()[0])
		require.EqualValues(t, life, r.src.arena.Bytes()[1])
	}
}

// Rule ARENA-05: what the machine or the config does not permit is an error of the config.
func TestArenaThatIsNotThere(t *testing.T) {
	for name, c := range map[string]struct {
		size  int64
		limit int
		want  string
	}{
		"beyond the machine": {1 << 44, 0, "kv_connector_extra_config: arena: TestConnector asks for an arena of 17592186044416 bytes, this machine has free"},
		"beyond the limit":   {4097, 4096, "asks for an arena of 4097 bytes, kvport.arena_limit permits 4096: ask for less or raise the limit"},
		"negative":           {-1, 0, "arena_bytes"},
		"beyond any machine": {math.MaxInt64, 0, "arena_bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			leaks := leaktest.Watch(t)
			o := rigOptions{extra: map[string]any{"arena": c.size}}
			if c.limit > 0 {
				o.settings = map[string]any{"arena_limit": c.limit}
			}
			cfg, eng, opts := o.build(t)
			_, err := Open(t.Context(), cfg, eng, opts)
			require.ErrorIs(t, err, ErrConfig)
			require.ErrorContains(t, err, c.want)
			require.Zero(t, countArenas(t))
			_, asked := Inspect(t.Context(), cfg, opts)
			require.ErrorIs(t, asked, ErrConfig)
			require.ErrorContains(t, asked, c.want, "it refuses what Open refuses")
			leaks()
		})
	}
}

// Rule ARENA-05: a plugin that comes back asking for another size is another plugin.
func TestArenaOfAnotherSize(t *testing.T) {
	r := newRig(t, rigOptions{extra: map[string]any{"arena": 4096}, settings: map[string]any{"breaker": map[string]any{"deaths": 1000}}})
	require.NoError(t, os.WriteFile(filepath.Join(r.dir, "larger"), nil, 0o600))
	require.NoError(t, syscall.Kill(r.Health().PID, syscall.SIGKILL))
	require.Eventually(t, func() bool {
		return strings.Contains(r.Health().Error, "has become another plugin")
	}, time.Minute, time.Millisecond)
	require.NoError(t, os.Remove(filepath.Join(r.dir, "larger")))
	require.Eventually(t, func() bool { return r.Health().State == "ready" }, time.Minute, time.Millisecond)
	require.EqualValues(t, 2, r.src.arena.Bytes()[0], "the same arena")
}

// Memory that is not the plugin's arena cannot be passed off as one.
func TestForeignArena(t *testing.T) {
	arena, err := NewArena()
	require.NoError(t, err)
	defer arena.Close()
	p, err := Launch(t.Context(), testPlugin(), LaunchOptions{Arena: arena})
	require.NoError(t, err)
	defer p.Kill()
	_, err = p.OpenScheduler(t.Context(), connector.Env{Arena: make([]byte, 8)}, nil)
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "not this plugin's Arena")
}

// taken is how much memory an arena has, in bytes.
func taken(t *testing.T, a *Arena) int64 {
	t.Helper()
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(int(a.file.Fd()), &st))
	return st.Blocks * 512
}

// An engine's start does not wait for its memory: an arena that was made has none yet. It gets it in the
// background, what was written meanwhile stays, and Close does not wait for the rest.
func TestArenaIsAllocatedInTheBackground(t *testing.T) {
	const size = 3*fillStep + 5
	a, err := NewArena()
	require.NoError(t, err)
	require.NoError(t, a.Fit(size))
	require.Zero(t, taken(t, a))
	a.Bytes()[size-1] = 7
	written := taken(t, a)
	require.Less(t, written, int64(fillStep))
	var told int64
	require.NoError(t, a.Fill(func(n int64) { told += n }))
	require.EqualValues(t, size, told)
	require.GreaterOrEqual(t, taken(t, a), int64(size))
	require.EqualValues(t, 7, a.Bytes()[size-1])
	require.NoError(t, a.Close())

	a, err = NewArena()
	require.NoError(t, err)
	require.NoError(t, a.Fit(1<<40), "far more than this machine has")
	step := make(chan struct{})
	a.filling.Go(func() {
		_ = a.Fill(func(int64) {
			select {
			case step <- struct{}{}:
			case <-a.closing:
			}
		})
	})
	<-step
	require.NoError(t, a.Close())
}

// A plugin at either trust level has the pages of its arena mapped once the host has allocated them.
func TestArenaIsMappedByThePlugin(t *testing.T) {
	const size = 2 * fillStep
	for _, trust := range []Trust{TrustInPlace, TrustStaged} {
		t.Run(string(trust), func(t *testing.T) {
			r := newRig(t, rigOptions{extra: map[string]any{"arena": size}, settings: map[string]any{"trust": trust, "landing_bytes": landingBytes(12)}})
			require.Eventually(t, func() bool { return r.metric("kvport_arena_allocated_bytes") == size }, time.Minute, time.Millisecond)
			require.Eventually(t, func() bool { return mappedPages(t, r.Health().PID, "kvport-arena") == size }, time.Minute, time.Millisecond)
		})
	}
}

// mappedPages is how many bytes of the pages of a memfd a process has mapped.
func mappedPages(t *testing.T, pid int, name string) int64 {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", pid))
	require.NoError(t, err)
	_, of, found := strings.Cut(string(data), name)
	require.True(t, found)
	var kilobytes int64
	_, rss, _ := strings.Cut(of, "Rss:")
	_, err = fmt.Sscan(rss, &kilobytes)
	require.NoError(t, err)
	return kilobytes << 10
}

// An arena that is replaced while it gets its memory goes on with the new one.
func TestArenaIsRenewedWhileItIsAllocated(t *testing.T) {
	const size = 8 * fillStep
	a, err := NewArena()
	require.NoError(t, err)
	require.NoError(t, a.Fit(size))
	begun, done := make(chan struct{}), make(chan error)
	go func() {
		begin := sync.OnceFunc(func() { close(begun) })
		done <- a.Fill(func(int64) { begin() })
	}()
	<-begun
	require.NoError(t, a.Renew())
	require.NoError(t, <-done)
	require.EqualValues(t, size, a.Size())
	require.NoError(t, a.Close())
}

// Without a limit a connector, which says by itself how much it needs, leaves the machine an eighth of its free memory.
func TestArenaIsTooMuch(t *testing.T) {
	for _, c := range []struct {
		want, limit, free int64
		why               string // empty: permitted
	}{
		{1750, 0, 2000, ""},
		{1751, 0, 2000, "this machine has free 2000, of which it may have seven eighths without kvport.arena_limit: ask for less or set the limit"},
		{2001, 0, 2000, "this machine has free 2000: ask for less or free some memory"},
		{1990, 1990, 2000, ""},
		{1991, 1990, 2000, "kvport.arena_limit permits 1990: ask for less or raise the limit"},
		{2001, 2001, 2000, "this machine has free 2000: ask for less or free some memory"},
		{2001, 3000, 2000, "this machine has free 2000: ask for less or free some memory"},
		{2001, 1990, 2000, "kvport.arena_limit permits 1990: ask for less or raise the limit"},
		{1, 0, 0, "this machine has free 0: ask for less or free some memory"},
	} {
		require.Equal(t, c.why, tooMuch(c.want, c.limit, c.free), "%+v", c)
	}
	_, err := (&promised{}).take(&Settings{}, &connector.Info{Name: "X"}, machine.FreeMemory("/")/16*15)
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, ": ask for less or set the limit")
}

// Two connectors of one host are not promised the same memory.
func TestArenasAreCountedTogether(t *testing.T) {
	shared := &promised{}
	fit := func() error {
		arena, err := NewArena()
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, arena.Close()) })
		s := &source{
			cfg: &Config{Settings: Settings{ArenaLimit: math.MaxInt}}, arena: arena, promised: shared,
			info: connector.Info{Name: "X", ArenaBytes: machine.FreeMemory("/") * 6 / 10, ArenaField: "size"},
		}
		return s.fitArena()
	}
	require.NoError(t, fit())
	err := fit()
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "kv_connector_extra_config: size: X asks for an arena of ")
	require.ErrorContains(t, err, ": ask for less or free some memory")
}
