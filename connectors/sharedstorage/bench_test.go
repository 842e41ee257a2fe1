package sharedstorage

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// Every round saves and loads a set of blocks twice, once by the store and once as plain files of
// the os package, write then rename: the limit. The two take turns within each block, so that
// whatever disturbs the machine disturbs both. Reported are the medians and their ratio.
func BenchmarkStore(b *testing.B) {
	for _, size := range []int{48 << 10, 1 << 20} {
		const blocks, layers = 32, 4
		lengths := append(slices.Repeat([]int{size / layers}, layers), 16)
		items := make([]connector.Item, blocks)
		for n := range items {
			items[n] = item(n, lengths...)
			items[n].Replace = true
		}
		s, err := newStore(slog.New(slog.DiscardHandler), Config{Path: b.TempDir(), Workers: 1})
		require.NoError(b, err)
		plain := b.TempDir()
		pair := func(name string, store, limit func(connector.Item) error) {
			b.Run(fmt.Sprintf("%s/%dKiB", name, size>>10), func(b *testing.B) {
				b.SetBytes(2 * blocks * int64(items[0].Size()))
				var took [2][]time.Duration
				for b.Loop() {
					for n, it := range items {
						for turn := range 2 {
							which := (n + turn) % 2
							start := time.Now()
							if err := [2]func(connector.Item) error{store, limit}[which](it); err != nil {
								b.Fatal(err)
							}
							took[which] = append(took[which], time.Since(start))
						}
					}
				}
				ours, theirs := median(took[0]), median(took[1])
				b.ReportMetric(float64(items[0].Size())/ours.Seconds()/1e9, "GB/s")
				b.ReportMetric(float64(items[0].Size())/theirs.Seconds()/1e9, "limit-GB/s")
				b.ReportMetric(theirs.Seconds()/ours.Seconds(), "ratio")
			})
		}
		pair("save", func(it connector.Item) error { return s.Put(b.Context(), []connector.Item{it}) },
			func(it connector.Item) error { return plainWrite(plain, it) })
		pair("load", func(it connector.Item) error { return s.Get(b.Context(), []connector.Item{it}) },
			func(it connector.Item) error { return plainRead(plain, it) })
		require.NoError(b, s.Close())
	}
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
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
		if _, err := io.ReadFull(f, s); err != nil {
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
