package host

import (
	"bytes"
	"context"
	"errors"
	"math"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/place"
	"github.com/kvport/kvport/internal/tracker"
)

// hears is called with each number of layers that is announced.
type hears func(n int)

// Advance implements connector.Arrivals.
func (h hears) Advance(n int) { h(n) }

// elsewhere are the other places of the cache to which blocks are loaded.
func elsewhere(bs []connector.Block) []connector.Block {
	to := slices.Clone(bs)
	for i := range to {
		to[i].ID += placedBlocks / 2
	}
	return to
}

// layered is a rig of which each layer of a load is announced, with blocks that are resident on all ranks.
func layered(t *testing.T, world int, groups ...connector.Group) (r *placedRig, bs []connector.Block, slots []uint32) {
	r = newPlacedRig(t, world, groups...)
	r.p.piece = 1
	for g := range groups {
		bs = append(bs, r.fill(keys(1, 4), uint16(g))...)
	}
	for n := range world {
		slots = append(slots, r.save(n, bs...)...)
	}
	return r, bs, slots
}

// Rule PLACE-36: when a layer is announced, it and the digests are in place in all blocks, on each rank and in each group.
func TestPlacedLayers(t *testing.T) {
	r, bs, _ := layered(t, 2, all(), connector.Group{BlockTokens: 16, Policy: connector.PolicyTrailing, Trailing: 2})
	to := elsewhere(bs)
	for n, rank := range r.ranks {
		var heard []int
		did := r.p.loadLayers(t.Context(), rank, n, to, hears(func(layers int) {
			heard = append(heard, layers)
			for i, b := range to {
				require.NoError(t, rank.hasher.CheckSegments(rank.kv, b, rank.kv.Between(b.Group, 0, layers)))
				for _, s := range rank.kv.Between(b.Group, 0, layers) {
					require.True(t, bytes.Equal(rank.kv.View(s, bs[i].ID), rank.kv.View(s, b.ID)))
				}
			}
		}))
		require.True(t, did.whole)
		require.True(t, did.announced)
		require.Equal(t, []int{1, 2, 3}, heard)
	}
	require.Zero(t, r.failed.Load())
	require.Len(t, r.p.takeUsed(), 2*len(bs))
}

// Nothing is announced of a load that is over at once, nor to an engine that does not want to know.
func TestSmallLoadsHaveNoLayers(t *testing.T) {
	r, bs, _ := layered(t, 1, all())
	require.Equal(t, []int{1, 2, 3}, r.p.pieces(bs, 1))
	r.p.piece = 1500 * int64(len(bs))
	require.Equal(t, []int{2, 3}, r.p.pieces(bs, 1))
	r.p.piece = 0
	require.Equal(t, []int{3}, r.p.pieces(bs, 1))
	did := r.p.loadLayers(t.Context(), r.ranks[0], 0, elsewhere(bs), hears(func(n int) { require.Fail(t, "announced", "%d layers", n) }))
	require.True(t, did.whole)
	require.False(t, did.announced)
	require.True(t, r.loaded(0, bs...))
}

// Each core has a piece to copy for each announcement, unless there are so many that nothing would be announced. What the highest layer is
// called costs nothing.
func TestPieces(t *testing.T) {
	layout := connector.Layout{Groups: []connector.Group{all()}}
	for layer := range 16 {
		layout.Segments = append(layout.Segments, connector.Segment{Layer: layer, Bytes: pieceBytes / 8})
	}
	p := &placement{layout: &layout}
	bs := make([]connector.Block, 8) // 1 MiB for each layer
	require.Len(t, p.pieces(bs, 1), 16)
	require.Equal(t, []int{2, 4, 6, 8, 10, 12, 14, 16}, p.pieces(bs, 2))
	require.Equal(t, []int{4, 8, 12, 16}, p.pieces(bs, 64))
	require.Equal(t, []int{8, 16}, p.pieces(bs[:1], 64), "no core has less than a piece")
	layout.Segments[15].Layer = math.MaxInt32
	require.Equal(t, []int{8, math.MaxInt32 + 1}, p.pieces(bs[:1], 1))
}

