package multiconnector_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/multiconnector"
)

// layerHand is the worker side of a child that saves layer by layer, and notes what it was told.
type layerHand struct {
	hand
	enough int // it answers when that number of layers is final
	told   []int
}

// SaveLayers implements connector.LayerWorker.
func (h *layerHand) SaveLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, progress connector.Progress) error {
	for n := 0; n < h.enough; {
		var err error
		if n, err = progress.Wait(ctx, n); err != nil {
			return err
		}
		h.told = append(h.told, n)
	}
	return h.Save(ctx, t, kv)
}

// layerSaver is a composite of children that do as powers say, and a cache of three layers.
func layerSaver(t *testing.T, shelves []*shelf, enough []int, change func([]multiconnector.Child)) (w connector.LayerWorker, hands []*layerHand, kv *connector.KV) {
	t.Helper()
	children, sides := make([]multiconnector.Child, len(shelves)), make([]connector.Worker, len(shelves))
	for i, s := range shelves {
		children[i] = multiconnector.Child{Name: string(rune('A' + i)), Role: connector.RoleBoth, Patience: time.Minute, Info: connector.Info{Groups: true, Scope: connector.ScopeNode}}
		h := &layerHand{hand: hand{s}, enough: enough[i]}
		hands, sides[i] = append(hands, h), h
		if enough[i] > 0 {
			children[i].Info.Capabilities = connector.CanLayers
		}
	}
	if change != nil {
		change(children)
	}
	m, err := multiconnector.New("Multi", children)
	require.NoError(t, err)
	layout := connector.Layout{Name: "test", Blocks: 8, Groups: groups()}
	for n := range 3 {
		layout.Segments = append(layout.Segments, connector.Segment{Layer: n, Offset: int64(n) * 8, BlockStride: 1, Bytes: 1})
	}
	kv, err = connector.NewKV(layout, [][]byte{make([]byte, 24)})
	require.NoError(t, err)
	side := m.Worker(sides, groups(), nil)
	t.Cleanup(func() { require.NoError(t, side.Close()) })
	w, ok := side.(connector.LayerWorker)
	require.True(t, ok)
	return w, hands, kv
}

// Rule MULTI-15: a child with the power learns of each layer, another one saves after the last, and nothing is saved of layers
// that do not come.
func TestSaveLayersOfChildren(t *testing.T) {
	for name, test := range map[string]struct {
		enough []int // layers after which a child answers; 0: it does not save layer by layer
		steps  []int // layers that are final then; 0: the engine gives up
		told   [2][]int
		stored [2]bool
		err    error
	}{
		"both":         {enough: []int{3, 3}, steps: []int{1, 2, 3}, told: [2][]int{{1, 2, 3}, {1, 2, 3}}, stored: [2]bool{true, true}},
		"one without":  {enough: []int{3, 0}, steps: []int{1, 3}, told: [2][]int{{1, 3}, nil}, stored: [2]bool{true, true}},
		"gives up":     {enough: []int{3, 0}, steps: []int{1, 2, 0}, told: [2][]int{{1, 2}, nil}, err: connector.ErrGone},
		"first layer":  {enough: []int{3, 0}, steps: []int{0}, err: connector.ErrGone},
		"too early":    {enough: []int{1, 3}, steps: []int{1, 3}, told: [2][]int{{1}, {1, 3}}, stored: [2]bool{true, true}},
		"both early":   {enough: []int{1, 2}, steps: []int{1, 2, 3}, told: [2][]int{{1}, {1, 2}}, stored: [2]bool{true, true}, err: connector.ErrIncompatible},
		"all are told": {enough: []int{3, 3}, steps: []int{3}, told: [2][]int{{3}, {3}}, stored: [2]bool{true, true}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, b := newShelf(), newShelf()
				w, hands, kv := layerSaver(t, []*shelf{a, b}, test.enough, nil)
				count, over := &connector.LayerCount{}, make(chan error, 1)
				go func() { over <- w.SaveLayers(t.Context(), transfer("r", keys(2)), kv, count) }()
				for _, n := range test.steps {
					synctest.Wait()
					if test.enough[1] == 0 {
						require.Empty(t, b.saves, "it saves when all is there")
					}
					if n == 0 {
						count.GiveUp()
					} else {
						count.Advance(n)
					}
				}
				require.ErrorIs(t, <-over, test.err)
				for i, s := range []*shelf{a, b} {
					require.Equal(t, test.told[i], hands[i].told, "child %d", i)
					require.Equal(t, test.stored[i], len(s.blocks) == 2, "child %d", i)
				}
			})
		})
	}
}

