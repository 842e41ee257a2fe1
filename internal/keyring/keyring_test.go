package keyring

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

var (
	one, two = bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 16)
	then     = time.Unix(1e9, 0).UTC()
)

func line(key []byte) string { return ID(key) + " " + hex.EncodeToString(key) + "\n" }

func TestParse(t *testing.T) {
	r, err := Parse([]byte(Head + " \r\n\n# first\n" + added + "2001-09-09T01:46:40Z\n  " + line(one) + "# second\n" +
		ID(two) + "\t" + base64.RawURLEncoding.EncodeToString(two) + "==\r\n# the end"))
	require.NoError(t, err)
	require.False(t, r.Old)
	require.Equal(t, []string{ID(one), ID(two)}, r.IDs())
	require.Equal(t, one, []byte(r.First().Secret))
	require.Equal(t, two, []byte(r.Keys[1].Secret))
	require.Equal(t, then, r.First().Added)
	require.True(t, r.Keys[1].Added.IsZero())
	require.Equal(t, Head+"\n# first\n"+added+"2001-09-09T01:46:40Z\n"+line(one)+"# second\n"+line(two)+"# the end\n", string(r.Format()))
	require.NotContains(t, fmt.Sprintf("%v %+v", r, *r), hex.EncodeToString(one)[:8])

	var many, tooMany strings.Builder
	for i := range MaxKeys + 1 {
		tooMany.WriteString(line(bytes.Repeat([]byte{byte(i)}, MaxKey)))
		if i < MaxKeys {
			many.WriteString(line(bytes.Repeat([]byte{byte(i)}, MaxKey)))
		}
	}
	_, err = Parse([]byte(Head + "\n" + many.String()))
	require.NoError(t, err)
	for text, want := range map[string]string{
		Head + "\n": "line 1: the ring has no key",
		Head + "\n" + line(one) + line(two) + line(one):         "line 4: key " + ID(one) + " is in the ring already",
		Head + "\n# c\n" + line(two[:15]):                       "line 3: the key has 120 bits, want 128 to 512: kvport keys rotate",
		Head + "\n" + line(bytes.Repeat([]byte{1}, MaxKey+1)):   "line 2: the key has 520 bits",
		Head + "\n" + ID(one) + "\n":                            "line 2: it has 1 words, want ID KEY",
		Head + "\n" + line(one)[:60] + "\n":                     "line 2: the key is damaged",
		Head + "\n" + ID(two) + line(one)[16:]:                  "the id of this key is " + ID(one),
		Head + "\n" + ID(one) + " !\n":                          "line 2: its second word is not a key",
		Head + "\n" + tooMany.String():                          "line 18: a ring has at most 16 keys",
		"\n" + Head + "\n" + line(one):                          "line 2: \"" + Head + "\" must be the first line",
		"# kvport key ring v2\n" + line(one):                    "line 1: ",
		"\ufeff" + Head + "\n" + line(one):                      "line 1: ",
		line(one) + line(two):                                   "line 1: these are the keys of a ring",
		strings.Repeat("k", 31):                                 "it holds 31 bytes, want at least 32",
		strings.Repeat("k", maxOld+1):                           "larger than 4096",
		Head + "\n" + strings.Repeat("# ", maxFile) + line(one): "larger than 32768",
	} {
		_, err := Parse([]byte(text))
		require.ErrorIs(t, err, connector.ErrIncompatible, text)
		require.ErrorContains(t, err, want)
		require.NotContains(t, err.Error(), hex.EncodeToString(one)[:8])
	}
}

func TestSteps(t *testing.T) {
	r, err := Parse([]byte("an old key of thirty-two bytes.."))
	require.NoError(t, err)
	require.True(t, r.Old)
	both, err := r.Rotate(then)
	require.NoError(t, err)
	again, err := Parse(both.Format())
	require.NoError(t, err)
	require.Equal(t, both, again, "an old key goes on as the first of a ring")
	require.Equal(t, r.First().Secret, both.First().Secret)
	require.Len(t, both.Keys[1].Secret, 32)
	_, err = both.Drop(both.First().ID)
	require.ErrorContains(t, err, "is the one that signs")
	promoted, err := both.Promote(both.Keys[1].ID)
	require.NoError(t, err)
	require.Equal(t, []string{both.Keys[1].ID, both.Keys[0].ID}, promoted.IDs())
	same, err := promoted.Promote(promoted.First().ID)
	require.NoError(t, err)
	require.Equal(t, promoted.IDs(), same.IDs())
	last, err := promoted.Drop(r.First().ID)
	require.NoError(t, err)
	require.Equal(t, []string{promoted.First().ID}, last.IDs())
	for _, step := range []func(string) (*Ring, error){last.Drop, last.Promote} {
		_, err = step("none")
		require.ErrorContains(t, err, "no key none")
	}
	for len(last.Keys) < MaxKeys {
		last, err = last.Rotate(then)
		require.NoError(t, err)
	}
	_, err = last.Rotate(then)
	require.ErrorContains(t, err, "drop old ones first")
}

func TestFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ring")
	require.NoError(t, Create(path, New(then)))
	require.ErrorIs(t, Create(path, New(then)), fs.ErrExist)
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o600), info.Mode())
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(path, link))
	var all sync.WaitGroup
	for range MaxKeys - 1 {
		all.Go(func() {
			_, err := Change(link, func(r *Ring) (*Ring, error) { return r.Rotate(then) })
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	r, err := Load(link)
	require.NoError(t, err)
	require.Len(t, r.Keys, MaxKeys, "no change is lost")
	_, err = Change(path, func(r *Ring) (*Ring, error) { return r.Rotate(then) })
	require.Error(t, err)
	left, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, left, 1, "no temporary file is left")

	fifo := filepath.Join(t.TempDir(), "fifo")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	_, err = Load(fifo)
	require.ErrorContains(t, err, "no regular file")
	require.NoError(t, os.Chmod(path, 0o640))
	_, err = Load(path)
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, path)
	require.ErrorContains(t, err, "chmod 600")
	_, err = Load(filepath.Join(t.TempDir(), "none"))
	require.ErrorIs(t, err, fs.ErrNotExist)
}

