package keyring

import (
	"bytes"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// places sets where the folders are, and gives the files in both.
func places(t *testing.T) (state, runtime string) {
	t.Helper()
	a, b := t.TempDir(), t.TempDir()
	t.Setenv("HOME", a)
	t.Setenv("XDG_STATE_HOME", "")
	t.Setenv("XDG_RUNTIME_DIR", b)
	return filepath.Join(a, ".local", "state", "kvport", sharedName), filepath.Join(b, "kvport", sharedName)
}

func TestShared(t *testing.T) {
	state, runtime := places(t)
	ids := make([]string, 8)
	var fresh atomic.Int32
	var all sync.WaitGroup
	for i := range ids {
		all.Go(func() {
			f, err := OpenAt("", nil)
			if err != nil {
				t.Error(err)
				return
			}
			ids[i] = f.Ring().First().ID
			if f.Fresh() {
				fresh.Add(1)
			}
		})
	}
	all.Wait()
	require.Positive(t, fresh.Load())
	for _, id := range ids {
		require.Equal(t, ids[0], id, "whoever comes first makes the key of all")
	}
	for _, path := range []string{state, runtime} {
		r, err := Load(path)
		require.NoError(t, err)
		require.True(t, r.Old, "earlier versions read it")
		require.Equal(t, ids[0], r.First().ID)
		entries, err := os.ReadDir(filepath.Dir(path))
		require.NoError(t, err)
		require.Len(t, entries, 1, "no temporary file is left")
		info, err := os.Stat(filepath.Dir(path))
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o700), info.Mode().Perm())
	}

	// The machine starts again: the runtime folder is empty.
	require.NoError(t, os.RemoveAll(filepath.Dir(runtime)))
	f, err := OpenAt("", nil)
	require.NoError(t, err)
	require.Equal(t, ids[0], f.Ring().First().ID)
	require.Equal(t, state, f.Path())
	require.False(t, f.Fresh())
	at, err := SharedPath()
	require.NoError(t, err)
	require.Equal(t, state, at)

	// An engine of an earlier version was there first after a start, and has another one.
	require.NoError(t, os.WriteFile(runtime, []byte(strings.Repeat("x", 32)), 0o600))
	var out bytes.Buffer
	f, err = OpenAt("", slog.New(slog.NewTextHandler(&out, nil)))
	require.NoError(t, err)
	require.Equal(t, ids[0], f.Ring().First().ID)
	require.Equal(t, 1, strings.Count(out.String(), "level=WARN"))
}

// The key of engines of an earlier version, which still run, stays the one that all share.
func TestSharedFromEarlierVersion(t *testing.T) {
	state, runtime := places(t)
	require.NoError(t, os.MkdirAll(filepath.Dir(runtime), 0o700))
	const text = "0123456789abcdef0123456789abcdef\n"
	require.NoError(t, os.WriteFile(runtime, []byte(text), 0o600))
	f, err := OpenAt("", nil)
	require.NoError(t, err)
	require.Equal(t, state, f.Path())
	data, err := os.ReadFile(state)
	require.NoError(t, err)
	require.Equal(t, text, string(data))

	// One that others can read is not taken over.
	require.NoError(t, os.Remove(state))
	require.NoError(t, os.Chmod(runtime, 0o644))
	f, err = OpenAt("", nil)
	require.NoError(t, err)
	data, err = os.ReadFile(f.Path())
	require.NoError(t, err)
	require.NotEqual(t, text, string(data))
}

// An engine without a state folder starts at the same time as one that has it: whichever comes first, both have one key.
func TestSharedAtOnce(t *testing.T) {
	for _, ring := range []bool{false, true} {
		state, runtime := places(t)
		links := 0
		path, err := shared(slog.New(slog.DiscardHandler), func(from, to string) error {
			if links++; links == 1 && ring {
				require.NoError(t, Create(runtime, New(then)))
			} else if links == 1 {
				require.NoError(t, create(runtime, nil, os.Link))
			}
			return os.Link(from, to)
		})
		require.NoError(t, err)
		require.Equal(t, state, path)
		theirs, err := Load(runtime)
		require.NoError(t, err)
		ours, err := Load(state)
		require.NoError(t, err)
		require.Equal(t, theirs, ours)
	}
}

