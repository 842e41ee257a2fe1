package host

import (
	"cmp"
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

// What is placed is loaded layer by layer where the engine takes layers as they come (rule PLACE-36): the host copies some layers of
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
	found     unreadable          // blocks that lay in their slots all the time and are not what was saved, or cannot be checked
	damage    error               // what was said of the first that is not what was saved
	gone      []connector.BlockID // blocks that cannot be used for another reason
	why       error               // the first of those that is not another use of the slot
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
	if out.whole = all && out.failed() == 0; out.whole {
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
	lie, refused := errors.AsType[*place.RefusalError](err)
	_, foreign := errors.AsType[*digest.ForeignKeyError](err)
	damaged := errors.Is(err, connector.ErrCorrupt) || refused && lie.Fault() // no honest plugin changes a header under its word
	switch {
	case err == nil:
	case errors.Is(err, place.ErrGone):
		l.gone = append(l.gone, id)
	case damaged || foreign || errors.Is(err, connector.ErrOutdated):
		if damaged {
			l.damage = cmp.Or(l.damage, err)
		}
		l.found.add(id, err)
	default:
		l.gone, l.why = append(l.gone, id), cmp.Or(l.why, err)
	}
}

// failed is how many blocks were copied and cannot be used.
func (l *placedLoad) failed() int {
	return len(l.gone) + len(l.found.corrupt) + len(l.found.foreign) + len(l.found.outdated)
}

// outcome is how a load of some blocks ended that nobody tries again, which is late if its time is over.
func (l *placedLoad) outcome(blocks int, late error) tracker.Outcome {
	out := tracker.Outcome{Err: late, Corrupt: l.found.corrupt, Damage: l.damage, Foreign: l.found.foreign, Outdated: l.found.outdated}
	if late != nil {
		return out
	}
	out.Placed = blocks - l.failed()
	if len(l.gone) > 0 {
		out.Err = &connector.BlockError{Blocks: l.gone, Err: cmp.Or(l.why, errReused)}
	}
	return out
}

// errReused is why a block failed whose slot was honestly given up.
var errReused = fmt.Errorf("its slot had another use before all layers were copied: %w", connector.ErrGone)

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
		if segments[g] = c.r.kv.Between(uint16(g), from, to); from == 0 && to >= c.layout.Layers() {
			segments[g] = c.r.kv.Segments(uint16(g)) // all of them, also where no segment has a layer
		}
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

// layersOf gives what tells the engine of the layers of a load, nil if it does not want to know, or if the request would fail for a load
// without a second attempt. over ends that, when all was told.
func (h *Host) layersOf(a *tracker.Move) (arrived connector.Arrivals, over func()) {
	if !h.place.open() || !a.Overlap || h.cfg.FailurePolicy == PolicyFail || !h.opts.Overlap(a.Step, a.Transfer.Request) {
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
