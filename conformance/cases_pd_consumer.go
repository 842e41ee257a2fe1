package conformance

import (
	"bytes"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

// What hurts where blocks arrive: a write that comes after its load has returned lands in another
// request's block, and a block that did not arrive is taken for one that did.

func pdConsumerCases() []Case {
	return []Case{
		pdCase("pd-exact", "PD-11", "A load writes its blocks and nothing else.", PDConsumer, pdExact),
		pdCase("pd-slots", "PD-11", "Blocks arrive in the slots that the consumer has chosen.", PDConsumer, pdSlots),
		pdCase("pd-part", "PD-11", "A consumer that has the first blocks loads the others.", PDConsumer, pdPart),
		pdCase("pd-other-prompt", "PD-12", "By its ticket another prompt gets only the blocks that both prompts share.", PDConsumer, pdOtherPrompt),
		pdCase("pd-named", "PD-12", "Blocks that the hold does not have are named.", PDConsumer, pdNamed),
		pdCase("pd-cancel", "PD-13", "Loads that are cancelled at random moments write nothing after they have returned.", PDConsumer, pdCancel),
		pdCase("pd-at-once", "PD-14", "Two loads of one ticket at the same time both end, and the hold ends once.", PDConsumer, pdAtOnce),
		pdCase("pd-crowd", "PD-14", "Eight requests are loaded at the same time.", PDConsumer, pdCrowd),
	}
}

func pdExact(r *rig) {
	p := r.sender(1)
	d := p.taker()
	for range 3 {
		pr := p.hand(4, 0)
		r.equal(4, d.offer(pr, 0), "blocks offered")
		for _, kv := range d.kv { // what others have there
			for id := range kv.Layout().Blocks {
				for _, s := range kv.Segments(0) {
					for i, view := 0, kv.View(s, connector.BlockID(id)); i < len(view); i++ {
						view[i] = byte(id + i)
					}
				}
			}
		}
		before := d.memory()[0]
		_, err := d.fetch(pr, loading{n: 4, after: func(to []connector.Block) {
			after := d.memory()[0]
			for _, m := range [][]byte{before, after} {
				kv, err := connector.NewKV(d.env.Layout, [][]byte{m})
				r.must(err, "copy of the cache")
				for _, b := range to {
					for _, s := range kv.Segments(b.Group) {
						clear(kv.View(s, b.ID))
					}
				}
			}
			if at := firstDifference(before, after); at >= 0 {
				r.Errorf("the load of blocks %v changed byte %d of the cache, which is in none of them", idsOf(to), at)
			}
		}})
		r.must(err, "load")
	}
}

func idsOf(bs []connector.Block) []connector.BlockID {
	ids := make([]connector.BlockID, len(bs))
	for i, b := range bs {
		ids[i] = b.ID
	}
	return ids
}

func pdSlots(r *rig) {
	p := r.sender(1)
	d := p.taker()
	for n := range 4 {
		d.mu.Lock()
		if n%2 == 0 { // falling, then scattered
			slices.Sort(d.free)
		} else {
			r.rand.Shuffle(len(d.free), func(i, j int) { d.free[i], d.free[j] = d.free[j], d.free[i] })
		}
		d.mu.Unlock()
		d.take(p.hand(5, 0))
	}
}

func pdPart(r *rig) {
	p := r.sender(1)
	d := p.taker()
	for first := 1; first < 4; first++ {
		pr := p.hand(5, 0)
		r.equal(5-first, d.offer(pr, first), "blocks offered to a consumer that has %d of 5", first)
		right, err := d.fetch(pr, loading{first: first, n: 5 - first})
		r.must(err, "load from block %d on", first)
		r.equal(5-first, right, "blocks that arrived")
		p.consumed(pr, 1)
	}
	for _, first := range []int{2, 5} {
		d.takeFrom(p.hand(5, 2), first)
	}
}

func pdOtherPrompt(r *rig) {
	p := r.sender(1)
	d := p.taker()
	pr, fresh := p.hand(4, 0), p.keys(4)
	other := &prompt{request: "other", keys: slices.Concat(pr.keys[:2], fresh[2:]), tokens: 4 * blockTokens, hold: pr.hold}
	other.blocks = blocks(0, other.keys...)
	d.try(other)
	alien := &prompt{request: "alien", keys: fresh, tokens: 4 * blockTokens, hold: pr.hold}
	alien.blocks = blocks(0, fresh...)
	d.try(alien)
	d.take(p.hand(4, 0))
}

func pdNamed(r *rig) {
	p := r.sender(1)
	d := p.taker()
	pr := p.hand(4, 0)
	long := &prompt{request: pr.request, keys: slices.Concat(pr.keys, p.keys(2)), tokens: 6 * blockTokens, hold: pr.hold}
	long.blocks = blocks(0, long.keys...)
	d.offer(long, 0)
	right, err := d.fetch(long, loading{n: 6})
	if err == nil {
		r.Errorf("a load of 6 blocks succeeds, the hold has 4")
	}
	if right > 4 {
		r.Errorf("%d blocks arrived of a hold of 4", right)
	}
}

// lateByte fills slots whose load has returned: a byte that changes was written too late.
const lateByte = 0x77

func pdCancel(r *rig) {
	p := r.sender(1)
	d := p.taker()
	pr := p.hand(6, 0)
	var cancelled []connector.Block
	for range 30 {
		if d.offer(pr, 0) < 6 {
			p.sweep()
			pr = p.hand(6, 0)
			d.offer(pr, 0)
		}
		limit := time.Duration(1+r.rand.IntN(1500)) * time.Microsecond
		var mine []connector.Block
		_, _ = d.fetch(pr, loading{n: 6, limit: limit, after: func(to []connector.Block) {
			d.wipe(lateByte, to...)
			mine = to
		}})
		d.pause(2 * time.Millisecond)
		d.unwritten(mine)
		cancelled = append(cancelled, mine...)
	}
	d.pause(aWhile)
	d.unwritten(cancelled) // a plugin that waits for a processor writes later than 2 ms
	d.take(p.hand(3, 0))
}

// unwritten checks that nothing has written to blocks since their load returned.
func (d *pd) unwritten(bs []connector.Block) {
	d.Helper()
	for rank, kv := range d.kv {
		for _, b := range bs {
			for _, s := range kv.Segments(b.Group) {
				view := kv.View(s, b.ID)
				if len(bytes.TrimLeft(view, string(rune(lateByte)))) > 0 {
					d.Errorf("rank %d, block %d: written after its load had returned", rank, b.ID)
					return
				}
			}
		}
	}
}

func pdAtOnce(r *rig) {
	p := r.sender(1)
	d := p.taker()
	for range 5 {
		pr := p.hand(4, 0)
		r.equal(4, d.offer(pr, 0), "blocks offered")
		var right [2]int
		together(2, func(i int) { right[i], _ = d.fetch(pr, loading{n: 4}) })
		if right[0] < 4 && right[1] < 4 {
			r.Errorf("neither of two loads at a time brings the hold's blocks")
		}
		p.consumed(pr, 1)
		p.sweep()
	}
	d.take(p.hand(4, 0))
}

func pdCrowd(r *rig) {
	p := r.sender(1)
	d := p.taker()
	var all []*prompt
	for range 8 {
		all = append(all, p.hand(4, 0))
	}
	p.churn()
	together(len(all), func(i int) { d.take(all[i]) })
	p.sweep()
	d.take(p.hand(4, 0))
}