// A load waits once for a core, and keeps that until all of its layers are there.
func TestPlacedLayersKeepTheirCore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, bs, _ := layered(t, 1, all())
		hands, heard := r.ranks[0].hands, 0
		did := r.p.loadLayers(t.Context(), r.ranks[0], 0, elsewhere(bs), hears(func(int) {
			heard++
			for len(hands) < cap(hands) {
				hands <- struct{}{} // others take what is free, and keep it
			}
		}))
		require.True(t, did.whole)
		require.Equal(t, 3, heard)
		require.Len(t, hands, cap(hands)-1)
	})
}

// Rule PLACE-36: a slot that is damaged, has another use or another version of its block between two layers costs that block, also where the
// engine may be reading its first layer. Before the first announcement nothing more is copied: the plugin is asked for all.
func TestPlacedLayersFail(t *testing.T) {
	for name, c := range map[string]struct {
		spoil   func(r *placedRig, b connector.Block, slot uint32)
		damaged bool
		says    error
	}{
		"damaged": {func(r *placedRig, _ connector.Block, slot uint32) {
			r.shelf.Bytes(place.Slot(slot), int(r.p.layout.BlockBytes(0)))[2500] ^= 1
		}, true, connector.ErrCorrupt},
		"its header lies": {func(r *placedRig, _ connector.Block, slot uint32) { r.arena[4096+128*int(slot)+20] ^= 1 }, true, place.ErrRefused},
		"given up":        {func(r *placedRig, _ connector.Block, slot uint32) { r.shelf.Retire(place.Slot(slot)) }, false, nil},
		"used again": {func(r *placedRig, b connector.Block, slot uint32) {
			r.shelf.Retire(place.Slot(slot))
			r.next = slot
			r.save(0, b)
		}, false, nil},
		"replaced where it lies": {func(r *placedRig, b connector.Block, slot uint32) {
			kv := r.ranks[0].kv
			kv.View(2, b.ID)[7] ^= 1
			require.NoError(r, r.ranks[0].hasher.Make(kv, b))
			spans, err := kv.Spans(b)
			require.NoError(r, err)
			copy(r.shelf.Bytes(place.Slot(slot), int(r.p.layout.BlockBytes(0))), bytes.Join(spans, nil))
		}, true, connector.ErrCorrupt},
	} {
		t.Run(name, func(t *testing.T) {
			r, bs, slots := layered(t, 1, all())
			to, heard := elsewhere(bs), 0
			did := r.p.loadLayers(t.Context(), r.ranks[0], 0, to, hears(func(n int) {
				if heard = n; n == 1 {
					c.spoil(r, bs[2], slots[2])
				}
			}))
			require.False(t, did.whole)
			require.True(t, did.announced)
			out, bad := did.outcome(len(to), nil), []connector.BlockID{to[2].ID}
			require.Equal(t, 3, out.Placed)
			if c.damaged {
				require.NoError(t, out.Err)
				require.Equal(t, bad, out.Corrupt)
				require.ErrorIs(t, out.Damage, c.says)
				late := did.outcome(len(to), context.DeadlineExceeded)
				require.ErrorIs(t, late.Err, context.DeadlineExceeded)
				require.Zero(t, late.Placed)
				require.Equal(t, bad, late.Corrupt, "it is replaced, whenever it was found")
			} else {
				require.Empty(t, out.Corrupt)
				require.ErrorIs(t, out.Err, connector.ErrGone)
				require.Equal(t, []connector.Block{to[0], to[1], to[3]}, tracker.Arrived(to, out.Err))
			}
			require.LessOrEqual(t, heard, 2)
			for _, i := range []int{0, 1, 3} {
				require.NoError(t, r.ranks[0].hasher.Check(r.ranks[0].kv, to[i]), "what did not fail is whole")
			}
			require.Zero(t, r.failed.Load(), "whoever knows whether the plugin is asked counts it")
			require.Empty(t, r.p.takeUsed())
		})
	}
	r, bs, slots := layered(t, 1, all())
	r.shelf.Bytes(place.Slot(slots[2]), 8)[3] ^= 1
	did := r.p.loadLayers(t.Context(), r.ranks[0], 0, elsewhere(bs), hears(func(int) { require.Fail(t, "announced") }))
	require.False(t, did.whole)
	require.False(t, did.announced)
	r.p.tally(&did)
	require.EqualValues(t, 1, r.failed.Load())
	require.EqualValues(t, 1, r.damaged.Load())
}

