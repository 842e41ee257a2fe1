package sharedstorage

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// A relative path, as in vLLM's example, begins at the working folder.
func TestRelativePath(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	put(t, open(t, Config{Path: "local_storage"}), item(1))
	again := open(t, Config{Path: filepath.Join(dir, "local_storage")})
	require.True(t, again.present(item(1).Key))
}

// Without a path blocks are kept in a folder that nobody else can enter, and the log says so.
func TestNoPath(t *testing.T) {
	cache := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	own := filepath.Join(cache, "kvport", "blocks")
	var log bytes.Buffer
	s, err := newStore(slog.New(slog.NewTextHandler(&log, nil)), Config{})
	require.NoError(t, err)
	put(t, s, item(1))
	require.NoError(t, s.Close())
	require.Contains(t, log.String(), "level=WARN")
	require.Contains(t, log.String(), "path="+own)
	info, err := os.Stat(own)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), info.Mode().Perm())
	require.True(t, open(t, Config{}).present(item(1).Key), "every engine of this user finds it")

	require.NoError(t, os.Chmod(own, 0o755))
	_, err = newStore(slog.New(slog.DiscardHandler), Config{})
	require.ErrorContains(t, err, "shared_storage_path: is not set, and "+own+" is not a folder of this user with mode 0700")
	t.Setenv("XDG_CACHE_HOME", "")
	t.Setenv("HOME", "")
	_, err = newStore(slog.New(slog.DiscardHandler), Config{})
	require.ErrorContains(t, err, "shared_storage_path: is not set, and this user has no cache folder")
}
