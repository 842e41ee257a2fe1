package vllmtrace

import (
	"fmt"
	"slices"
)

// inv33: the worker reports an id at most once, and only one that was handed out.
func inv33(s *state, c *Call) error {
	b, ok := c.Body.(*ResultsCall)
	if !ok {
		return nil
	}
	for i, id := range b.Sending {
		if r := s.of(id); !r.ended || !r.owed || s.send[id] || slices.Contains(b.Sending[:i], id) {
			return fmt.Errorf("finished_sending of %s, which is not due", id)
		}
	}
	for i, id := range b.Recving {
		if s.of(id).load == nil || s.recv[id] || slices.Contains(b.Recving[:i], id) {
			return fmt.Errorf("finished_recving of %s, which is not due", id)
		}
	}
	return nil
}

// inv34: the scheduler side hears what the workers reported, all of it and nothing else.
func inv34(s *state, c *Call) error {
	switch b := c.Body.(type) {
	case *OutputCall:
		for _, id := range b.Recving {
			if !s.recv[id] {
				return fmt.Errorf("finished_recving of %s, which no worker reported", id)
			}
		}
		for _, id := range b.Sending {
			if !s.send[id] {
				return fmt.Errorf("finished_sending of %s, which no worker reported", id)
			}
		}
	case nil:
		if c.Kind == End && len(s.recv)+len(s.send) > 0 {
			return fmt.Errorf("%d reports of workers were lost", len(s.recv)+len(s.send))
		}
	}
	return nil
}

// inv36: a request is reported when all its transfers are over.
func inv36(s *state, c *Call) error {
	b, ok := c.Body.(*ResultsCall)
	if !ok {
		return nil
	}
	for block, by := range s.saving {
		for _, id := range b.Sending {
			if by[id] {
				return fmt.Errorf("finished_sending of %s, whose block %d is being saved", id, block)
			}
		}
	}
	return nil
}

// inv37: failed blocks are reported no later than the end of their load.
func inv37(s *state, c *Call) error {
	b, ok := c.Body.(*OutputCall)
	if !ok {
		return nil
	}
	for _, id := range b.Failed {
		if !slices.Contains(b.Recving, id) {
			return fmt.Errorf("failed_recving of %s without finished_recving", id)
		}
	}
	for _, block := range b.Invalid {
		if _, loading := s.loading[block]; !loading {
			return fmt.Errorf("block %d is invalid and no load writes it", block)
		}
	}
	return nil
}

// inv38: every load ends with a report, also that of an aborted request.
func inv38(s *state, c *Call) error {
	if c.Kind != End {
		return nil
	}
	for id, r := range s.requests {
		if r.load != nil {
			return fmt.Errorf("the load of %s never ended", id)
		}
	}
	return nil
}

// inv39: blocks of a request that ended while loading are free when both directions are over.
func inv39(s *state, c *Call) error {
	return s.reused(c, func(r *request) bool { return r.both && (r.owed || r.load != nil) })
}

// inv40: the end of a load is reported only for a request that waits for it.
func inv40(s *state, c *Call) error {
	b, ok := c.Body.(*OutputCall)
	if !ok {
		return nil
	}
	for _, id := range b.Recving {
		if r := s.of(id); r.load == nil || r.running {
			return fmt.Errorf("request %s does not wait for a load", id)
		}
	}
	return nil
}

// inv42: after a failed load a request goes on from its first bad block.
func inv42(s *state, c *Call) error {
	b, ok := c.Body.(*AllocCall)
	if !ok {
		return nil
	}
	if r := s.of(b.Request.ID); r.failedAt >= 0 && b.Request.Computed != r.failedAt {
		return fmt.Errorf("request %s goes on from token %d, valid are %d", b.Request.ID, b.Request.Computed, r.failedAt)
	}
	return nil
}

// inv44: failed blocks cannot be named in a cache of several groups.
func inv44(s *state, c *Call) error {
	b, ok := c.Body.(*OutputCall)
	if init := s.inits[SchedulerSide]; ok && init != nil && len(init.Groups) > 1 && len(b.Invalid) > 0 {
		return fmt.Errorf("%d failed blocks of %d groups", len(b.Invalid), len(init.Groups))
	}
	return nil
}

