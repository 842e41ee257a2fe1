package sharedstorage

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
)

func open(t *testing.T, c Config) *Store {
	t.Helper()
	s, err := newStore(slog.New(slog.DiscardHandler), c)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func keyOf(n int) connector.StoreKey {
	return sha256.Sum256(binary.LittleEndian.AppendUint64(nil, uint64(n)))
}

// item makes an item whose bytes are a function of n.
func item(n int, lengths ...int) connector.Item {
	if lengths == nil {
		lengths = []int{300, 0, 70, 16}
	}
	r := rand.New(rand.NewPCG(uint64(n), 1))
	it := connector.Item{Key: keyOf(n)}
	for _, l := range lengths {
		span := make([]byte, l)
		for i := range span {
			span[i] = byte(r.Uint32())
		}
		it.Spans = append(it.Spans, span)
	}
	return it
}

// blank is an item like it, with zeros.
func blank(it connector.Item) connector.Item {
	out := connector.Item{Key: it.Key}
	for _, s := range it.Spans {
		out.Spans = append(out.Spans, make([]byte, len(s)))
	}
	return out
}

func (s *Store) pathOf(k connector.StoreKey) string {
	n := fileName(k)
	return filepath.Join(s.config.Path, n[:1], n[1:2], n)
}

func put(t *testing.T, s *Store, items ...connector.Item) {
	t.Helper()
	require.NoError(t, s.Put(t.Context(), items))
}

func get(t *testing.T, s *Store, want connector.Item) error {
	t.Helper()
	got := blank(want)
	err := s.Get(t.Context(), []connector.Item{got})
	if err == nil {
		require.Equal(t, want.Spans, got.Spans)
	}
	return err
}

func lookup(t *testing.T, s *Store, ns ...int) int {
	t.Helper()
	run := make([]connector.StoreKey, len(ns))
	for i, n := range ns {
		run[i] = keyOf(n)
	}
	found, err := s.Lookup(t.Context(), [][]connector.StoreKey{run})
	require.NoError(t, err)
	return found[0]
}

func files(t *testing.T, dir string) (names []string, bytes int64) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			info, err := d.Info()
			require.NoError(t, err)
			names, bytes = append(names, path), bytes+info.Size()
		}
		return nil
	}))
	return names, bytes
}

func TestRoundTrip(t *testing.T) {
	many := make([]int, 2500) // beyond IOV_MAX
	for i := range many {
		many[i] = i % 7
	}
	for _, lengths := range [][]int{{1}, {300, 0, 70, 16}, many, {1 << 20, 16}} {
		s := open(t, Config{Path: t.TempDir(), Fsync: true})
		it := item(1, lengths...)
		put(t, s, it)
		require.NoError(t, get(t, s, it))
		other := open(t, Config{Path: s.config.Path})
		require.Equal(t, 1, lookup(t, other, 1))
		require.NoError(t, get(t, other, it))
	}
}

func TestLookupStopsAtHole(t *testing.T) {
	s := open(t, Config{Path: t.TempDir()})
	put(t, s, item(1), item(2), item(4))
	require.Equal(t, 2, lookup(t, s, 1, 2, 3, 4))
	require.Equal(t, 0, lookup(t, s, 3, 1))
	require.Equal(t, 0, lookup(t, s))
	found, err := s.Lookup(t.Context(), [][]connector.StoreKey{{keyOf(9)}, {keyOf(4), keyOf(1)}, nil})
	require.NoError(t, err)
	require.Equal(t, []int{0, 2, 0}, found)
}

func TestGetNamesWhatIsMissing(t *testing.T) {
	s := open(t, Config{Path: t.TempDir()})
	put(t, s, item(1), item(3))
	got := []connector.Item{blank(item(1)), blank(item(2)), blank(item(3)), blank(item(4))}
	err := s.Get(t.Context(), got)
	var failed *connector.ItemError
	require.ErrorAs(t, err, &failed)
	require.Equal(t, []int{1, 3}, failed.Items)
	require.ErrorIs(t, err, connector.ErrGone)
	require.Equal(t, item(1).Spans, got[0].Spans)
	require.Equal(t, item(3).Spans, got[2].Spans)
}

