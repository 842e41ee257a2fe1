package cluster

import (
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestWeigh: a descriptor that is opened counts, and so does memory that is written; a process that has ended is an error.
func TestWeigh(t *testing.T) {
	before, err := Weigh(os.Getpid())
	require.NoError(t, err)
	f, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer f.Close()
	memory := make([]byte, 32<<20)
	for i := 0; i < len(memory); i += 4096 {
		memory[i] = 1
	}
	after, err := Weigh(os.Getpid())
	require.NoError(t, err)
	require.Greater(t, after.Memory-before.Memory, int64(len(memory)/2))
	require.Greater(t, after.Descriptors, before.Descriptors)
	require.Positive(t, after.Threads)
	require.Equal(t, byte(1), memory[0])

	cmd := exec.CommandContext(t.Context(), "sh", "-c", "sleep 100 & wait")
	require.NoError(t, cmd.Start())
	require.Eventually(t, func() bool { return len(Descendants(cmd.Process.Pid)) == 1 }, time.Minute, time.Millisecond)
	below := Descendants(os.Getpid())
	require.Contains(t, below, cmd.Process.Pid)
	require.Len(t, below, 2)
	for _, pid := range below {
		p, err := os.FindProcess(pid)
		require.NoError(t, err)
		require.NoError(t, p.Kill())
	}
	require.Error(t, cmd.Wait())
	_, err = Weigh(cmd.Process.Pid)
	require.Error(t, err)
}