// inv46: nobody else may compute on a block that was found invalid.
func inv46(s *state, c *Call) error {
	b, ok := c.Body.(*OutputCall)
	if !ok {
		return nil
	}
	for _, block := range b.Invalid {
		for id, r := range s.requests {
			if s.loading[block] != id && r.running && slices.Contains(r.table, block) {
				return fmt.Errorf("request %s runs on block %d", id, block)
			}
		}
	}
	return nil
}

// inv48: a request ends once, with the blocks of its computed tokens.
func inv48(s *state, c *Call) error {
	b, ok := c.Body.(*FinishedCall)
	if !ok {
		return nil
	}
	r, known := s.requests[b.Request.ID]
	n, computed := len(b.Blocks), b.Request.Computed
	switch {
	case !known:
		return fmt.Errorf("request %s never arrived", b.Request.ID)
	case r.ended:
		return fmt.Errorf("request %s has ended before", b.Request.ID)
	case r.load == nil && (n*s.blockSize < computed || n > 0 && (n-1)*s.blockSize > computed):
		return fmt.Errorf("request %s: %d blocks for %d tokens", b.Request.ID, n, computed)
	}
	return nil
}

// inv49: kept blocks stay until finished_sending, which comes.
func inv49(s *state, c *Call) error {
	if c.Kind == End {
		for id, r := range s.requests {
			if r.owed {
				return fmt.Errorf("finished_sending of %s never came", id)
			}
		}
	}
	return s.reused(c, func(r *request) bool { return r.ended && r.owed })
}

// reused reports a fresh block that some other request, of a certain kind, still has.
func (s *state) reused(c *Call, kept func(*request) bool) error {
	id, fresh, _ := s.taken(c)
	if m, ok := c.Body.(*MetaCall); ok {
		for _, n := range m.Cached {
			if !n.Resumed {
				fresh = append(fresh, slices.Concat(n.NewBlocks...)...)
			}
		}
	}
	if len(fresh) == 0 {
		return nil
	}
	for other, r := range s.requests {
		if other == id || !kept(r) {
			continue
		}
		for _, block := range fresh {
			if slices.Contains(r.table, block) {
				return fmt.Errorf("block %d is given away while it is kept for %s", block, other)
			}
		}
	}
	return nil
}

// inv54: nothing is pending when an engine has come to rest.
func inv54(s *state, c *Call) error {
	if c.Kind != End {
		return nil
	}
	for id, r := range s.requests {
		if !r.ended {
			return fmt.Errorf("request %s never ended", id)
		}
	}
	for block, by := range s.saving {
		if len(by) > 0 {
			return fmt.Errorf("block %d is still being saved", block)
		}
	}
	return nil
}

// inv55: a hash stands for one prefix: it has one place in a chain, behind one other hash.
func inv55(s *state, c *Call) error {
	b, ok := c.Body.(*MetaCall)
	if !ok {
		return nil
	}
	refs := slices.Clone(b.Saves)
	for _, l := range b.Loads {
		for i, block := range l.Blocks {
			refs = append(refs, SaveRef{l.Request, block, l.Hashes[i]})
		}
	}
	here := map[string]place{} // named by this very step
	for _, v := range refs {
		r := s.of(v.Request)
		i := slices.Index(r.table, v.Block)
		if i < 0 {
			continue
		}
		now := place{i, r.hashes[i-1]}
		was, known := s.places[v.Hash]
		if !known {
			was, known = here[v.Hash]
		}
		if known && (was.index != i || was.parent != "" && now.parent != "" && was.parent != now.parent) {
			return fmt.Errorf("hash %s is block %d behind %q, and block %d behind %q of %s", v.Hash, was.index, was.parent, i, now.parent, v.Request)
		}
		here[v.Hash] = now
	}
	return nil
}

// inv63: what was loaded are the bytes that were saved.
func inv63(_ *state, c *Call) error {
	if b, ok := c.Body.(*BlocksCall); ok && c.Kind == Verified && len(b.Wrong) > 0 {
		return fmt.Errorf("request %s: other bytes in blocks %v", b.Request, b.Wrong)
	}
	return nil
}
