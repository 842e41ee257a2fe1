package peer

import (
	"context"
	"fmt"

	"github.com/kvport/kvport/connector"
)

// minStage is how much is copied at least before layers are announced: the host checks what is announced, and each check has its
// start.
const minStage = 1 << 20

// Has reports whether all blocks of a load are in the buffer.
func (w *Worker) Has(items []connector.Item) bool {
	for i := range items {
		if !w.peers.has(items[i].Key) {
			return false
		}
	}
	return true
}

// GetLayers copies the blocks of a load, all of which have keys, out of the buffer: the digests first, then one layer after the
// other, and says which are there. Of a small load it says nothing, since that is over at once. An *ItemError names the blocks that
// were dropped meanwhile.
func (w *Worker) GetLayers(ctx context.Context, items []connector.Item, t *connector.Transfer, l *connector.Layout, arrived connector.Arrivals) error {
	c := &layerCopy{peers: w.peers, items: items, blocks: t.Blocks, layout: l}
	if err := c.layer(ctx, connector.DigestLayer); err != nil {
		return err
	}
	layers, told := l.Layers(), false
	for n := range layers {
		if err := c.layer(ctx, n); err != nil {
			return err
		}
		if last := n == layers-1; c.copied >= minStage && !last || last && told {
			arrived.Advance(n + 1)
			c.copied, told = 0, true
		}
	}
	return nil
}

// layerCopy is one load layer by layer.
type layerCopy struct {
	peers  *Store
	items  []connector.Item
	blocks []connector.Block // of the items
	layout *connector.Layout
	copied int // bytes that were not announced
}

// layer copies the segments of one layer of all blocks.
func (c *layerCopy) layer(ctx context.Context, layer int) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	failed := &connector.ItemError{}
	for i := range c.items {
		it := &c.items[i]
		found, err := c.peers.memory.Read(it.Key, func(data []byte) error {
			if len(data) != it.Size() {
				return fmt.Errorf("block of %d bytes, there is room for %d: %w", len(data), it.Size(), connector.ErrOutdated)
			}
			span := 0
			for s := range c.layout.Segments {
				if c.layout.Segments[s].Group != c.blocks[i].Group {
					continue
				}
				to := it.Spans[span]
				if c.layout.Segments[s].Layer == layer {
					c.copied += copy(to, data)
				}
				data, span = data[len(to):], span+1
			}
			return nil
		})
		if err == nil && !found {
			err = fmt.Errorf("block is not in the buffer any more: %w", connector.ErrGone)
		}
		if err != nil {
			failed.Items, failed.Err = append(failed.Items, i), err
		}
	}
	if failed.Err != nil {
		return failed
	}
	return nil
}
