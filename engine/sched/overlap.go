package sched

import (
	"slices"

	"github.com/kvport/kvport/connector"
)

// Early chunks: a request whose load arrives layer by layer is computed while it is parked. The model waits before
// each layer for that of the load. Such a chunk counts only if the load has ended well by the time of Commit; otherwise
// nothing has happened, and the request is computed when its load is over, as without.

// Arriving says that the layers of a load are verified one after the other from now on, so that the request can be
// computed early, once.
func (s *Scheduler) Arriving(step uint64, id connector.RequestID) {
	if h := s.handed[handle{'l', step, id}]; h != nil && h.seq.state == loading {
		h.seq.arriving = h
	}
}

// overlap adds early chunks to the step while there are places and tokens left. It adds none beside blocks that are
// saved while they are computed: what such a step computes may not be computed once more.
func (s *Scheduler) overlap(budget int) {
	places := s.cfg.MaxSeqs - len(s.running)
	for _, r := range s.queue {
		if r.state == loading && r.arriving != nil && budget > 0 && places > 0 && len(s.step.Computing) == 0 {
			budget -= s.chunk(r, r.arriving.to, budget, true)
			r.arriving, places = nil, places-1
		}
	}
}

// Postpone takes the early chunks out of the planned step, whose layers did not come in time, and returns the others.
func (s *Scheduler) Postpone() []Chunk {
	s.chunks = slices.DeleteFunc(s.chunks, func(c Chunk) bool { return c.Early })
	return s.chunks
}

// confirm says whether an early chunk counts: its load has brought all that it was computed from. Its request joins the batch.
func (s *Scheduler) confirm(c *Chunk) bool {
	counts := c.seq.state == ready && c.seq.computed == c.Start
	if counts {
		s.join(c.seq)
		s.stats.Overlapped++
	}
	return counts
}
