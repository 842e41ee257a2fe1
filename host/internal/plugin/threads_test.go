package plugin

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestThreads(t *testing.T) {
	own := strings.Join(threads(os.Getpid()), "\n")
	require.Contains(t, own, OfKernel+"it has a handler for SIGQUIT") // a Go program
	require.Regexp(t, `(?m)^`+OfKernel+`a thread ".+" in state [RSD] waits in \S+$`, own)

	command := exec.CommandContext(t.Context(), "sleep", "60")
	require.NoError(t, command.Start())
	defer func() {
		_ = command.Process.Kill()
		_ = command.Wait()
	}()
	require.Contains(t, threads(command.Process.Pid), OfKernel+"it has no handler for SIGQUIT")
	require.Empty(t, threads(0))
}
