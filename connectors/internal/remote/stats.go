package remote

import (
	"errors"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/storekit"
)

// Stats counts what a store did since it was opened.
type Stats struct {
	Loaded      uint64 `stat:"loaded_blocks_total" help:"Blocks read."`
	Saved       uint64 `stat:"saved_blocks_total" help:"Blocks written."`
	Known       uint64 `stat:"known_blocks_total" help:"Saves of blocks that were there."`
	Gone        uint64 `stat:"gone_blocks_total" help:"Blocks that were wanted and not there."`
	Corrupt     uint64 `stat:"corrupt_blocks_total" help:"Values that were not the block."`
	Outdated    uint64 `stat:"outdated_blocks_total" help:"Whole values of another length: another version has stored them."`
	Refused     uint64 `stat:"refused_blocks_total" help:"Blocks that were not written: the server was away or full, or they were too large."`
	BytesLoaded uint64 `stat:"loaded_bytes_total" help:"Bytes read."`
	BytesSaved  uint64 `stat:"saved_bytes_total" help:"Bytes written."`
	Evicted     uint64 `stat:"evicted_blocks_total" help:"Without a server: blocks given up for others."`
	Held        uint64 `stat:"held_bytes" help:"Without a server: bytes of blocks held."`
	Away        uint64 `stat:"away" help:"1 while the server cannot be used."`
}

func (s *Stats) read(size int) {
	s.Loaded++
	s.BytesLoaded += uint64(size)
}

func (s *Stats) wrote(size int) {
	s.Saved++
	s.BytesSaved += uint64(size)
}

const statPrefix = "remote_"

// Infos declares what Values gives.
func Infos() []connector.StatInfo { return storekit.Infos[Stats](statPrefix) }

// Values are the numbers that Infos declares.
func (s Stats) Values() []connector.Stat { return storekit.Stats(statPrefix, s) }

// served is what stores on a server have in common.
type served struct {
	o      Options
	health health
	counts storekit.Counts[Stats]
}

// Stats gives the counts so far.
func (s *served) Stats() Stats {
	c := s.counts.Now()
	s.health.mu.Lock()
	defer s.health.mu.Unlock()
	if s.health.away {
		c.Away = 1
	}
	return c
}

// received counts the reply to one question for a block and gives its error.
func (s *served) received(r *scatter) error {
	s.counts.Count(func(n *Stats) {
		switch {
		case r.err == nil:
			n.read(r.item.Size())
		case errors.Is(r.err, connector.ErrCorrupt):
			n.Corrupt++
		case errors.Is(r.err, connector.ErrOutdated):
			n.Outdated++
		default:
			n.Gone++
		}
	})
	return r.err
}

// Stats gives the counts so far.
func (m *Memory) Stats() Stats {
	c := m.counts.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	c.Held = uint64(m.bytes)
	return c
}
