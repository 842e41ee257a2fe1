package tracker

import (
	"container/heap"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

// wakes is a heap of times at which something may be due. Entries are never removed early: a wake
// without work costs little.
type wakes struct{ times timeHeap }

func (w *wakes) at(t time.Time) {
	if len(w.times) > 0 && w.times[0].Equal(t) {
		return
	}
	heap.Push(&w.times, t)
}

func (w *wakes) drop(now time.Time) {
	for len(w.times) > 0 && !now.Before(w.times[0]) {
		heap.Pop(&w.times)
	}
}

func (w *wakes) first() (time.Time, bool) {
	if len(w.times) == 0 {
		return time.Time{}, false
	}
	return w.times[0], true
}

type timeHeap []time.Time

func (h timeHeap) Len() int           { return len(h) }
func (h timeHeap) Less(i, j int) bool { return h[i].Before(h[j]) }
func (h timeHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }

// Push implements heap.Interface.
func (h *timeHeap) Push(x any) {
	if t, ok := x.(time.Time); ok {
		*h = append(*h, t)
	}
}

// Pop implements heap.Interface.
func (h *timeHeap) Pop() any {
	old := *h
	last := old[len(old)-1]
	*h = old[:len(old)-1]
	return last
}

// corruptKeys remembers keys whose stored blocks were damaged, the oldest forgotten first.
type corruptKeys struct {
	limit int
	keys  map[connector.BlockKey]struct{}
	order []connector.BlockKey // may name keys that are gone
}

func (c *corruptKeys) add(k connector.BlockKey) {
	if _, has := c.keys[k]; has || k == (connector.BlockKey{}) || c.limit <= 0 {
		return
	}
	for len(c.keys) >= c.limit || len(c.order) >= 2*c.limit {
		delete(c.keys, c.order[0])
		c.order = c.order[1:]
	}
	c.keys[k] = struct{}{}
	c.order = append(c.order, k)
}

func (c *corruptKeys) has(k connector.BlockKey) bool {
	_, has := c.keys[k]
	return has
}

func (c *corruptKeys) remove(k connector.BlockKey) { delete(c.keys, k) }

// first is the index of the first damaged key, -1 if there is none.
func (c *corruptKeys) first(keys []connector.BlockKey) int {
	if len(c.keys) == 0 {
		return -1
	}
	return slices.IndexFunc(keys, func(k connector.BlockKey) bool {
		_, has := c.keys[k]
		return has
	})
}

func (c *corruptKeys) any(blocks []connector.Block) bool {
	if len(c.keys) == 0 {
		return false
	}
	for _, b := range blocks {
		if _, has := c.keys[b.Key]; has {
			return true
		}
	}
	return false
}

// Breaker decides how long to wait before a plugin that died is started again. The zero value of
// its state is a plugin that never died.
type Breaker struct {
	Deaths     int           // this many deaths...
	Window     time.Duration // ...within this time open the breaker...
	Cooldown   time.Duration // ...for this long; then one start is tried
	BackoffMin time.Duration
	BackoffMax time.Duration

	seen []time.Time
	open bool
}

// Died records a death and says how long to wait before the next start, and whether nothing can
// be expected of the plugin until then.
func (b *Breaker) Died(now time.Time) (wait time.Duration, isBroken bool) {
	for len(b.seen) > 0 && now.Sub(b.seen[0]) > b.Window {
		b.seen = b.seen[1:]
	}
	b.seen = append(b.seen, now)
	if b.open || len(b.seen) >= b.Deaths {
		b.open = true
		return b.Cooldown, true
	}
	wait = b.BackoffMin
	for range len(b.seen) - 1 {
		wait = min(2*wait, b.BackoffMax)
	}
	return wait, false
}

// Proved records that a plugin has been well for long enough to forget its past.
func (b *Breaker) Proved() {
	b.open, b.seen = false, nil
}
