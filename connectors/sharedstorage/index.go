package sharedstorage

import (
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

const (
	// fresh is how long a block that was seen on disk is believed to be there. Another engine may
	// evict it meanwhile: its Get then fails and the block is computed.
	fresh = time.Second
	// generation is how many keys one generation of the index holds; there are two.
	generation = 1 << 17
)

// index remembers which keys were on disk a moment ago, so that asking about one prompt 72 times
// costs one look at the disk. Only presence is remembered: what is absent is asked of the disk
// every time, so that what another engine saved is seen at once.
//
// It holds at most two generations of keys. When the young one is full it becomes the old one;
// what is still asked for moves back.
type index struct {
	mu         sync.Mutex
	young, old map[connector.StoreKey]time.Time
}

// has reports whether the key was seen less than fresh ago.
func (x *index) has(k connector.StoreKey, now time.Time) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	seen, ok := x.young[k]
	if !ok {
		seen, ok = x.old[k]
	}
	return ok && now.Sub(seen) < fresh
}

// add notes that the key is on disk.
func (x *index) add(k connector.StoreKey, now time.Time) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.young == nil || len(x.young) >= generation {
		x.young, x.old = make(map[connector.StoreKey]time.Time), x.young
	}
	x.young[k] = now
}

// drop forgets the key.
func (x *index) drop(k connector.StoreKey) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.young, k)
	delete(x.old, k)
}

// clear forgets everything.
func (x *index) clear() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.young, x.old = nil, nil
}
