package peer

import (
	"bytes"
	"log/slog"
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
			require.True(t, w.Has(items))
			watch := &watcher{t: t, kv: kv, blocks: load.Blocks}
			require.NoError(t, w.GetLayers(t.Context(), items, load, kv.Layout(), watch))
			require.Equal(t, test.want, watch.announced)

			items[1].Key = connector.StoreKey{9} // one that is not there
			require.False(t, w.Has(items))
			watch.announced = nil
			var some *connector.ItemError
			require.ErrorAs(t, w.GetLayers(t.Context(), items, load, kv.Layout(), watch), &some)
			require.Equal(t, []int{1}, some.Items)
			require.Empty(t, watch.announced)
		})
	}
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