// Rule MULTI-15: SaveLayers lasts until the last layer is final, also where no child has to be sent anything.
func TestSaveLayersWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shelves := []*shelf{newShelf()}
		children := []multiconnector.Child{{
			Name: "A", Role: connector.RoleBoth, Patience: time.Minute,
			Info: connector.Info{Groups: true, Scope: connector.ScopeShared, Capabilities: connector.CanLayers},
		}}
		m, err := multiconnector.New("Multi", children)
		require.NoError(t, err)
		h := &layerHand{hand: hand{shelves[0]}, enough: 1}
		side := m.Worker([]connector.Worker{h}, groups(), nil)
		kv, err := connector.NewKV(connector.Layout{
			Name: "test", Blocks: 8, Groups: groups(), Segments: []connector.Segment{{BlockStride: 1, Bytes: 1}},
		}, [][]byte{make([]byte, 8)})
		require.NoError(t, err)
		for _, gone := range []bool{false, true} {
			count, over := &connector.LayerCount{}, make(chan error, 1)
			go func() { over <- side.(connector.LayerWorker).SaveLayers(t.Context(), transfer("r", nil), kv, count) }()
			synctest.Wait()
			require.Empty(t, over)
			if gone {
				count.GiveUp()
				require.ErrorIs(t, <-over, connector.ErrGone)
			} else {
				count.Advance(1)
				require.NoError(t, <-over)
			}
		}
		require.Empty(t, shelves[0].saves)
		require.NoError(t, side.Close())
	})
}

// Only children that save get layers.
func TestLayersOfSaversOnly(t *testing.T) {
	a, b := newShelf(), newShelf()
	w, hands, kv := layerSaver(t, []*shelf{a, b}, []int{3, 3}, func(cs []multiconnector.Child) { cs[1].Role = connector.RoleConsumer })
	count := &connector.LayerCount{}
	count.Advance(3)
	require.NoError(t, w.SaveLayers(t.Context(), transfer("r", keys(1)), kv, count))
	require.Equal(t, []int{3}, hands[0].told)
	require.Empty(t, hands[1].told)
	require.Empty(t, b.saves)
}

// slowLayers is a worker side that is asked by layers, and saves for a time after the last one.
type slowLayers struct{ slowHand }

// SaveLayers implements connector.LayerWorker.
func (h *slowLayers) SaveLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, progress connector.Progress) error {
	for n := 0; n < 3; {
		var err error
		if n, err = progress.Wait(ctx, n); err != nil {
			return err
		}
	}
	return h.Save(ctx, t, kv)
}

// While blocks are being computed nobody is late, and nothing is promised: the patience with a child begins when another one has
// stored the last layer.
func TestLayersAreNotLate(t *testing.T) {
	for _, powers := range []connector.Capability{0, connector.CanLayers} {
		synctest.Test(t, func(t *testing.T) {
			const patience = 100 * time.Millisecond
			ks := keys(2)
			shelves := []*shelf{newShelf(ks...), newShelf()}
			infos := []connector.Info{
				{Groups: true, Scope: connector.ScopeShared, Capabilities: connector.CanLayers}, {Groups: true, Scope: connector.ScopeEngine, Capabilities: powers},
			}
			var children []multiconnector.Child
			for i, info := range infos {
				children = append(children, multiconnector.Child{Name: string(rune('A' + i)), Role: connector.RoleBoth, Patience: patience, Info: info})
			}
			m, err := multiconnector.New("Multi", children)
			require.NoError(t, err)
			r := &rig{t: t, sched: m.Scheduler([]connector.Scheduler{shelves[0], shelves[1]}, groups(), nil)}
			side := m.Worker([]connector.Worker{&layerHand{hand: hand{shelves[0]}, enough: 3}, &slowLayers{slowHand{takes: time.Hour}}}, groups(), nil)
			w, ok := side.(interface {
				SaveLayersTelling(ctx context.Context, t *connector.Transfer, kv *connector.KV, progress connector.Progress, promised func()) error
			})
			require.True(t, ok)
			layout := connector.Layout{Name: "test", Blocks: 8, Groups: groups()}
			for n := range 3 {
				layout.Segments = append(layout.Segments, connector.Segment{Layer: n, Offset: int64(n) * 8, BlockStride: 1, Bytes: 1})
			}
			kv, err := connector.NewKV(layout, [][]byte{make([]byte, 24)})
			require.NoError(t, err)
			count, over, promised := &connector.LayerCount{}, make(chan error, 1), make(chan time.Time, 2)
			go func() {
				over <- w.SaveLayersTelling(t.Context(), transfer("r", ks), kv, count, func() { promised <- time.Now() })
			}()
			count.Advance(2)
			<-time.After(time.Minute)
			require.Empty(t, promised)
			final := time.Now()
			count.Advance(3)
			require.Equal(t, patience, (<-promised).Sub(final))
			require.NoError(t, <-over)
			require.Empty(t, promised)
			require.NoError(t, r.sched.Close())
			require.NoError(t, side.Close())
		})
	}
}
