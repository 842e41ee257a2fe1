package mutants

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/kvport/kvport/connector"
)

// pdPart is a segment, as far as another shape must know it.
type pdPart struct {
	Planes int   `json:"planes"`
	Heads  int   `json:"heads"`
	Bytes  int64 `json:"bytes"`
}

func partsOf(l *connector.Layout) []pdPart {
	var out []pdPart
	for _, s := range l.Segments {
		if s.Group == 0 {
			out = append(out, pdPart{s.Planes, s.Heads, s.Bytes})
		}
	}
	return out
}

func reshapeMutants() []Mutant {
	return []Mutant{
		pdMutant("a consumer that offers what comes behind the common tokens", "reshape-offer", pdFaults{offersAll: true}),
		pdMutant("a consumer that takes the numbers of small blocks for those of large ones", "reshape-blocks", pdFaults{sameNumbers: true}),
		pdMutant("ranks that all read the first heads", "reshape-ranks", pdFaults{firstHeads: true}),
		pdMutant("a consumer that asks one rank of its producer", "reshape-both", pdFaults{oneRank: true}),
		pdMutant("a consumer that fills whole blocks", "reshape-part", pdFaults{wholeBlocks: true}),
		pdMutant("a consumer that divides with a remainder", "reshape-refused", pdFaults{unchecked: true}),
		pdMutant("a consumer that takes half a block for a block", "reshape-named", pdFaults{hidesMissing: true}),
		pdMutant("a producer that waits for as many ranks as it has itself", "reshape-once", pdFaults{ownRanks: true}),
		pdMutant("a producer that serves a fetched hold in another shape", "reshape-consumed", pdFaults{keepsConsumed: true}),
	}
}

// pdReshape is one Reshape.
type pdReshape struct {
	*pdWorker
	from   pdTicket
	kv     *connector.KV
	conn   *pdConn
	cuts   []connector.Cut // of our segments that can be cut
	failed map[connector.BlockID]bool
}

// Reshape implements connector.Reshaper.
func (w *pdWorker) Reshape(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	r := &pdReshape{pdWorker: w, kv: kv, failed: map[connector.BlockID]bool{}}
	if err := json.Unmarshal(t.Ticket, &r.from); err != nil {
		return errPDGone("ticket", err)
	}
	if err := r.fit(); err != nil {
		return err
	}
	var err error
	if r.conn, err = w.node.dial(ctx, &r.from); err != nil {
		return err
	}
	defer r.conn.close()
	size, end := w.node.size, t.From+t.Tokens
	first := (end+size-1)/size - len(t.Blocks)
	for i, b := range t.Blocks {
		lo, hi := max(t.From, (first+i)*size), min(end, (first+i+1)*size)
		if w.node.wholeBlocks {
			lo, hi = (first+i)*size, min((first+i+1)*size, r.from.Tokens)
		}
		if hi > r.from.Tokens {
			r.failed[b.ID] = true
			continue
		}
		if err := r.block(ctx, b, lo, hi); err != nil {
			return err
		}
	}
	if _, err := r.conn.ask(ctx, pdQuestion{Rank: w.env.Rank, World: w.env.World, Done: true}); err != nil {
		return err
	}
	return r.missing(t)
}

// missing names the blocks that did not arrive; nil without any.
func (r *pdReshape) missing(t *connector.Transfer) error {
	if len(r.failed) == 0 || r.node.hidesMissing {
		return nil
	}
	some := &connector.BlockError{Err: fmt.Errorf("the producer does not hold all of their tokens: %w", connector.ErrGone)}
	for _, b := range t.Blocks {
		if r.failed[b.ID] {
			some.Blocks = append(some.Blocks, b.ID)
		}
	}
	return some
}

// fit makes sure that both caches are the same, cut in two ways.
func (r *pdReshape) fit() error {
	l := r.kv.Layout()
	if len(r.from.Parts) != len(l.Segments) || r.from.World < 1 || r.from.Size < 1 {
		return fmt.Errorf("%d segments on %d ranks: %w", len(r.from.Parts), r.from.World, connector.ErrIncompatible)
	}
	for i, s := range l.Segments {
		if s.Planes == 0 {
			continue
		}
		c, err := l.CutOf(i, r.env.Rank, r.env.World)
		if err != nil {
			return err
		}
		if r.node.firstHeads {
			c.Rank = 0
		}
		other := r.theirs(i, 0)
		if err := c.Fits(&other); err != nil && !r.node.unchecked {
			return err
		}
		r.cuts = append(r.cuts, c)
	}
	return nil
}

// theirs is how a producer's rank cuts a segment.
func (r *pdReshape) theirs(segment, rank int) connector.Cut {
	p := r.from.Parts[segment]
	return connector.Cut{BlockTokens: r.from.Size, Bytes: p.Bytes, Planes: p.Planes, Heads: p.Heads, Rank: rank, World: r.from.World}
}

// block fetches tokens of one of our blocks from all ranks.
func (r *pdReshape) block(ctx context.Context, b connector.Block, lo, hi int) error {
	ranks := r.from.World
	if r.node.oneRank {
		ranks = 1
	}
	for rank := range ranks {
		for place := lo / r.from.Size; place*r.from.Size < hi; place++ {
			number := place
			if r.node.sameNumbers {
				number = lo / r.node.size
			}
			a, err := r.conn.ask(ctx, pdQuestion{Rank: rank, Place: number})
			if err != nil {
				return err
			}
			if a.Gone {
				r.failed[b.ID] = true
				continue
			}
			r.pieces(a.Data, b, rank, [2]int{max(lo, place*r.from.Size), min(hi, (place+1)*r.from.Size)})
		}
	}
	return nil
}

// pieces copies tokens out of a block of a producer's rank.
func (r *pdReshape) pieces(data []byte, b connector.Block, rank int, tokens [2]int) {
	n, base := 0, int64(0)
	for segment, part := range r.from.Parts {
		from := base
		base += part.Bytes
		if part.Planes == 0 {
			continue
		}
		other := r.theirs(segment, rank)
		r.cuts[n].Pieces(&other, tokens[0], tokens[1], func(p connector.Piece) {
			if end := from + p.From + p.Len; end <= int64(len(data)) { // a fault may want more
				copy(r.kv.View(segment, b.ID)[p.At:], data[from+p.From:end])
			}
		})
		n++
	}
}
