package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/digest"
	"github.com/kvport/kvport/internal/mac"
	"github.com/kvport/kvport/internal/place"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/tracker"
)

// What is placed is loaded layer by layer where the engine takes layers as they come (rule PLACE-29): the host copies some layers of
// all blocks after the others, and verifies each in the copy.

// pieceBytes is how much comes at least from one announcement to the next: what each costs is little beside copying that much.
const pieceBytes = 1 << 20

// copying is a load of blocks of one rank from the slots in which they lie.
type copying struct {
	*placement
	r      *rank // that has the cache
	blocks []connector.Block
	refs   []place.Ref
	stores mac.Stores
	errs   []error // by block; nil: what was copied so far is right
}

// loadLayers copies blocks of one rank to the cache and verifies them there. over is false if the plugin has to be asked for all of them: not all
// came whole. arrived, unless nil, hears how many layers are right in all blocks, if the load is large. Whoever has heard of a layer may be
// reading it, so from then on the load is over in any case, and a *connector.BlockError names what failed. Else an error is that of ctx.
func (p *placement) loadLayers(ctx context.Context, r *rank, number int, blocks []connector.Block, arrived connector.Arrivals) (over bool, err error) {
	if len(blocks) == 0 || !p.enter() {
		return ended(ctx)
	}
	defer p.leave()
	refs, ok := p.where(number, blocks)
	if !ok {
		return ended(ctx)
	}
	c := &copying{placement: p, r: r, blocks: blocks, refs: refs, stores: digest.StoresForLoad(int64(r.size(blocks))), errs: make([]error, len(blocks))}
	ends := []int{p.layout.Layers()}
	if arrived != nil {
		ends = p.pieces(blocks)
	}
	told, from := false, 0
	for _, to := range ends {
		all := c.copyLayers(ctx, from, to)
		if !told && p.tally(c.errs) || !all {
			return ended(ctx)
		}
		if len(ends) > 1 && c.right() {
			arrived.Advance(to)
			told = true
		}
		from = to
	}
	if err := c.end(); err != nil {
		return true, err
	}
	p.used.note(refs)
	if told && p.layered != nil {
		p.layered(len(blocks))
	}
	return true, nil
}

// ended says that a load is over if its time is.
func ended(ctx context.Context) (bool, error) {
	err := ctx.Err()
	return err != nil, err
}

// pieces are the numbers of layers after which a load of blocks says that they are there.
func (p *placement) pieces(blocks []connector.Block) (ends []int) {
	blocksOf := make([]int64, len(p.layout.Groups))
	for _, b := range blocks {
		blocksOf[b.Group]++
	}
	bytes := make([]int64, p.layout.Layers())
	for _, s := range p.layout.Segments {
		if s.Layer >= 0 {
			bytes[s.Layer] += blocksOf[s.Group] * s.Bytes
		}
	}
	least := p.piece
	if least == 0 {
		least = pieceBytes
	}
	sum := int64(0)
	for layer, n := range bytes {
		if sum += n; sum >= least || layer == len(bytes)-1 {
			ends, sum = append(ends, layer+1), 0
		}
	}
	return ends
}

// copyLayers copies the layers from one number to another of all blocks that are right so far; false: ctx has ended before that.
func (c *copying) copyLayers(ctx context.Context, from, to int) bool {
	segments := make([][]int, len(c.layout.Groups))
	for g := range segments {
		segments[g] = c.r.kv.Between(uint16(g), from, to)
	}
	return c.r.shareUntil(ctx, len(c.blocks), func(i int) {
		if c.errs[i] == nil {
			c.errs[i] = c.copyBlock(i, from == 0, segments[c.blocks[i].Group])
		}
	})
}

// copyBlock copies segments of one block, and at first its digests. What was copied counts only if its slot had no other use meanwhile, and its digests are
// right (rule PLACE-08): until then nobody reads it in the cache.
func (c *copying) copyBlock(i int, first bool, segments []int) error {
	b, ref := c.blocks[i], c.refs[i]
	return shm.Guard(func() error {
		pin, err := c.host.Pin(ref)
		if err != nil {
			return err
		}
		from := digest.Slot{KV: c.kv, ID: connector.BlockID(ref.Slot)}
		if first {
			err = digest.CopyDigests(c.r.kv, b, from)
		}
		if err == nil {
			err = c.r.hasher.CopySegments(c.r.kv, b, segments, from, c.stores)
		}
		if gone := pin.Release(time.Now().UnixMilli()); gone != nil {
			return errors.Join(err, gone)
		}
		if err != nil {
			c.host.Drop(ref) // the plugin loads it from now on, and is blamed if that is wrong, too
		}
		return err
	})
}

// right says whether no block has failed.
func (c *copying) right() bool {
	return !slices.ContainsFunc(c.errs, func(err error) bool { return err != nil })
}

// end is how a load ends of which layers were announced; nil: well. If something is damaged, all that failed is replaced when it is
// computed, and counts as what a plugin loads so.
func (c *copying) end() error {
	bad := &connector.BlockError{Err: fmt.Errorf("its slot had another use before all layers were copied: %w", connector.ErrGone)}
	for i, err := range c.errs {
		if err == nil {
			continue
		}
		bad.Blocks = append(bad.Blocks, c.blocks[i].ID)
		if damaged(err) {
			bad.Err = err
		}
	}
	if len(bad.Blocks) == 0 {
		return nil
	}
	c.fail(len(bad.Blocks), 0)
	return bad
}

// damaged says that a block which lay in its slot all the time is not what was saved.
func damaged(err error) bool {
	return errors.Is(err, connector.ErrCorrupt) && !errors.Is(err, place.ErrGone)
}

// layersOf gives what tells the engine of the layers of a load, nil if it does not want to know. over ends that, when all was told.
func (h *Host) layersOf(a *tracker.Move) (arrived connector.Arrivals, over func()) {
	if h.place == nil || !a.Overlap || !h.opts.Overlap(a.Step, a.Transfer.Request) {
		return nil, func() {}
	}
	count := &connector.LayerCount{}
	var telling sync.WaitGroup
	telling.Go(func() { // whoever copies holds the arena, and must not wait for mu
		for n := 0; ; {
			final, err := count.Wait(context.Background(), n)
			if err != nil {
				return
			}
			n = final
			h.verified(a.ID, n)
		}
	})
	return count, func() {
		count.GiveUp()
		telling.Wait()
	}
}
