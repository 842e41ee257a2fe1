package sched

import (
	"fmt"
	"slices"

	"github.com/kvport/kvport/connector"
)

// Commit completes the step that Schedule planned: the chunks' KV is computed, and sampled[i] is the
// token after chunk i (ignored where none was wanted). It returns what the host must know now, nil
// if nothing.
func (s *Scheduler) Commit(sampled []int32) *connector.Step {
	for i := range s.chunks {
		c := &s.chunks[i]
		r := c.seq
		if c.Early && !s.confirm(c) {
			continue
		}
		r.computed += len(c.Tokens)
		s.completed(r)
		s.slide(r, r.computed-1) // the consumer of a Remote request computes the last token itself
		if !c.Sample {
			continue
		}
		token := sampled[i]
		r.tokens = append(r.tokens, token)
		r.extendKeys(s.cfg.BlockTokens)
		switch {
		case slices.Contains(r.Stops, token):
			s.end(r, connector.ReasonStop, nil, token)
		case r.generated() == r.MaxTokens:
			s.end(r, connector.ReasonLength, nil, token)
		default:
			s.outputs = append(s.outputs, r.output(token))
		}
	}
	s.chunks = s.chunks[:0]
	return s.takeStep()
}

// Fail ends the requests of the planned step: computing them failed and left their KV undefined.
func (s *Scheduler) Fail(err error) *connector.Step {
	for _, c := range s.Postpone() {
		c.seq.handed = 0
		s.end(c.seq, connector.ReasonError, fmt.Errorf("%w: %w", ErrCompute, err))
	}
	s.chunks = s.chunks[:0]
	return s.takeStep()
}

// completed publishes the blocks that became full by computing, and offers them to be saved unless
// that was done before.
func (s *Scheduler) completed(r *seq) {
	full := r.computed / s.cfg.BlockTokens
	if full == r.full {
		return
	}
	if s.saves(r, full) && r.handed < full {
		s.step.Computed = append(s.step.Computed, s.save(r, full))
	}
	s.publish(r, full)
	r.handed = 0
}

// saves reports whether a request has something to save when the given number of its blocks is full.
func (s *Scheduler) saves(r *seq, full int) bool {
	return s.cfg.Role.Saves() && r.full < full && full <= min(len(r.Keys), r.clean/s.cfg.BlockTokens)
}

// save hands the host the blocks of a request that become full.
func (s *Scheduler) save(r *seq, full int) connector.Transfer {
	first, end := r.full*s.cfg.BlockTokens, full*s.cfg.BlockTokens
	blocks := s.blocks(r, first, end, true)
	s.hand('s', r, &handover{blocks: blocks})
	r.saves++
	return connector.Transfer{Request: r.ID, From: first, Tokens: end - first, Blocks: blocks, Replace: first < r.replace, Tenant: r.Space.Tenant()}
}

// publish makes a request's complete blocks findable, up to the given number.
func (s *Scheduler) publish(r *seq, full int) {
	if s.cfg.PrefixCaching {
		for g, table := range r.table {
			for i := r.full; i < min(full, len(r.Keys), r.clean/s.cfg.BlockTokens); i++ {
				if table[i] != none && s.pool.Publish(table[i], uint16(g), r.Keys[i]) && s.cfg.Published != nil {
					s.cfg.Published(uint16(g), i, &r.Request, r.tokens)
				}
			}
		}
	}
	r.full = full
}

// Loaded says that a load is over: the blocks in failed hold nothing, all others are filled. replace
// says that what failed is stored and cannot be used, unverified that nobody has verified the others. What the
// host reports twice, or was never given, is ignored here and below.
func (s *Scheduler) Loaded(step uint64, id connector.RequestID, failed []connector.BlockID, replace, unverified bool) {
	h := s.taken(handle{'l', step, id})
	if h == nil || h.seq.state != loading {
		return // unknown, or aborted meanwhile
	}
	r, valid := h.seq, s.valid(h, failed)
	r.computed, r.state = valid, ready
	if r.generated() == 0 {
		r.external = valid - h.from
	}
	s.stats.LoadedTokens += valid - h.from
	s.slide(r, valid)
	if unverified && valid > h.from {
		if r.clean = h.from; slices.Max(s.cfg.Trailing) > 0 {
			r.clean = 0 // a window leaves blocks behind that a consumer of the first tokens needs
		}
	}
	if r.private {
		r.full, r.private = valid/s.cfg.BlockTokens, false
	}
	s.publish(r, valid/s.cfg.BlockTokens)
	if len(failed) == 0 {
		return
	}
	s.stats.FailedLoads++
	r.barred = valid == h.from
	if replace {
		r.replace = h.to
	}
	if s.cfg.FailLoads {
		s.end(r, connector.ReasonError, ErrLoadFailed)
	}
}

// Lost says that a load, or else a save, is over whose blocks somebody may still use and always will: they stay
// pinned, and a request that waited for its load starts over with others.
func (s *Scheduler) Lost(step uint64, id connector.RequestID, load bool) {
	key := handle{'s', step, id}
	if load {
		key.kind = 'l'
	}
	h := s.over(key, s.pool.Lose)
	switch {
	case h == nil:
	case !load:
		s.stored(h)
	case h.seq.state != loading: // aborted meanwhile
	case s.cfg.FailLoads:
		s.stats.FailedLoads++
		s.end(h.seq, connector.ReasonError, ErrLoadFailed)
	default:
		s.stats.FailedLoads++
		s.preempt(h.seq)
		h.seq.barred, h.seq.private = true, false
	}
}

