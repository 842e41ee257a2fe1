package testkit

import (
	"bufio"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Family starts a shell that starts another one, and gives the process ids of both. They wait until end is called, which returns
// when both are gone.
func Family(t testing.TB) (parent, child int, end func()) {
	t.Helper()
	theirs, ours, err := os.Pipe()
	require.NoError(t, err)
	t.Cleanup(func() { _ = ours.Close() })
	shell := exec.CommandContext(t.Context(), "sh", "-c", `sh -c 'echo $$; read line <&3; :' & wait`)
	shell.ExtraFiles = []*os.File{theirs}
	out, err := shell.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, shell.Start())
	require.NoError(t, theirs.Close())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	child, err = strconv.Atoi(strings.TrimSpace(line))
	require.NoError(t, err)
	return shell.Process.Pid, child, func() {
		t.Helper()
		require.NoError(t, ours.Close())
		require.NoError(t, shell.Wait())
	}
}
