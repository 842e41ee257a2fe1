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

// byLayer is the worker side of a child that announces the layers that a test sends it.
type byLayer struct {
	hand
	steps chan int // closed: the load is over
}

// LoadLayers implements connector.LayerLoader.
func (b byLayer) LoadLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, arrived connector.Arrivals) error {
	for n := range b.steps {
		arrived.Advance(n)
	}
	return b.Load(ctx, t, kv)
}

// heard is what a composite has announced.
type heard struct{ layers []int }

// Advance implements connector.Arrivals.
func (h *heard) Advance(n int) { h.layers = append(h.layers, n) }

// layeredRig is a composite of two shelves, of which those in powers load layer by layer.
func layeredRig(t *testing.T, powers [2]bool, shelves ...*shelf) (worker connector.LayerLoader, kv *connector.KV, match func(ks []connector.BlockKey), steps [2]chan int) {
	t.Helper()
	children, scheds, workers := make([]multiconnector.Child, 2), make([]connector.Scheduler, 2), make([]connector.Worker, 2)
	for i, s := range shelves {
		children[i] = multiconnector.Child{
			Name: string(rune('A' + i)), Role: connector.RoleBoth, Patience: time.Minute, Info: connector.Info{Groups: true, Scope: connector.ScopeNode},
		}
		steps[i] = make(chan int)
		scheds[i], workers[i] = s, hand{s}
		if powers[i] {
			children[i].Info.Capabilities = connector.CanOverlap
			workers[i] = byLayer{hand{s}, steps[i]}
		}
	}
	m, err := multiconnector.New("Multi", children)
	require.NoError(t, err)
	require.NotZero(t, m.Info().Capabilities&connector.CanOverlap)
	layout := connector.Layout{Name: "test", Blocks: 8, Groups: groups()}
	for n := range 3 {
		layout.Segments = append(layout.Segments, connector.Segment{Layer: n, Offset: int64(n) * 8, BlockStride: 1, Bytes: 1})
	}
	kv, err = connector.NewKV(layout, [][]byte{make([]byte, 24)})
	require.NoError(t, err)
	r := &rig{t: t, sched: m.Scheduler(scheds, groups(), nil)}
	w := m.Worker(workers, groups(), nil)
	t.Cleanup(func() {
		require.NoError(t, r.sched.Close())
		require.NoError(t, w.Close())
	})
	loader, ok := w.(connector.LayerLoader)
	require.True(t, ok)
	return loader, kv, func(ks []connector.BlockKey) { r.match("r", ks) }, steps
}

// step is one child's announcement; 0: its load ends.
type step struct{ child, layers int }

// Rule MULTI-14: a layer is announced when every child that was asked has it, and after that no other child is asked.
func TestLoadLayersOfChildren(t *testing.T) {
	ks := keys(4)
	for name, test := range map[string]struct {
		a, b   *shelf
		powers [2]bool
		steps  []step
		heard  []int
		failed int // blocks
		asked  int // of b
	}{
		"both": {
			a: newShelf(ks[:2]...), b: newShelf(ks[2:]...), powers: [2]bool{true, true},
			steps: []step{{0, 2}, {1, 1}, {1, 3}, {1, 0}, {0, 3}, {0, 0}}, heard: []int{1, 2, 3}, asked: 2,
		},
		"one alone":         {a: newShelf(ks...), b: newShelf(), powers: [2]bool{true, false}, steps: []step{{0, 1}, {0, 0}}, heard: []int{1, 3}},
		"one without":       {a: newShelf(ks[:2]...), b: newShelf(ks[2:]...), powers: [2]bool{true, false}, steps: []step{{0, 2}, {0, 0}}, heard: []int{2, 3}, asked: 2},
		"fails, used":       {a: refusing(ks...), b: newShelf(ks...), powers: [2]bool{true, true}, steps: []step{{0, 1}, {0, 0}}, heard: []int{1}, failed: 4},
		"fails, not used":   {a: refusing(ks...), b: newShelf(ks...), powers: [2]bool{true, true}, steps: []step{{0, 0}, {1, 2}, {1, 0}}, heard: []int{2, 3}, asked: 4},
		"nobody has a part": {a: newShelf(ks[:3]...), b: newShelf(), powers: [2]bool{true, true}, steps: []step{{0, 0}, {1, 0}}, heard: nil, failed: 1, asked: 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, kv, match, steps := layeredRig(t, test.powers, test.a, test.b)
				match(ks)
				h := &heard{}
				over := make(chan error, 1)
				go func() { over <- w.LoadLayers(t.Context(), transfer("r", ks), kv, h) }()
				for _, s := range test.steps {
					synctest.Wait()
					if s.layers == 0 {
						close(steps[s.child])
					} else {
						steps[s.child] <- s.layers
					}
				}
				err := <-over
				require.Equal(t, test.heard, h.layers)
				require.Len(t, loadedOf(test.b), test.asked)
				if test.failed == 0 {
					require.NoError(t, err)
					return
				}
				require.Error(t, err)
				if some, named := err.(*connector.BlockError); named { //nolint:errorlint // the load's own
					require.Len(t, some.Blocks, test.failed)
				} else {
					require.Len(t, ks, test.failed, "all of them")
				}
			})
		})
	}
}

// refusing has blocks and does not bring them.
func refusing(ks ...connector.BlockKey) *shelf {
	s := newShelf(ks...)
	s.loadErr = connector.ErrGone
	return s
}

// A child that does not load brings no layers.
func TestOverlapOfLoadersOnly(t *testing.T) {
	child := multiconnector.Child{Name: "A", Role: connector.RoleProducer, Info: connector.Info{Capabilities: connector.CanOverlap | connector.CanReset}}
	m, err := multiconnector.New("Multi", []multiconnector.Child{child})
	require.NoError(t, err)
	require.Equal(t, connector.CanReset, m.Info().Capabilities)
}
