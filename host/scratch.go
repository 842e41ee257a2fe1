package host

import (
	"slices"
	"sync"
)

// scratch is memory for copies of source blocks, where no plugin can write. All loads of a host share it, so that together
// they never have more than a limit. It is allocated when it is needed first, and kept.
type scratch struct {
	mu        sync.Mutex
	back      *sync.Cond // something was given back
	limit     int64
	allocated int64
	free      [][]byte
}

func newScratch(limit int64) *scratch {
	s := &scratch{limit: limit}
	s.back = sync.NewCond(&s.mu)
	return s
}

// take gives size bytes or more, which must be no more than the limit, and waits for them if others have them all.
func (s *scratch) take(size int64) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		if i := slices.IndexFunc(s.free, func(b []byte) bool { return int64(len(b)) >= size }); i >= 0 {
			b := s.free[i]
			s.free = slices.Delete(s.free, i, i+1)
			return b
		}
		for s.allocated+size > s.limit && len(s.free) > 0 { // they are too short: loads from another engine had them
			last := len(s.free) - 1
			s.allocated -= int64(len(s.free[last]))
			s.free = slices.Delete(s.free, last, last+1)
		}
		if s.allocated+size <= s.limit {
			s.allocated += size
			return make([]byte, size)
		}
		s.back.Wait()
	}
}

// give takes memory back.
func (s *scratch) give(b []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free = append(s.free, b)
	s.back.Broadcast()
}