// A folder in which no key can be made is as good as none.
func TestSharedWhereOneFolderIsFull(t *testing.T) {
	for _, name := range []string{"state", "runtime"} {
		state, runtime := places(t)
		full, other := state, runtime
		if name == "runtime" {
			full, other = runtime, state
		}
		var out bytes.Buffer
		path, err := shared(slog.New(slog.NewTextHandler(&out, nil)), func(from, to string) error {
			if to == full {
				return syscall.EDQUOT
			}
			return os.Link(from, to)
		})
		require.NoError(t, err, name)
		require.Equal(t, other, path)
		_, err = Load(path)
		require.NoError(t, err)
		at, err := SharedPath()
		require.NoError(t, err)
		require.Equal(t, other, at, "commands mean the same file")
		require.Equal(t, name == "state", strings.Contains(out.String(), "only in the runtime folder"))
	}
}

// Looking makes nothing, and a new key is not made beside one that engines use.
func TestCreateShared(t *testing.T) {
	state, runtime := places(t)
	at, err := SharedPath()
	require.NoError(t, err)
	require.Equal(t, state, at)
	require.NoDirExists(t, filepath.Dir(state))
	require.NoDirExists(t, filepath.Dir(runtime))

	require.NoError(t, os.Mkdir(filepath.Dir(runtime), 0o700))
	require.NoError(t, create(runtime, nil, os.Link))
	at, err = CreateShared(New(then))
	require.ErrorIs(t, err, fs.ErrExist)
	require.Equal(t, runtime, at)
	require.NoFileExists(t, state)

	require.NoError(t, os.Remove(runtime))
	ring := New(then)
	at, err = CreateShared(ring)
	require.NoError(t, err)
	require.Equal(t, state, at)
	f, err := OpenAt("", nil)
	require.NoError(t, err)
	require.Equal(t, ring.IDs(), f.Ring().IDs())
	_, err = CreateShared(New(then))
	require.ErrorIs(t, err, fs.ErrExist)
}

// Without a state folder the key is in the runtime folder, as it was, and the log says so once.
func TestSharedWithoutState(t *testing.T) {
	_, runtime := places(t)
	for name, set := range map[string]func(){
		"no HOME": func() { t.Setenv("HOME", "") },
		"a file":  func() { t.Setenv("XDG_STATE_HOME", filepath.Join(os.DevNull, "x")) },
		"open to others": func() {
			dir := t.TempDir()
			t.Setenv("XDG_STATE_HOME", dir)
			require.NoError(t, os.Mkdir(filepath.Join(dir, "kvport"), 0o755))
		},
	} {
		set()
		var out bytes.Buffer
		f, err := OpenAt("", slog.New(slog.NewTextHandler(&out, nil)))
		require.NoError(t, err, name)
		require.Equal(t, runtime, f.Path(), name)
		require.Equal(t, 1, strings.Count(out.String(), "\n"), name)
		require.Contains(t, out.String(), "only in the runtime folder", name)
	}
	require.NoError(t, os.Chmod(filepath.Dir(runtime), 0o755))
	_, err := OpenAt("", nil)
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.NoError(t, os.RemoveAll(filepath.Dir(runtime)))
	require.NoError(t, os.Symlink(t.TempDir(), filepath.Dir(runtime)))
	_, err = OpenAt("", nil)
	require.ErrorIs(t, err, connector.ErrIncompatible, "a link that somebody else may have put there")
	_, err = SharedPath()
	require.Error(t, err)
	t.Setenv("XDG_RUNTIME_DIR", "")
	t.Setenv("TMPDIR", t.TempDir())
	f, err := OpenAt("", nil)
	require.NoError(t, err)
	require.Contains(t, f.Path(), os.Getenv("TMPDIR"))
}