// A changed file is taken over; one that is gone or broken leaves the keys as they are, with one warning until it is well.
func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "ring")
		require.NoError(t, Create(path, New(then)))
		f, err := Open(path)
		require.NoError(t, err)
		var out lockedBuffer
		log := slog.New(slog.NewTextHandler(&out, nil))
		ctx, cancel := context.WithCancel(t.Context())
		var told []bool
		var watching sync.WaitGroup
		watching.Go(func() { f.Watch(ctx, log, func(stale bool) { told = append(told, stale) }) })
		pass := func() {
			<-time.After(2 * Every)
			synctest.Wait()
		}
		pass()
		require.Empty(t, out.String())
		first := f.Ring()
		next, err := Change(path, func(r *Ring) (*Ring, error) { return r.Rotate(then) })
		require.NoError(t, err)
		pass()
		require.Equal(t, next.IDs(), f.Ring().IDs())
		require.Contains(t, out.String(), "has changed")

		good, err := os.ReadFile(path)
		require.NoError(t, err)
		for _, bad := range []func() error{
			func() error { return os.Remove(path) },
			func() error { return os.WriteFile(path, good[:len(good)-9], 0o600) },
			func() error { return os.WriteFile(path, nil, 0o600) },
			func() error { return errorsOf(os.WriteFile(path, good, 0o600), os.Chmod(path, 0o644)) },
		} {
			require.NoError(t, bad())
			pass()
			require.Equal(t, next.IDs(), f.Ring().IDs())
			require.True(t, f.Stale())
		}
		require.Equal(t, 1, strings.Count(out.String(), "level=WARN"))
		require.NoError(t, os.Chmod(path, 0o600))
		pass()
		require.False(t, f.Stale())
		require.Equal(t, []bool{true, false}, told)
		require.Len(t, first.Keys, 1, "a ring never changes")
		for _, k := range next.Keys {
			require.NotContains(t, out.String(), hex.EncodeToString(k.Secret)[:8])
		}
		cancel()
		watching.Wait()
	})
	Fixed(New(then)).Watch(t.Context(), slog.New(slog.DiscardHandler), nil)
}

// lockedBuffer is what a watch that goes on has logged so far.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// A read that fails for a moment, for want of descriptors for example, leaves the file as it was, and is tried again.
func TestReadFailsForAMoment(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ring")
	require.NoError(t, Create(path, New(then)))
	f, err := Open(path)
	require.NoError(t, err)
	f.stale.Store(true)
	f.look(slog.New(slog.DiscardHandler))
	require.False(t, f.Stale())
}

// A change that would make a file larger than anybody reads is refused, and the file stays.
func TestChangeKeepsFileReadable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ring")
	full := Head + "\n#" + strings.Repeat("c", maxFile-len(Head)-len(line(one))-3) + "\n" + line(one)
	require.NoError(t, os.WriteFile(path, []byte(full), 0o600))
	_, err := Change(path, func(r *Ring) (*Ring, error) { return r.Rotate(then) })
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "after this change it is larger than 32768 bytes")
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, full, string(data))
}

// A file system without hard links has files of keys as well, and none is overwritten.
func TestLinkOrWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ring")
	noLinks := func(string, string) error { return syscall.EPERM }
	require.NoError(t, linkOrWrite("", path, New(then).Format(), noLinks))
	first, err := Load(path)
	require.NoError(t, err)
	require.ErrorIs(t, linkOrWrite("", path, New(then).Format(), noLinks), fs.ErrExist)
	second, err := Load(path)
	require.NoError(t, err)
	require.Equal(t, first, second)
}

func errorsOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(Head + "\n" + line(one) + "# c\n" + line(two)))
	f.Add([]byte(line(one)))
	f.Add([]byte("0123456789abcdef0123456789abcdef\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := Parse(data)
		if err != nil {
			require.ErrorIs(t, err, connector.ErrIncompatible)
			return
		}
		require.NotEmpty(t, r.Keys)
		require.LessOrEqual(t, len(r.Keys), MaxKeys)
		seen := map[string]bool{}
		for _, k := range r.Keys {
			require.Equal(t, ID(k.Secret), k.ID)
			require.False(t, seen[k.ID])
			seen[k.ID] = true
			require.GreaterOrEqual(t, len(k.Secret), MinKey)
		}
		require.Equal(t, !r.Old, IsRing(data))
		again, err := Parse(r.Format())
		if len(r.Format()) <= maxFile {
			require.NoError(t, err)
			require.Equal(t, r.IDs(), again.IDs())
		}
	})
}

// A group may read a file of root's where the process is not root's: so secrets are mounted. Nobody may write it, and others nothing.
func TestExposed(t *testing.T) {
	for perm, want := range map[fs.FileMode][2]bool{ // of our own, and of root's
		0o600: {false, false}, 0o400: {false, false}, 0o440: {true, false}, 0o640: {true, false},
		0o460: {true, true}, 0o450: {true, true}, 0o444: {true, true}, 0o644: {true, true}, 0o602: {true, true},
	} {
		require.Equal(t, want, [2]bool{exposed(perm, false), exposed(perm, true)}, "%#o", perm)
	}
}
