package model

import (
	"context"
	"slices"
	"time"
)

// ShrinkWithin is Shrink for a history that may fail by chance: each one is run up to tries times, until it fails or the
// limit is over. It also gives the number of runs.
func ShrinkWithin(ctx context.Context, h *History, limit time.Duration, tries int, fails func(*History) bool) (short *History, runs int) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	short = Shrink(h, func(h *History) (failed, stop bool) {
		for range tries {
			if ctx.Err() != nil {
				return false, true
			}
			runs++
			if fails(h) {
				return true, false
			}
		}
		return false, false
	})
	return short, runs
}

// Shrink makes a history shorter and simpler as long as fails says that it still fails in the same way, and gives the
// last one that did. fails runs a history; it says stop when there is no time for another.
func Shrink(h *History, fails func(*History) (failed, stop bool)) *History {
	s := &shrinker{best: h, fails: fails}
	for {
		before := s.kept
		s.fewerSlots()
		s.dropSteps()
		s.dropCalls()
		s.simplifyShape()
		s.fewerSlots()
		s.serialize()
		s.simplifyCalls()
		s.dropKeys()
		if s.stop || s.kept == before {
			return s.best
		}
	}
}

type shrinker struct {
	best  *History
	fails func(*History) (failed, stop bool)
	stop  bool
	kept  int // how often a change was kept
}

// try keeps a change after which the history still fails.
func (s *shrinker) try(change func(*History) bool) bool {
	if s.stop {
		return false
	}
	h := s.best.clone()
	if !change(h) {
		return false
	}
	failed, stop := s.fails(h)
	s.stop = s.stop || stop
	if failed {
		s.best = h
		s.kept++
	}
	return failed
}

// without calls try for shorter and shorter parts of a list of n, from the end on, and drop removes one.
func (s *shrinker) without(length func(*History) int, drop func(h *History, from, to int)) {
	for size := length(s.best); size > 0 && !s.stop; size /= 2 {
		for to := length(s.best); to > 0 && !s.stop; to -= size {
			from := max(0, to-size)
			s.try(func(h *History) bool {
				drop(h, from, min(to, length(h)))
				return true
			})
		}
	}
}

func (s *shrinker) dropSteps() {
	s.without(func(h *History) int { return len(h.Steps) }, func(h *History, from, to int) { h.Steps = slices.Delete(h.Steps, from, to) })
}

func (s *shrinker) dropCalls() {
	for i := len(s.best.Steps) - 1; i >= 0; i-- {
		if len(s.best.Steps[i]) > 1 {
			s.without(func(h *History) int { return len(h.Steps[i]) - 1 }, func(h *History, from, to int) { h.Steps[i] = slices.Delete(h.Steps[i], from+1, to+1) })
			s.try(func(h *History) bool {
				h.Steps[i] = h.Steps[i][1:]
				return len(h.Steps[i]) > 0
			})
		}
	}
}

// serialize makes calls of one step come one after another.
func (s *shrinker) serialize() {
	for i, v := range slices.Backward(s.best.Steps) {
		for n := len(v) - 1; n > 0; n-- {
			for _, first := range []bool{true, false} { // the one part first, or the other
				if s.try(func(h *History) bool { return h.split(i, n, first) }) {
					break
				}
			}
		}
	}
}

// split makes two steps of a step. The first n calls come first, or last.
func (h *History) split(i, n int, first bool) bool {
	if n >= len(h.Steps[i]) {
		return false
	}
	one, two := slices.Clone(h.Steps[i][:n]), slices.Clone(h.Steps[i][n:])
	if !first {
		one, two = two, one
	}
	h.Steps[i] = one
	h.Steps = slices.Insert(h.Steps, i+1, two)
	return true
}

// fewerSlots makes the caches as small as the largest step permits, so that further runs take less time.
func (s *shrinker) fewerSlots() {
	s.try(func(h *History) bool {
		most := minSlots
		for _, step := range h.Steps {
			need := 0
			for i := range step {
				need += len(step[i].Blocks(&h.Shape))
			}
			most = max(most, need)
		}
		was := h.Shape.Slots
		h.Shape.Slots = min(was, most)
		return h.Shape.Slots < was
	})
}

// simplifyShape makes caches smaller.
func (s *shrinker) simplifyShape() {
	for ranks := 1; ranks < s.best.Shape.Ranks; ranks++ {
		s.try(func(h *History) bool {
			h.Shape.Ranks = ranks
			h.each(func(c *Call) { c.Only = min(c.Only, ranks) })
			return true
		})
	}
	for g := range slices.Backward(s.best.Shape.Groups) {
		s.try(func(h *History) bool { return h.dropGroup(g) })
	}
	for g := range s.best.Shape.Groups {
		group := func(h *History) *Group { return &h.Shape.Groups[g] }
		s.smallest(1, func(h *History) *int { return &group(h).Segments })
		s.smallest(0, func(h *History) *int { return &group(h).Trailing })
		s.smallestBytes(g)
		s.try(func(h *History) bool { was := group(h).Cut; group(h).Cut = CutUneven; return was != CutUneven })
	}
	s.try(func(h *History) bool { was := h.Shape.Tokens; h.Shape.Tokens = 0; return was != 0 })
	s.try(func(h *History) bool {
		was := h.Shape.Gaps
		h.Shape.Gaps = false
		return was
	})
	s.try(func(h *History) bool {
		plain := make([]Near, len(h.Keys))
		was := !slices.Equal(plain, h.Keys)
		h.Keys = plain
		return was
	})
}