// Somebody else who makes the folders first, or a machine without a folder to write to, keeps no engine from starting.
// Without a state folder it has a key of its own then, and says so; with one it has the key of all.
func TestFoldersOfOthers(t *testing.T) {
	state, runtime := places(t)
	squat := func(dir string) { // as another user would: not ours alone
		require.NoError(t, os.Mkdir(dir, 0o777))
		require.NoError(t, os.Chmod(dir, 0o777))
	}
	squat(filepath.Dir(runtime))
	f, err := OpenOrOwn("", nil)
	require.NoError(t, err)
	require.Equal(t, state, f.Path())
	require.NoError(t, f.Own())

	t.Setenv("HOME", "")
	var out bytes.Buffer
	ids := map[string]bool{f.Ring().First().ID: true}
	for range 2 {
		out.Reset()
		f, err = OpenOrOwn("", slog.New(slog.NewTextHandler(&out, nil)))
		require.NoError(t, err)
		require.Empty(t, f.Path())
		require.False(t, f.Fresh(), "it is not the key of this user's engines")
		require.ErrorIs(t, f.Own(), errNoPlace)
		require.ErrorContains(t, f.Own(), filepath.Dir(runtime))
		require.False(t, ids[f.Ring().First().ID], "the key is nobody else's")
		ids[f.Ring().First().ID] = true
		require.Empty(t, out.String(), "whoever asks says what it means to them")
	}
	entries, err := os.ReadDir(filepath.Dir(runtime))
	require.NoError(t, err)
	require.Empty(t, entries, "nothing is put into another's folder")
	_, err = OpenAt("", nil)
	require.ErrorIs(t, err, connector.ErrIncompatible, "a router has no use for such a key")
	t.Setenv("XDG_RUNTIME_DIR", filepath.Join(os.DevNull, "x"))
	_, err = OpenOrOwn("", nil)
	require.NoError(t, err)

	// A key that is there and cannot be used is no reason for another one.
	_, runtime = places(t)
	t.Setenv("HOME", "")
	_, err = OpenAt("", nil)
	require.NoError(t, err)
	require.NoError(t, os.Chmod(runtime, 0o644))
	_, err = OpenOrOwn("", nil)
	require.ErrorContains(t, err, "use chmod 600")
	_, err = OpenOrOwn(filepath.Join(t.TempDir(), "missing"), nil)
	require.ErrorIs(t, err, fs.ErrNotExist)
}

// A key that other engines of this user may use is not replaced by one of this process's own, however it is out of reach.
func TestKeyOutOfReach(t *testing.T) {
	state, runtime := places(t)
	_, err := OpenAt("", nil)
	require.NoError(t, err)
	require.True(t, HasShared())
	for _, path := range []string{state, runtime} {
		require.NoError(t, os.Chmod(filepath.Dir(path), 0o755)) // as a backup may be restored
	}
	_, err = OpenOrOwn("", nil)
	require.ErrorIs(t, err, errNoPlace)
	require.NoError(t, os.RemoveAll(filepath.Dir(runtime)))
	require.NoError(t, os.Mkdir(filepath.Dir(runtime), 0o755))
	_, err = OpenOrOwn("", nil)
	require.ErrorIs(t, err, errNoPlace, "the state folder has one")
	require.NoError(t, os.RemoveAll(state))
	require.False(t, HasShared())
	f, err := OpenOrOwn("", nil)
	require.NoError(t, err)
	require.Error(t, f.Own())
	if os.Getuid() != 0 {
		t.Log("a file of somebody else is not tried: only the administrator can give one away")
		return
	}
	require.NoError(t, os.WriteFile(runtime, nil, 0o600))
	require.True(t, HasShared())
	require.NoError(t, os.Chown(runtime, 65534, 0))
	require.False(t, HasShared(), "whoever makes the folder first keeps no engine from starting by a file in it")
}
