package remote

import (
	"sync/atomic"

	"github.com/kvport/kvport/connector"
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

// number is one number of a store.
type number struct {
	name, help string
	of         func(Stats) uint64
	gauge      bool
}

// numbers are all of them.
func numbers() []number {
	return []number{
		{"loaded_blocks_total", "Blocks read.", func(s Stats) uint64 { return s.Loaded }, false},
		{"saved_blocks_total", "Blocks written.", func(s Stats) uint64 { return s.Saved }, false},
		{"known_blocks_total", "Saves of blocks that were there.", func(s Stats) uint64 { return s.Known }, false},
		{"gone_blocks_total", "Blocks that were wanted and not there.", func(s Stats) uint64 { return s.Gone }, false},
		{"corrupt_blocks_total", "Values that were not the block.", func(s Stats) uint64 { return s.Corrupt }, false},
		{"refused_blocks_total", "Blocks that were not written: the server was away or full, or they were too large.", func(s Stats) uint64 { return s.Refused }, false},
		{"loaded_bytes_total", "Bytes read.", func(s Stats) uint64 { return s.BytesLoaded }, false},
		{"saved_bytes_total", "Bytes written.", func(s Stats) uint64 { return s.BytesSaved }, false},
		{"evicted_blocks_total", "Without a server: blocks given up for others.", func(s Stats) uint64 { return s.Evicted }, false},
		{"held_bytes", "Without a server: bytes of blocks held.", func(s Stats) uint64 { return s.Held }, true},
		{"away", "1 while the server cannot be used.", Stats.away, true},
	}
}

func (s Stats) away() uint64 {
	if s.Away {
		return 1
	}
	return 0
}

// Infos declares what Values gives.
func Infos() (infos []connector.StatInfo) {
	for _, n := range numbers() {
		kind := connector.Counter
		if n.gauge {
			kind = connector.Gauge
		}
		infos = append(infos, connector.StatInfo{Name: "remote_" + n.name, Help: n.help, Kind: kind})
	}
	return infos
}

// Values are the numbers that Infos declares.
func (s Stats) Values() (values []connector.Stat) {
	for _, n := range numbers() {
		values = append(values, connector.Stat{Name: "remote_" + n.name, Value: float64(n.of(s))})
	}
	return values
}

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