// Rule HOST-03: a layer-wise load is given up at its deadline, too.
func TestPlacedLayersEndAtTheirDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, bs, _ := layered(t, 1, all())
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		did := r.p.loadLayers(ctx, r.ranks[0], 0, elsewhere(bs), hears(func(n int) {
			require.Equal(t, 1, n)
			<-ctx.Done()
		}))
		require.False(t, did.whole)
		require.ErrorIs(t, ctx.Err(), context.DeadlineExceeded)
		require.Empty(t, r.p.takeUsed())
	})
}

// takesLayers are options of an engine that takes layers as they come.
func takesLayers(o *Options) { o.Overlap = func(uint64, connector.RequestID) bool { return true } }

// Rule PLACE-36: what one rank has announced and the engine has not learned, since another rank has not got that far, is taken back when a block
// fails: then the load is a plugin's, as any other of which not all is there.
func TestPlacedLayersAreTakenBack(t *testing.T) {
	r := newAloneRigWith(t, 0, 2, takesLayers)
	r.place.piece = 1
	ks := keys(1, 3)
	r.keep(ks)                                          // in slots 0 to 2 for the first rank, and 3 to 5 for the second
	r.placed.shelf.Bytes(place.Slot(2), 1024)[600] ^= 1 // in the second layer
	r.placed.shelf.Bytes(place.Slot(3), 1024)[5] ^= 1   // in the first layer
	r.send(&connector.Step{Admitted: []connector.Transfer{transfer("a", ks, 8)}})
	r.tried()
	require.Equal(t, 1, r.Health().Pending, "the next plugin may bring it")
	require.InDelta(t, 0, testutil.ToFloat64(r.Host.metrics.placed), 0)
	require.InDelta(t, 2, testutil.ToFloat64(r.Host.metrics.placedFailed), 0)
	require.InDelta(t, 2, testutil.ToFloat64(r.Host.metrics.integrity), 0)
	require.NoError(t, r.closeNow())
	require.False(t, slices.ContainsFunc(r.seen, func(e Event) bool { return e.Kind == Arriving }))
}

// Where a load that fails ends its request, one from slots keeps its second attempt: the engine learns of no layer, and the load is a plugin's.
func TestNoPlacedLayersWhereLoadsMustNotFail(t *testing.T) {
	r := newAloneRigWith(t, 0, 1, takesLayers)
	r.cfg.FailurePolicy = PolicyFail
	r.place.piece = 1
	ks := keys(1, 3)
	r.keep(ks)
	r.placed.shelf.Bytes(place.Slot(2), 1024)[600] ^= 1 // in the second layer
	r.send(&connector.Step{Admitted: []connector.Transfer{transfer("a", ks, 8)}})
	r.tried()
	require.Equal(t, 1, r.Health().Pending, "the next plugin may bring it")
	require.NoError(t, r.closeNow())
	require.False(t, slices.ContainsFunc(r.seen, func(e Event) bool { return e.Kind == Arriving }))
}

// gatedWorker brings blocks from eight places before theirs, announces the first layer when told to, and ends when told to.
type gatedWorker struct {
	powerfulWorker
	called, announce, end chan struct{}
}

// LoadLayers implements connector.LayerLoader.
func (w *gatedWorker) LoadLayers(_ context.Context, t *connector.Transfer, kv *connector.KV, arrived connector.Arrivals) error {
	close(w.called)
	bring(t, kv, 8)
	<-w.announce
	arrived.Advance(1)
	<-w.end
	return nil
}

