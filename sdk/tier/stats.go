package tier

import (
	"context"
	"slices"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/storekit"
)

// Stats counts what one tier did since it was opened.
type Stats struct {
	HeldStats
	PassedStats
	DeclinedStats
	Stored, Known uint64 // blocks written, and offered although they were there
}

// HeldStats are the numbers that both tiers have.
type HeldStats struct {
	Hits     uint64 `stat:"hits_total" help:"Blocks that were wanted and there."`
	Misses   uint64 `stat:"misses_total" help:"Blocks that were wanted and not there."`
	BytesOut uint64 `stat:"read_bytes_total" help:"Bytes read."`
	BytesIn  uint64 `stat:"written_bytes_total" help:"Bytes written."`
	Evicted  uint64 `stat:"evictions_total" help:"Blocks given up for others."`
	Adopted  uint64 `stat:"adopted_blocks" help:"Blocks found at the start."`
	Torn     uint64 `stat:"torn_slots" help:"Slots found half written, or with a damaged header."`
	Corrupt  uint64 `stat:"corrupt_total" help:"Blocks that were not what was written."`
	Errors   uint64 `stat:"errors_total" help:"Reads and writes that failed."`
	Expired  uint64 `stat:"expired_total" help:"Blocks whose time was over."`
	Blocks   uint64 `stat:"blocks" help:"Blocks stored."`
	Slots    uint64 `stat:"slots" help:"Blocks that fit."`
}

// PassedStats are the numbers of what goes on between the tiers.
type PassedStats struct {
	WriteBacks  uint64 `stat:"write_backs_total" help:"Blocks written behind to the tier below."`
	Dropped     uint64 `stat:"write_backs_dropped_total" help:"Blocks not written to the tier below: the queue was full, or they had gone."`
	NotAdmitted uint64 `stat:"not_admitted_total" help:"Times that a block was not yet used often enough for the tier below."`
	Prefetches  uint64 `stat:"prefetches_total" help:"Blocks read from the tier below before they were asked for."`
}

// DeclinedStats are the numbers of what memory did not store.
type DeclinedStats struct {
	BelowThreshold uint64 `stat:"declined_threshold_total" help:"Saves declined by a store threshold."`
	NoQuota        uint64 `stat:"declined_quota_total" help:"Saves declined by a tenant's quota."`
	AllPinned      uint64 `stat:"declined_pinned_total" help:"Saves declined because every slot was in use."`
}

func (s *Stats) read(size int) {
	s.Hits++
	s.BytesOut += uint64(size)
}

func (s *Stats) wrote(size int) {
	s.Stored++
	s.BytesIn += uint64(size)
}

type counts = storekit.Counts[Stats]

// Infos declares what Store.Stats gives, for sdk.Definition.Stats.
func Infos() []connector.StatInfo {
	return slices.Concat(storekit.Infos[HeldStats]("memory_"), storekit.Infos[PassedStats](""), storekit.Infos[DeclinedStats](""))
}

// DiskInfos declares what Disk.Stats gives.
func DiskInfos() []connector.StatInfo { return storekit.Infos[HeldStats]("disk_") }

// Stats implements connector.StatsSource: the numbers of the memory tier and of the way below.
func (s *Store) Stats(context.Context) ([]connector.Stat, error) { return s.Values(), nil }

// Values are the numbers that Stats gives, for Stores that wrap this one.
func (s *Store) Values() []connector.Stat {
	memory, lower := s.Counts()
	return slices.Concat(storekit.Stats("memory_", memory.HeldStats), storekit.Stats("", lower.PassedStats), storekit.Stats("", memory.DeclinedStats))
}

// Stats implements connector.StatsSource: the numbers of the disk tier.
func (d *Disk) Stats(context.Context) ([]connector.Stat, error) { return d.Values(), nil }

// Values are the numbers that Stats gives.
func (d *Disk) Values() []connector.Stat { return storekit.Stats("disk_", d.Counts().HeldStats) }
