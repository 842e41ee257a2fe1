package mutants

import (
	"context"
	"time"

	"github.com/kvport/kvport/connector"
)

// LoadLayers implements connector.LayerLoader: digests come first, then one layer of all blocks after the other.
func (w *worker) LoadLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, arrived connector.Arrivals) error {
	return overlapCall{call{w, ctx, t, kv}, arrived}.right()
}

// overlapCall is one LoadLayers.
type overlapCall struct {
	call
	arrived connector.Arrivals
}

// right loads as the reference does.
func (c overlapCall) right() error {
	return c.load(func() error {
		c.digests()
		c.layers(c.arrived.Advance)
		return nil
	})
}

// load has a function bring the blocks if all are there, and reports that the hold was fetched.
func (c overlapCall) load(bring func() error) error {
	for _, b := range c.t.Blocks {
		if _, ok := c.backend.get(c.key(b)); !ok {
			return c.Load(c.ctx, c.t, c.kv)
		}
	}
	if err := c.ctx.Err(); err != nil {
		return err
	}
	if err := bring(); err != nil {
		return err
	}
	return c.fetched(c.t.Ticket)
}

// awhile is time in which what is wrong can be seen.
func awhile() { <-time.After(50 * time.Millisecond) }

func (c overlapCall) count() int { return c.kv.Layout().Layers() }

// digests writes those of all blocks.
func (c overlapCall) digests() { c.write(connector.DigestLayer) }

// layers writes one after the other, and says so.
func (c overlapCall) layers(say func(n int)) {
	for n := range c.count() {
		c.write(n)
		say(n + 1)
	}
}

// write writes the segments of one layer of all blocks.
func (c overlapCall) write(layer int) {
	for _, b := range c.t.Blocks {
		data, _ := c.backend.get(c.key(b))
		for _, s := range c.kv.Segments(b.Group) {
			view := c.kv.View(s, b.ID)
			if c.kv.Layout().Segments[s].Layer == layer {
				copy(view, data)
			}
			data = data[len(view):]
		}
	}
}

// onOverlap plants a LoadLayers.
func onOverlap(f func(overlapCall) error) func(*backend, *wrappers) {
	return func(_ *backend, w *wrappers) {
		w.worker = func(k *worker) connector.Worker { return &badWorker{worker: k, overlap: f} }
	}
}

func overlapFaults() []fault {
	return []fault{
		{"announces all layers when the load begins", "overlap-order", onOverlap(func(c overlapCall) error {
			c.arrived.Advance(c.count())
			awhile()
			return c.right()
		})},
		{"brings the digests after the layers", "overlap-digests", onOverlap(func(c overlapCall) error {
			return c.load(func() error {
				c.layers(c.arrived.Advance)
				awhile()
				c.digests()
				return nil
			})
		})},
		{"writes the first layer once more at the end", "overlap-still", onOverlap(func(c overlapCall) error {
			return c.load(func() error {
				c.digests()
				c.write(0)
				c.arrived.Advance(1)
				awhile()
				c.layers(c.arrived.Advance)
				return nil
			})
		})},
		{"writes a layer of its last block once more at the end", "overlap-still", onOverlap(func(c overlapCall) error {
			return c.load(func() error {
				c.digests()
				c.layers(c.arrived.Advance)
				awhile()
				last := *c.t
				last.Blocks = last.Blocks[len(last.Blocks)-1:]
				c.t = &last
				c.write(0)
				return nil
			})
		})},
		{"announces the layers of what it has of a load", "overlap-missing", onOverlap(func(c overlapCall) error {
			err := c.Load(c.ctx, c.t, c.kv)
			c.arrived.Advance(c.count())
			awhile()
			return err
		})},
		{"returns when the first layer is there", "overlap-whole", onOverlap(func(c overlapCall) error {
			return c.load(func() error {
				c.digests()
				c.write(0)
				c.arrived.Advance(1)
				return nil
			})
		})},
	}
}