// Rule PLACE-36: the layer that one rank has announced and taken back, since a later one is damaged, does not count when the other rank gets that
// far, as long as the plugin is writing those blocks.
func TestTakenBackLayersAreNotTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		workers := make([]*gatedWorker, 2)
		for i := range workers {
			workers[i] = &gatedWorker{called: make(chan struct{}), announce: make(chan struct{}), end: make(chan struct{})}
		}
		r := newWorkersRig(t, TrustInPlace, workers[0], workers[1])
		r.place.piece = 1
		ks := keys(1, 3)
		bs := blocksOf(ks, 0)
		r.digested(bs)
		r.placed.save(0, bs...)
		r.placed.shelf.Bytes(place.Slot(2), 1024)[600] ^= 1 // in the second layer
		r.send(&connector.Step{Admitted: []connector.Transfer{transfer("a", ks, 8)}})
		<-workers[0].called // the first rank's plugin is asked, after its first layer was announced
		<-workers[1].called
		close(workers[1].announce)
		synctest.Wait()
		select {
		case e := <-r.Events():
			require.Fail(t, "the engine was told", "%+v", e)
		default:
		}
		close(workers[0].announce)
		close(workers[0].end)
		close(workers[1].end)
		require.Empty(t, r.next(Loaded).Failed)
		require.True(t, r.same(blocksOf(ks, 8)))
		require.NoError(t, r.closeNow())
	})
}

// The engine learns of the layers of what the host loads by itself, and of its end: well, or with the blocks that failed.
func TestEngineLearnsOfPlacedLayers(t *testing.T) {
	r := newAloneRigWith(t, 0, 1, takesLayers)
	r.place.piece = 1
	ks := keys(1, 3)
	r.keep(ks)
	load := func(id string, first connector.BlockID) (Event, Event) {
		tr := transfer(id, ks, first)
		r.wipe(tr.Blocks)
		r.send(&connector.Step{Admitted: []connector.Transfer{tr}})
		return r.next(Arriving), r.next(Loaded)
	}
	arriving, loaded := load("a", 8)
	require.Empty(t, loaded.Failed)
	require.True(t, r.same(blocksOf(ks, 8)))
	require.NoError(t, connector.AwaitLayers(t.Context(), arriving.Layers, r.layers))
	require.InDelta(t, 3, testutil.ToFloat64(r.Host.metrics.byLayer), 0)
	require.InDelta(t, 3, testutil.ToFloat64(r.Host.metrics.placed), 0)

	r.placed.shelf.Bytes(place.Slot(r.placed.next-1), 1024)[600] ^= 1 // in the second layer of the last block
	arriving, loaded = load("b", 16)
	require.Len(t, loaded.Failed, 1)
	require.True(t, loaded.Replace)
	require.ErrorIs(t, loaded.Err, connector.ErrCorrupt)
	require.ErrorIs(t, connector.AwaitLayers(t.Context(), arriving.Layers, r.layers), connector.ErrGone)
	require.InDelta(t, 1, testutil.ToFloat64(r.Host.metrics.integrity), 0)
	for _, counter := range []prometheus.Counter{r.Host.metrics.placed, r.Host.metrics.alone, r.Host.metrics.byLayer} {
		require.InDelta(t, 5, testutil.ToFloat64(counter), 0, "what came of a load that failed in part counts in all of them")
	}
	require.Empty(t, r.arriving)
	require.NoError(t, r.closeNow())
}

// powerfulWorker has the powers overlap and place, and brings nothing.
type powerfulWorker struct {
	idleWorker
	layers, loads atomic.Int64 // calls
}

// LoadLayers implements connector.LayerLoader.
func (w *powerfulWorker) LoadLayers(context.Context, *connector.Transfer, *connector.KV, connector.Arrivals) error {
	w.layers.Add(1)
	return nil
}

// SavePlaced implements connector.Placer.
func (w *powerfulWorker) SavePlaced(context.Context, *connector.Transfer, *connector.KV, []uint32) ([]uint32, error) {
	return nil, nil
}

// LoadPlaced implements connector.Placer.
func (w *powerfulWorker) LoadPlaced(context.Context, *connector.Transfer, *connector.KV, []uint32) ([]uint32, error) {
	w.loads.Add(1)
	return nil, nil
}

