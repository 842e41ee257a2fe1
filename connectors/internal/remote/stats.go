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

// Infos declares what Values gives.
func Infos() []connector.StatInfo {
	counter := func(name, help string) connector.StatInfo {
		return connector.StatInfo{Name: name, Help: help, Kind: connector.Counter}
	}
	return []connector.StatInfo{
		counter("remote_loaded_blocks_total", "Blocks read."),
		counter("remote_saved_blocks_total", "Blocks written."),
		counter("remote_known_blocks_total", "Saves of blocks that were there."),
		counter("remote_gone_blocks_total", "Blocks that were wanted and not there."),
		counter("remote_corrupt_blocks_total", "Values that were not the block."),
		counter("remote_refused_blocks_total", "Blocks that were not written: the server was away or full, or they were too large."),
		counter("remote_loaded_bytes_total", "Bytes read."),
		counter("remote_saved_bytes_total", "Bytes written."),
		counter("remote_evicted_blocks_total", "Without a server: blocks given up for others."),
		{Name: "remote_held_bytes", Help: "Without a server: bytes of blocks held.", Kind: connector.Gauge},
		{Name: "remote_away", Help: "1 while the server cannot be used.", Kind: connector.Gauge},
	}
}

// Values are the numbers that Infos declares.
func (s Stats) Values() []connector.Stat {
	away := 0.0
	if s.Away {
		away = 1
	}
	return []connector.Stat{
		{Name: "remote_loaded_blocks_total", Value: float64(s.Loaded)},
		{Name: "remote_saved_blocks_total", Value: float64(s.Saved)},
		{Name: "remote_known_blocks_total", Value: float64(s.Known)},
		{Name: "remote_gone_blocks_total", Value: float64(s.Gone)},
		{Name: "remote_corrupt_blocks_total", Value: float64(s.Corrupt)},
		{Name: "remote_refused_blocks_total", Value: float64(s.Refused)},
		{Name: "remote_loaded_bytes_total", Value: float64(s.BytesLoaded)},
		{Name: "remote_saved_bytes_total", Value: float64(s.BytesSaved)},
		{Name: "remote_evicted_blocks_total", Value: float64(s.Evicted)},
		{Name: "remote_held_bytes", Value: float64(s.Held)},
		{Name: "remote_away", Value: away},
	}
}

// Stats gives the counts so far.
func (s *Store) Stats() Stats {
	c := s.stats()
	c.Away = s.health.isAway()
	return c
}

// Stats gives the counts so far.
func (s *LM) Stats() Stats {
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