func TestKnownBlocksAreNotWrittenAgain(t *testing.T) {
	s := open(t, Config{Path: t.TempDir()})
	put(t, s, item(1))
	put(t, s, item(1))
	require.Equal(t, Counts{Saved: 1, Known: 1, SavedBytes: uint64(headerSize + item(1).Size())}, s.Counts())

	changed := item(1)
	changed.Spans[0][5] ^= 1
	changed.Replace = true
	put(t, s, changed)
	require.NoError(t, get(t, s, changed))
}

func TestCrashLeftovers(t *testing.T) {
	dir := t.TempDir()
	s := open(t, Config{Path: dir})
	put(t, s, item(1))
	for name, age := range map[string]time.Duration{"dead-1": time.Hour, "dead-2": 11 * time.Minute, "alive": time.Minute} {
		path := filepath.Join(dir, tmpName, name)
		require.NoError(t, os.WriteFile(path, []byte("half a block"), 0o600))
		then := time.Now().Add(-age)
		require.NoError(t, os.Chtimes(path, then, then))
	}
	again := open(t, Config{Path: dir})
	require.EqualValues(t, 2, again.Counts().StaleTemporaries)
	names, _ := files(t, dir)
	require.ElementsMatch(t, []string{filepath.Join(dir, tmpName, "alive"), s.pathOf(keyOf(1))}, names)
}

func TestTwoStoresRaceOnOneFolder(t *testing.T) {
	dir := t.TempDir()
	const blocks, rounds = 12, 60
	size := int64(headerSize + item(0).Size())
	stores := []*Store{open(t, Config{Path: dir, MaxBytes: size * blocks / 2}), open(t, Config{Path: dir, MaxBytes: size * blocks / 2})}
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 2))
			s := stores[w%2]
			for range rounds {
				n := r.IntN(blocks)
				it := item(n)
				it.Replace = r.IntN(3) == 0
				if err := s.Put(context.Background(), []connector.Item{it}); err != nil {
					t.Errorf("put: %v", err)
				}
				got := blank(it)
				if err := s.Get(context.Background(), []connector.Item{got}); err == nil {
					for i := range it.Spans {
						if !bytes.Equal(it.Spans[i], got.Spans[i]) {
							t.Errorf("block %d: wrong bytes", n)
						}
					}
				}
			}
		})
	}
	wg.Wait()
	require.Zero(t, stores[0].Counts().Corrupt+stores[1].Counts().Corrupt)
	require.NotZero(t, stores[0].Counts().Evicted+stores[1].Counts().Evicted)
	names, _ := files(t, filepath.Join(dir, tmpName))
	require.Empty(t, names)
}

func TestEvictionKeepsTheCap(t *testing.T) {
	size := int64(headerSize + item(0).Size())
	s := open(t, Config{Path: t.TempDir(), MaxBytes: 20 * size})
	for n := range 10 {
		put(t, s, item(n))
		old := time.Now().Add(-time.Duration(100-n) * time.Minute)
		require.NoError(t, os.Chtimes(s.pathOf(keyOf(n)), old, old))
	}
	require.NoError(t, get(t, s, item(0))) // used just now: the others go first
	for n := 10; n < 25; n++ {
		put(t, s, item(n))
		_, total := files(t, s.config.Path)
		require.LessOrEqual(t, total, s.config.MaxBytes)
	}
	require.Equal(t, 1, lookup(t, s, 0))
	require.Equal(t, 0, lookup(t, s, 1))
	require.Equal(t, 1, lookup(t, s, 24))
	require.NotZero(t, s.Counts().Evicted)

	err := s.Put(t.Context(), []connector.Item{item(99, int(s.config.MaxBytes))})
	require.ErrorContains(t, err, "max_bytes")
}

