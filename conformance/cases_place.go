package conformance

import (
	"bytes"
	"errors"
	"slices"

	"github.com/kvport/kvport/connector"
	slot "github.com/kvport/kvport/internal/place"
)

// A connector that places its blocks, and a host that reads them in their slots.

func placeCase(id, rule, text string, body func(*placing)) Case {
	return Case{
		ID: id, Rule: rule, Text: text, Profiles: []Profile{Place}, Needs: connector.CanPlace,
		Run: rigged(connector.CanPlace, false, func(r *rig) { body(r.placing()) }),
	}
}

func placeCases() []Case {
	reset := placeCase("place-reset", "PLACE-21", "After a reset no slot is what it was.", placeReset)
	reset.Optional = true // a connector may place and have no reset, or not be emptied by one
	complete := placeCase("place-complete", "PLACE-27", "After saves, loads, evictions, what was declined and another life: a connector that says that what is placed is all there is finds nothing else.", placeComplete)
	complete.Optional = true // it need not say so
	return append([]Case{
		placeCase("place-named", "PLACE-21", "The slots that a save names hold its blocks whole, also when the blocks were there already.", placeNamed),
		placeCase("place-replaced", "PLACE-21", "A block is replaced in another use of a slot: who reads what was there reads it whole, or sees that it is gone.", placeReplaced),
		placeCase("place-layers", "PLACE-21", "A block is replaced again and again, as between two layers that a host reads, and slots are used again: who reads what was there reads it whole, or sees that it is gone.", placeLayers),
		reset,
		placeCase("place-used", "PLACE-22", "A save that names slots which were read, of any number, is a save like others.", placeUsed),
		placeCase("place-loaded", "PLACE-25", "The slots that a load names hold its blocks whole, and it takes any number of a slot that was read.", placeLoaded),
		placeCase("place-next-life", "PLACE-21", "What the next life writes to slots in which it found blocks is another use of them: who read on between the lives sees that.", placeNextLife),
		placeCase("place-message", "PLACE-22", "What was placed is matched and loaded by calls, too.", placeMessage),
		complete,
	}, lendCases()...)
}

// placing is an engine whose host reads the arena.
type placing struct {
	*engine
	host *slot.Host
}

func (r *rig) placing() *placing {
	r.Helper()
	return r.closed(setup{}).place(0)
}

// place has a host read the arena of an engine whose connector has had that many lives, and opens its sides.
func (e *engine) place(lives uint64) *placing {
	e.Helper()
	largest := int64(0)
	for g := range e.env.Layout.Groups {
		largest = max(largest, e.env.Layout.BlockBytes(uint16(g)))
	}
	g := slot.Fit(int64(len(e.env.Arena)), largest, connector.MaxSlots)
	if g.Slots == 0 {
		e.Errorf("a connector that can %v asks for an arena of %d bytes, which holds no block", connector.CanPlace, len(e.env.Arena))
		e.FailNow()
	}
	arena, err := slot.Private(e.env.Arena[:g.ArenaBytes()]) // its words are accessed in turns
	e.must(err, "arena")
	p := &placing{engine: e}
	p.host, err = slot.NewReader(arena, g)
	e.must(err, "host")
	p.host.Draw(lives << 40)
	opening, err := p.host.Reopen()
	e.must(err, "open the arena")
	e.env.Placement = &connector.Placement{Slots: g.Slots, SlotBytes: largest, Epoch: opening.Epoch, Serial: p.host.Draw(1 << 40)}
	e.openAll()
	return p
}

func (p *placing) placer() connector.Placer {
	p.Helper()
	w, ok := connector.As[connector.Placer](p.workers[0])
	if !ok {
		p.Errorf("Info has %v, and the worker side is not a connector.Placer", connector.CanPlace)
		p.FailNow()
	}
	return w
}

// savePlaced saves what lies in the blocks, and learns the slots that are named.
func (p *placing) savePlaced(replace bool, used []uint32, bs ...connector.Block) []uint32 {
	p.Helper()
	t := transfer(bs)
	t.Replace = replace
	slots, err := p.placer().SavePlaced(p.Context(), &t, p.kv[0], used)
	p.must(err, "SavePlaced")
	p.learn("a save", slots)
	return slots
}

