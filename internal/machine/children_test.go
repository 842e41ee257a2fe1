package machine

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A shell starts another one, which waits: a child and a grandchild are found, and nothing when they are gone.
func TestDescendants(t *testing.T) {
	theirs, ours, err := os.Pipe()
	require.NoError(t, err)
	defer ours.Close()
	c := exec.CommandContext(t.Context(), "sh", "-c", `sh -c 'echo $$; read line <&3; :' & wait`)
	c.ExtraFiles = []*os.File{theirs}
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	require.NoError(t, theirs.Close())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	grandchild, err := strconv.Atoi(strings.TrimSpace(line))
	require.NoError(t, err)

	require.Contains(t, Children(0), c.Process.Pid)
	require.NotContains(t, Children(0), grandchild)
	require.Equal(t, []int{grandchild}, Children(c.Process.Pid))
	found := Descendants(64, os.Getpid())
	require.Contains(t, found, c.Process.Pid)
	require.Contains(t, found, grandchild)
	require.Less(t, slices.Index(found, c.Process.Pid), slices.Index(found, grandchild))
	require.Len(t, Descendants(1, os.Getpid()), 1)

	_, err = ours.WriteString("\n")
	require.NoError(t, err)
	require.NoError(t, c.Wait())
	require.NotContains(t, Children(0), c.Process.Pid)
	require.Empty(t, Children(c.Process.Pid))
}

// Both kinds of kernel, as files.
func TestFamilyOfBothKernels(t *testing.T) {
	put := func(root, path, text string) {
		file := filepath.Join(root, path)
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o700))
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	}
	lists := t.TempDir()
	put(lists, "7/task/7/children", "8 ")
	put(lists, "7/task/9/children", "10 11 ")
	require.Equal(t, []int{8, 10, 11}, familyIn(lists, true).children(7))

	silent := t.TempDir()
	put(silent, "7/stat", "7 (a) S 1 7")
	put(silent, "8/stat", "8 (a b) R 1 (c)) S 7 8")
	put(silent, "9/stat", "9 (c) Z 8 9")
	put(silent, "10/stat", "") // it has just ended
	put(silent, "uptime", "1")
	require.Equal(t, []int{8}, familyIn(silent, false).children(7))
	require.Equal(t, []int{9}, familyIn(silent, false).children(8))
	require.Empty(t, familyIn(silent, false).children(9))
}
