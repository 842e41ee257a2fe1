package sharedstorage

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
)

func TestFolderDeletedWhileRunning(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kv")
	s := open(t, Config{Path: dir})
	put(t, s, item(1))
	require.NoError(t, os.RemoveAll(dir))
	s.index.clear() // as after a second
	require.Equal(t, 0, lookup(t, s, 1))
	require.ErrorIs(t, get(t, s, item(1)), connector.ErrGone)
	put(t, s, item(2))
	require.NoError(t, get(t, s, item(2)))
	require.EqualValues(t, 1, s.Counts().Reopened)
}

func TestFolderReplacedByAnotherEngine(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kv")
	reader := open(t, Config{Path: dir})
	require.Equal(t, 0, lookup(t, reader, 1))
	require.NoError(t, os.RemoveAll(dir))
	writer := open(t, Config{Path: dir})
	put(t, writer, item(1))
	reader.checked = time.Time{} // as after a second
	lookup(t, reader, 1)         // finds that the folder is another one
	require.Equal(t, 1, lookup(t, reader, 1))
	require.NoError(t, get(t, reader, item(1)))
}

func TestShardDeletedWhileRunning(t *testing.T) {
	s := open(t, Config{Path: t.TempDir()})
	put(t, s, item(1))
	require.NoError(t, os.RemoveAll(filepath.Dir(s.pathOf(keyOf(1)))))
	again := item(1)
	again.Replace = true
	put(t, s, again)
	require.NoError(t, get(t, s, again))
	require.Zero(t, s.Counts().Reopened)
}

func TestFolderCannotComeBack(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kv")
	s := open(t, Config{Path: dir})
	require.NoError(t, os.RemoveAll(dir))
	require.NoError(t, os.WriteFile(dir, []byte("in the way"), 0o600))
	require.ErrorIs(t, s.Put(t.Context(), []connector.Item{item(1)}), connector.ErrGone)
	require.ErrorContains(t, s.Put(t.Context(), []connector.Item{item(1)}), "next attempt soon")
	require.Equal(t, 0, lookup(t, s, 1))
	require.ErrorIs(t, get(t, s, item(1)), connector.ErrGone)
	require.Equal(t, 2*firstWait, s.wait)

	require.NoError(t, os.Remove(dir))
	s.retryAt = time.Time{} // as after the wait
	put(t, s, item(1))
	require.NoError(t, get(t, s, item(1)))
	require.Equal(t, firstWait, s.wait)
}

func TestReadOnlyByConfig(t *testing.T) {
	dir := t.TempDir()
	put(t, open(t, Config{Path: dir}), item(1))
	before, _ := files(t, dir)
	s := open(t, Config{Path: dir, ReadOnly: true})
	require.Equal(t, 1, lookup(t, s, 1))
	require.NoError(t, get(t, s, item(1)))
	require.ErrorIs(t, s.Put(t.Context(), []connector.Item{item(2)}), ErrReadOnly)
	require.EqualValues(t, 1, s.Counts().Refused)
	after, _ := files(t, dir)
	require.Equal(t, before, after)
}

// Nobody makes folders in /sys, root neither.
func TestFolderThatCannotBeMade(t *testing.T) {
	_, err := newStore(slog.New(slog.DiscardHandler), Config{Path: "/sys/kvport/kv"})
	require.ErrorContains(t, err, "shared_storage_path /sys/kvport/kv: mkdir /sys/kvport: ")
	require.NotErrorIs(t, err, fs.ErrNotExist, "it hides why")
}

// Root ignores modes, so an unwritable folder is made by mounting one read-only where that is
// allowed, and by injection everywhere.
func TestReadOnlyFolderIsNoticed(t *testing.T) {
	var log bytes.Buffer
	s, err := newStore(slog.New(slog.NewTextHandler(&log, nil)), Config{Path: t.TempDir()})
	require.NoError(t, err)
	defer s.Close()
	put(t, s, item(1))
	s.write = func(int, connector.Item) error { return unix.EROFS }
	for n := range 5 {
		require.ErrorIs(t, s.Put(t.Context(), []connector.Item{item(10 + n)}), ErrReadOnly)
	}
	require.Equal(t, 1, strings.Count(log.String(), "cannot be written"))
	require.EqualValues(t, 5, s.Counts().Refused)
	require.NoError(t, get(t, s, item(1)))

	s.write, s.locked = writeItem, time.Now() // as after the wait
	put(t, s, item(2))
	require.Equal(t, 1, strings.Count(log.String(), "can be written again"))
	put(t, s, item(3))

	s.write = func(int, connector.Item) error { return unix.EROFS }
	require.ErrorIs(t, s.Put(t.Context(), []connector.Item{item(4)}), ErrReadOnly)
	require.Equal(t, 2, strings.Count(log.String(), "cannot be written"), "the second time is told, too")
}

// A closed store stays closed: no call may open the folder again.
func TestClosedStaysClosed(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kv")
	s := open(t, Config{Path: dir})
	put(t, s, item(1))
	require.NoError(t, s.Close())
	require.NoError(t, os.RemoveAll(dir))
	s.index.clear()
	s.checked = time.Time{}
	require.Equal(t, 0, lookup(t, s, 1))
	require.ErrorIs(t, get(t, s, item(1)), connector.ErrGone)
	require.ErrorIs(t, s.Put(t.Context(), []connector.Item{item(1)}), connector.ErrGone)
	require.NoDirExists(t, dir)
	require.Nil(t, s.dir)
}

