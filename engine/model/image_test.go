package model

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/model/kernel"
)

// images lists the files of a cache of images.
func images(t *testing.T, dir string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*"))
	require.NoError(t, err)
	return names
}

func TestImages(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cache")
	o := Options{Threads: 2, DType: F16, Images: kernel.Images{Dir: dir}}
	tokens := randomTokens(7, 40, tinyVocab)
	plain := loadTiny(t, Options{Threads: 2, DType: F16})
	want := logits(t, plain, tokens, 40, 16)
	same := func(what string) {
		t.Helper()
		m := loadTiny(t, o)
		require.Equal(t, plain.Spec(), m.Spec())
		requireSame(t, want, logits(t, m, tokens, 40, 16), what)
	}
	same("packed")
	files := images(t, dir)
	require.Len(t, files, 1)
	whole, err := os.ReadFile(files[0])
	require.NoError(t, err)
	for path, mode := range map[string]os.FileMode{dir: 0o700, files[0]: 0o600} {
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.Equal(t, mode, info.Mode().Perm(), path)
	}
	for _, isa := range kernel.Supported() {
		o.ISA = isa
		same("from its image")
	}
	for name, damaged := range map[string][]byte{
		"empty": {}, "cut": whole[:len(whole)-1], "longer": append(slices.Clone(whole), 0),
		"magic": flipped(whole, 7), "size": flipped(whole, 9), "digest": flipped(whole, 20), "header": flipped(whole, 4000),
		"first weight": flipped(whole, 4096), "last weight": flipped(whole, len(whole)-1),
	} {
		require.NoError(t, os.Remove(files[0])) // what is mapped must not change
		require.NoError(t, os.WriteFile(files[0], damaged, 0o600))
		same(name)
		mended, err := os.ReadFile(files[0])
		require.NoError(t, err)
		require.Equal(t, whole, mended, "%s: it is written again", name)
	}
	require.NoError(t, os.Chmod(files[0], 0o622))
	m, err := o.Images.Open(filepath.Base(files[0][:len(files[0])-len(".weights")]), len(whole)-4096)
	require.ErrorContains(t, err, "mode")
	require.Nil(t, m)
	require.NoError(t, os.Remove(files[0]))
	require.NoError(t, os.Symlink("/etc/hostname", files[0]))
	same("a link is not followed")
}

func flipped(b []byte, at int) []byte {
	b = slices.Clone(b)
	b[at] ^= 1
	return b
}

func TestImagesAreFew(t *testing.T) {
	dir := t.TempDir()
	old := time.Now().Add(-2 * time.Hour)
	left := filepath.Join(dir, "new-1")
	require.NoError(t, os.WriteFile(left, nil, 0o600))
	require.NoError(t, os.Chtimes(left, old, old))
	for seed := range uint64(5) {
		m, err := Tiny(seed, Options{Threads: 1, Images: kernel.Images{Dir: dir, Max: 2}})
		require.NoError(t, err)
		require.NoError(t, m.Close())
		for _, f := range images(t, dir) { // the next one is newer
			info, err := os.Stat(f)
			require.NoError(t, err)
			require.NoError(t, os.Chtimes(f, old, info.ModTime().Add(-time.Minute)))
		}
	}
	require.Len(t, images(t, dir), 2)
	require.NoFileExists(t, left)
}

// A folder that cannot be written costs time, nothing else.
func TestImagesNowhere(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	m := loadTiny(t, Options{Threads: 1, Images: kernel.Images{Dir: filepath.Join(file, "cache")}})
	require.Len(t, logits(t, m, []int32{1, 2}, 2, 16), 2)
}

// BenchmarkWarmLoad takes turns: the model packed, and from its image.
func BenchmarkWarmLoad(b *testing.B) {
	path, dir := modelPath(b), b.TempDir()
	var took [2][]time.Duration
	for b.Loop() {
		for i, o := range []Options{{DType: F16}, {DType: F16, Images: kernel.Images{Dir: dir}}} {
			begin := time.Now()
			m, err := Load(path, o)
			if err != nil {
				b.Fatal(err)
			}
			took[i] = append(took[i], time.Since(begin))
			if err := m.Close(); err != nil {
				b.Fatal(err)
			}
		}
	}
	for i, what := range []string{"packed", "image"} {
		slices.Sort(took[i])
		b.ReportMetric(float64(took[i][len(took[i])/2].Milliseconds()), fmt.Sprint(what, "-ms"))
	}
}