// loadPlaced loads blocks, and learns the slots that are named.
func (p *placing) loadPlaced(used []uint32, bs ...connector.Block) {
	p.Helper()
	t := transfer(bs)
	slots, err := p.placer().LoadPlaced(p.Context(), &t, p.kv[0], used)
	p.must(err, "LoadPlaced")
	p.learn("a load", slots)
}

func (p *placing) learn(who string, slots []uint32) {
	p.Helper()
	for _, s := range slots {
		if err := p.host.Notice(&slot.Notice{Slots: []slot.Slot{slot.Slot(s)}}, 0); err != nil {
			p.Errorf("slot %d, which %s has named: %v", s, who, err)
		}
	}
}

// find is where a block lies.
func (p *placing) find(b connector.Block) (slot.Ref, error) {
	refs, err := p.host.Find([]connector.StoreKey{connector.NewStoreKey(b.Key, p.env.Shape, b.Group, connector.Shard{World: 1})}, 0)
	if err != nil {
		return slot.Ref{}, err
	}
	return refs[0], nil
}

// read copies what lies in a slot. An error says that it is gone.
func (p *placing) read(ref slot.Ref) ([]byte, error) {
	pin, err := p.host.Pin(ref)
	if err != nil {
		return nil, err
	}
	b := bytes.Clone(pin.Bytes())
	return b, pin.Release(0)
}

// bytesOf are those of a block in the cache.
func (p *placing) bytesOf(b connector.Block) []byte {
	p.Helper()
	spans, err := p.kv[0].Spans(b)
	p.must(err, "spans")
	return slices.Concat(spans...)
}

// resident fails the case unless each block lies whole in a slot.
func (p *placing) resident(bs ...connector.Block) {
	p.Helper()
	for _, b := range bs {
		ref, err := p.find(b)
		if err != nil {
			p.Errorf("block %d was moved, and no slot was named that holds it: %v", b.ID, err)
			continue
		}
		got, err := p.read(ref)
		p.must(err, "read slot %d", ref.Slot)
		if !bytes.Equal(p.bytesOf(b), got) {
			p.Errorf("slot %d does not hold what was saved of block %d", ref.Slot, b.ID)
		}
	}
}

func placeNamed(p *placing) {
	bs := blocks(0, p.keys(5)...)
	p.fill(bs...)
	first := p.savePlaced(false, nil, bs...)
	p.resident(bs...)
	more := blocks(5, p.keys(7)...)
	p.fill(more...)
	p.savePlaced(false, nil, more...)
	p.resident(slices.Concat(bs, more)...)
	p.host.Forget()
	again := p.savePlaced(false, nil, bs...)
	p.resident(bs...)
	slices.Sort(first)
	slices.Sort(again)
	if !slices.Equal(first, again) {
		p.Errorf("blocks that were known lie in slots %v now, first in %v", again, first)
	}
}

func placeReplaced(p *placing) {
	b, ref, was := p.found()
	p.replace(b, 0x5a)
	p.wasOrGone(ref, was)
}

// found saves a block and finds it: where it lies, and its bytes.
func (p *placing) found() (b connector.Block, ref slot.Ref, was []byte) {
	p.Helper()
	b = blocks(0, p.keys(1)...)[0]
	p.fill(b)
	p.savePlaced(false, nil, b)
	ref, err := p.find(b)
	p.must(err, "find")
	return b, ref, bytes.Clone(p.bytesOf(b))
}

// replace saves another version of a block, whose bytes differ in some bits.
func (p *placing) replace(b connector.Block, bits byte) {
	p.Helper()
	for _, s := range p.kv[0].Segments(b.Group) {
		for i := range p.kv[0].View(s, b.ID) {
			p.kv[0].View(s, b.ID)[i] ^= bits
		}
	}
	p.seal(p.kv[0], b)
	p.savePlaced(true, nil, b)
	p.resident(b)
}