// newWorkersRig is a host whose engine takes layers as they come, and whose connector has these worker sides, one for each rank, and has placed
// nothing yet.
func newWorkersRig(t *testing.T, trust Trust, workers ...connector.Worker) *aloneRig {
	t.Helper()
	o := rigOptions{ranks: len(workers), settings: map[string]any{"trust": string(trust)}}
	cfg, eng, opts := o.build(t)
	takesLayers(&opts)
	opts.Workers = func([]*Region, connector.Layout) ([]connector.Worker, error) { return workers, nil }
	h := newHost(cfg, eng, opts)
	require.NoError(t, errors.Join(h.identify(), h.openRanks()))
	g, err := h.startWorkers()
	require.NoError(t, err)
	h.place = newPlacement(&h.eng.Layout, h.eng.Shape, len(h.ranks), nil)
	h.begin(g)
	r := &aloneRig{
		rig:    &rig{Host: h, t: t, ranks: eng.Ranks},
		placed: &placedRig{T: t, p: h.place, ranks: h.ranks, arena: make([]byte, 1<<18)},
	}
	for _, rank := range h.ranks {
		r.kvs = append(r.kvs, rank.kv)
	}
	r.placed.life()
	return r
}

// Where the engine takes layers of what the host places, a plugin that brings layers, too, does so in place. At trust level staged it is asked
// for whole loads: it fills landing memory, and knows no block of the cache.
func TestStagedLoadsOfAPlacerAreWhole(t *testing.T) {
	for trust, layers := range map[Trust]int64{TrustInPlace: 1, TrustStaged: 0} {
		t.Run(string(trust), func(t *testing.T) {
			w := &powerfulWorker{}
			r := newWorkersRig(t, trust, w)
			require.Len(t, r.load("a", keys(1, 2), 8).Failed, 2, "what it says that it brought is not what was saved")
			require.Equal(t, layers, w.layers.Load())
			require.Equal(t, 1-layers, w.loads.Load())
			require.NoError(t, r.closeNow())
		})
	}
}

// bring fills blocks with those that lie some places before them.
func bring(t *connector.Transfer, kv *connector.KV, places connector.BlockID) {
	for _, b := range t.Blocks {
		for _, s := range kv.Segments(b.Group) {
			copy(kv.View(s, b.ID), kv.View(s, b.ID-places))
		}
	}
}

// slowLoader brings blocks from eight places before theirs, announces the first layer, and answers when the gate is open.
type slowLoader struct {
	powerfulWorker
	gate chan struct{}
}

// LoadLayers implements connector.LayerLoader.
func (w *slowLoader) LoadLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, arrived connector.Arrivals) error {
	bring(t, kv, 8)
	arrived.Advance(1)
	select {
	case <-w.gate:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// One rank's blocks are placed, and a plugin brings those of the other layer by layer: the engine learns of a layer when both have it, whether
// the host has said so of its own or is done with them.
func TestOneRankIsPlaced(t *testing.T) {
	w, slow := &powerfulWorker{}, &slowLoader{gate: make(chan struct{})}
	r := newWorkersRig(t, TrustInPlace, w, slow)
	ks := keys(1, 3)
	bs := blocksOf(ks, 0)
	r.digested(bs)
	r.placed.save(0, bs...)
	to := transfer("a", ks, 8)
	r.send(&connector.Step{Admitted: []connector.Transfer{to}})
	arriving := r.next(Arriving)
	close(slow.gate)
	require.Empty(t, r.next(Loaded).Failed)
	require.True(t, r.same(to.Blocks))
	require.NoError(t, connector.AwaitLayers(t.Context(), arriving.Layers, r.layers))
	require.Zero(t, w.layers.Load()+w.loads.Load())
	require.InDelta(t, 3, testutil.ToFloat64(r.Host.metrics.placed), 0)
	require.InDelta(t, 3, testutil.ToFloat64(r.Host.metrics.byLayer), 0)
	require.NoError(t, r.closeNow())
}
