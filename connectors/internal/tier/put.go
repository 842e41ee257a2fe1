package tier

import (
	"context"

	"github.com/kvport/kvport/connector"
)

// put is one call that writes blocks into memory. What it has written stays pinned until the call is
// over, so that it does not evict its own blocks: when it returns all are visible.
type put struct {
	store   *Store
	ctx     context.Context //nolint:containedctx // the arguments of a call, for the time of the call
	items   []connector.Item
	expires []int64 // nil: never
	errs    []error
	lowered uint32 // the blocks come from the lower tier

	pinned []uint32
	pieces []piece
	fills  []*fill
	index  []int // items of fills
}

// run writes the items. An item that somebody else is writing is looked at again afterwards: nobody
// waits while others may wait for them.
func (p *put) run() {
	todo := make([]int, len(p.items))
	for i := range todo {
		todo[i] = i
	}
	for len(todo) > 0 {
		var later []int
		var wait <-chan struct{}
		for len(todo) > 0 {
			n := min(batch, len(todo))
			busy, first := p.write(todo[:n])
			todo = todo[n:]
			if len(busy) > 0 && wait == nil {
				wait = first
			}
			later = append(later, busy...)
		}
		if wait != nil {
			select {
			case <-wait:
			case <-p.ctx.Done():
			}
		}
		todo = later
	}
	for _, id := range p.pinned {
		p.store.memory.index.Release(id)
	}
}

// write writes one batch. busy are the items that others are writing, the first of them until wait ends.
func (p *put) write(batch []int) (busy []int, wait <-chan struct{}) {
	p.pieces, p.fills, p.index = p.pieces[:0], p.fills[:0], p.index[:0]
	for _, i := range batch {
		other := p.begin(i)
		if other == nil {
			continue
		}
		if wait == nil {
			wait = other
		}
		busy = append(busy, i)
	}
	copyAll(p.pieces, p.store.o.Workers)
	for j, f := range p.fills {
		if err := p.ctx.Err(); err != nil {
			p.store.memory.abandon(f)
			p.errs[p.index[j]] = err
			continue
		}
		p.store.memory.commit(f, p.lowered)
		p.pinned = append(p.pinned, f.id)
		if p.lowered == notLowered {
			p.store.writeBehind(f.key, f.id)
		}
	}
	return busy, wait
}

// begin starts to write one item. The result is not nil if somebody else is writing it.
func (p *put) begin(i int) (wait <-chan struct{}) {
	s, it := p.store, p.items[i]
	if p.errs[i] = p.ctx.Err(); p.errs[i] != nil {
		return nil
	}
	if p.lowered == notLowered && s.threshold != nil && !s.memory.has(it.Key) && s.threshold.add(it.Key) < s.o.StoreThreshold {
		s.mem.belowThreshold.Add(1)
		p.errs[i] = ErrThreshold
		return nil
	}
	var expires int64
	if p.expires != nil {
		expires = p.expires[i]
	}
	size := it.Size()
	f, known, wait, err := s.memory.begin(it, size, expires)
	switch {
	case err != nil:
		p.errs[i] = err
	case known:
		s.mem.known.Add(1)
		if p.lowered == notLowered {
			s.memory.index.Touch(it.Key)
		}
	case wait == nil:
		p.pieces = gather(p.pieces, f.slot, it.Spans)
		p.fills, p.index = append(p.fills, f), append(p.index, i)
	}
	return wait
}