// dropGroup removes a group, unless it is the only one that needs all blocks.
func (h *History) dropGroup(g int) bool {
	groups := slices.Delete(slices.Clone(h.Shape.Groups), g, g+1)
	if !slices.ContainsFunc(groups, func(g Group) bool { return g.Trailing == 0 }) {
		return false
	}
	h.Shape.Groups = groups
	h.each(func(c *Call) {
		if g < len(c.Skip) {
			c.Skip = slices.Delete(slices.Clone(c.Skip), g, g+1)
		}
	})
	return true
}

// smallest makes a number as small as it may be: by bisection.
func (s *shrinker) smallest(least int, at func(*History) *int) {
	for low := least; low < *at(s.best) && !s.stop; {
		middle := low + (*at(s.best)-low)/2
		if !s.try(func(h *History) bool { *at(h) = middle; return true }) {
			low = middle + 1
		}
	}
}

func (s *shrinker) smallestBytes(g int) {
	at := func(h *History) int64 { return h.Shape.Groups[g].Bytes }
	for low := max(minBlock, 16*int64(s.best.Shape.Groups[g].Segments)); low < at(s.best) && !s.stop; {
		middle := low + (at(s.best)-low)/2
		if !s.try(func(h *History) bool { h.Shape.Groups[g].Bytes = middle; return true }) {
			low = middle + 1
		}
	}
}

// each visits all calls.
func (h *History) each(visit func(*Call)) {
	for _, step := range h.Steps {
		for i := range step {
			visit(&step[i])
		}
	}
}

// simplifyCalls takes away from calls whatever makes them special.
func (s *shrinker) simplifyCalls() {
	changes := []func(*Call) bool{
		func(c *Call) bool {
			if c.Kind == Wait {
				return false
			}
			was := c.Cancel != 0
			c.Cancel = 0
			return was
		},
		func(c *Call) bool {
			if c.Kind == Wait {
				return false
			}
			was := c.Cancel > 0
			c.Cancel = -1
			return was
		},
		func(c *Call) bool { was := c.After != 0; c.After = 0; return was },
		func(c *Call) bool { was := c.Tail; c.Tail = false; return was },
		func(c *Call) bool { was := c.Replace; c.Replace = false; return was },
		func(c *Call) bool { was := c.Only != 0; c.Only = 0; return was },
		func(c *Call) bool { was := c.Engine != 0; c.Engine = 0; return was },
		func(c *Call) bool { was := c.Version != 0; c.Version = 0; return was },
		func(c *Call) bool { was := c.Version > 1; c.Version = 1; return was },
		func(c *Call) bool { was := c.Skip != nil; c.Skip = nil; return was },
	}
	for _, change := range changes {
		for i := range s.best.Steps {
			for n := range s.best.Steps[i] {
				s.try(func(h *History) bool { return change(&h.Steps[i][n]) })
			}
		}
	}
}

// dropKeys makes calls smaller.
func (s *shrinker) dropKeys() {
	for i, v := range slices.Backward(s.best.Steps) {
		for n := range v {
			s.dropQueries(i, n)
			s.without(func(h *History) int { return len(h.Steps[i][n].Keys) - 1 }, func(h *History, from, to int) {
				c := &h.Steps[i][n]
				c.Keys = slices.Delete(slices.Clone(c.Keys), from+1, to+1)
			})
			s.dropFirstKey(i, n)
		}
	}
}

// dropFirstKey drops the first keys of a transfer, which dropKeys leaves there.
func (s *shrinker) dropFirstKey(i, n int) {
	for len(s.best.Steps[i][n].Keys) > 1 {
		if !s.try(func(h *History) bool {
			c := &h.Steps[i][n]
			c.Keys = c.Keys[1:]
			return true
		}) {
			return
		}
	}
}

func (s *shrinker) dropQueries(i, n int) {
	s.without(func(h *History) int { return len(h.Steps[i][n].Queries) - 1 }, func(h *History, from, to int) {
		c := &h.Steps[i][n]
		c.Queries = slices.Delete(slices.Clone(c.Queries), from+1, to+1)
	})
	for len(s.best.Steps[i][n].Queries) > 1 {
		if !s.try(func(h *History) bool {
			c := &h.Steps[i][n]
			c.Queries = c.Queries[1:]
			return true
		}) {
			break
		}
	}
	for q := range s.best.Steps[i][n].Queries {
		query := func(h *History) *Query {
			c := &h.Steps[i][n]
			c.Queries = slices.Clone(c.Queries)
			return &c.Queries[q]
		}
		s.try(func(h *History) bool { was := query(h).Computed != 0; query(h).Computed = 0; return was })
		s.try(func(h *History) bool { was := query(h).Probe; query(h).Probe = false; return was })
		s.without(func(h *History) int { return len(h.Steps[i][n].Queries[q].Keys) }, func(h *History, from, to int) {
			at := query(h)
			at.Keys = slices.Delete(slices.Clone(at.Keys), from, to)
			at.Computed = min(at.Computed, len(at.Keys))
		})
	}
}