// A folder in the place of a block file does not keep the block from being saved.
func TestFolderInPlaceOfBlock(t *testing.T) {
	dir := t.TempDir()
	s := open(t, Config{Path: dir})
	for n, inside := range []string{"", "somebody's"} {
		path := s.pathOf(keyOf(n))
		require.NoError(t, os.MkdirAll(filepath.Join(path, inside), 0o700))
		put(t, s, item(n))
		require.NoError(t, get(t, s, item(n)))
	}
	kept, err := filepath.Glob(filepath.Join(dir, tmpName, "*-folder", "somebody's"))
	require.NoError(t, err)
	require.Len(t, kept, 1)
}

func TestReadOnlyMount(t *testing.T) {
	dir := t.TempDir()
	put(t, open(t, Config{Path: dir}), item(1))
	mount := t.TempDir()
	if err := unix.Mount(dir, mount, "", unix.MS_BIND, ""); errors.Is(err, unix.EPERM) {
		t.Skip("mounting is not permitted here; TestReadOnlyFolderIsNoticed injects the error instead")
	} else {
		require.NoError(t, err)
	}
	defer func() { require.NoError(t, unix.Unmount(mount, unix.MNT_DETACH)) }()
	require.NoError(t, unix.Mount("", mount, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	s := open(t, Config{Path: mount})
	require.NoError(t, get(t, s, item(1)))
	require.ErrorIs(t, s.Put(t.Context(), []connector.Item{item(2)}), ErrReadOnly)
	require.NoError(t, unix.Mount("", mount, "", unix.MS_BIND|unix.MS_REMOUNT, ""))
	s.locked = time.Now()
	put(t, s, item(2))
	require.NoError(t, s.Close())
}

func TestDiskFull(t *testing.T) {
	s := open(t, Config{Path: t.TempDir(), MaxBytes: 1 << 20, Workers: 1})
	s.write = func(fd int, it connector.Item) error {
		if it.Key != keyOf(2) {
			return writeItem(fd, it)
		}
		_, _ = unix.Write(fd, []byte("half"))
		return unix.ENOSPC
	}
	err := s.Put(t.Context(), []connector.Item{item(1), item(2), item(3)})
	require.ErrorIs(t, err, unix.ENOSPC)
	var failed *connector.ItemError
	require.ErrorAs(t, err, &failed)
	require.Equal(t, []int{1}, failed.Items)
	names, total := files(t, s.config.Path)
	require.Len(t, names, 2)
	require.Equal(t, total, s.budget.used)
	require.Equal(t, 1, lookup(t, s, 1, 2, 3))
}

func TestCancelled(t *testing.T) {
	s := open(t, Config{Path: t.TempDir()})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, s.Put(ctx, []connector.Item{item(1)}), context.Canceled)
	require.Equal(t, 0, lookup(t, s, 1))
	put(t, s, item(1))
	require.ErrorIs(t, s.Get(ctx, []connector.Item{blank(item(1))}), context.Canceled)
	names, _ := files(t, filepath.Join(s.config.Path, tmpName))
	require.Empty(t, names)
}

func TestConfig(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	for _, c := range []struct {
		config Config
		field  string
	}{
		{Config{Path: file}, "shared_storage_path " + file + " is a file, want a folder"},
		{Config{Path: filepath.Join(file, "below")}, "shared_storage_path"},
		{Config{Path: filepath.Join(t.TempDir(), "missing"), ReadOnly: true}, "shared_storage_path"},
		{Config{Path: t.TempDir(), MaxBytes: -1}, "max_bytes"},
		{Config{Path: t.TempDir(), Workers: 65}, "workers"},
	} {
		_, err := Open(t.Context(), connector.Env{Log: slog.New(slog.DiscardHandler)}, c.config)
		require.ErrorIs(t, err, connector.ErrIncompatible)
		require.ErrorContains(t, err, c.field)
	}
}

func TestCloseFreesDescriptors(t *testing.T) {
	count := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		return len(entries)
	}
	before := count()
	for range 3 {
		s, err := newStore(slog.New(slog.DiscardHandler), Config{Path: t.TempDir()})
		require.NoError(t, err)
		for n := range 100 {
			put(t, s, item(n))
		}
		require.NoError(t, os.RemoveAll(s.config.Path))
		put(t, s, item(1))
		require.NoError(t, s.Close())
		require.NoError(t, s.Close())
	}
	require.Equal(t, before, count())
}

func TestIndexIsBounded(t *testing.T) {
	var x index
	start := time.Now()
	for n := range 2*generation + 10 {
		x.add(keyOf(n), start)
	}
	require.LessOrEqual(t, len(x.young)+len(x.old), 2*generation)
	require.True(t, x.has(keyOf(2*generation+9), start))
	require.False(t, x.has(keyOf(0), start))
	require.False(t, x.has(keyOf(2*generation+9), start.Add(fresh)))
}
