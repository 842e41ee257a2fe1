package tier

import (
	"sync/atomic"

	"github.com/kvport/kvport/connector"
)

// Stats counts what one tier did since it was opened.
type Stats struct {
	Hits, Misses            uint64 // blocks that Get wanted
	BytesIn, BytesOut       uint64 // written to and read from the tier
	Stored, Known           uint64 // blocks written, and offered although they were there
	Evicted, Expired        uint64
	Torn, Corrupt, Errors   uint64 // slots found half written; damaged blocks; failed reads and writes
	WriteBacks, Prefetches  uint64 // into this tier from above; out of it before somebody asked
	Dropped                 uint64 // write-backs given up: the queue was full, or the block gone
	BelowThreshold, NoQuota uint64 // not stored
	NotAdmitted, AllPinned  uint64 // not stored
	Adopted                 uint64 // blocks taken over from an earlier process
	Blocks, Slots           uint64 // now
}

// counters is Stats while it is counted.
type counters struct {
	hits, misses, bytesIn, bytesOut, stored, known, evicted, expired, torn, corrupt, errors,
	writeBacks, prefetches, dropped, belowThreshold, noQuota, notAdmitted, allPinned, adopted atomic.Uint64
}

func (c *counters) stats() Stats {
	return Stats{
		Hits: c.hits.Load(), Misses: c.misses.Load(), BytesIn: c.bytesIn.Load(), BytesOut: c.bytesOut.Load(),
		Stored: c.stored.Load(), Known: c.known.Load(), Evicted: c.evicted.Load(), Expired: c.expired.Load(),
		Torn: c.torn.Load(), Corrupt: c.corrupt.Load(), Errors: c.errors.Load(), WriteBacks: c.writeBacks.Load(),
		Prefetches: c.prefetches.Load(), Dropped: c.dropped.Load(), BelowThreshold: c.belowThreshold.Load(),
		NoQuota: c.noQuota.Load(), NotAdmitted: c.notAdmitted.Load(), AllPinned: c.allPinned.Load(), Adopted: c.adopted.Load(),
	}
}

// count is one number of a tier.
type count struct {
	name, help string
	of         func(Stats) uint64
	gauge      bool
}

// counts are the numbers of both tiers.
func counts() []count {
	return []count{
		{"hits_total", "Blocks that were wanted and there.", func(s Stats) uint64 { return s.Hits }, false},
		{"misses_total", "Blocks that were wanted and not there.", func(s Stats) uint64 { return s.Misses }, false},
		{"read_bytes_total", "Bytes read.", func(s Stats) uint64 { return s.BytesOut }, false},
		{"written_bytes_total", "Bytes written.", func(s Stats) uint64 { return s.BytesIn }, false},
		{"evictions_total", "Blocks given up for others.", func(s Stats) uint64 { return s.Evicted }, false},
		{"adopted_blocks", "Blocks found at the start.", func(s Stats) uint64 { return s.Adopted }, true},
		{"torn_slots", "Slots found half written, or with a damaged header.", func(s Stats) uint64 { return s.Torn }, true},
		{"corrupt_total", "Blocks that were not what was written.", func(s Stats) uint64 { return s.Corrupt }, false},
		{"errors_total", "Reads and writes that failed.", func(s Stats) uint64 { return s.Errors }, false},
		{"expired_total", "Blocks whose time was over.", func(s Stats) uint64 { return s.Expired }, false},
		{"blocks", "Blocks stored.", func(s Stats) uint64 { return s.Blocks }, true},
		{"slots", "Blocks that fit.", func(s Stats) uint64 { return s.Slots }, true},
	}
}

// betweenTiers are the numbers of what goes on between the tiers, and of what was not stored.
func betweenTiers() []count {
	return []count{
		{"write_backs_total", "Blocks written behind to the tier below.", func(s Stats) uint64 { return s.WriteBacks }, false},
		{"write_backs_dropped_total", "Blocks not written to the tier below: the queue was full, or they had gone.", func(s Stats) uint64 { return s.Dropped }, false},
		{"not_admitted_total", "Times that a block was not yet used often enough for the tier below.", func(s Stats) uint64 { return s.NotAdmitted }, false},
		{"prefetches_total", "Blocks read from the tier below before they were asked for.", func(s Stats) uint64 { return s.Prefetches }, false},
	}
}

// declined are the numbers of what memory did not store.
func declined() []count {
	return []count{
		{"declined_threshold_total", "Saves declined by a store threshold.", func(s Stats) uint64 { return s.BelowThreshold }, false},
		{"declined_quota_total", "Saves declined by a tenant's quota.", func(s Stats) uint64 { return s.NoQuota }, false},
		{"declined_pinned_total", "Saves declined because every slot was in use.", func(s Stats) uint64 { return s.AllPinned }, false},
	}
}

// declare adds numbers with a prefix.
func declare(infos []connector.StatInfo, prefix string, list []count) []connector.StatInfo {
	for _, c := range list {
		kind := connector.Counter
		if c.gauge {
			kind = connector.Gauge
		}
		infos = append(infos, connector.StatInfo{Name: prefix + c.name, Help: c.help, Kind: kind})
	}
	return infos
}

func values(stats []connector.Stat, prefix string, list []count, of Stats) []connector.Stat {
	for _, c := range list {
		stats = append(stats, connector.Stat{Name: prefix + c.name, Value: float64(c.of(of))})
	}
	return stats
}

// Infos declares what Store.Values gives.
func Infos() []connector.StatInfo {
	return declare(declare(declare(nil, "memory_", counts()), "", betweenTiers()), "", declined())
}

// DiskInfos declares what Disk.Values gives.
func DiskInfos() []connector.StatInfo { return declare(nil, "disk_", counts()) }

// Values are the numbers of the memory tier and of the way below.
func (s *Store) Values() []connector.Stat {
	memory, lower := s.Stats()
	return values(values(values(nil, "memory_", counts(), memory), "", betweenTiers(), lower), "", declined(), memory)
}

// Values are the numbers of the disk tier.
func (d *Disk) Values() []connector.Stat { return values(nil, "disk_", counts(), d.Stats()) }
