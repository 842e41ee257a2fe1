package host

import (
	"context"
	"errors"
	"fmt"
	"maps"
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

// pieceBytes is how much each core that may copy has to copy from one announcement to the next, so that what each costs is little beside
// that. Where there are many cores a load has a few announcements nevertheless, if it is large enough for one core.
const (
	pieceBytes = 1 << 20
	fewPieces  = 4
)

// copying is a load of blocks of one rank from the slots in which they lie.
type copying struct {
	*placement
	r      *rank // that has the cache
	blocks []connector.Block
	refs   []place.Ref
	stores mac.Stores
	errs   []error // by block; nil: what was copied so far is right
}

// placedLoad is what became of a load from slots.
type placedLoad struct {
	whole     bool                // all blocks came, and are right
	announced bool                // somebody has heard of a layer
	failed    []connector.BlockID // blocks that were copied and cannot be used
	damaged   int                 // of them: they are not what was saved
	why       error               // what was wrong with the first of those that are damaged
}

// loadLayers copies blocks of one rank to the cache and verifies them there. arrived, unless nil, hears how many layers are right in all
// blocks, if the load is large. Whoever has heard of a layer may be reading it, so nobody may write these blocks then before that is taken back.
func (p *placement) loadLayers(ctx context.Context, r *rank, number int, blocks []connector.Block, arrived connector.Arrivals) (out placedLoad) {
	if len(blocks) == 0 || !p.enter() {
		return out
	}
	defer p.leave()
	refs, ok := p.where(number, blocks)
	if !ok {
		return out
	}
	c := &copying{placement: p, r: r, blocks: blocks, refs: refs, stores: digest.StoresForLoad(int64(r.size(blocks))), errs: make([]error, len(blocks))}
	ends := []int{p.layout.Layers()}
	if arrived != nil {
		ends = p.pieces(blocks, min(cap(r.hands), len(blocks)))
	}
	if !r.hold(ctx) { // once for all pieces: what others have to do is waited for once
		return out
	}
	defer r.let()
	var all bool
	out.announced, all = c.copyPieces(ctx, ends, arrived)
	for i, err := range c.errs {
		out.note(blocks[i].ID, err)
	}
	if out.whole = all && len(out.failed) == 0; out.whole {
		p.used.note(refs)
	}
	return out
}

// copyPieces copies one piece after the other, and says after each which layers are there, until a block fails of a load of which nobody has
// heard: the plugin may bring that. all is false if something is not copied.
func (c *copying) copyPieces(ctx context.Context, ends []int, arrived connector.Arrivals) (announced, all bool) {
	from := 0
	for _, to := range ends {
		all = c.copyLayers(ctx, from, to)
		right := c.right()
		if !all || !right && !announced {
			return announced, false
		}
		if right && len(ends) > 1 {
			arrived.Advance(to)
			announced = true
		}
		from = to
	}
	return announced, all
}

// note adds what became of a block.
func (l *placedLoad) note(id connector.BlockID, err error) {
	if err == nil {
		return
	}
	l.failed = append(l.failed, id)
	if damaged(err) {
		if l.damaged++; l.why == nil {
			l.why = err
		}
	}
}

// err says which blocks failed of a load that nobody tries again. If something is damaged, all that failed is replaced when it is
// computed, and counts as what a plugin loads so.
func (l *placedLoad) err() error {
	bad := &connector.BlockError{Blocks: l.failed, Err: l.why}
	if bad.Err == nil {
		bad.Err = fmt.Errorf("its slot had another use before all layers were copied: %w", connector.ErrGone)
	}
	return bad
}

// pieces are the numbers of layers after which a load of blocks by some cores says that they are there. Only layers that have a segment count:
// their numbers are the engine's.
func (p *placement) pieces(blocks []connector.Block, cores int) (ends []int) {
	blocksOf := make([]int64, len(p.layout.Groups))
	for _, b := range blocks {
		blocksOf[b.Group]++
	}
	bytes, all := map[int]int64{}, int64(0)
	for _, s := range p.layout.Segments {
		if s.Layer >= 0 {
			n := blocksOf[s.Group] * s.Bytes
			bytes[s.Layer] += n
			all += n
		}
	}
	least := p.piece
	if least == 0 {
		least = max(pieceBytes, min(int64(cores)*pieceBytes, all/fewPieces))
	}
	sum, layers := int64(0), slices.Sorted(maps.Keys(bytes))
	for i, layer := range layers {
		if sum += bytes[layer]; sum >= least || i == len(layers)-1 {
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
	return c.r.shareWith(ctx, len(c.blocks), func(i int) {
		if c.errs[i] == nil {
			c.errs[i] = c.copyBlock(i, from == 0, segments[c.blocks[i].Group])
		}
	}, func(work func()) { work() })
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

// retract takes back what the engine would learn of a load, so that the plugin may write its blocks; false: the engine has learned of a
// layer, and may be reading it.
func (h *Host) retract(id tracker.CallID) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.tracker.Retract(id)
}
