package host

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/place"
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

// Rule PLACE-29: when a layer is announced, it and the digests are in place in all blocks, on each rank and in each group.
func TestPlacedLayers(t *testing.T) {
	r, bs, _ := layered(t, 2, all(), connector.Group{BlockTokens: 16, Policy: connector.PolicyTrailing, Trailing: 2})
	to := elsewhere(bs)
	for n, rank := range r.ranks {
		var heard []int
		over, err := r.p.loadLayers(t.Context(), rank, n, to, hears(func(layers int) {
			heard = append(heard, layers)
			for i, b := range to {
				require.NoError(t, rank.hasher.CheckSegments(rank.kv, b, rank.kv.Between(b.Group, 0, layers)))
				for _, s := range rank.kv.Between(b.Group, 0, layers) {
					require.True(t, bytes.Equal(rank.kv.View(s, bs[i].ID), rank.kv.View(s, b.ID)))
				}
			}
		}))
		require.NoError(t, err)
		require.True(t, over)
		require.Equal(t, []int{1, 2, 3}, heard)
	}
	require.Zero(t, r.failed.Load())
	require.Len(t, r.p.takeUsed(), 2*len(bs))
}

// Nothing is announced of a load that is over at once, nor to an engine that does not want to know.
func TestSmallLoadsHaveNoLayers(t *testing.T) {
	r, bs, _ := layered(t, 1, all())
	require.Equal(t, []int{1, 2, 3}, r.p.pieces(bs))
	r.p.piece = 1500 * int64(len(bs))
	require.Equal(t, []int{2, 3}, r.p.pieces(bs))
	r.p.piece = 0
	require.Equal(t, []int{3}, r.p.pieces(bs))
	over, err := r.p.loadLayers(t.Context(), r.ranks[0], 0, elsewhere(bs), hears(func(n int) { require.Fail(t, "announced", "%d layers", n) }))
	require.NoError(t, err)
	require.True(t, over)
	require.True(t, r.loaded(0, bs...))
}

// Rule PLACE-29: a slot that is damaged, has another use or another version of its block between two layers costs that block, and no plugin
// is asked for it: the engine may be reading its first layer. Before the first announcement the plugin is asked for all.
func TestPlacedLayersFail(t *testing.T) {
	for name, c := range map[string]struct {
		spoil   func(r *placedRig, b connector.Block, slot uint32)
		damaged bool
	}{
		"damaged": {func(r *placedRig, b connector.Block, slot uint32) {
			r.shelf.Bytes(place.Slot(slot), int(r.p.layout.BlockBytes(0)))[2500] ^= 1
		}, true},
		"given up": {func(r *placedRig, _ connector.Block, slot uint32) { r.shelf.Retire(place.Slot(slot)) }, false},
		"used again": {func(r *placedRig, b connector.Block, slot uint32) {
			r.shelf.Retire(place.Slot(slot))
			r.next = slot
			r.save(0, b)
		}, false},
		"replaced where it lies": {func(r *placedRig, b connector.Block, slot uint32) {
			kv := r.ranks[0].kv
			kv.View(2, b.ID)[7] ^= 1
			require.NoError(r, r.ranks[0].hasher.Make(kv, b))
			spans, err := kv.Spans(b)
			require.NoError(r, err)
			copy(r.shelf.Bytes(place.Slot(slot), int(r.p.layout.BlockBytes(0))), bytes.Join(spans, nil))
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			r, bs, slots := layered(t, 1, all())
			to, heard := elsewhere(bs), 0
			over, err := r.p.loadLayers(t.Context(), r.ranks[0], 0, to, hears(func(n int) {
				if heard = n; n == 1 {
					c.spoil(r, bs[2], slots[2])
				}
			}))
			require.True(t, over)
			some, is := errors.AsType[*connector.BlockError](err)
			require.True(t, is)
			require.Equal(t, []connector.BlockID{to[2].ID}, some.Blocks)
			require.Equal(t, c.damaged, errors.Is(err, connector.ErrCorrupt))
			require.Equal(t, !c.damaged, errors.Is(err, connector.ErrGone))
			require.LessOrEqual(t, heard, 2)
			for _, i := range []int{0, 1, 3} {
				require.NoError(t, r.ranks[0].hasher.Check(r.ranks[0].kv, to[i]), "what did not fail is whole")
			}
			require.EqualValues(t, 1, r.failed.Load())
			require.Zero(t, r.damaged.Load(), "the end of the load counts it")
			require.Empty(t, r.p.takeUsed())
		})
	}
	r, bs, slots := layered(t, 1, all())
	r.shelf.Bytes(place.Slot(slots[2]), 8)[3] ^= 1
	over, err := r.p.loadLayers(t.Context(), r.ranks[0], 0, elsewhere(bs), hears(func(int) { require.Fail(t, "announced") }))
	require.NoError(t, err)
	require.False(t, over)
	require.EqualValues(t, 1, r.damaged.Load())
}

// Rule HOST-03: a layer-wise load is given up at its deadline, too.
func TestPlacedLayersEndAtTheirDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, bs, _ := layered(t, 1, all())
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		over, err := r.p.loadLayers(ctx, r.ranks[0], 0, elsewhere(bs), hears(func(n int) {
			require.Equal(t, 1, n)
			<-ctx.Done()
		}))
		require.True(t, over)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Empty(t, r.p.takeUsed())
	})
}

// The engine learns of the layers of what the host loads by itself, and of its end: well, or with the blocks that failed.
func TestEngineLearnsOfPlacedLayers(t *testing.T) {
	r := newAloneRigWith(t, 0, func(o *Options) { o.Overlap = func(uint64, connector.RequestID) bool { return true } })
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
	require.InDelta(t, 5, testutil.ToFloat64(r.Host.metrics.placed), 0)
	require.InDelta(t, 3, testutil.ToFloat64(r.Host.metrics.byLayer), 0)
	require.Empty(t, r.arriving)
	require.NoError(t, r.closeNow())
}
