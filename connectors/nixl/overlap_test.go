package nixl

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvport/kvport/connector"
)

// watcher compares what has arrived with what the producer holds, whenever layers are announced.
type watcher struct {
	t            *testing.T
	ours, theirs *connector.KV
	from, to     []connector.Block
	announced    []int
}

// Advance implements connector.Arrivals.
func (w *watcher) Advance(n int) {
	w.announced = append(w.announced, n)
	layout := w.ours.Layout()
	for i, b := range w.to {
		for _, s := range w.ours.Segments(b.Group) {
			if layer := layout.Segments[s].Layer; layer < n { // the digests too
				require.Equal(w.t, w.theirs.View(s, w.from[i].ID), w.ours.View(s, b.ID), "block %d, layer %d of %d", i, layer, n)
			}
		}
	}
}

// Rule OVERLAP-01: layers are announced one after the other where each is a stage, all at once where they are small, and not
// at all where the producer writes.
func TestLoadLayers(t *testing.T) {
	libDir(t)
	defer goleak.VerifyNone(t)
	for name, test := range map[string]struct {
		mode  string
		stage uint64
		want  []int
	}{
		"each layer": {modePull, 1, []int{1, 2, 3}}, "small": {modePull, minStage, []int{3}}, "push": {modePush, 1, nil},
	} {
		t.Run(name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(5, 6))
			p, d := open(t, connector.RoleProducer, Config{}, nil), open(t, connector.RoleConsumer, Config{Mode: test.mode}, nil)
			d.w.(*worker).rank.stageBytes = test.stage
			for i := range 8 {
				n := 2 + rng.IntN(8)
				theirs, hold := p.finish(rng, byte(i), n)
				ours := run(rng, byte(i), n)
				w := &watcher{t: t, ours: d.kv, theirs: p.kv, from: theirs, to: ours}
				load := &connector.Transfer{Request: "r", Tokens: tokens(n), Blocks: ours, Ticket: hold.Ticket}
				require.NoError(t, d.w.(connector.LayerLoader).LoadLayers(t.Context(), load, d.kv, w))
				require.Equal(t, test.want, w.announced)
				require.Equal(t, p.bytes(theirs), d.bytes(ours))
				p.fetched(hold.ID)
			}
		})
	}
}

// Rule OVERLAP-01: a load that lacks a block announces nothing.
func TestLoadLayersLacks(t *testing.T) {
	libDir(t)
	t.Cleanup(func() { goleak.VerifyNone(t) }) // after the sides are closed
	rng := rand.New(rand.NewPCG(7, 8))
	p, d := open(t, connector.RoleProducer, Config{}, nil), open(t, connector.RoleConsumer, Config{Mode: modePull}, nil)
	d.w.(*worker).rank.stageBytes = 1
	theirs, hold := p.finish(rng, 1, 4)
	ours := run(rng, 1, 4)
	ours[1].Key[5]++
	w := &watcher{t: t, ours: d.kv, theirs: p.kv, from: theirs, to: ours}
	load := &connector.Transfer{Request: "r", Tokens: tokens(4), Blocks: ours, Ticket: hold.Ticket}
	var some *connector.BlockError
	require.ErrorAs(t, d.w.(connector.LayerLoader).LoadLayers(t.Context(), load, d.kv, w), &some)
	require.Equal(t, []connector.BlockID{ours[1].ID}, some.Blocks)
	require.Empty(t, w.announced)
}
