package offload

import (
	"context"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/internal/tier"
)

// Capabilities are the optional powers of a Store.
const Capabilities = connector.CanReset | connector.CanStat | connector.CanEvents

// Medium is where the blocks are, for whoever is told that they come and go.
const Medium = "cpu"

// count is one number of a tier.
type count struct {
	name, help string
	of         func(tier.Stats) uint64
	gauge      bool
}

// counts are the numbers of both tiers.
func counts() []count {
	return []count{
		{"hits_total", "Blocks that were wanted and there.", func(s tier.Stats) uint64 { return s.Hits }, false},
		{"misses_total", "Blocks that were wanted and not there.", func(s tier.Stats) uint64 { return s.Misses }, false},
		{"read_bytes_total", "Bytes read.", func(s tier.Stats) uint64 { return s.BytesOut }, false},
		{"written_bytes_total", "Bytes written.", func(s tier.Stats) uint64 { return s.BytesIn }, false},
		{"evictions_total", "Blocks given up for others.", func(s tier.Stats) uint64 { return s.Evicted }, false},
		{"adopted_blocks", "Blocks found at the start.", func(s tier.Stats) uint64 { return s.Adopted }, true},
		{"torn_slots", "Slots found half written, or with a damaged header.", func(s tier.Stats) uint64 { return s.Torn }, true},
		{"corrupt_total", "Blocks that were not what was written.", func(s tier.Stats) uint64 { return s.Corrupt }, false},
		{"errors_total", "Reads and writes that failed.", func(s tier.Stats) uint64 { return s.Errors }, false},
		{"expired_total", "Blocks whose time was over.", func(s tier.Stats) uint64 { return s.Expired }, false},
		{"blocks", "Blocks stored.", func(s tier.Stats) uint64 { return s.Blocks }, true},
		{"slots", "Blocks that fit.", func(s tier.Stats) uint64 { return s.Slots }, true},
	}
}

// between are the numbers of what goes on between the tiers, and of what was not stored.
func between() []count {
	return []count{
		{"write_backs_total", "Blocks written behind to disk.", func(s tier.Stats) uint64 { return s.WriteBacks }, false},
		{"write_backs_dropped_total", "Blocks not written to disk: the queue was full, or they had gone.", func(s tier.Stats) uint64 { return s.Dropped }, false},
		{"not_admitted_total", "Times that a block was not yet used often enough for the disk.", func(s tier.Stats) uint64 { return s.NotAdmitted }, false},
		{"prefetches_total", "Blocks read from disk before they were asked for.", func(s tier.Stats) uint64 { return s.Prefetches }, false},
	}
}

// declined are the numbers of what memory did not store.
func declined() []count {
	return []count{
		{"declined_threshold_total", "Saves declined by store_threshold.", func(s tier.Stats) uint64 { return s.BelowThreshold }, false},
		{"declined_quota_total", "Saves declined by tenant_bytes.", func(s tier.Stats) uint64 { return s.NoQuota }, false},
		{"declined_pinned_total", "Saves declined because every slot was in use.", func(s tier.Stats) uint64 { return s.AllPinned }, false},
	}
}

// StatInfos declares what Stats gives.
func StatInfos() (infos []connector.StatInfo) {
	add := func(prefix string, list []count) {
		for _, c := range list {
			kind := connector.Counter
			if c.gauge {
				kind = connector.Gauge
			}
			infos = append(infos, connector.StatInfo{Name: prefix + c.name, Help: c.help, Kind: kind})
		}
	}
	add("memory_", counts())
	add("disk_", counts())
	add("", between())
	add("", declined())
	return infos
}

// Stats implements connector.StatsSource.
func (s *Store) Stats(context.Context) (stats []connector.Stat, err error) {
	add := func(prefix string, list []count, of tier.Stats) {
		for _, c := range list {
			stats = append(stats, connector.Stat{Name: prefix + c.name, Value: float64(c.of(of))})
		}
	}
	memory, lower := s.tiers.Stats()
	add("memory_", counts(), memory)
	add("", between(), lower)
	add("", declined(), memory)
	if s.disk != nil {
		add("disk_", counts(), s.disk.Stats())
	}
	return stats, nil
}

// Watch is told of every block that neither tier has any more.
func (s *Store) Watch(removed func(keys []connector.StoreKey)) { s.removed.Store(&removed) }

// changed is told of every change of either tier, of which other is the other one.
func (s *Store) changed(k connector.StoreKey, stored bool, other func(connector.StoreKey) bool) {
	if removed := s.removed.Load(); !stored && removed != nil && !other(k) {
		(*removed)([]connector.StoreKey{k})
	}
}
