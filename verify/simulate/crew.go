package simulate

import (
	"context"
	"iter"
	"slices"
	"time"
)

// crew is the multiconnector.Runner of a simulated composite: what runs side by side there are coroutines here, of
// which one goes on at a time, in a fixed order, and the time is that of the world.
type crew struct {
	w       *World
	list    []*coroutine
	current *coroutine
}

// coroutine is one of them, which waits for something whenever another runs.
type coroutine struct {
	next  func() (struct{}, bool)
	stop  func()
	yield func(struct{}) bool
	ready func() bool // nil: it has not begun
	until time.Time   // zero: it waits for ready alone
	late  bool        // it goes on because until has come
}

// stopped ends a coroutine from within.
type stopped struct{}

// Now implements multiconnector.Runner.
func (c *crew) Now() time.Time { return c.w.now }

// Go implements multiconnector.Runner.
func (c *crew) Go(f func()) {
	co := &coroutine{}
	co.next, co.stop = iter.Pull(func(yield func(struct{}) bool) {
		defer func() {
			if r := recover(); r != nil && r != (stopped{}) {
				panic(r)
			}
		}()
		co.yield = yield
		f()
	})
	c.list = append(c.list, co)
}

// Wait implements multiconnector.Runner.
func (c *crew) Wait(ctx context.Context, ready <-chan struct{}, until time.Time) error {
	taken := func() bool {
		select {
		case <-ready:
			return true
		default:
			return false
		}
	}
	got := taken()
	switch {
	case got:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	}
	late := c.wait(func() bool {
		got = taken()
		return got || ctx.Err() != nil
	}, until)
	switch {
	case got:
		return nil
	case late:
		return context.DeadlineExceeded
	}
	return ctx.Err()
}

// wait lets the others go on until ready says so, or until has come, which it reports.
func (c *crew) wait(ready func() bool, until time.Time) (late bool) {
	co := c.current
	co.ready, co.until = ready, until
	if !co.yield(struct{}{}) {
		panic(stopped{})
	}
	return co.late
}

// pump lets the compositions of all engines go on.
func (w *World) pump() {
	for _, e := range w.engines {
		if h := e.host; h != nil && h.proc != nil && h.proc.comp != nil {
			h.proc.comp.crew.pump()
		}
	}
}

// pump lets all go on that can.
func (c *crew) pump() {
	if c.current != nil {
		return // one of them has called
	}
	for moved := true; moved; {
		moved = false
		for i := 0; i < len(c.list); i++ {
			co := c.list[i]
			isReady := co.ready == nil || co.ready()
			if co.late = !isReady && !co.until.IsZero() && !c.w.now.Before(co.until); !isReady && !co.late {
				continue
			}
			moved = true
			c.current = co
			_, more := co.next()
			c.current = nil
			if !more {
				c.list = slices.Delete(c.list, i, i+1)
				i--
			}
		}
	}
}

// due is when one of them goes on because of the time.
func (c *crew) due() (first time.Time, found bool) {
	for _, co := range c.list {
		if !co.until.IsZero() && (!found || co.until.Before(first)) {
			first, found = co.until, true
		}
	}
	return first, found
}

// end stops them where they are.
func (c *crew) end() {
	for len(c.list) > 0 {
		co := c.list[0]
		c.list = c.list[1:]
		c.current = co
		co.stop()
	}
	c.current = nil
}
