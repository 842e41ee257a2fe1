package sharedstorage

import (
	"context"
	"maps"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// Every engine's blocks go, and another engine that has just seen one no longer believes that it is there.
func TestReset(t *testing.T) {
	dir := t.TempDir()
	s, peer := open(t, Config{Path: dir, MaxBytes: 1 << 20}), open(t, Config{Path: dir})
	for n := range 20 {
		put(t, s, item(n))
	}
	put(t, peer, item(20))
	require.Equal(t, 2, lookup(t, peer, 3, 20))
	emptied, err := s.Reset(t.Context())
	require.NoError(t, err)
	require.True(t, emptied)
	require.Zero(t, lookup(t, s, 3))
	require.Zero(t, lookup(t, peer, 3))
	names, _ := files(t, dir)
	require.Empty(t, names)
	put(t, s, item(3))
	require.Equal(t, 1, lookup(t, peer, 3))

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	emptied, err = s.Reset(ctx)
	require.ErrorIs(t, err, context.Canceled)
	require.False(t, emptied)
}

// A block that another engine saves again at that moment does not count: only what was there before has to go.
func TestResetBesideSaves(t *testing.T) {
	dir := t.TempDir()
	s, peer := open(t, Config{Path: dir}), open(t, Config{Path: dir})
	ctx, stop := context.WithCancel(t.Context())
	var saving sync.WaitGroup
	for n := range 2 {
		saving.Go(func() {
			again := item(n)
			again.Replace = true
			for ctx.Err() == nil {
				_ = peer.Put(ctx, []connector.Item{again})
			}
		})
	}
	for range 8 {
		emptied, err := s.Reset(t.Context())
		require.NoError(t, err)
		require.True(t, emptied)
	}
	stop()
	saving.Wait()
}

func TestResetOfAReadOnlyFolder(t *testing.T) {
	dir := t.TempDir()
	put(t, open(t, Config{Path: dir}), item(1))
	s := open(t, Config{Path: dir, ReadOnly: true})
	emptied, err := s.Reset(t.Context())
	require.NoError(t, err)
	require.False(t, emptied)
	require.Equal(t, 1, lookup(t, s, 1))
}

// What is evicted, damaged or gone with the folder is told; nothing else is.
func TestWatch(t *testing.T) {
	size := int64(headerSize + item(0).Size())
	s := open(t, Config{Path: t.TempDir(), MaxBytes: 20 * size})
	var mu sync.Mutex
	gone, all := map[connector.StoreKey]bool{}, false
	s.Watch(func(keys []connector.StoreKey) {
		mu.Lock()
		defer mu.Unlock()
		all = all || keys == nil
		for _, k := range keys {
			gone[k] = true
		}
	})
	told := func() (map[connector.StoreKey]bool, bool) {
		mu.Lock()
		defer mu.Unlock()
		return maps.Clone(gone), all
	}
	for n := range 30 {
		put(t, s, item(n))
	}
	evicted, _ := told()
	require.NotEmpty(t, evicted)
	require.EqualValues(t, len(evicted), s.Counts().Evicted)
	for n := range 30 {
		require.Equal(t, evicted[keyOf(n)], lookup(t, s, n) == 0, "block %d", n)
	}
	require.NoError(t, os.WriteFile(s.pathOf(keyOf(29)), []byte("damaged"), 0o600))
	err := get(t, s, item(29))
	require.ErrorIs(t, err, connector.ErrCorrupt)
	damaged, everything := told()
	require.True(t, damaged[keyOf(29)])
	require.False(t, everything)
	require.NoError(t, os.RemoveAll(s.config.Path))
	require.Eventually(t, func() bool {
		_ = s.Put(t.Context(), []connector.Item{item(31)})
		_, everything = told()
		return everything
	}, time.Minute, 10*time.Millisecond)
}

func TestStats(t *testing.T) {
	s := open(t, Config{Path: t.TempDir(), MaxBytes: 1 << 20})
	put(t, s, item(1), item(2))
	put(t, s, item(1))
	require.NoError(t, get(t, s, item(2)))
	require.NoError(t, connector.ValidateStats(StatInfos()))
	stats, err := s.Stats(t.Context())
	require.NoError(t, err)
	got := map[string]float64{}
	for i := range stats {
		require.NoError(t, StatInfos()[i].Check(&stats[i]))
		got[stats[i].Name] = stats[i].Value
	}
	size := float64(headerSize + item(1).Size())
	for name, want := range map[string]float64{
		"saved_blocks_total": 2, "saved_bytes_total": 2 * size, "known_blocks_total": 1, "loaded_blocks_total": 1,
		"loaded_bytes_total": size, "evicted_blocks_total": 0, "used_bytes": 2 * size,
	} {
		require.InDelta(t, want, got[name], 0, name)
	}
}
