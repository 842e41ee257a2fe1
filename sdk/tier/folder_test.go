package tier

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// sized is a block of n bytes for another shape.
func sized(k uint64, n int) connector.Item {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(uint64(i)*7 + k)
	}
	return connector.Item{Key: storeKey(k), Spans: [][]byte{b}}
}

// shaped opens a disk tier for blocks of n bytes in a folder that is to have most bytes.
func shaped(t *testing.T, path string, n int, most int64) *Disk {
	t.Helper()
	d, err := OpenDisk(DiskOptions{Path: path, Bytes: most, SlotBytes: int64(n)})
	require.NoError(t, err)
	return d
}

// stored counts the blocks of those numbered 0 to n that are there and right.
func stored(t *testing.T, d *Disk, n uint64, size int) (right int) {
	t.Helper()
	for k := range n {
		want, got := sized(k, size), connector.Item{Key: storeKey(k), Spans: [][]byte{make([]byte, size)}}
		if d.Get(t.Context(), []connector.Item{got}) == nil {
			require.Equal(t, want.Spans[0], got.Spans[0])
			right++
		}
	}
	return right
}

// folderBytes is the size of all files of a folder.
func folderBytes(t *testing.T, path string) (sum int64) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(path, "*"))
	require.NoError(t, err)
	for _, name := range files {
		info, err := os.Stat(name)
		require.NoError(t, err)
		sum += info.Size()
	}
	return sum
}

// Engines of different shapes take turns in one folder, and each finds what it left.
func TestShapesShareAFolder(t *testing.T) {
	path := t.TempDir()
	sizes := []int{3000, 5000, 12000}
	for round := range 3 {
		for _, size := range sizes {
			d := shaped(t, path, size, 1<<20)
			if round > 0 {
				require.Equal(t, 20, stored(t, d, 20, size), "blocks of %d bytes", size)
			}
			for k := range uint64(20) {
				require.NoError(t, d.Put(t.Context(), []connector.Item{sized(k, size)}))
			}
			require.NoError(t, d.Close())
		}
	}
}

// Together they keep to the limit: what was left longest goes first, and only as much as must.
func TestShapesShareTheLimit(t *testing.T) {
	const most = 1 << 20
	path := t.TempDir()
	left := time.Now().Add(-time.Hour)
	for i, size := range []int{3000, 5000} { // each takes more than a third
		d := shaped(t, path, size, most)
		for k := range uint64(400_000 / size) {
			require.NoError(t, d.Put(t.Context(), []connector.Item{sized(k, size)}))
		}
		require.NoError(t, d.Close())
		require.NoError(t, os.Chtimes(filepath.Join(path, fileName(i)), left, left.Add(time.Duration(i)*time.Minute)))
	}
	d := shaped(t, path, 12000, most)
	for k := range uint64(400_000 / 12000) {
		require.NoError(t, d.Put(t.Context(), []connector.Item{sized(k, 12000)}))
		require.LessOrEqual(t, folderBytes(t, path), int64(most))
	}
	require.NoError(t, d.Close())
	for _, c := range []struct{ size, want int }{{5000, 80}, {12000, 33}, {3000, 0}} {
		d := shaped(t, path, c.size, most)
		require.Equal(t, c.want, stored(t, d, uint64(400_000/c.size), c.size), "blocks of %d bytes", c.size)
		require.NoError(t, d.Close())
	}
	d = shaped(t, path, 3000, most) // a tier that needs all of it gets it
	for k := range uint64(d.Slots() + 10) {
		require.NoError(t, d.Put(t.Context(), []connector.Item{sized(k, 3000)}))
		require.LessOrEqual(t, folderBytes(t, path), int64(most))
	}
	require.Equal(t, d.Slots(), int(d.Counts().Blocks))
	require.NoError(t, d.Close())
}

// A file that another process uses is left alone, whoever needs room, and only that one.
func TestUsedFilesAreLeftAlone(t *testing.T) {
	const most = 200_000
	path := t.TempDir()
	a, b := shaped(t, path, 3000, most), shaped(t, path, 5000, most)
	for k := range uint64(60) {
		require.NoError(t, a.Put(t.Context(), []connector.Item{sized(k, 3000)}))
		require.NoError(t, b.Put(t.Context(), []connector.Item{sized(k, 5000)}))
	}
	require.Equal(t, 60, stored(t, a, 60, 3000))
	require.Equal(t, b.Slots(), int(b.Counts().Blocks))
	again := shaped(t, path, 3000, most) // of a's shape: a file of its own
	require.Zero(t, again.Counts().Adopted)
	for _, d := range []*Disk{a, b, again} {
		require.NoError(t, d.Close())
	}
}

