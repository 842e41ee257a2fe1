package peer

import (
	"context"

	"github.com/kvport/kvport/connector"
)

// minStage is how much is copied at least before layers are announced: the host checks what is announced, and each check has its
// start.
const minStage = 1 << 20

// Held are the blocks of a load. They stay in the buffer as they are until they are released, so that no layer of one can be
// missing, or be of another version than those that were copied before it.
type Held struct {
	items  []connector.Item
	groups []uint16 // of the items
	data   [][]byte // of the items
	frees  []func()
	pieces map[layerOf][]piece
	layers int
}

// layerOf names one layer of the blocks of a group.
type layerOf struct {
	group uint16
	layer int
}

// piece is a segment of a block: which of the block's spans it fills, and where it begins in the stored block.
type piece struct{ span, at int }

// piecesOf are the segments of a cache, by group and layer.
func piecesOf(l *connector.Layout) map[layerOf][]piece {
	out, next := map[layerOf][]piece{}, map[uint16]piece{}
	for i := range l.Segments {
		s := &l.Segments[i]
		of, p := layerOf{s.Group, s.Layer}, next[s.Group]
		out[of] = append(out[of], p)
		next[s.Group] = piece{p.span + 1, p.at + int(s.Bytes)}
	}
	return out
}

// Hold keeps the blocks of a load in the buffer, whose items these are. ok is false, and nothing is held, if one is not there or has
// another length. The caller releases what is held.
func (w *Worker) Hold(items []connector.Item, blocks []connector.Block, l *connector.Layout) (_ *Held, ok bool) {
	h := &Held{items: items, pieces: piecesOf(l), layers: l.Layers()}
	for i := range items {
		data, release, found := w.peers.memory.Hold(items[i].Key)
		if found {
			h.frees = append(h.frees, release)
		}
		if !found || len(data) != items[i].Size() {
			h.Release()
			return nil, false
		}
		h.groups, h.data = append(h.groups, blocks[i].Group), append(h.data, data)
	}
	return h, true
}

// Release lets the blocks go.
func (h *Held) Release() {
	for _, free := range h.frees {
		free()
	}
}

// Get copies the blocks: the digests first, then one layer after the other, and says which are there. Of a small load it says
// nothing, since that is over at once. An error is that of ctx.
func (h *Held) Get(ctx context.Context, arrived connector.Arrivals) error {
	copied, told := h.copy(connector.DigestLayer), false
	for n := range h.layers {
		if err := ctx.Err(); err != nil {
			return err
		}
		copied += h.copy(n)
		if last := n == h.layers-1; copied >= minStage && !last || last && told {
			arrived.Advance(n + 1)
			copied, told = 0, true
		}
	}
	return nil
}

// copy copies one layer of all blocks, and returns how many bytes that was.
func (h *Held) copy(layer int) (n int) {
	for i, data := range h.data {
		for _, p := range h.pieces[layerOf{h.groups[i], layer}] {
			n += copy(h.items[i].Spans[p.span], data[p.at:])
		}
	}
	return n
}
