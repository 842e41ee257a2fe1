package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/digest"
	"github.com/kvport/kvport/internal/mac"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/ticket"
	"github.com/kvport/kvport/internal/tracker"
)

// Blocks of an engine with another block size or other ranks. Their digests are of other blocks than ours, so whole
// blocks of that engine are read into memory for source blocks, their own digests are checked, and what they verify is
// cut into ours. Their keys are others, too, so the prompt is compared by the addresses that the producer's blocks have.

// sourceWindows is how many parts memory for source blocks has. A load has one of them to itself.
const sourceWindows = 4

// openSources makes memory for source blocks, if blocks of other shapes may come.
func (h *Host) openSources() (err error) {
	if h.eng.Base == (connector.Fingerprint{}) || h.eng.Addresses == nil || !h.cfg.Role.Loads() {
		return nil
	}
	size := int64(h.cfg.Settings.LandingBytes)
	h.window = size / sourceWindows / landingAlign * landingAlign
	h.copies = newScratch(h.window)
	h.sources, err = newSources(size)
	return err
}

// newSources makes memory for source blocks. Its pages are allocated when a load needs them.
func newSources(size int64) (*Region, error) {
	mem, err := shm.CreateOnDemand("kvport-sources", size)
	if err != nil {
		return nil, fmt.Errorf("memory of %d bytes for blocks of engines of other shapes: %w", size, err)
	}
	return &Region{mem: mem}, nil
}

// openReshape has our tickets made for engines of other shapes, and theirs accepted, where connector and engine can do
// it. What a lossy connector brings no digest verifies, so it is not cut either.
func (h *Host) openReshape() {
	if !h.info.Reshapes() || h.info.Lossy || h.eng.Base == (connector.Fingerprint{}) || h.eng.Addresses == nil {
		return
	}
	h.cuts = true
	h.tickets.guard.Reshape(h.eng.Base)
}

// sourceOf is the engine of another shape from which a ticket comes; nil: it is of ours. Errors wrap
// connector.ErrIncompatible: its blocks cannot be cut to fit ours (rule RESHAPE-04), or there is no memory for them any
// more. The caller holds mu.
func (h *Host) sourceOf(e *ticket.Envelope) (*tracker.Source, error) {
	if e.Shape == h.eng.Shape {
		return nil, nil
	}
	if h.tracker.Windowless() {
		return nil, fmt.Errorf("all memory for blocks of other shapes is lost until the engine is started again: %w", connector.ErrIncompatible)
	}
	s := &tracker.Source{Shape: e.Shape, World: e.Cut.Ranks, BlockTokens: e.Cut.BlockTokens}
	c, err := h.cutterOf(s)
	if err != nil {
		return nil, err
	}
	_, err = c.fit(h.window)
	return s, err
}

// cutter knows how blocks of an engine of another shape are cut to fit ours.
type cutter struct {
	layout connector.Layout // of a rank there, with room for one block
	pairs  []segmentPair
}

// segmentPair is a segment here and there.
type segmentPair struct {
	group       uint16
	here, there int           // indexes in the layouts
	own, theirs connector.Cut // of rank 0
}

// cutterOf compares our layout with that of a source. Errors wrap connector.ErrIncompatible.
func (h *Host) cutterOf(src *tracker.Source) (*cutter, error) {
	own, world := h.eng.Layout, len(h.ranks)
	c := &cutter{layout: connector.Layout{Name: own.Name, Blocks: 1, Groups: slices.Clone(own.Groups)}}
	for g := range c.layout.Groups {
		c.layout.Groups[g].BlockTokens = src.BlockTokens
	}
	for i, s := range own.Segments {
		if s.Layer == connector.DigestLayer {
			continue
		}
		cut, err := own.CutOf(i, 0, world)
		if err != nil {
			return nil, err
		}
		heads := cut.Heads * world
		if src.World <= 0 || heads%src.World != 0 {
			return nil, fmt.Errorf("%d heads on %d ranks there: %w", heads, src.World, connector.ErrIncompatible)
		}
		theirs := cut
		theirs.BlockTokens, theirs.Heads, theirs.World = src.BlockTokens, heads/src.World, src.World
		theirs.Bytes = cut.Bytes / int64(cut.BlockTokens*cut.Heads) * int64(theirs.BlockTokens*theirs.Heads)
		if err := cut.Fits(&theirs); err != nil {
			return nil, err
		}
		c.pairs = append(c.pairs, segmentPair{s.Group, i, len(c.layout.Segments), cut, theirs})
		s.Bytes, s.BlockStride, s.Heads = theirs.Bytes, theirs.Bytes, theirs.Heads
		c.layout.Segments = append(c.layout.Segments, s)
	}
	c.layout, _ = digest.WithSegments(c.layout, 0)
	return c, nil
}