func TestEvictionInParallelKeepsTheCap(t *testing.T) {
	size := int64(headerSize + item(0).Size())
	s := open(t, Config{Path: t.TempDir(), MaxBytes: 32 * size, Workers: 8})
	var batch []connector.Item
	for n := range 300 {
		batch = append(batch, item(n))
	}
	put(t, s, batch...)
	_, total := files(t, s.config.Path)
	require.LessOrEqual(t, total, s.config.MaxBytes)
}

func TestForeignFilesDoNoHarm(t *testing.T) {
	victim := filepath.Join(t.TempDir(), "victim")
	require.NoError(t, os.WriteFile(victim, []byte("do not touch"), 0o600))
	for name, plant := range map[string]func(path string) error{
		"fifo":      func(p string) error { return unix.Mkfifo(p, 0o600) },
		"symlink":   func(p string) error { return os.Symlink(victim, p) },
		"dangling":  func(p string) error { return os.Symlink("nowhere", p) },
		"empty":     func(p string) error { return os.WriteFile(p, nil, 0o600) },
		"text":      func(p string) error { return os.WriteFile(p, bytes.Repeat([]byte("x"), 600), 0o600) },
		"directory": func(p string) error { return os.Mkdir(p, 0o700) },
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t, Config{Path: t.TempDir(), MaxBytes: 1 << 20})
			put(t, s, item(2))
			path := s.pathOf(keyOf(1))
			require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
			require.NoError(t, plant(path))
			err := get(t, s, item(1))
			require.ErrorIs(t, err, connector.ErrCorrupt)
			if name != "directory" {
				_, err = os.Lstat(path)
				require.ErrorIs(t, err, os.ErrNotExist)
				put(t, s, item(1))
				require.NoError(t, get(t, s, item(1)))
			}
			kept, err := os.ReadFile(victim)
			require.NoError(t, err)
			require.Equal(t, "do not touch", string(kept))
		})
	}
	t.Run("beside the blocks", func(t *testing.T) {
		size := int64(headerSize + item(0).Size())
		s := open(t, Config{Path: t.TempDir(), MaxBytes: 4 * size})
		put(t, s, item(1))
		foreign := filepath.Join(filepath.Dir(s.pathOf(keyOf(1))), "README")
		require.NoError(t, os.WriteFile(foreign, []byte("mine"), 0o600))
		for n := range 20 {
			put(t, s, item(n))
		}
		require.FileExists(t, foreign)
	})
	t.Run("shard is a link out of the folder", func(t *testing.T) {
		s := open(t, Config{Path: t.TempDir()})
		outside := t.TempDir()
		n := fileName(keyOf(1))
		require.NoError(t, os.Mkdir(filepath.Join(s.config.Path, n[:1]), 0o700))
		require.NoError(t, os.Symlink(outside, filepath.Join(s.config.Path, n[:1], n[1:2])))
		require.Error(t, s.Put(t.Context(), []connector.Item{item(1)}))
		names, _ := files(t, outside)
		require.Empty(t, names)
		names, _ = files(t, filepath.Join(s.config.Path, tmpName))
		require.Empty(t, names)
	})
}

// A whole file of another length has been written by another version: it stays until a save replaces it.
func TestOutdatedFiles(t *testing.T) {
	s := open(t, Config{Path: t.TempDir()})
	put(t, s, item(1))
	now := item(1)
	now.Spans = append(now.Spans, make([]byte, 16))
	require.ErrorIs(t, get(t, s, now), connector.ErrOutdated)
	require.FileExists(t, s.pathOf(keyOf(1)))
	require.Zero(t, s.Counts().Corrupt)
	require.Equal(t, uint64(1), s.Counts().Outdated)
	require.NoError(t, get(t, s, item(1)), "it is as it was")
	now.Replace = true
	require.NoError(t, s.Put(t.Context(), []connector.Item{now}))
	require.NoError(t, s.Get(t.Context(), []connector.Item{now}))
}

