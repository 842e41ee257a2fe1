package machine_test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/internal/machine"
)

func TestFreeMemory(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) {
		path := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	require.EqualValues(t, math.MaxInt64, machine.FreeMemory(root), "nobody says")
	write("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:    1000 kB\n")
	require.EqualValues(t, 1000<<10, machine.FreeMemory(root))
	write("sys/fs/cgroup/memory.max", "max\n")
	write("sys/fs/cgroup/memory.current", "100\n")
	require.EqualValues(t, 1000<<10, machine.FreeMemory(root))
	for limit, want := range map[int]int{4096: 3996, 50: 0} {
		write("sys/fs/cgroup/memory.max", fmt.Sprintf("%d\n", limit))
		require.EqualValues(t, want, machine.FreeMemory(root))
	}
	require.Positive(t, machine.FreeMemory("/"))
}

// The group of a service is not the outermost one where it has no namespace of its own.
func TestFreeMemoryOfNestedGroups(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) {
		path := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	write("proc/meminfo", "MemAvailable: 1000 kB\n")
	write("proc/self/cgroup", "1:cpu:/other\n0::/system.slice/kvport.service\n")
	write("sys/fs/cgroup/system.slice/memory.max", "8192\n")
	write("sys/fs/cgroup/system.slice/memory.current", "1000\n")
	require.EqualValues(t, 7192, machine.FreeMemory(root))
	write("sys/fs/cgroup/system.slice/kvport.service/memory.max", "4096\n")
	write("sys/fs/cgroup/system.slice/kvport.service/memory.current", "1000\n")
	require.EqualValues(t, 3096, machine.FreeMemory(root))
	write("proc/self/cgroup", "0::/../elsewhere\n")
	require.EqualValues(t, 1000<<10, machine.FreeMemory(root))
}
