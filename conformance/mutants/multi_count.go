package mutants

import (
	"context"
	"sync"

	"github.com/kvport/kvport/connector"
)

// partCount counts what the two children of a composite have reported, whichever hold it is a part of, and ends the oldest hold with each
// second part.
type partCount struct {
	mu    sync.Mutex
	parts int
	open  []connector.HoldID
	over  chan connector.HoldID
}

func countsOverAll() multiKnobs {
	c := &partCount{over: make(chan connector.HoldID, 16)}
	return multiKnobs{scheduler: c.child, joint: c.composite}
}

// opened notes new holds of the composite.
func (c *partCount) opened(holds []connector.Hold) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, h := range holds {
		if h.ID != 0 {
			c.open = append(c.open, h.ID)
		}
	}
}

// reported counts a part.
func (c *partCount) reported() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.parts++
	if c.parts%2 == 0 && len(c.open) > 0 {
		c.over <- c.open[0]
		c.open = c.open[1:]
	}
}

// telling makes a Consumed in its own way.
type telling struct {
	connector.Holder
	consumed func(ctx context.Context) ([]connector.HoldID, error)
}

// Consumed implements connector.Holder.
func (t telling) Consumed(ctx context.Context) ([]connector.HoldID, error) { return t.consumed(ctx) }

// child is a child's side whose reports are counted.
func (c *partCount) child(_ int, s connector.Scheduler) connector.Scheduler {
	side := sideOf(s)
	inner := side.Holder
	if inner == nil {
		return s
	}
	side.Holder = telling{inner, func(ctx context.Context) ([]connector.HoldID, error) {
		ids, err := inner.Consumed(ctx)
		for range ids {
			c.reported()
		}
		return ids, err
	}}
	return side
}

// composite is the composite's side, which reports what was counted.
func (c *partCount) composite(s connector.Scheduler) connector.Scheduler {
	side := sideOf(s)
	side.Holder = telling{finishing{side.Holder, c.opened}, func(ctx context.Context) ([]connector.HoldID, error) {
		select {
		case id := <-c.over:
			return []connector.HoldID{id}, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}}
	return side
}