func TestDamagedFilesAreFoundAndRemoved(t *testing.T) {
	whole := headerSize + item(1).Size()
	damage := map[string]func([]byte) []byte{
		"truncated header": func(b []byte) []byte { return b[:50] },
		"truncated":        func(b []byte) []byte { return b[:whole-1] },
		"header only":      func(b []byte) []byte { return b[:headerSize] },
		"oversized":        func(b []byte) []byte { return append(b, 0) },
		"huge":             func(b []byte) []byte { return append(b, make([]byte, 1<<20)...) },
	}
	for bit := range headerSize * 8 {
		if bit%37 == 0 {
			damage["bit "+string(rune('0'+bit/1000))+string(rune('0'+bit/100%10))+string(rune('0'+bit/10%10))+string(rune('0'+bit%10))] = func(b []byte) []byte { b[bit/8] ^= 1 << (bit % 8); return b }
		}
	}
	for name, change := range damage {
		t.Run(name, func(t *testing.T) {
			for _, readOnly := range []bool{false, true} {
				dir := t.TempDir()
				writer := open(t, Config{Path: dir})
				put(t, writer, item(1))
				path := writer.pathOf(keyOf(1))
				b, err := os.ReadFile(path)
				require.NoError(t, err)
				require.NoError(t, os.WriteFile(path, change(b), 0o600))

				s := open(t, Config{Path: dir, ReadOnly: readOnly})
				require.ErrorIs(t, get(t, s, item(1)), connector.ErrCorrupt)
				require.EqualValues(t, 1, s.Counts().Corrupt)
				if readOnly {
					require.FileExists(t, path)
				} else {
					require.NoFileExists(t, path)
				}
			}
		})
	}
}

func TestFileUnderTheWrongKey(t *testing.T) {
	s := open(t, Config{Path: t.TempDir()})
	put(t, s, item(1), item(2))
	b, err := os.ReadFile(s.pathOf(keyOf(1)))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(s.pathOf(keyOf(2)), b, 0o600))
	require.ErrorIs(t, get(t, s, item(2)), connector.ErrCorrupt)
	require.NoError(t, get(t, s, item(1)))

	// The same key and total length, but other spans.
	other := item(1, 299, 1, 70, 16)
	require.ErrorIs(t, s.Get(t.Context(), []connector.Item{other}), connector.ErrCorrupt)
}

func FuzzDecode(f *testing.F) {
	f.Add(headerOf(item(1)).encode())
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := decode(b)
		if err != nil {
			require.ErrorIs(t, err, connector.ErrCorrupt)
			return
		}
		again, err := decode(h.encode())
		require.NoError(t, err)
		require.Equal(t, h, again)
		require.Len(t, b, headerSize)
		if want := headerOf(item(1)); h != want {
			require.ErrorIs(t, h.check(want), connector.ErrCorrupt, "a sound header of another block")
		}
		for i := range b { // no damage of one bit passes
			damaged := bytes.Clone(b)
			damaged[i] ^= 1
			_, err := decode(damaged)
			require.ErrorIs(t, err, connector.ErrCorrupt)
		}
	})
}

// A block that is there and was made with another key or by another version is written again.
func TestPutReplacesOtherKeys(t *testing.T) {
	s := open(t, Config{Path: t.TempDir()})
	marked := func(key byte, lengths ...int) connector.Item {
		it := item(1, append(lengths, 48)...)
		copy(it.Spans[len(lengths)], []byte{2, 0, 0, 0, 0, 0, 0, 0, key, 2, 3, 4, 5, 6, 7, 8})
		return it
	}
	for _, it := range []connector.Item{marked(1, 300), marked(2, 300), marked(2, 300), marked(2, 300, 16)} {
		put(t, s, it)
		require.NoError(t, get(t, s, it))
	}
	require.Equal(t, uint64(3), s.Counts().Saved)
	require.Equal(t, uint64(1), s.Counts().Known)
}