// Many processes open and leave a folder at once while files make room: none gets another's file.
func TestFolderIsContended(t *testing.T) {
	path := t.TempDir()
	failed := make(chan error, 8)
	for worker := range 8 {
		go func() {
			for round := range 20 {
				d, err := OpenDisk(DiskOptions{Path: path, Bytes: 150_000, SlotBytes: int64(2000 + 500*(worker%4))})
				for k := range uint64(40) {
					if err == nil {
						err = d.Put(t.Context(), []connector.Item{sized(k+uint64(round), 2000+500*(worker%4))})
					}
				}
				if err == nil {
					err = d.Close()
				}
				if err != nil {
					failed <- err
					return
				}
			}
			failed <- nil
		}()
	}
	for range 8 {
		require.NoError(t, <-failed)
	}
}

// A tier whose file was removed begins another one with the next save, so that the next tier in the folder finds what was saved since; what lay
// in the removed file is not offered any more. A folder that was only moved away keeps its file.
func TestRemovedFile(t *testing.T) {
	const size = 2000
	path := filepath.Join(t.TempDir(), "tier")
	put := func(d *Disk, keys ...uint64) error {
		var items []connector.Item
		for _, k := range keys {
			items = append(items, sized(k, size))
		}
		return d.Put(t.Context(), items)
	}
	next := func(d *Disk) *Disk {
		require.NoError(t, d.Close())
		return shaped(t, path, size, 100_000)
	}
	d := shaped(t, path, size, 100_000)
	require.NoError(t, put(d, 0, 1))
	require.NoError(t, os.RemoveAll(path))
	require.Equal(t, 2, stored(t, d, 3, size), "they can be read until the next save")
	require.NoError(t, put(d, 1, 2))
	require.Equal(t, 2, stored(t, d, 3, size), "the first is gone")
	d = next(d)
	require.Equal(t, 2, stored(t, d, 3, size))

	require.NoError(t, os.Rename(path, path+".away"))
	require.NoError(t, put(d, 3))
	require.NoDirExists(t, path)
	require.NoError(t, os.Rename(path+".away", path))
	d = next(d)
	require.Equal(t, 3, stored(t, d, 4, size))

	require.NoError(t, os.RemoveAll(path))
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	require.ErrorContains(t, put(d, 4), "the tier's file was removed, and no other can be opened: mkdir")
	require.Positive(t, d.waits.Load())
	require.NoError(t, os.Remove(path))
	d.waits.Store(time.Now().Add(time.Hour).UnixMilli())
	require.Equal(t, errLost, put(d, 4), "it does not look all the time")
	d.waits.Store(time.Now().UnixMilli())
	require.NoError(t, put(d, 4))
	d = next(d)
	require.Equal(t, 1, stored(t, d, 5, size))

	require.NoError(t, os.RemoveAll(path))
	d.named = false
	require.NoError(t, put(d, 5))
	require.NoDirExists(t, path, "on a file system that counts no names, none is missed")
	require.NoError(t, d.Close())
}

// What memory has goes to the next file when it is saved again, or loaded, although it went to the one that was removed.
func TestRemovedFileBelowMemory(t *testing.T) {
	path := t.TempDir()
	s := open(t, Options{MemoryBytes: ArenaBytes(16, blockBytes), Lower: disk(t, path, 64), AdmitAfter: 1})
	for _, written := range []int{3, 6} { // the second time two are there already
		puts(t, s, 1, 2, 3)
		require.NoError(t, s.Flush(t.Context()))
		_, lower := s.Counts()
		require.EqualValues(t, written, lower.WriteBacks)
		require.NoError(t, os.Remove(filepath.Join(path, fileName(0))))
		puts(t, s, 1)
		require.NoError(t, gets(t, s, 2))
		require.NoError(t, s.Flush(t.Context()))
	}
	require.NoError(t, s.Close())
	d := disk(t, path, 64)
	require.True(t, d.Has(storeKey(1)))
	require.True(t, d.Has(storeKey(2)))
	require.EqualValues(t, 2, d.Counts().Adopted)
	require.NoError(t, d.Close())
}
