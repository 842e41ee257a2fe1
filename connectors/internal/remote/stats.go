package remote

import (
	"sync/atomic"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/internal/storekit"
)

// Stats counts what a store did since it was opened.
type Stats struct {
	Loaded, Saved, Known    uint64 // values read, values written, saves of blocks that were there
	Gone, Corrupt, Refused  uint64 // items that were not there, damaged, or not taken
	BytesLoaded, BytesSaved uint64
	Evicted, Held           uint64 // without a server: blocks given up for others; bytes of values now
	Away                    bool   // the server cannot be used now
}

// counters is Stats while it is counted.
type counters struct {
	loaded, saved, known, gone, corrupt, refused, in, out, evicted atomic.Uint64
}

func (c *counters) stats() Stats {
	return Stats{
		Loaded: c.loaded.Load(), Saved: c.saved.Load(), Known: c.known.Load(), Gone: c.gone.Load(), Corrupt: c.corrupt.Load(),
		Refused: c.refused.Load(), BytesLoaded: c.in.Load(), BytesSaved: c.out.Load(), Evicted: c.evicted.Load(),
	}
}

// counts are all numbers of a store.
func counts() []storekit.Count[Stats] {
	return []storekit.Count[Stats]{
		{Name: "loaded_blocks_total", Help: "Blocks read.", Of: func(s Stats) uint64 { return s.Loaded }},
		{Name: "saved_blocks_total", Help: "Blocks written.", Of: func(s Stats) uint64 { return s.Saved }},
		{Name: "known_blocks_total", Help: "Saves of blocks that were there.", Of: func(s Stats) uint64 { return s.Known }},
		{Name: "gone_blocks_total", Help: "Blocks that were wanted and not there.", Of: func(s Stats) uint64 { return s.Gone }},
		{Name: "corrupt_blocks_total", Help: "Values that were not the block.", Of: func(s Stats) uint64 { return s.Corrupt }},
		{Name: "refused_blocks_total", Help: "Blocks that were not written: the server was away or full, or they were too large.", Of: func(s Stats) uint64 { return s.Refused }},
		{Name: "loaded_bytes_total", Help: "Bytes read.", Of: func(s Stats) uint64 { return s.BytesLoaded }},
		{Name: "saved_bytes_total", Help: "Bytes written.", Of: func(s Stats) uint64 { return s.BytesSaved }},
		{Name: "evicted_blocks_total", Help: "Without a server: blocks given up for others.", Of: func(s Stats) uint64 { return s.Evicted }},
		{Name: "held_bytes", Help: "Without a server: bytes of blocks held.", Of: func(s Stats) uint64 { return s.Held }, Gauge: true},
		{Name: "away", Help: "1 while the server cannot be used.", Of: Stats.away, Gauge: true},
	}
}

func (s Stats) away() uint64 {
	if s.Away {
		return 1
	}
	return 0
}

const statPrefix = "remote_"

// Infos declares what Values gives.
func Infos() []connector.StatInfo { return storekit.Infos(statPrefix, counts()) }

// Values are the numbers that Infos declares.
func (s Stats) Values() []connector.Stat { return storekit.Stats(statPrefix, counts(), s) }

// served is what stores on a server have in common.
type served struct {
	o      Options
	health health
	counters
}

// Stats gives the counts so far.
func (s *served) Stats() Stats {
	c := s.stats()
	c.Away = s.health.isAway()
	return c
}

// Stats gives the counts so far.
func (m *Memory) Stats() Stats {
	c := m.stats()
	m.mu.Lock()
	defer m.mu.Unlock()
	c.Held = uint64(m.bytes)
	return c
}

// isAway reports whether the server is held to be away.
func (h *health) isAway() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.away
}
