package plugin

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/host/internal/leaktest"
)

// What a killed host leaves behind goes; what a host uses, or is just making, stays.
func TestSweepSockets(t *testing.T) {
	leaks := leaktest.Watch(t)
	root := t.TempDir()
	dir := func(name string, age time.Duration, lock bool) string {
		path := filepath.Join(root, name)
		require.NoError(t, os.Mkdir(path, 0o700))
		if lock {
			require.NoError(t, os.WriteFile(filepath.Join(path, lockName), nil, 0o600))
			require.NoError(t, os.WriteFile(filepath.Join(path, "socket"), nil, 0o600))
		}
		then := time.Now().Add(-age)
		require.NoError(t, os.Chtimes(path, then, then))
		return path
	}
	gone := []string{dir("kvport-plugin-dead", time.Minute, true), dir("kvport-plugin-bare", 2*time.Hour, false)}
	used := dir("kvport-plugin-used", time.Hour, true)
	lock, err := lockDir(used)
	require.NoError(t, err)
	_, err = lockDir(used)
	require.ErrorContains(t, err, "flock "+used)
	stay := []string{
		used, dir("kvport-plugin-new", 0, true), dir("kvport-plugin-newbare", time.Minute, false), dir("kvport-other", 2*time.Hour, true),
		filepath.Join(root, "kvport-plugin-link"), filepath.Join(root, "kvport-plugin-file"),
	}
	require.NoError(t, os.Symlink(dir("target", 2*time.Hour, true), stay[4]))
	require.NoError(t, os.WriteFile(stay[5], nil, 0o600))
	require.Equal(t, 2, SweepSockets([]string{"/does/not/exist", root}, time.Now()))
	for _, path := range gone {
		require.NoDirExists(t, path)
	}
	for _, path := range stay {
		_, err := os.Lstat(path)
		require.NoError(t, err)
	}
	require.NoError(t, lock.Close())
	require.Equal(t, 1, SweepSockets([]string{root}, time.Now().Add(time.Minute))-1, "used, and new")
	leaks()
}

// What a plugin that starts has is not taken for a folder that was left behind.
func TestStartingPluginKeepsItsFolder(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	p := &Process{}
	var err error
	p.dir, err = SocketDir()
	require.NoError(t, err)
	p.lock, err = lockDir(p.dir)
	require.NoError(t, err)
	dir := p.dir
	require.False(t, abandoned(dir, 24*time.Hour))
	p.vacate()
	require.NoDirExists(t, dir)
	require.Nil(t, p.lock)
}
