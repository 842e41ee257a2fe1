package tier

import (
	"slices"
	"sync/atomic"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/internal/storekit"
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

// counts are the numbers of both tiers.
func counts() []storekit.Count[Stats] {
	return []storekit.Count[Stats]{
		{Name: "hits_total", Help: "Blocks that were wanted and there.", Of: func(s Stats) uint64 { return s.Hits }},
		{Name: "misses_total", Help: "Blocks that were wanted and not there.", Of: func(s Stats) uint64 { return s.Misses }},
		{Name: "read_bytes_total", Help: "Bytes read.", Of: func(s Stats) uint64 { return s.BytesOut }},
		{Name: "written_bytes_total", Help: "Bytes written.", Of: func(s Stats) uint64 { return s.BytesIn }},
		{Name: "evictions_total", Help: "Blocks given up for others.", Of: func(s Stats) uint64 { return s.Evicted }},
		{Name: "adopted_blocks", Help: "Blocks found at the start.", Of: func(s Stats) uint64 { return s.Adopted }, Gauge: true},
		{Name: "torn_slots", Help: "Slots found half written, or with a damaged header.", Of: func(s Stats) uint64 { return s.Torn }, Gauge: true},
		{Name: "corrupt_total", Help: "Blocks that were not what was written.", Of: func(s Stats) uint64 { return s.Corrupt }},
		{Name: "errors_total", Help: "Reads and writes that failed.", Of: func(s Stats) uint64 { return s.Errors }},
		{Name: "expired_total", Help: "Blocks whose time was over.", Of: func(s Stats) uint64 { return s.Expired }},
		{Name: "blocks", Help: "Blocks stored.", Of: func(s Stats) uint64 { return s.Blocks }, Gauge: true},
		{Name: "slots", Help: "Blocks that fit.", Of: func(s Stats) uint64 { return s.Slots }, Gauge: true},
	}
}

// betweenTiers are the numbers of what goes on between the tiers, and of what was not stored.
func betweenTiers() []storekit.Count[Stats] {
	return []storekit.Count[Stats]{
		{Name: "write_backs_total", Help: "Blocks written behind to the tier below.", Of: func(s Stats) uint64 { return s.WriteBacks }},
		{Name: "write_backs_dropped_total", Help: "Blocks not written to the tier below: the queue was full, or they had gone.", Of: func(s Stats) uint64 { return s.Dropped }},
		{Name: "not_admitted_total", Help: "Times that a block was not yet used often enough for the tier below.", Of: func(s Stats) uint64 { return s.NotAdmitted }},
		{Name: "prefetches_total", Help: "Blocks read from the tier below before they were asked for.", Of: func(s Stats) uint64 { return s.Prefetches }},
	}
}

// declined are the numbers of what memory did not store.
func declined() []storekit.Count[Stats] {
	return []storekit.Count[Stats]{
		{Name: "declined_threshold_total", Help: "Saves declined by a store threshold.", Of: func(s Stats) uint64 { return s.BelowThreshold }},
		{Name: "declined_quota_total", Help: "Saves declined by a tenant's quota.", Of: func(s Stats) uint64 { return s.NoQuota }},
		{Name: "declined_pinned_total", Help: "Saves declined because every slot was in use.", Of: func(s Stats) uint64 { return s.AllPinned }},
	}
}

// Infos declares what Store.Values gives.
func Infos() []connector.StatInfo {
	return slices.Concat(storekit.Infos("memory_", counts()), storekit.Infos("", betweenTiers()), storekit.Infos("", declined()))
}

// DiskInfos declares what Disk.Values gives.
func DiskInfos() []connector.StatInfo { return storekit.Infos("disk_", counts()) }

// Values are the numbers of the memory tier and of the way below.
func (s *Store) Values() []connector.Stat {
	memory, lower := s.Stats()
	return slices.Concat(storekit.Stats("memory_", counts(), memory), storekit.Stats("", betweenTiers(), lower), storekit.Stats("", declined(), memory))
}

// Values are the numbers of the disk tier.
func (d *Disk) Values() []connector.Stat { return storekit.Stats("disk_", counts(), d.Stats()) }
