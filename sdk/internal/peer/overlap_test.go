package peer

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// watcher looks at what is in place whenever layers are announced.
type watcher struct {
	t         *testing.T
	kv        *connector.KV
	blocks    []connector.Block
	announced []int
	then      func(n int) // what happens to the buffer meanwhile; may be nil
}

// Advance implements connector.Arrivals.
func (w *watcher) Advance(n int) {
	w.announced = append(w.announced, n)
	for i, b := range w.blocks {
		for s, seg := range w.kv.Layout().Segments {
			if seg.Group == b.Group && seg.Layer < n { // the digests too
				require.Equal(w.t, content(i, s, int(seg.Bytes)), w.kv.View(s, b.ID), "block %d, segment %d, %d layers", i, s, n)
			}
		}
	}
	if w.then != nil {
		w.then(n)
	}
}

func content(block, segment, n int) []byte {
	return bytes.Repeat([]byte{byte(1 + 10*block + segment)}, n)
}

// Rule OVERLAP-01: what has arrived is copied layer by layer, the digests first, and announced in stages that are worth a check.
func TestGetLayers(t *testing.T) {
	for name, test := range map[string]struct {
		bytes int64
		want  []int
	}{"each layer": {1100 << 10, []int{1, 2, 3}}, "two at a time": {400 << 10, []int{2, 3}}, "small": {64, nil}} {
		t.Run(name, func(t *testing.T) {
			w, kv, items, load := filled(t, test.bytes)
			held, ok := w.Hold(items, load.Blocks, kv.Layout())
			require.True(t, ok)
			watch := &watcher{t: t, kv: kv, blocks: load.Blocks}
			require.NoError(t, held.Get(t.Context(), watch))
			held.Release()
			require.Equal(t, test.want, watch.announced)
		})
	}
}

// Rule OVERLAP-02: what happens to the buffer during a load, neither that a block is replaced in it nor that one is dropped, does
// anything to the load.
func TestGetLayersOfWhatWasThere(t *testing.T) {
	w, kv, items, load := filled(t, 1100<<10)
	memory := w.peers.memory
	other := connector.Item{Key: items[1].Key, Spans: [][]byte{make([]byte, items[1].Size())}, Replace: true}
	watch := &watcher{t: t, kv: kv, blocks: load.Blocks}
	watch.then = func(n int) {
		switch n {
		case 1:
			require.NoError(t, memory.Insert(t.Context(), []connector.Item{other}))
		case 2:
			_, err := memory.Reserve(connector.StoreKey{8}, 5<<20)
			require.ErrorIs(t, err, connector.ErrBusy, "what is held has its place")
		}
	}
	held, ok := w.Hold(items, load.Blocks, kv.Layout())
	require.True(t, ok)
	require.NoError(t, held.Get(t.Context(), watch))
	require.Equal(t, []int{1, 2, 3}, watch.announced)
	watch.then = nil
	watch.Advance(3) // every block is as it was stored
	held.Release()
	slot, err := memory.Reserve(connector.StoreKey{8}, 8<<20)
	require.NoError(t, err, "what was held can be dropped")
	require.NoError(t, slot.Done(nil))

	_, ok = w.Hold(items, load.Blocks, kv.Layout())
	require.False(t, ok, "none is there any more")
}

// Nothing is held of a load of which a block is not there, or has another length; nor does one that was cancelled announce anything.
func TestHoldsAllOrNothing(t *testing.T) {
	w, kv, items, load := filled(t, 1100<<10)
	held, ok := w.Hold(items, load.Blocks, kv.Layout())
	require.True(t, ok)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	watch := &watcher{t: t, kv: kv, blocks: load.Blocks}
	require.ErrorIs(t, held.Get(ctx, watch), context.Canceled)
	require.Empty(t, watch.announced)
	held.Release()
	for _, change := range []func(it *connector.Item){
		func(it *connector.Item) { it.Key = connector.StoreKey{9} },
		func(it *connector.Item) { it.Spans = it.Spans[1:] },
	} {
		some := slices.Clone(items)
		change(&some[1])
		_, ok := w.Hold(some, load.Blocks, kv.Layout())
		require.False(t, ok)
	}
	slot, err := w.peers.memory.Reserve(connector.StoreKey{8}, 8<<20)
	require.NoError(t, err)
	require.NoError(t, slot.Done(nil))
}

// filled is a worker whose buffer has two blocks of two groups, in a layout whose digests lie between layers.
func filled(t *testing.T, segment int64) (*Worker, *connector.KV, []connector.Item, *connector.Transfer) {
	t.Helper()
	s := newStore(pipe.Peers{Bytes: 8 << 20}, nil, slog.New(slog.DiscardHandler))
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	l := connector.Layout{Name: "test", Blocks: 2, Groups: []connector.Group{{BlockTokens: 4, Policy: connector.PolicyAll}, {BlockTokens: 4, Policy: connector.PolicyAll}}}
	offset := int64(0)
	for _, at := range []struct {
		layer int
		group uint16
	}{{2, 0}, {0, 0}, {connector.DigestLayer, 0}, {1, 0}, {0, 1}, {connector.DigestLayer, 1}, {2, 1}} {
		size := segment
		if at.layer == connector.DigestLayer {
			size = 32
		}
		l.Segments = append(l.Segments, connector.Segment{Layer: at.layer, Group: at.group, Offset: offset, BlockStride: size, Bytes: size})
		offset += 2 * size
	}
	kv, err := connector.NewKV(l, [][]byte{make([]byte, offset)})
	require.NoError(t, err)
	load := &connector.Transfer{Blocks: []connector.Block{{Key: connector.BlockKey{1}, ID: 1}, {Key: connector.BlockKey{2}, ID: 0, Group: 1}}}
	var items []connector.Item
	for i, b := range load.Blocks {
		var stored [][]byte
		for _, s := range kv.Segments(b.Group) {
			stored = append(stored, content(i, s, int(l.Segments[s].Bytes)))
		}
		key := connector.StoreKey{byte(1 + i)}
		require.NoError(t, s.memory.Insert(t.Context(), []connector.Item{{Key: key, Spans: stored}}))
		spans, err := kv.Spans(b)
		require.NoError(t, err)
		items = append(items, connector.Item{Key: key, Spans: spans})
	}
	return &Worker{side{peers: s}}, kv, items, load
}