// fit is how many blocks there is room for in size bytes. Errors wrap connector.ErrIncompatible.
func (c *cutter) fit(size int64) (int, error) {
	n, one := slotsIn(&c.layout, size)
	if n < 1 {
		return 0, fmt.Errorf("a block there has %d bytes on each rank, and a part of kvport.landing_bytes for it %d: %w", one, size, connector.ErrIncompatible)
	}
	return n, nil
}

// maxShapes bounds the engines of other shapes whose hashers are kept. Beyond it one makes room.
const maxShapes = 16

// sourceHashers are those of engines of other shapes, by engine. Each derives its keys from the ring once.
type sourceHashers struct {
	mu sync.Mutex
	of map[sourceShape][]*digest.Hasher
}

type sourceShape struct {
	shape connector.Fingerprint
	world int
}

// hashersOf are those of a source's ranks.
func (h *Host) hashersOf(src *tracker.Source) []*digest.Hasher {
	c := &h.others
	c.mu.Lock()
	defer c.mu.Unlock()
	name := sourceShape{src.Shape, src.World}
	if c.of[name] == nil {
		if c.of == nil {
			c.of = map[sourceShape][]*digest.Hasher{}
		}
		for old := range c.of {
			if len(c.of) < maxShapes {
				break
			}
			delete(c.of, old)
		}
		for rank := range src.World {
			c.of[name] = append(c.of[name], h.hasher(src.Shape, connector.Shard{Rank: rank, World: src.World}))
		}
	}
	return c.of[name]
}

// reshaping is one load from an engine of another shape.
type reshaping struct {
	h    *Host
	move *tracker.Move
	cutter
	hashers []*digest.Hasher // of the ranks there
	load    *tracker.Reshape
	here    map[tracker.Read]tracker.Target // by group and place in our blocks
	landed  *connector.KV                   // the load's window of the memory for source blocks
	one     connector.Layout                // of a copy of a block
	size    int64                           // of that

	mu     sync.Mutex
	faults map[tracker.Read]error
	found  unreadable // which keys and editions there were
}

func (h *Host) newReshaping(a *tracker.Move) (*reshaping, int, error) {
	c, err := h.cutterOf(a.Source)
	if err != nil {
		return nil, 0, err
	}
	n, err := c.fit(h.window)
	if err != nil {
		return nil, 0, err
	}
	r := &reshaping{
		h: h, move: a, cutter: *c, load: a.Reshape(h.eng.Layout.Groups), here: map[tracker.Read]tracker.Target{}, faults: map[tracker.Read]error{},
	}
	r.one, r.size = packed(c.layout, 1, 0, 0)
	r.hashers = h.hashersOf(a.Source)
	for _, t := range r.load.Targets() {
		r.here[tracker.Read{Group: t.Group, Place: t.From / h.eng.Layout.Groups[t.Group].BlockTokens}] = t
	}
	at := int64(a.Window) * h.window
	if err = shm.Allocate(h.sources.file(), at, h.window); err != nil { // or whoever touches it may die
		return nil, 0, err
	}
	layout, _ := packed(c.layout, n, 1, at)
	if r.landed, err = connector.NewKV(layout, [][]byte{nil, h.sources.Bytes()}); err != nil {
		return nil, 0, err
	}
	return r, n, nil
}

// reshape loads from an engine of another shape: batch by batch, from one rank of it after the other.
func (h *Host) reshape(ctx context.Context, g *generation, a *tracker.Move) tracker.Outcome {
	r, most, err := h.newReshaping(a)
	if err != nil {
		return tracker.Outcome{Err: err}
	}
	batches := r.load.Batches(most)
	for i, batch := range batches {
		for rank := range a.Source.World {
			from := connector.Source{Rank: rank, World: a.Source.World, Last: i == len(batches)-1 && rank == a.Source.World-1}
			err := r.read(ctx, g.workers[rank%len(g.workers)], batch, from)
			if err != nil {
				out := tracker.Outcome{Err: whole{err}, Lost: errors.Is(err, plugin.ErrLost)}
				h.unread(&r.found, len(a.Transfer.Blocks), out.Err)
				return out
			}
			h.ranks[0].share(len(batch), func(i int) { r.take(batch[i], connector.BlockID(i), rank) })
		}
	}
	out := r.load.Outcome(func(b tracker.Read) error { return r.faults[b] })
	r.found.foreign, r.found.outdated = out.Foreign, out.Outdated
	h.unread(&r.found, 0, nil)
	if err := r.seal(out); err != nil {
		return tracker.Outcome{Err: err}
	}
	return out
}

// whole is an error that fails a whole load. It hides which blocks a plugin's error names: those are slots of a window,
// and the Tracker would take them for blocks of the cache.
type whole struct{ err error }

func (w whole) Error() string        { return w.err.Error() }
func (w whole) Is(target error) bool { return errors.Is(w.err, target) }

