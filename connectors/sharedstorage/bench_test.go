package sharedstorage

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// Each size is measured twice: the store, and beside it, in the same run, what the file system can
// do with one plain file a block.
func BenchmarkStore(b *testing.B) {
	for _, layer := range []int{48 << 10, 1 << 20} {
		const blocks, layers = 32, 4
		items := make([]connector.Item, blocks)
		lengths := make([]int, layers)
		for i := range lengths {
			lengths[i] = layer / layers
		}
		for n := range items {
			items[n] = item(n, append(lengths, 16)...)
			items[n].Replace = true
		}
		s, err := newStore(slog.New(slog.DiscardHandler), Config{Path: b.TempDir(), Workers: 1})
		require.NoError(b, err)
		plain := b.TempDir()
		run := func(name string, do func(connector.Item) error) {
			b.Run(fmt.Sprintf("%s/%dKiB", name, layer>>10), func(b *testing.B) {
				b.SetBytes(int64(items[0].Size()) * blocks)
				for b.Loop() {
					for _, it := range items {
						if err := do(it); err != nil {
							b.Fatal(err)
						}
					}
				}
			})
		}
		run("save", func(it connector.Item) error { return s.Put(b.Context(), []connector.Item{it}) })
		run("save-limit", func(it connector.Item) error { return plainWrite(plain, it) })
		run("load", func(it connector.Item) error { return s.Get(b.Context(), []connector.Item{it}) })
		run("load-limit", func(it connector.Item) error { return plainRead(plain, it) })
		require.NoError(b, s.Close())
	}
}

func plainWrite(dir string, it connector.Item) error {
	name := filepath.Join(dir, fileName(it.Key))
	f, err := os.Create(name + ".tmp")
	if err != nil {
		return err
	}
	for _, s := range it.Spans {
		if _, err := f.Write(s); err != nil {
			return err
		}
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(name+".tmp", name)
}

func plainRead(dir string, it connector.Item) error {
	f, err := os.Open(filepath.Join(dir, fileName(it.Key)))
	if err != nil {
		return err
	}
	for _, s := range it.Spans {
		if _, err := f.Read(s); err != nil {
			return err
		}
	}
	return f.Close()
}

func BenchmarkLookup32(b *testing.B) {
	s, err := newStore(slog.New(slog.DiscardHandler), Config{Path: b.TempDir()})
	require.NoError(b, err)
	defer s.Close()
	run := make([]connector.StoreKey, 32)
	for n := range run {
		require.NoError(b, s.Put(b.Context(), []connector.Item{item(n)}))
		run[n] = keyOf(n)
	}
	for name, each := range map[string]func(){"warm": func() {}, "cold": s.index.clear} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				each()
				if found, err := s.Lookup(b.Context(), [][]connector.StoreKey{run}); err != nil || found[0] != 32 {
					b.Fatal(found, err)
				}
			}
		})
	}
}