// wasOrGone reads a slot that was found before, and fails the case unless it still holds what it held, or is seen to be gone.
func (p *placing) wasOrGone(ref slot.Ref, was []byte) {
	p.Helper()
	got, err := p.read(ref)
	switch {
	case err == nil && !bytes.Equal(was, got):
		p.Errorf("slot %d has another block's bytes, and counts as what it was", ref.Slot)
	case err != nil && !errors.Is(err, slot.ErrGone):
		p.Errorf("what was there before: %v", err)
	}
}

func placeLayers(p *placing) {
	b, ref, was := p.found()
	for turn := range 4 { // between two layers the block may be replaced more than once
		p.replace(b, 1<<turn) // other bits each time, so no version comes again
		p.wasOrGone(ref, was)
	}
}

func placeReset(p *placing) {
	resetter, ok := connector.As[connector.Resetter](p.scheduler)
	if !ok {
		p.Skipf("the connector cannot be reset")
	}
	bs := blocks(0, p.keys(4)...)
	p.fill(bs...)
	p.savePlaced(false, nil, bs...)
	emptied, err := resetter.Reset(p.Context())
	p.must(err, "reset")
	if !emptied {
		p.Skipf("the connector cannot be emptied")
	}
	for _, b := range bs {
		if ref, err := p.find(b); err == nil {
			p.Errorf("slot %d still holds block %d after a reset", ref.Slot, b.ID)
		}
	}
	p.savePlaced(false, nil, bs...)
	p.resident(bs...)
}

func placeUsed(p *placing) {
	bs := blocks(0, p.keys(3)...)
	p.fill(bs...)
	slots := p.savePlaced(false, []uint32{0, 1, 1 << 31}, bs...)
	more := blocks(3, p.keys(3)...)
	p.fill(more...)
	p.savePlaced(false, slices.Concat(slots, slots, []uint32{uint32(p.env.Placement.Slots - 1), uint32(p.env.Placement.Slots), 1<<32 - 1}), more...)
	p.resident(slices.Concat(bs, more)...)
}

func placeLoaded(p *placing) {
	keys := p.keys(4)
	bs, to := blocks(0, keys...), blocks(8, keys...)
	p.fill(bs...)
	slots := p.savePlaced(false, nil, bs...)
	p.host.Forget()
	p.wipe(0x11, to...)
	p.loadPlaced(slices.Concat(slots, []uint32{uint32(p.env.Placement.Slots), 1<<32 - 1}), to...)
	p.holds(to...)
	p.resident(bs...)
	p.loadPlaced(nil, to...)
	p.resident(bs...)
}

func placeMessage(p *placing) {
	keys := p.keys(6)
	bs := blocks(0, keys...)
	p.fill(bs...)
	p.savePlaced(false, nil, bs...)
	p.equal(len(keys), p.match(keys...), "blocks offered of those that were placed")
	p.whole(keys, 8)
}

// nextLife opens the connector's next life, whose host knows which of the blocks lie where, as the host before it did.
func (p *placing) nextLife(keys []connector.BlockKey) *placing {
	p.Helper()
	var known []slot.Slot
	for _, k := range keys {
		if ref, err := p.find(connector.Block{Key: k}); err == nil {
			known = append(known, ref.Slot)
		}
	}
	p.closeAll()
	i, err := p.inst.Again(p.Context())
	p.must(err, "start again")
	e := *p.engine
	e.inst, e.env.Arena = p.keep(i), i.Arena
	e.scheduler, e.workers = nil, make([]connector.Worker, len(p.workers))
	n := e.place(1)
	for _, s := range known {
		if err := n.host.Notice(&slot.Notice{Slots: []slot.Slot{s}}, 0); err != nil && !errors.Is(err, slot.ErrGone) {
			n.Errorf("slot %d in the next life: %v", s, err)
		}
	}
	return n
}

// slotNow is what lies in a slot: its header and its bytes.
func (p *placing) slotNow(s uint32) (header [16]uint64, data []byte) {
	p.Helper()
	g := slot.Geometry{Slots: p.env.Placement.Slots, SlotBytes: p.env.Placement.SlotBytes}
	arena, err := slot.Private(p.env.Arena[:g.ArenaBytes()])
	p.must(err, "arena")
	for i := range header {
		header[i] = arena.Load(headersAt + headerBytes*int64(s) + int64(8*i))
	}
	return header, bytes.Clone(arena.Bytes(g.SlotAt(slot.Slot(s)), g.SlotBytes))
}

