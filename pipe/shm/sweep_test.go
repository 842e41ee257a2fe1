package shm

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// listenOnly makes this test binary a process that listens until it is killed.
const listenOnly = "KVPORT_TEST_LISTEN"

func listenForever() int {
	l, err := new(Network).Listen(context.Background())
	if err == nil {
		fmt.Fprintln(os.Stdout, "listening")
		_, err = l.Accept(context.Background())
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// A process that is killed leaves its folder, and the next listener removes it. A folder that is in use, is
// new, or does not belong to a listener stays.
func TestSweep(t *testing.T) {
	root, err := os.MkdirTemp("/tmp", "kvport") //nolint:usetesting // short: unix sockets lie below it
	require.NoError(t, err)
	defer os.RemoveAll(root)
	t.Setenv("TMPDIR", root)
	self, err := os.Executable()
	require.NoError(t, err)
	child := exec.CommandContext(t.Context(), self)
	child.Env = append(os.Environ(), listenOnly+"=1")
	out, err := child.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, child.Start())
	_, err = out.Read(make([]byte, 1)) // it listens
	require.NoError(t, err)
	require.NoError(t, child.Process.Kill())
	require.Error(t, child.Wait())
	left, err := filepath.Glob(filepath.Join(root, folderPrefix+"*"))
	require.NoError(t, err)
	require.Len(t, left, 1, "a killed process leaves its folder")

	long := time.Now().Add(-2 * time.Hour)
	age := func(dir string) string {
		require.NoError(t, os.Chtimes(dir, long, long))
		return dir
	}
	folder := func(name string) string {
		dir := filepath.Join(root, name)
		require.NoError(t, os.Mkdir(dir, 0o700))
		return dir
	}
	used := folder(folderPrefix + "used")
	var config net.ListenConfig
	inner, err := config.Listen(t.Context(), "unix", filepath.Join(used, "pipe-1"))
	require.NoError(t, err)
	defer inner.Close()
	odd := folder(folderPrefix + "odd")
	require.NoError(t, os.WriteFile(filepath.Join(odd, "mine"), nil, 0o600))
	alias := filepath.Join(root, folderPrefix+"link")
	require.NoError(t, os.Symlink(age(folder("target")), alias))
	stay := []string{age(used), age(odd), alias, folder(folderPrefix + "new"), age(folder("kvport-other"))}
	gone := []string{left[0], age(folder(folderPrefix + "empty"))}

	soon := time.Now().Add(time.Hour)
	require.NoError(t, os.Chtimes(left[0], soon, soon)) // new for as long as the test runs
	first, err := new(Network).Listen(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, first.Close()) }()
	require.DirExists(t, left[0], "its process may be just making it")
	age(left[0])
	second, err := new(Network).Listen(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, second.Close()) }()
	for _, path := range gone {
		require.NoDirExists(t, path)
	}
	for _, path := range append(stay, first.Address(), second.Address()) {
		_, err := os.Lstat(path)
		require.NoError(t, err)
	}
	sweep(root, time.Now().Add(time.Minute))
	require.FileExists(t, first.Address(), "somebody listens")
	link, err := new(Network).Dial(t.Context(), first.Address())
	require.NoError(t, err, "looking at a listener does not harm it")
	require.NoError(t, link.Close())
}
