package mutants

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/kvport/kvport/connector"
)

// partsOf are the sizes of a block's parts.
func partsOf(l *connector.Layout) (sizes []int64) {
	for _, s := range l.Segments {
		if s.Group == 0 {
			sizes = append(sizes, s.Bytes)
		}
	}
	return sizes
}

func reshapeMutants() []Mutant {
	return []Mutant{
		pdMutant("a consumer that offers what comes behind the common tokens", "reshape-offer", pdFaults{offersAll: true}),
		pdMutant("a consumer that takes the numbers of slots for those of blocks", "reshape-blocks", pdFaults{sameNumbers: true}),
		pdMutant("a consumer whose numbers of blocks have six bits", "reshape-blocks", pdFaults{sixBits: true}),
		pdMutant("a consumer that leaves out the last part of a block", "reshape-blocks", pdFaults{noDigests: true}),
		pdMutant("a consumer that looks for whole blocks where its memory for them would have them", "reshape-blocks", pdFaults{ownLayout: true}),
		pdMutant("a consumer that reads at most two ranks of its producer", "reshape-ranks", pdFaults{twoRanks: true}),
		pdMutant("ranks that read the producer's rank of their own number", "reshape-both", pdFaults{ownNumber: true}),
		pdMutant("a consumer that reads from the first block on", "reshape-part", pdFaults{fromStart: true}),
		pdMutant("a consumer that reads blocks of other sizes", "reshape-refused", pdFaults{unchecked: true}),
		pdMutant("a consumer that says nothing of what it lacks", "reshape-named", pdFaults{hidesMissing: true}),
		pdMutant("a producer that counts calls", "reshape-once", pdFaults{countsCalls: true}),
		pdMutant("a producer that serves a fetched hold in another shape", "reshape-consumed", pdFaults{keepsConsumed: true}),
	}
}

// Reshape implements connector.Reshaper.
func (w *pdWorker) Reshape(ctx context.Context, t *connector.Transfer, source connector.Source, kv *connector.KV) error {
	var from pdTicket
	if err := json.Unmarshal(t.Ticket, &from); err != nil {
		return errPDGone("ticket", err)
	}
	n, size := w.node, kv.Layout().Groups[0].BlockTokens
	if n.tooBusy() {
		return fmt.Errorf("other calls are under way: %w", connector.ErrBusy)
	}
	if n.otherShape(&from) {
		return fmt.Errorf("the first producer has other blocks: %w", connector.ErrIncompatible)
	}
	if fits := from.World == source.World && from.Size == size && slices.Equal(from.Parts, partsOf(kv.Layout())); !fits && !n.unchecked {
		return fmt.Errorf("blocks of %d tokens on %d ranks with parts of %v: %w", from.Size, from.World, from.Parts, connector.ErrIncompatible)
	}
	c, err := n.dial(ctx, &from)
	if err != nil {
		return err
	}
	defer c.close()
	if n.endsCut {
		defer func() {
			if ctx.Err() != nil {
				_ = n.tellEnd(&from) //nolint:contextcheck // the fault
			}
		}()
	}
	if err := w.readBlocks(ctx, c, &pdRead{t, source.Rank, kv, from.Parts}); !pdNames(err) {
		return err
	} else if _, gone := c.ask(ctx, pdQuestion{Rank: w.env.Rank, Done: true, Reshaped: true, Last: source.Last}); gone != nil || !n.hidesMissing {
		return cmp.Or(gone, err)
	}
	return nil
}

// pdNames says whether a call is over: an error names blocks, if there is one.
func pdNames(err error) bool { return err == nil || errors.As(err, new(*connector.BlockError)) }

// pdRead is what is read from one rank.
type pdRead struct {
	t     *connector.Transfer
	rank  int
	kv    *connector.KV
	parts []int64
}

// readBlocks reads whole blocks. Its error names those that are not there.
func (w *pdWorker) readBlocks(ctx context.Context, c *pdConn, r *pdRead) error {
	n, t, size := w.node, r.t, r.kv.Layout().Groups[0].BlockTokens
	failed := &connector.BlockError{Err: fmt.Errorf("the producer does not hold them: %w", connector.ErrGone)}
	first := (t.From+t.Tokens+size-1)/size - len(t.Blocks)
	if n.fromStart {
		first = 0
	}
	first = n.goOn(c.from, r.rank, first, len(t.Blocks))
	for i, b := range t.Blocks {
		a, err := c.ask(ctx, pdQuestion{Rank: n.rankToRead(r.rank, w.env.Rank), Place: n.placeToRead(first+i, b), Layout: n.told(r.kv)})
		if err != nil {
			return err
		}
		if a.Gone || !n.isFor(a, b) && !n.readsOthers() {
			failed.Blocks = append(failed.Blocks, b.ID)
			continue
		}
		if n.noDigests {
			a.Data = a.Data[:int64(len(a.Data))-r.parts[len(r.parts)-1]]
		}
		w.put(r.kv, b, a.Data)
	}
	if len(failed.Blocks) > 0 {
		return failed
	}
	return nil
}

// readsOthers is a fault that does not notice that it reads other blocks.
func (f *pdFaults) readsOthers() bool { return f.fromStart || f.sixBits || f.sameNumbers }

// rankToRead is the producer's rank that a call is about, and for a fault another.
func (f *pdFaults) rankToRead(asked, own int) int {
	switch {
	case f.twoRanks:
		return min(asked, 1)
	case f.ownNumber:
		return own
	}
	return asked
}

// placeToRead is the place of the block that is wanted, and for a fault another.
func (f *pdFaults) placeToRead(place int, b connector.Block) int {
	switch {
	case f.sameNumbers:
		return int(b.ID)
	case f.sixBits:
		return place % 64
	}
	return place
}
