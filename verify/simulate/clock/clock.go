// Package clock is virtual time for simulations: what is to happen, in order.
package clock

import (
	"container/heap"
	"time"
)

// Clock is virtual time, and what is to happen. Its zero value is at 0 and has nothing to do.
type Clock struct {
	now   time.Duration
	queue happenings
	n     int
}

// Now is the time.
func (c *Clock) Now() time.Duration { return c.now }

// At makes something happen at a time. What happens at the same time does so in the order in which it was asked for.
func (c *Clock) At(t time.Duration, do func()) {
	c.n++
	heap.Push(&c.queue, happening{t, c.n, do})
}

// After makes something happen later.
func (c *Clock) After(d time.Duration, do func()) { c.At(c.now+d, do) }

// Next lets the next thing happen, at its time; false if there is none.
func (c *Clock) Next() bool {
	if len(c.queue) == 0 {
		return false
	}
	next, _ := heap.Pop(&c.queue).(happening)
	c.now = next.at
	next.do()
	return true
}

type happening struct {
	at time.Duration
	n  int // breaks ties
	do func()
}

type happenings []happening

func (h happenings) Len() int { return len(h) }
func (h happenings) Less(i, j int) bool {
	return h[i].at < h[j].at || h[i].at == h[j].at && h[i].n < h[j].n
}
func (h happenings) Swap(i, j int) { h[i], h[j] = h[j], h[i] }

// Push implements heap.Interface.
func (h *happenings) Push(x any) {
	one, _ := x.(happening)
	*h = append(*h, one)
}

// Pop implements heap.Interface.
func (h *happenings) Pop() any {
	last := (*h)[len(*h)-1]
	(*h)[len(*h)-1] = happening{}
	*h = (*h)[:len(*h)-1]
	return last
}
