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

// Loading says whether a request is parked because of a load.
func (s *Scheduler) Loading(id connector.RequestID) bool {
	r := s.live[id]
	return r != nil && r.state == loading
}

// overlap adds early chunks to the step while there are places and tokens left. It adds none beside blocks that are
// saved while they are computed: what such a step computes may not be computed once more.
func (s *Scheduler) overlap(budget int) {
	places := s.cfg.MaxSeqs - len(s.running)
	for _, r := range s.queue {
		if len(s.step.Computing) > 0 || budget <= 0 || places <= 0 {
			return
		}
		if r.state != loading || r.arriving == nil {
			continue
		}
		from := r.arriving.to
		n := min(len(r.tokens)-from, budget)
		s.chunks = append(s.chunks, Chunk{
			Request: r.ID, Tokens: r.tokens[from : from+n], Start: from, Blocks: r.table, Sample: from+n == len(r.tokens), Early: true, seq: r,
		})
		r.arriving = nil
		budget, places = budget-n, places-1
	}
}

// Postpone takes the early chunks out of the planned step, whose layers did not come in time, and returns the others.
func (s *Scheduler) Postpone() []Chunk {
	s.chunks = slices.DeleteFunc(s.chunks, func(c Chunk) bool { return c.Early })
	return s.chunks
}

// counts says whether a chunk was computed from what the request has. An early one joins the batch.
func (s *Scheduler) counts(c *Chunk) bool {
	r := c.seq
	switch {
	case !c.Early:
		return true
	case r.state != ready || r.computed != c.Start:
		return false
	}
	s.queue, s.running = remove(s.queue, r), insert(s.running, r)
	r.state = running
	s.stats.Overlapped++
	return true
}
