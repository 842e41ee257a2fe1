package vllmtrace

import (
	"fmt"
	"slices"
)

// inv10: a lookup has no effect and gives the same answer until something has changed. "Ask again"
// is allowed in between (invariant 12): a host asks anew when its answer has got old.
func inv10(s *state, c *Call) error {
	b, ok := c.Body.(*LookupCall)
	if !ok || b.Later {
		return nil
	}
	r := s.of(b.Request.ID)
	if r.lookup == nil || r.lookup.Later || r.lookupAt != s.changed || r.lookup.Computed != b.Computed || r.alloc != nil {
		return nil
	}
	if r.lookup.Tokens != b.Tokens {
		return fmt.Errorf("request %s: %d tokens, and before %d", b.Request.ID, b.Tokens, r.lookup.Tokens)
	}
	return nil
}

// inv11: the count is what lies beyond the block-aligned local hit, and within the request.
func inv11(s *state, c *Call) error {
	b, ok := c.Body.(*LookupCall)
	switch {
	case !ok:
		return nil
	case b.Tokens < 0 || b.Computed < 0:
		return fmt.Errorf("request %s: %d tokens beyond %d", b.Request.ID, b.Tokens, b.Computed)
	case s.blockSize > 0 && b.Computed%s.blockSize != 0:
		return fmt.Errorf("request %s: local hit of %d tokens is not whole blocks", b.Request.ID, b.Computed)
	case b.Computed+b.Tokens > b.Request.Tokens:
		return fmt.Errorf("request %s: %d + %d tokens of %d", b.Request.ID, b.Computed, b.Tokens, b.Request.Tokens)
	}
	return nil
}

// inv12: "ask again" is followed by an answer.
func inv12(s *state, c *Call) error {
	if c.Kind != End {
		return nil
	}
	for id, r := range s.requests {
		if r.lookup != nil && r.lookup.Later && !r.ended {
			return fmt.Errorf("request %s never got an answer", id)
		}
	}
	return nil
}

// inv13: nothing is not loaded asynchronously.
func inv13(_ *state, c *Call) error {
	if b, ok := c.Body.(*LookupCall); ok && b.Async && (b.Tokens == 0 || b.Later) {
		return fmt.Errorf("request %s: async without tokens", b.Request.ID)
	}
	return nil
}

// inv14: no lookup for a request that runs, waits for a load or has loaded.
func inv14(s *state, c *Call) error {
	b, ok := c.Body.(*LookupCall)
	if !ok {
		return nil
	}
	if r := s.of(b.Request.ID); r.running || r.loaded || r.load != nil || b.Request.Computed != 0 {
		return fmt.Errorf("request %s is past its lookup", b.Request.ID)
	}
	return nil
}

// inv16: a synchronous offer leaves a token to compute; a host's offer always does.
func inv16(s *state, c *Call) error {
	b, ok := c.Body.(*LookupCall)
	if ok && b.Tokens > 0 && b.Computed+b.Tokens >= b.Request.Tokens && (!b.Async || s.async) {
		return fmt.Errorf("request %s: nothing left to compute", b.Request.ID)
	}
	return nil
}

// inv17: the engine takes up an offer or leaves it; it never takes more.
func inv17(s *state, c *Call) error {
	b, ok := c.Body.(*AllocCall)
	if !ok || b.External == 0 {
		return nil
	}
	r := s.of(b.Request.ID)
	if r.lookup == nil || r.lookup.Later || b.External < 0 || b.External > r.lookup.Tokens {
		return fmt.Errorf("request %s: %d external tokens were not offered", b.Request.ID, b.External)
	}
	return nil
}

// inv18: whether there is a load depends on the number of external tokens, not on the blocks.
func inv18(s *state, c *Call) error {
	b, ok := c.Body.(*MetaCall)
	if !ok {
		return nil
	}
	for _, l := range b.Loads {
		if r := s.of(l.Request); r.alloc != nil && r.alloc.External == 0 {
			return fmt.Errorf("request %s: a load where no token is external", l.Request)
		}
	}
	return nil
}

// inv19: exactly one load for each allocation with external tokens.
func inv19(s *state, c *Call) error {
	switch b := c.Body.(type) {
	case *AllocCall:
		r := s.of(b.Request.ID)
		if b.External > 0 && (r.load != nil || r.wantsLoad()) {
			return fmt.Errorf("request %s: a second load is wanted", b.Request.ID)
		}
	case *MetaCall:
		return s.oneLoadEach(b)
	}
	return nil
}

// wantsLoad says that blocks were allocated for a load that has not begun.
func (r *request) wantsLoad() bool {
	return r.alloc != nil && r.alloc.External > 0 && !r.claimed && !r.ended
}

func (s *state) oneLoadEach(b *MetaCall) error {
	seen := map[string]bool{}
	for _, l := range b.Loads {
		r := s.of(l.Request)
		again := r.alloc != nil && r.alloc.External > 0 && r.claimed
		if seen[l.Request] || r.load != nil || again {
			return fmt.Errorf("request %s: a second load", l.Request)
		}
		seen[l.Request] = true
	}
	for id, r := range s.requests {
		if r.wantsLoad() && !seen[id] {
			return fmt.Errorf("request %s: its load was not started", id)
		}
	}
	return nil
}

// inv20: a load fills the blocks behind the local hit.
func inv20(s *state, c *Call) error {
	b, ok := c.Body.(*MetaCall)
	if !ok {
		return nil
	}
	for _, l := range b.Loads {
		r := s.of(l.Request)
		if r.alloc == nil || r.lookup == nil {
			continue
		}
		first := r.lookup.Computed / s.blockSize
		end := first + r.alloc.External/s.blockSize
		if end > len(r.table) || !slices.Equal(r.table[first:end], l.Blocks) {
			return fmt.Errorf("request %s: blocks %v, want those of tokens %d to %d", l.Request, l.Blocks, first*s.blockSize, end*s.blockSize)
		}
	}
	return nil
}

// inv21: nothing is loaded for a request whose allocation failed.
func inv21(s *state, c *Call) error {
	b, ok := c.Body.(*MetaCall)
	if !ok {
		return nil
	}
	for _, l := range b.Loads {
		if s.of(l.Request).alloc == nil {
			return fmt.Errorf("request %s has no blocks", l.Request)
		}
	}
	return nil
}

// inv22: blocks that are being loaded belong to nobody else.
func inv22(s *state, c *Call) error {
	id, _, all := s.taken(c)
	for _, block := range all {
		if owner, busy := s.loading[block]; busy && owner != id {
			return fmt.Errorf("request %s got block %d, which is being loaded for %s", id, block, owner)
		}
	}
	if m, ok := c.Body.(*MetaCall); ok {
		for _, n := range m.Cached {
			for _, block := range slices.Concat(n.NewBlocks...) {
				if owner, busy := s.loading[block]; busy && owner != n.ID {
					return fmt.Errorf("request %s got block %d, which is being loaded for %s", n.ID, block, owner)
				}
			}
		}
	}
	return nil
}

// inv45: after a load that left no valid token the request is offered nothing any more.
func inv45(s *state, c *Call) error {
	b, ok := c.Body.(*LookupCall)
	if ok && b.Tokens > 0 && s.of(b.Request.ID).emptied {
		return fmt.Errorf("request %s is offered %d tokens again", b.Request.ID, b.Tokens)
	}
	return nil
}
