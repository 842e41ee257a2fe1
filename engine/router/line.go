package router

import (
	"maps"
	"slices"
	"time"

	"github.com/kvport/kvport/engine/router/policy"
)

// waiter is a request that waits for a decode instance.
type waiter struct {
	request *policy.Request
	tried   map[int]bool  // its call changes them only with the pool's lock while it waits
	woken   chan struct{} // holds one when there may be an instance
}

// like reports whether two requests find the same instances.
func (w *waiter) like(other *waiter) bool {
	return w.request.Client == other.request.Client && w.request.NoWork == other.request.NoWork && maps.Equal(w.tried, other.tried)
}

// line lets a request wait behind those that wait already, until leaveLine.
func (p *pool) line(r *policy.Request, tried map[int]bool) *waiter {
	p.mu.Lock()
	defer p.mu.Unlock()
	w := &waiter{request: r, tried: tried, woken: make(chan struct{}, 1)}
	p.waiting = append(p.waiting, w)
	return w
}

// leaveLine takes a request out that has an instance or no longer waits. If it has not looked since it was woken, others do.
func (p *pool) leaveLine(w *waiter) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := slices.Index(p.waiting, w)
	p.waiting = slices.Delete(p.waiting, at, at+1)
	if len(w.woken) > 0 {
		p.wakeFrom(at)
	}
}

// wakeBehind lets those look that wait behind a request, which has looked.
func (p *pool) wakeBehind(w *waiter) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wakeFrom(slices.Index(p.waiting, w) + 1)
}

// wake lets the first request look for which there is an instance now. When it has looked, the next one does for which there is
// still one. Those that would find nothing are not woken. The caller holds mu.
func (p *pool) wake() { p.wakeFrom(0) }

func (p *pool) wakeFrom(first int) {
	now := p.now()
	var none *waiter // the last one for which there is nothing
	for _, w := range p.waiting[first:] {
		switch {
		case len(w.woken) > 0 || none != nil && w.like(none):
		case p.hasFor(w, now):
			w.woken <- struct{}{}
			return
		default:
			none = w
		}
	}
}

// hasFor reports whether a decode instance may be had for a request. The caller holds mu.
func (p *pool) hasFor(w *waiter, now time.Time) bool {
	for i, in := range p.table.instances {
		if in.role == decode && !w.tried[i] && p.table.available(i) && p.known[i].admits(now, w.request.Client) && (w.request.NoWork || !p.isFull(i)) {
			return true
		}
	}
	return false
}