// Where headers are, and how large one is (rule PLACE-01).
const headersAt, headerBytes = 4096, 128

func placeNextLife(p *placing) {
	type use struct {
		header [16]uint64
		data   []byte
	}
	keys := p.keys(6)
	bs := blocks(0, keys...)
	p.fill(bs...)
	was := map[uint32]use{}
	for _, s := range p.savePlaced(false, nil, bs...) {
		header, data := p.slotNow(s)
		was[s] = use{header, data}
	}
	n := p.nextLife(keys)
	for round := range 5 {
		for s, u := range was {
			header, data := n.slotNow(s)
			if header[0] == u.header[0] && (header != u.header || !bytes.Equal(data, u.data)) {
				n.Errorf("slot %d has the word that it had in the life before, %#x, and holds something else: who read it between the lives cannot tell", s, header[0])
			}
		}
		if round == 4 {
			return
		}
		more := blocks(6, n.keys(6)...)
		n.fill(more...)
		n.savePlaced(false, nil, more...)
		n.resident(more...)
	}
}

// placedAlone is an engine whose connector says that it has nothing but what it has placed.
type placedAlone struct {
	*placing
	prompts [][]connector.BlockKey // that were saved, or declined
	told    bool                   // the last answer could name slots: an error has no room for them
}

func placeComplete(p *placing) {
	if !p.info.Complete {
		p.Skipf("the connector does not say that what is placed is all that it has")
	}
	if p.info.Scope != connector.ScopeEngine {
		p.Errorf("Info says Complete with the scope %v: other engines store what this one never learns of", p.info.Scope)
	}
	a := &placedAlone{placing: p}
	for range 6 {
		a.store(1 + p.rand.IntN(slots/2))
		a.use()
		a.only()
	}
	a.store(slots) // what finds no room is declined, or pushes others out
	a.use()
	a.only()
	a.placing = p.nextLife(slices.Concat(a.prompts...))
	a.only()
	a.store(slots / 2)
	a.use()
	a.only()
}

// store saves a fresh prompt, of which blocks may be declined.
func (a *placedAlone) store(n int) {
	a.Helper()
	keys := a.keys(n)
	a.prompts = append(a.prompts, keys)
	bs := blocks(0, keys...)
	a.fill(bs...)
	t := transfer(bs)
	named, err := a.placer().SavePlaced(a.Context(), &t, a.kv[0], nil)
	if _, some := errors.AsType[*connector.BlockError](err); err != nil && !some {
		a.must(err, "SavePlaced")
	}
	a.learn("a save", named)
	a.told = err == nil
}

// use saves and loads what is there of a prompt.
func (a *placedAlone) use() {
	a.Helper()
	for _, at := range a.rand.Perm(len(a.prompts)) {
		keys := a.prompts[at]
		n := a.match(keys...)
		if n == 0 {
			continue
		}
		bs := blocks(0, keys[:min(n, len(keys))]...)
		a.fill(bs...)
		a.savePlaced(false, nil, bs...)
		a.wipe(0x11, bs...)
		a.loadPlaced(nil, bs...)
		a.holds(bs...)
		a.told = true
		return
	}
}

// only fails the case if a query by message finds what lies in no slot that was named.
func (a *placedAlone) only() {
	a.Helper()
	if !a.told {
		return
	}
	for _, keys := range a.prompts {
		qs := []connector.Query{query(keys)}
		for i := range keys {
			qs = append(qs, query(keys[i:i+1]))
		}
		for i, m := range a.ask(qs...) {
			for _, k := range qs[i].Keys[:min(m.Tokens/blockTokens, len(qs[i].Keys))] {
				if _, err := a.find(connector.Block{Key: k}); err != nil {
					a.Errorf("Info says Complete, and a query finds a block that lies in no slot that an answer has named: %v", err)
					return
				}
			}
		}
	}
}