// read has a worker read a batch of blocks from one rank. Its error fails the whole load.
func (r *reshaping) read(ctx context.Context, w connector.Worker, batch []tracker.Read, from connector.Source) error {
	reshaper, ok := connector.As[connector.Reshaper](w)
	if !ok {
		return fmt.Errorf("the connector cannot %v: %w", connector.CanReshape, connector.ErrIncompatible)
	}
	t := *r.move.Transfer
	t.From, t.Blocks = batch[0].Place*r.load.BlockTokens, make([]connector.Block, len(batch))
	t.Tokens = r.load.End(batch[len(batch)-1].Place) - t.From
	for i, b := range batch {
		t.Blocks[i] = connector.Block{ID: connector.BlockID(i), Group: b.Group}
		if !r.load.Partial(b.Place) {
			t.Blocks[i].Key = r.load.Keys[b.Place]
		}
	}
	err := reshaper.Reshape(ctx, &t, from, r.landed)
	some, is := errors.AsType[*connector.BlockError](err)
	if !is || len(some.Blocks) == 0 || errors.Is(err, connector.ErrBusy) { // the Tracker asks for all of a busy load again
		return err
	}
	for _, id := range some.Blocks {
		if id < 0 || int(id) >= len(batch) {
			r.h.violation(fmt.Sprintf("Reshape: an error names block %d of %d", id, len(batch)))
			return fmt.Errorf("the connector's answer names block %d of %d: %w (%v)", id, len(batch), connector.ErrIncompatible, err) //nolint:errorlint // nobody is to find block ids in it: they are not ours
		}
		r.fault(batch[id], cmp.Or(some.Err, connector.ErrGone))
	}
	return nil
}

// fault notes why a block is not here. Damage counts before absence.
func (r *reshaping) fault(b tracker.Read, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.found.see(err) {
		err = fmt.Errorf("%w: %w", tracker.ErrForeignKey, err)
	}
	if r.faults[b] == nil || errors.Is(err, connector.ErrCorrupt) {
		r.faults[b] = err
	}
}

// take copies a block out of the memory that the plugin can write, checks what it has copied by the producer's digests, and cuts
// it into our blocks on all ranks. One with a fault goes nowhere.
func (r *reshaping) take(b tracker.Read, slot connector.BlockID, rank int) {
	r.mu.Lock()
	failed := r.faults[b] != nil
	r.mu.Unlock()
	if failed {
		return
	}
	room := r.h.copies.take(r.size)
	defer r.h.copies.give(room)
	copied, err := connector.NewKV(r.one, [][]byte{room})
	if err != nil {
		r.fault(b, err)
		return
	}
	src, from := r.load.Source, digest.Slot{KV: r.landed, ID: slot}
	block := connector.Block{Key: src.Keys[b.Place], Group: b.Group}
	if err = r.hashers[rank].CopyIn(copied, block, from, mac.Cached); err != nil { // it is cut next
		r.fault(b, fmt.Errorf("block %d of the prompt, as rank %d of %d of the producer has it (%d tokens): %w", b.Place, rank, src.World, src.BlockTokens, err))
		return
	}
	r.cut(b, rank, copied)
}

// cut copies what our ranks have in common with a rank's block into our blocks.
func (r *reshaping) cut(b tracker.Read, rank int, copied *connector.KV) {
	size := r.load.BlockTokens
	t := r.move.Transfer
	from, to := max(b.Place*size, t.From), min(r.load.End(b.Place), t.From+t.Tokens)
	for _, p := range r.pairs {
		if p.group != b.Group {
			continue
		}
		theirs, bytes := p.theirs, copied.View(p.there, 0)
		theirs.Rank = rank
		for i, ours := range r.h.ranks {
			own := p.own
			own.Rank = i
			own.Pieces(&theirs, from, to, func(piece connector.Piece) {
				if t, wanted := r.here[tracker.Read{Group: b.Group, Place: piece.Here}]; wanted {
					copy(ours.kv.View(p.here, t.ID)[piece.At:piece.At+piece.Len], bytes[piece.From:])
				}
			})
		}
	}
}

// seal makes digests of our blocks that are full and came whole: they are verified, so they can be handed on.
func (r *reshaping) seal(out tracker.Outcome) error {
	blocks := tracker.Arrived(r.move.Transfer.Blocks, out.Err)
	bad := map[connector.BlockID]bool{}
	for _, id := range slices.Concat(out.Corrupt, out.Foreign, out.Outdated) {
		bad[id] = true
	}
	blocks = slices.DeleteFunc(slices.Clone(blocks), func(b connector.Block) bool { return bad[b.ID] })
	for _, rank := range r.h.ranks {
		if err := rank.makeDigests(blocks, nil); err != nil {
			return err
		}
		r.h.metrics.copied.WithLabelValues(r.h.metrics.name, "load").Add(rank.size(blocks))
	}
	return nil
}
