package host

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// computing hands over blocks that are about to be computed and gives the step.
func (r *rig) computing(id string, ks []connector.BlockKey, first connector.BlockID) (step uint64, t connector.Transfer) {
	r.t.Helper()
	t = transfer(id, ks, first)
	r.wipe(t.Blocks)
	return r.send(&connector.Step{Arrived: []connector.Query{query(id, ks)}, Computing: []connector.Transfer{t}}), t
}

// compute fills one layer of blocks and says so.
func (r *rig) compute(step uint64, blocks []connector.Block, layer int) {
	for rank, kv := range r.kvs {
		for _, b := range blocks {
			copy(kv.View(kv.Segments(b.Group)[layer], b.ID), wantOf(b, rank, layer))
		}
	}
	r.Layers(step, layer+1)
}

// Rule LAYER-08: when a layer is announced its digest is there, and it is the one that is stored.
func TestLayersAreSealed(t *testing.T) {
	for _, trust := range []string{"in-place", "staged"} {
		t.Run(trust, func(t *testing.T) {
			r := newRig(t, rigOptions{
				ranks: 2, extra: map[string]any{"fault": "layers"},
				settings: map[string]any{"trust": trust, "landing_bytes": landingBytes(12)},
			})
			require.True(t, r.LayerWise())
			ks := keys(1, 3)
			step, tr := r.computing("a", ks, 4)
			seals := func(layer int) (got [][]byte) {
				for rank := range r.kvs {
					for _, k := range ks {
						data, err := os.ReadFile(filepath.Join(r.dir, k.String()+"."+strconv.Itoa(rank)+".seal"+strconv.Itoa(layer)))
						if err == nil {
							got = append(got, data)
						}
					}
				}
				return got
			}
			require.Empty(t, seals(0))
			for layer := range 2 {
				r.compute(step, tr.Blocks, layer)
			}
			e := r.next(Saved)
			require.NoError(t, e.Err)
			require.Empty(t, e.Failed)
			require.Equal(t, step, e.Step)
			for layer := range 2 {
				got := seals(layer)
				require.NotEmpty(t, got)
				for _, s := range got {
					require.NotEqual(t, make([]byte, 16), s, "layer %d was announced without its digest", layer)
				}
			}
			require.Equal(t, 48, r.match(query("b", ks), nil).Tokens)
			require.NoError(t, r.load("b", ks, 20).Err)
			require.True(t, r.same(blocksOf(ks, 20)))
			r.mu.Lock()
			defer r.mu.Unlock()
			require.Empty(t, r.gen.layers, "the call is forgotten")
		})
	}
}

// Rule LAYER-07: one Saved, whatever becomes of the step and the plugin.
func TestLayersSurvive(t *testing.T) {
	t.Run("given up", func(t *testing.T) {
		r := newRig(t, rigOptions{extra: map[string]any{"fault": "layers"}})
		ks := keys(1, 2)
		step, tr := r.computing("a", ks, 4)
		r.compute(step, tr.Blocks, 0)
		r.GiveUp(step)
		e := r.next(Saved)
		require.ErrorIs(t, e.Err, connector.ErrGone)
		require.Len(t, e.Failed, 2)
		require.Zero(t, r.match(query("b", ks), nil).Tokens)
		r.Layers(step, 2) // too late, and without effect
		require.Empty(t, r.save("c", ks, 8).Failed)
	})
	t.Run("plugin killed", func(t *testing.T) {
		r := newRig(t, rigOptions{extra: map[string]any{"fault": "layers"}})
		ks := keys(1, 2)
		step, tr := r.computing("a", ks, 4)
		r.compute(step, tr.Blocks, 0)
		r.killed()
		r.compute(step, tr.Blocks, 1)
		e := r.next(Saved)
		require.NoError(t, e.Err, "the next life of the plugin saves what is there")
		require.Equal(t, 32, r.match(query("b", ks), nil).Tokens)
	})
	t.Run("plugin crashes at each layer", func(t *testing.T) {
		r := newRig(t, rigOptions{extra: map[string]any{"fault": "crash_layers"}})
		step, tr := r.computing("a", keys(1, 2), 4)
		r.compute(step, tr.Blocks, 0)
		r.compute(step, tr.Blocks, 1)
		require.Len(t, r.next(Saved).Failed, 2)
	})
	t.Run("plugin answers early", func(t *testing.T) {
		r := newRig(t, rigOptions{extra: map[string]any{"fault": "early_layers"}})
		step, tr := r.computing("a", keys(1, 2), 4)
		require.Len(t, r.next(Saved).Failed, 2, "it cannot have what was not computed")
		r.compute(step, tr.Blocks, 1)
	})
}

// Connectors without the power are told what was computed when it is.
func TestNotLayerWise(t *testing.T) {
	require.False(t, newRig(t, rigOptions{}).LayerWise())
	require.False(t, newRig(t, rigOptions{role: "kv_consumer", extra: map[string]any{"fault": "layers"}}).LayerWise())
}
