package sharedstorage

import (
	"context"
	"fmt"
	"time"

	"github.com/kvport/kvport/connector"
)

// Capabilities are the optional powers of a Store.
const Capabilities = connector.CanReset | connector.CanStat | connector.CanEvents

// Medium is where the blocks are.
const Medium = "disk"

// Counts is what a Store did since it was opened.
type Counts struct {
	Loaded, Saved, Known       uint64 // files read, files written, saves of blocks that were there
	LoadedBytes, SavedBytes    uint64 // of whole files
	Corrupt, Evicted, Refused  uint64 // damaged files found, files evicted, saves refused as read-only
	Reopened, StaleTemporaries uint64
}

// Counts gives the counts so far.
func (s *Store) Counts() Counts {
	return Counts{
		Loaded: s.loaded.Load(), Saved: s.saved.Load(), Known: s.known.Load(),
		LoadedBytes: s.loadedBytes.Load(), SavedBytes: s.savedBytes.Load(),
		Corrupt: s.corrupt.Load(), Evicted: s.evicted.Load(), Refused: s.refused.Load(),
		Reopened: s.reopened.Load(), StaleTemporaries: s.stale.Load(),
	}
}

// StatInfos declares what Stats gives.
func StatInfos() []connector.StatInfo {
	counter := func(name, help string) connector.StatInfo {
		return connector.StatInfo{Name: name, Help: help, Kind: connector.Counter}
	}
	return []connector.StatInfo{
		counter("loaded_blocks_total", "Block files read."),
		counter("loaded_bytes_total", "Bytes of the block files read."),
		counter("saved_blocks_total", "Block files written."),
		counter("saved_bytes_total", "Bytes of the block files written."),
		counter("known_blocks_total", "Saves of blocks that were stored already."),
		counter("evicted_blocks_total", "Block files evicted by this engine to keep max_bytes."),
		counter("corrupt_blocks_total", "Damaged block files found."),
		counter("refused_saves_total", "Saves refused because the folder cannot be written."),
		counter("reopened_total", "Times that the folder had to be opened again."),
		{Name: "used_bytes", Help: "Bytes of all block files, as far as this engine knows; only with max_bytes.", Kind: connector.Gauge},
	}
}

// Stats implements connector.StatsSource.
func (s *Store) Stats(context.Context) ([]connector.Stat, error) {
	c := s.Counts()
	stats := make([]connector.Stat, 0, len(StatInfos()))
	for _, v := range []struct {
		name  string
		value uint64
	}{
		{"loaded_blocks_total", c.Loaded},
		{"loaded_bytes_total", c.LoadedBytes},
		{"saved_blocks_total", c.Saved},
		{"saved_bytes_total", c.SavedBytes},
		{"known_blocks_total", c.Known},
		{"evicted_blocks_total", c.Evicted},
		{"corrupt_blocks_total", c.Corrupt},
		{"refused_saves_total", c.Refused},
		{"reopened_total", c.Reopened},
	} {
		stats = append(stats, connector.Stat{Name: v.name, Value: float64(v.value)})
	}
	if used, known := s.budget.known(); known {
		stats = append(stats, connector.Stat{Name: "used_bytes", Value: float64(used)})
	}
	return stats, nil
}

// Watch implements sdk.Watchable: removed is called with the keys of the blocks that this engine has
// evicted, or removed as damaged, and with nil when the folder is gone with all of them. It is not called
// for what other engines evict.
func (s *Store) Watch(removed func(keys []connector.StoreKey)) { s.removed = removed }

// Reset implements connector.Resetter: it removes every block file of the folder, those of other
// engines too. They may believe for a second that a block is there which they have just seen, so it
// takes as long. A folder that cannot be written keeps its blocks.
func (s *Store) Reset(ctx context.Context) (emptied bool, err error) {
	if s.writable() != nil {
		return false, nil
	}
	err = s.with(func(d *dir) error {
		for n := range shards {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := emptyShard(d, n); err != nil {
				return err
			}
		}
		return nil
	})
	s.index.clear()
	s.budget.forget()
	if err != nil {
		return false, fmt.Errorf("reset: %w", err)
	}
	timer := time.NewTimer(fresh)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true, nil
	case <-ctx.Done():
		return false, ctx.Err()
	}
}

// emptyShard removes the block files of one shard. One that cannot be removed is an error.
func emptyShard(d *dir, n int) error {
	for {
		files := appendShard(nil, d, n)
		if len(files) == 0 {
			return nil
		}
		for _, f := range files {
			d.remove(f.key)
		}
		if _, still := d.size(files[0].key); still {
			return fmt.Errorf("%s cannot be removed", fileName(files[0].key))
		}
	}
}
