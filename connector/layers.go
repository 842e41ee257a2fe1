package connector

import (
	"context"
	"fmt"
	"sync"
)

// Progress says how many layers of a transfer are final while the engine computes the rest: layers
// 0 to n-1, so every segment whose Layer is less than n. The digests (DigestLayer) are final together
// with the last layer. See [KV.Between].
type Progress interface {
	// Wait blocks until more than seen layers are final and returns how many are, which is at most
	// Layout.Layers. ErrGone means that the engine has given up and that the rest will never be final; any
	// other error is that of ctx. Any number of goroutines may wait at the same time.
	Wait(ctx context.Context, seen int) (final int, err error)
}

// AwaitLayers waits until that many layers are final, for whoever needs all of them at once. Its error is that of progress.
func AwaitLayers(ctx context.Context, progress Progress, layers int) (err error) {
	for n := 0; n < layers && err == nil; {
		n, err = progress.Wait(ctx, n)
	}
	return err
}

// A LayerWorker saves blocks while they are being computed (capability CanLayers), so that most of
// their bytes have left when the last layer is done.
type LayerWorker interface {
	// SaveLayers is Save, except that the host calls it when the engine begins to compute the blocks of t.
	// It reads a segment only after progress has said that the segment is final (rule LAYER-01) and, like
	// Save, returns nil only when everything is stored (LAYER-02). If progress fails, SaveLayers keeps
	// nothing of the blocks, except what another save has stored, and returns an error (LAYER-03).
	SaveLayers(ctx context.Context, t *Transfer, kv *KV, progress Progress) error
}

// Arrivals hears how many layers of a load have arrived. *[LayerCount] is one.
type Arrivals interface {
	// Advance says that the digests (DigestLayer) and layers 0 to n-1 of every block of the load are in place, and
	// that nothing writes them any more. It never blocks, and a smaller n than before has no effect.
	Advance(n int)
}

// A LayerLoader loads blocks layer by layer (capability CanOverlap), so that the engine computes with the
// first layers while the others are still on their way.
type LayerLoader interface {
	// LoadLayers is Load, except that it tells arrived of layers as they come: first of none, since digests come
	// before all layers, then of more and more (rule OVERLAP-01). It may leave announcements out, and makes none
	// any more when a block cannot be had. What it returns counts, and means what it means for Load (OVERLAP-02).
	LoadLayers(ctx context.Context, t *Transfer, kv *KV, arrived Arrivals) error
}

// Layers is how many layers a cache has: one more than the highest Layer of a segment, or 0 if no segment
// has a layer.
func (l *Layout) Layers() int {
	n := 0
	for i := range l.Segments {
		n = max(n, l.Segments[i].Layer+1)
	}
	return n
}

// Between lists the segments of a group that become final when the number of final layers grows
// from one to another, in layout order; the digests come with the last layer.
func (kv *KV) Between(group uint16, from, to int) []int { return kv.layout.Between(group, from, to) }

// Between is the same as KV.Between, for callers that have the layout but not the memory.
func (l *Layout) Between(group uint16, from, to int) []int {
	var out []int
	last := l.Layers()
	for i := range l.Segments {
		at := l.Segments[i].Layer + 1 // how many layers must be final
		if at <= 0 {
			at = last
		}
		if l.Segments[i].Group == group && from < at && at <= to {
			out = append(out, i)
		}
	}
	return out
}

// LayerCount is a Progress that code in this process advances. The zero value has no final layer.
type LayerCount struct {
	mu      sync.Mutex
	final   int
	gone    bool
	changed chan struct{} // closed when final or gone changes; nil while nobody waits
}

// Advance says that the first n layers are final. It never blocks, and a smaller n than before has no
// effect.
func (c *LayerCount) Advance(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n > c.final {
		c.final = n
		c.wake()
	}
}

// GiveUp says that no more layers will be final. It never blocks.
func (c *LayerCount) GiveUp() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gone = true
	c.wake()
}

func (c *LayerCount) wake() {
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}

// Wait implements Progress.
func (c *LayerCount) Wait(ctx context.Context, seen int) (int, error) {
	for {
		c.mu.Lock()
		final, gone := c.final, c.gone
		if c.changed == nil {
			c.changed = make(chan struct{})
		}
		changed := c.changed
		c.mu.Unlock()
		switch {
		case final > seen:
			return final, nil
		case gone:
			return 0, fmt.Errorf("the engine has given up computing: %w", ErrGone)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}
