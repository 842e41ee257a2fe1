package conformance

import (
	"bytes"
	"errors"

	"github.com/kvport/kvport/connector"
	slot "github.com/kvport/kvport/internal/place"
)

// A connector that lends the host empty slots ahead of saves.

func lendCases() []Case {
	cases := []Case{
		placeCase("lent", "PLACE-29", "Slots that are lent are empty, each is lent once, with a serial of its own, and no block that is offered lies there.", lent),
		placeCase("lent-found", "PLACE-32", "What the host has written into a lent slot is matched, loaded and replaced by calls like other blocks, before the connector is told, and it is not what was there after a reset.", lentFound),
		placeCase("lent-back", "PLACE-33", "Slots that are given back are lent again, and hold blocks of saves by message; a serial that means nothing is no fault.", lentBack),
	}
	for i := range cases {
		cases[i].Optional = true // a connector that places need not lend
	}
	return cases
}

// lending is an engine whose connector lends slots.
type lending struct {
	*placing
	lender connector.Lender
	next   connector.BlockID // where the next block is computed
}

// lending skips the case if the connector lends nothing.
func (p *placing) lending() *lending {
	w, ok := p.workers[0].(connector.Lender)
	if !ok || w.Lends() == 0 {
		p.Skipf("the connector lends no slots")
	}
	return &lending{placing: p, lender: w}
}

// ask asks for slots.
func (l *lending) ask(says connector.Lending) (loans []slot.Loan) {
	l.Helper()
	loan, err := l.lender.Lend(l.Context(), &says)
	l.must(err, "Lend")
	if len(loan.Slots) > says.Want {
		l.Errorf("%d slots are lent, %d were wanted", len(loan.Slots), says.Want)
	}
	for i, s := range loan.Slots {
		loans = append(loans, slot.Loan{Slot: slot.Slot(s), Serial: loan.Serial + uint64(i)})
	}
	l.learn("Lend", loan.Placed)
	return loans
}

// some asks for slots, of which there must be one.
func (l *lending) some(most int, says connector.Lending) []slot.Loan {
	l.Helper()
	says.Want = min(most, l.lender.Lends())
	loans := l.ask(says)
	if len(loans) == 0 {
		l.Errorf("the connector lends %d slots at a time, and none now", l.lender.Lends())
		l.FailNow()
	}
	return loans
}

// write computes a block for each loan and writes it there, as a host does.
func (l *lending) write(loans []slot.Loan) (bs []connector.Block) {
	l.Helper()
	for i, k := range l.keys(len(loans)) {
		b := connector.Block{Key: k, ID: l.next}
		l.next = (l.next + 1) % connector.BlockID(slots/2)
		l.fill(b)
		data := l.bytesOf(b)
		key := connector.NewStoreKey(b.Key, l.env.Shape, 0, connector.Shard{World: 1})
		save, err := l.host.Claim(loans[i], slot.Part{Key: key, Length: uint32(len(data))}, 0)
		if err != nil {
			l.Errorf("a slot that is lent: %v", err)
			l.FailNow()
		}
		copy(save.Bytes(0), data)
		if _, err := save.Publish(0); err != nil {
			l.Errorf("a slot that was lent: %v", err)
		}
		bs = append(bs, b)
	}
	return bs
}

func lent(p *placing) {
	l := p.lending()
	bs := blocks(slots/2, l.keys(4)...)
	l.fill(bs...)
	l.savePlaced(false, nil, bs...)
	loans := l.some(3, connector.Lending{})
	loans = append(loans, l.ask(connector.Lending{Want: l.lender.Lends()})...)
	if len(loans) > l.lender.Lends() {
		l.Errorf("%d slots are lent at a time, the connector says %d", len(loans), l.lender.Lends())
	}
	seen := map[slot.Slot]bool{}
	for _, loan := range loans {
		if seen[loan.Slot] {
			l.Errorf("slot %d is lent twice", loan.Slot)
			return
		}
		seen[loan.Slot] = true
	}
	for _, b := range bs {
		if ref, err := l.find(b); err == nil && seen[ref.Slot] {
			l.Errorf("slot %d is lent, and holds a block", ref.Slot)
		}
	}
	l.resident(l.write(loans[:min(len(loans), slots/2)])...)
	l.whole(keysOf(bs[:min(len(bs), l.match(keysOf(bs)...))]), 0)
}

func lentFound(p *placing) {
	l := p.lending()
	bs := l.write(l.some(6, connector.Lending{}))
	l.equal(len(bs), l.match(keysOf(bs)...), "blocks offered of those that the host has written")
	l.whole(keysOf(bs), slots/2)
	l.host.Forget()
	l.savePlaced(false, nil, bs...)
	l.resident(bs...)
	was := bytes.Clone(l.bytesOf(bs[0]))
	ref, err := l.find(bs[0])
	l.must(err, "find")
	for _, s := range l.kv[0].Segments(0) {
		for i := range l.kv[0].View(s, bs[0].ID) {
			l.kv[0].View(s, bs[0].ID)[i] ^= 0x5a
		}
	}
	l.seal(l.kv[0], bs[0])
	l.savePlaced(true, nil, bs[0])
	l.resident(bs...)
	if got, err := l.read(ref); err == nil && !bytes.Equal(was, got) || err != nil && !errors.Is(err, slot.ErrGone) {
		l.Errorf("slot %d, in which a block was replaced: %v", ref.Slot, err)
	}
	l.lentBeforeReset()
}

// lentBeforeReset resets while slots are lent.
func (l *lending) lentBeforeReset() {
	resetter, ok := connector.As[connector.Resetter](l.scheduler)
	if !ok {
		return
	}
	loans := l.some(3, connector.Lending{})
	early := l.write(loans[:len(loans)/2])
	emptied, err := resetter.Reset(l.Context())
	l.must(err, "reset")
	if !emptied {
		return
	}
	late := l.write(loans[len(loans)/2:])
	for _, b := range append(early, late...) {
		l.equal(0, l.match(b.Key), "blocks offered that are older than a reset")
		if ref, err := l.find(b); err == nil {
			l.Errorf("slot %d still holds a block that is older than a reset", ref.Slot)
		}
	}
	l.resident(l.write(l.some(3, connector.Lending{}))...)
}

// mostBack is how many serials lentBack remembers: said twice, and two more with them, they are as many as a call of Lend may have.
const mostBack = 1<<15 - 1

func lentBack(p *placing) {
	l := p.lending()
	most := min(l.lender.Lends(), mostBack)
	var back []uint64
	written := 0
	for range min(1000, 2*l.env.Placement.Slots/most+2) {
		loans := l.some(most, connector.Lending{Back: append(back, 1<<39, 0)})
		if len(loans) > 1 && written < l.env.Placement.Slots/2 { // one is written, and there is room for the save at the end
			written += len(l.write(loans[:1]))
			loans = loans[1:]
		}
		was := back
		back = nil
		for _, loan := range loans {
			back = append(back, loan.Serial)
		}
		back = append(back, was...) // again, as a host does that has not heard the answer
		back = back[:min(len(back), 4*most, mostBack)]
	}
	l.ask(connector.Lending{Back: append(back, back...)})
	bs := blocks(slots/2, l.keys(5)...)
	l.fill(bs...)
	l.savePlaced(false, nil, bs...)
	l.resident(bs...)
}
