package tier

import (
	"hash/maphash"
	"sync"

	"github.com/kvport/kvport/connector"
)

// sketch estimates how often keys were seen: a count-min sketch of four rows of saturating counters,
// halved now and then so that it forgets. It never says less than the truth since it last halved.
type sketch struct {
	mu    sync.Mutex
	seed  maphash.Seed
	count []uint8
	added int
}

const (
	sketchRows = 4
	maxCount   = 255
)

// newSketch makes a sketch for about n keys: 4n bytes and more.
func newSketch(n int) *sketch {
	size := 1024
	for size < n && size < 1<<28 {
		size <<= 1
	}
	return &sketch{seed: maphash.MakeSeed(), count: make([]uint8, sketchRows*size)}
}

// add counts a key once more and gives the estimate, this time included.
func (s *sketch) add(k connector.StoreKey) int {
	h := maphash.Bytes(s.seed, k[:])
	s.mu.Lock()
	defer s.mu.Unlock()
	size := uint64(len(s.count) / sketchRows)
	least := maxCount
	var at [sketchRows]uint64
	for row := range at {
		at[row] = uint64(row)*size + (h>>(8*row)^h*uint64(2*row+1)>>32)&(size-1)
		least = min(least, int(s.count[at[row]]))
	}
	for _, i := range at { // conservative update: only what is too small grows
		if int(s.count[i]) == least && least < maxCount {
			s.count[i]++
		}
	}
	if s.added++; s.added >= 8*int(size) {
		s.added = 0
		for i := range s.count {
			s.count[i] /= 2
		}
	}
	return min(least+1, maxCount)
}