// LostHold says that a hold is over whose blocks somebody may still use and always will: they stay held.
func (s *Scheduler) LostHold(step uint64, id connector.RequestID) {
	s.over(handle{'h', step, id}, s.pool.Lose)
}

// valid is how far a request can go on after a load of which some blocks failed: to where every
// group has the blocks that it needs.
func (s *Scheduler) valid(h *handover, failed []connector.BlockID) int {
	bad := make(map[connector.BlockID]bool, len(failed))
	for _, id := range failed {
		bad[id] = true
	}
	first := h.from / s.cfg.BlockTokens
	usable := func(end int) bool {
		for g, table := range h.seq.table {
			for i := max(first, s.first(g, end)); i < s.blocksFor(end); i++ {
				if i < s.first(g, h.to) || bad[table[i]] {
					return false // not part of the load, or failed
				}
			}
		}
		return true
	}
	end := h.to
	for end > h.from && !usable(end) {
		end = (end - 1) / s.cfg.BlockTokens * s.cfg.BlockTokens
	}
	return end
}

// Saved says that a save is over.
func (s *Scheduler) Saved(step uint64, id connector.RequestID) {
	s.stored(s.taken(handle{'s', step, id}))
}

// Stored says that all that a ticket promises of a save is stored: its blocks stay pinned until Saved.
func (s *Scheduler) Stored(step uint64, id connector.RequestID) {
	s.stored(s.handed[handle{'s', step, id}])
}

// stored says that nobody has to wait for a save any more, unless that was said before.
func (s *Scheduler) stored(h *handover) {
	if h != nil && !h.stored {
		h.stored = true
		h.seq.saves--
		s.settle(h.seq)
	}
}

// Finished says that the host has dealt with an ended request. If held, its blocks are kept until
// Released. ticket is for the consumer of a Remote request.
func (s *Scheduler) Finished(step uint64, id connector.RequestID, held bool, ticket []byte) {
	h := s.handed[handle{'e', step, id}]
	if h == nil {
		return
	}
	if held {
		for _, b := range h.blocks {
			s.pool.Hold(b.ID)
		}
		s.handed[handle{'h', step, id}] = h
	}
	s.taken(handle{'e', step, id})
	h.seq.finished, h.seq.last.Ticket = true, ticket
	s.settle(h.seq)
}

// Released says that a hold is over.
func (s *Scheduler) Released(step uint64, id connector.RequestID) {
	s.over(handle{'h', step, id}, s.pool.Unhold)
}

// end ends a request: the host is told, its blocks are dropped, and the client is told too unless a
// ticket is still to come.
func (s *Scheduler) end(r *seq, reason connector.Reason, err error, tokens ...int32) {
	s.queue, s.running = remove(s.queue, r), remove(s.running, r)
	r.last = r.output(tokens...)
	r.last.Reason, r.last.Err = reason, err
	r.state = withheld
	clean := min(r.computed, r.clean)
	remote := r.Remote && (reason == connector.ReasonStop || reason == connector.ReasonLength) && s.cfg.Role != 0 && clean > 0
	if s.cfg.Role != 0 {
		blocks := s.blocks(r, 0, clean, true)
		s.hand('e', r, &handover{blocks: blocks})
		r.tail = r.tailOf(clean, clean, s.cfg.BlockTokens)
		s.step.Ended = append(s.step.Ended, connector.Ended{Request: r.ID, Reason: reason, Tokens: clean, Remote: remote, Weak: remote && r.Turn, Blocks: blocks})
	}
	s.release(r)
	if !remote {
		s.emitLast(r)
	}
}

// settle lets the last output of a Remote request go once its consumer can find everything: the
// ticket is there and all saves are over.
func (s *Scheduler) settle(r *seq) {
	if r.state == withheld && r.finished && r.saves == 0 {
		s.emitLast(r)
	}
}

func (s *Scheduler) emitLast(r *seq) {
	r.state = gone
	delete(s.live, r.ID)
	s.outputs = append(s.outputs, r.last)
}

// hand pins blocks for something that the coming step gives to the host.
func (s *Scheduler) hand(kind byte, r *seq, h *handover) {
	h.seq, h.blocks = r, slices.Clone(h.blocks) // the step is the host's from now on
	for _, b := range h.blocks {
		s.pool.Pin(b.ID)
	}
	s.handed[handle{kind, s.step.ID, r.ID}] = h
}

// taken ends a handover and drops its pins. It returns nil for one that is not open.
func (s *Scheduler) taken(key handle) *handover { return s.over(key, s.pool.Unpin) }

// over ends a handover and changes its claim on the blocks. It returns nil for one that is not open.
func (s *Scheduler) over(key handle, change func(connector.BlockID)) *handover {
	h := s.handed[key]
	if h != nil {
		delete(s.handed, key)
		for _, b := range slices.Backward(h.blocks) {
			change(b.ID)
		}
	}
	return h
}

// takeStep gives what has gathered for the host since the last step, nil if nothing.
func (s *Scheduler) takeStep() *connector.Step {
	st := s.step
	if len(st.Arrived)+len(st.Admitted)+len(st.Computed)+len(st.Computing)+len(st.Preempted)+len(st.Ended) == 0 {
		return nil
	}
	s.step = connector.Step{ID: st.ID + 1}
	return &st
}
