package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvport/kvport/connector"
)

// A case of profile multi works on a connector whose config lists children under "connectors". It
// opens the connector with some of them only to see what each has.

func multiCase(id, rule, text string, body func(*composite)) Case {
	return Case{ID: id, Rule: rule, Text: text, Profiles: []Profile{MultiChildren}, Run: rigged(0, false, withChildren(body))}
}

// resetCase is one for children that can be reset by another engine.
func resetCase(id, rule, text string, body func(*composite)) Case {
	c := multiCase(id, rule, text, body)
	c.Optional = true
	return c
}

// heldCase is one for children that keep blocks for consumers.
func heldCase(id, rule, text string, body func(*composite)) Case {
	return Case{
		ID: id, Rule: rule, Text: text, Profiles: []Profile{MultiChildren}, Needs: connector.CanHold, Optional: true,
		Run: rigged(connector.CanHold, false, withChildren(body)),
	}
}

// renewedCase is one for children that renew holds.
func renewedCase(id, rule, text string, body func(*composite)) Case {
	c := heldCase(id, rule, text, body)
	c.Needs, c.Run = connector.CanLease, rigged(connector.CanLease, false, withChildren(body))
	return c
}

// layeredCase is one for children that save layer by layer.
func layeredCase(id, rule, text string, body func(*composite)) Case {
	c := heldCase(id, rule, text, body)
	c.Needs, c.Run = connector.CanLayers, rigged(connector.CanLayers, false, withChildren(body))
	return c
}

func multiCases() []Case {
	return []Case{
		multiCase("multi-engine-id", "MULTI-01", "A child with an engine_id is refused, and the error says which child it is.", multiEngineID),
		multiCase("multi-bad-list", "MULTI-01", "A config with no list, an empty list or a child twice is refused, and the error names the field.", multiBadList),
		multiCase("multi-depth", "MULTI-01", "A config nested 40 deep is refused.", multiDepth),
		multiCase("multi-first", "MULTI-02", "A block that two children have is loaded from the first.", multiFirst),
		multiCase("multi-producer", "MULTI-02", "Nothing is loaded from a child that only saves.", multiProducer),
		multiCase("multi-save-all", "MULTI-03", "Every child has what was saved.", multiSaveAll),
		multiCase("multi-consumer", "MULTI-03", "Nothing is saved to a child that only loads.", multiConsumer),
		multiCase("multi-replace", "MULTI-03", "A Save with Replace replaces the block in every child.", multiReplace),
		resetCase("multi-other-resets", "MULTI-03", "What one engine has found and another one has reset is saved to every child again.", multiOtherResets),
		multiCase("multi-compose", "MULTI-04", "The first blocks come from one child and the next from another.", multiCompose),
		multiCase("multi-alternate", "MULTI-04", "Blocks that alternate between two children make one prefix.", multiAlternate),
		multiCase("multi-gap", "MULTI-04", "An offer ends at the first block that no child has.", multiGap),
		multiCase("multi-second", "MULTI-05", "The second child loads what the first cannot, even without a Match.", multiSecond),
		multiCase("multi-nobody", "MULTI-05", "A block that no child has is named as failed, and all others are filled.", multiNobody),
		multiCase("multi-nested", "MULTI-06", "A child may itself be a connector that is made of children.", multiNested),
		heldCase("multi-tickets", "MULTI-07", "A ticket contains the tickets of all children: a consumer with any one of these children can load by it.", multiTickets),
		heldCase("multi-hold-last", "MULTI-07", "A hold ends when the hold of its last child was fetched, and not before.", multiHoldLast),
		heldCase("multi-named", "MULTI-13", "What a producer has saved to a shared store is loaded from there, although another child hands it over, too.", multiNamed),
		renewedCase("multi-renews", "MULTI-11", "A hold is renewed while a consumer that has any one of the children waits.", multiRenews),
		renewedCase("multi-renews-no-more", "MULTI-11", "A hold that the host has ended is no longer renewed, whoever waits for it.", multiRenewsNoMore),
		layeredCase("multi-layers", "MULTI-15", "Every child has what was saved layer by layer, and nothing is acknowledged before the last layer.", multiLayers),
		layeredCase("multi-layers-give-up", "MULTI-15", "The engine gives up in the middle: the save fails, and no child has the blocks.", multiLayersGiveUp),
	}
}

// composite is a connector made of children: a rig and the configs of the first two children.
type composite struct {
	*rig
	a, b map[string]json.RawMessage
}

func withChildren(body func(*composite)) func(*rig) {
	return func(r *rig) {
		var c struct {
			Connectors []map[string]json.RawMessage `json:"connectors"`
		}
		if json.Unmarshal(r.h.Config(), &c) != nil || len(c.Connectors) < 2 {
			r.Skipf("the config does not list two children under connectors")
		}
		body(&composite{r, c.Connectors[0], c.Connectors[1]})
	}
}

// child is a child's config with some fields changed.
func child(of map[string]json.RawMessage, fields ...string) map[string]json.RawMessage {
	out := map[string]json.RawMessage{}
	maps.Copy(out, of)
	for i := 0; i+1 < len(fields); i += 2 {
		quoted, _ := json.Marshal(fields[i+1]) // a string
		out[fields[i]] = quoted
	}
	return out
}

func (f *composite) configOf(children ...map[string]json.RawMessage) json.RawMessage {
	f.Helper()
	raw, err := json.Marshal(map[string][]map[string]json.RawMessage{"connectors": children})
	f.must(err, "config")
	return raw
}

// of opens an engine whose connector has the given children.
func (f *composite) of(children ...map[string]json.RawMessage) *engine {
	f.Helper()
	r := *f.rig
	r.config = f.configOf(children...)
	e := r.engine(setup{})
	f.closers, f.epoch = r.closers, r.epoch
	e.rig = f.rig
	return e
}

// refused checks that a config is refused by an error that has the given words.
func (f *composite) refused(config json.RawMessage, words ...string) {
	f.Helper()
	_, err := f.start(1, 64).Describe(f.Context(), config)
	if !errors.Is(err, connector.ErrIncompatible) {
		f.Errorf("config %.200s: got %v, want ErrIncompatible", config, err)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			f.Errorf("config %.200s: the error does not say %q: %v", config, w, err)
		}
	}
}

func multiEngineID(f *composite) {
	f.refused(f.configOf(f.a, child(f.b, "engine_id", "mine")), "connectors[1]", "engine_id")
	f.refused(f.configOf(child(f.a, "engine_id", "mine"), f.b), "connectors[0]", "engine_id")
}

func multiBadList(f *composite) {
	f.refused(json.RawMessage(`{}`), "connectors")
	f.refused(json.RawMessage(`{"connectors":[]}`), "connectors")
	f.refused(f.configOf(f.a, f.b, f.a), "connectors[2]")
}

func multiDepth(f *composite) {
	config := f.configOf(f.a)
	for range 40 {
		config = f.configOf(f.nested(config))
	}
	f.refused(config, "nested")
}

// nested makes a child of a whole config.
func (f *composite) nested(config json.RawMessage) map[string]json.RawMessage {
	name, _ := json.Marshal(f.info.Name) // a string
	out := map[string]json.RawMessage{
		"kv_connector": name, "kv_role": json.RawMessage(`"kv_both"`), "kv_connector_extra_config": config,
	}
	if limits, set := f.a["kvport"]; set { // those of a child hold for what is made of children, too
		out["kvport"] = limits
	}
	return out
}

// damaged saves other bytes than belong under the keys.
func (e *engine) damaged(bs ...connector.Block) {
	e.Helper()
	e.spoil(bs...)
	e.must(e.saveOnly(e.Context(), transfer(bs)), "save")
}

func multiFirst(f *composite) {
	a, b := f.of(f.a), f.of(f.b)
	keys := a.keys(3)
	a.save(blocks(0, keys...)...)
	b.damaged(blocks(0, keys...)...)
	both := f.of(f.a, f.b)
	f.equal(3, both.match(keys...), "blocks offered")
	to := blocks(6, keys...)
	f.must(both.load(to...), "load")
	both.holds(to...)
	turned := f.of(f.b, f.a)
	f.equal(3, turned.match(keys...), "blocks offered in the other order")
	f.must(turned.load(to...), "load in the other order")
	for _, k := range to {
		if turned.differs(k) == "" {
			f.Errorf("block %d came from the second child", k.ID)
		}
	}
}

func multiProducer(f *composite) {
	a := f.of(f.a)
	keys := a.keys(2)
	a.save(blocks(0, keys...)...)
	e := f.of(child(f.a, "kv_role", "kv_producer"), f.b)
	f.equal(0, e.match(keys...), "blocks offered from a child that only saves")
	if err := e.load(blocks(6, keys...)...); err == nil {
		f.Errorf("a child that only saves was loaded from")
	}
}

func multiSaveAll(f *composite) {
	both := f.of(f.a, f.b)
	keys := both.keys(3)
	both.save(blocks(0, keys...)...)
	f.eachHas(keys)
}

func multiOtherResets(f *composite) {
	if f.info.Scope == connector.ScopeEngine {
		f.Skipf("no other engine sees what is stored")
	}
	one, other := f.of(f.a, f.b), f.of(f.a, f.b)
	keys := one.keys(3)
	one.save(blocks(0, keys...)...)
	f.equal(len(keys), one.match(keys...), "blocks that are found")
	resetter, can := connector.As[connector.Resetter](other.scheduler)
	if !can {
		f.Skipf("the connector has no Reset")
	}
	emptied, err := resetter.Reset(f.Context())
	f.must(err, "Reset by another engine")
	if !emptied {
		f.Skipf("Reset keeps what is stored")
	}
	one.save(blocks(0, keys...)...)
	f.equal(len(keys), other.match(keys...), "blocks that another engine finds")
	f.eachHas(keys)
}

// eachHas checks that each child alone has some blocks.
func (f *composite) eachHas(keys []connector.BlockKey) {
	f.Helper()
	for i, kid := range []map[string]json.RawMessage{f.a, f.b} {
		e := f.of(kid)
		f.equal(len(keys), e.match(keys...), "blocks that child %d has", i)
		f.must(e.load(blocks(6, keys...)...), "load from child %d", i)
		e.holds(blocks(6, keys...)...)
	}
}

func multiLayers(f *composite) {
	both := f.of(f.a, f.b)
	keys := both.keys(3)
	l := both.layerBlocks(0, blocks(0, keys...)...)
	for n := range both.layers() {
		l.running("before the last layer was announced")
		both.pause(pauseOfLayer)
		f.neitherHas(keys, n)
		l.compute(n + 1)
	}
	f.must(l.result(), "save layers")
	f.eachHas(keys)
}

func multiLayersGiveUp(f *composite) {
	both := f.of(f.a, f.b)
	for n := range both.layers() - 1 {
		keys := both.keys(2)
		l := both.layerBlocks(0, blocks(0, keys...)...)
		l.compute(n)
		both.pause(pauseOfLayer)
		l.count.GiveUp()
		if l.result() == nil {
			f.Errorf("SaveLayers returned nil, the engine gave up after %d of %d layers", n, both.layers())
		}
		f.neitherHas(keys, n)
	}
}

// neitherHas fails if a child offers blocks of which only some layers were computed.
func (f *composite) neitherHas(keys []connector.BlockKey, layers int) {
	f.Helper()
	for i, kid := range []map[string]json.RawMessage{f.a, f.b} {
		f.equal(0, f.of(kid).match(keys...), "blocks that child %d has of which %d layers were computed", i, layers)
	}
}

func multiConsumer(f *composite) {
	e := f.of(f.a, child(f.b, "kv_role", "kv_consumer"))
	keys := e.keys(2)
	e.save(blocks(0, keys...)...)
	f.equal(2, f.of(f.a).match(keys...), "blocks that the child has that saves")
	f.equal(0, f.of(f.b).match(keys...), "blocks that the child has that only loads")
}

func multiReplace(f *composite) {
	both := f.of(f.a, f.b)
	keys := both.keys(2)
	both.damaged(blocks(0, keys...)...)
	both.fill(blocks(0, keys...)...)
	t := transfer(blocks(0, keys...))
	t.Replace = true
	f.must(both.saveOnly(f.Context(), t), "save with Replace")
	for i, kid := range []map[string]json.RawMessage{f.a, f.b} {
		e := f.of(kid)
		f.must(e.load(blocks(6, keys...)...), "load from child %d", i)
		e.holds(blocks(6, keys...)...)
	}
}

// spread saves each block in the child that where says: a, b, or none.
func (f *composite) spread(where string) []connector.BlockKey {
	f.Helper()
	a, b := f.of(f.a), f.of(f.b)
	keys := a.keys(len(where))
	for i, w := range where {
		switch w {
		case 'a':
			a.save(blocks(i, keys[i])...)
		case 'b':
			b.save(blocks(i, keys[i])...)
		}
	}
	return keys
}

// found matches and loads a prefix in both orders of the children.
func (f *composite) found(where string, want int) {
	f.Helper()
	keys := f.spread(where)
	for _, e := range []*engine{f.of(f.a, f.b), f.of(f.b, f.a)} {
		f.equal(want, e.match(keys...), "blocks offered where children a and b have %q", where)
		to := blocks(8, keys[:want]...)
		e.wipe(0, to...)
		f.must(e.load(to...), "load")
		e.holds(to...)
	}
}

func multiCompose(f *composite)   { f.found("aabbb", 5) }
func multiAlternate(f *composite) { f.found("abbabab", 7) }
func multiGap(f *composite)       { f.found("ab-ab", 2) }

func multiSecond(f *composite) {
	b := f.of(f.b)
	keys := b.keys(3)
	b.save(blocks(0, keys...)...)
	e := f.of(f.a, f.b)
	to := blocks(6, keys...)
	e.wipe(0, to...)
	f.must(e.load(to...), "load what only the second child has, without a Match")
	e.holds(to...)
}

func multiNobody(f *composite) {
	keys := f.spread("ab-ba")
	e := f.of(f.a, f.b)
	to := blocks(8, keys...)
	e.wipe(0, to...)
	e.failed(e.load(to...), to[2].ID)
	e.holds(to[0], to[1], to[3], to[4])
}

func multiNested(f *composite) {
	e := f.of(f.nested(f.configOf(f.a)), f.b)
	keys := e.keys(2)
	e.save(blocks(0, keys...)...)
	f.equal(2, f.of(f.a).match(keys...), "blocks that the nested child has")
	f.equal(2, f.of(f.b).match(keys...), "blocks that the other child has")
	f.equal(2, e.match(keys...), "blocks offered")
	f.must(e.load(blocks(6, keys...)...), "load")
	e.holds(blocks(6, keys...)...)
}

// produced saves a prompt, ends its request and gives the hold.
func (f *composite) produced(p *engine) (connector.Hold, []connector.BlockKey) {
	f.Helper()
	return f.producedAt(p, 0)
}

// producedAt is produced in the slots from the first on.
func (f *composite) producedAt(p *engine, first int) (connector.Hold, []connector.BlockKey) {
	f.Helper()
	keys := p.keys(3)
	p.save(blocks(first, keys...)...)
	hold := p.finish(ended("producer", blocks(first, keys...)))[0]
	if hold.ID == 0 || len(hold.Ticket) == 0 {
		f.Skipf("the children hold nothing for a consumer")
	}
	return hold, keys
}

// fetch loads by ticket into an engine with one of the children.
func (f *composite) fetch(kid map[string]json.RawMessage, hold connector.Hold, keys []connector.BlockKey) {
	f.Helper()
	d := f.of(kid)
	q := query(keys)
	q.Ticket = hold.Ticket
	f.equal(3*blockTokens, d.ask(q)[0].Tokens, "tokens offered for the ticket")
	to := blocks(6, keys...)
	d.wipe(0, to...)
	f.must(d.loadTicket(f.Context(), to, hold.Ticket), "load with the ticket")
	d.holds(to...)
}

// consumed polls for a while.
func (f *composite) consumed(p *engine, wait time.Duration) []connector.HoldID {
	f.Helper()
	ctx, cancel := context.WithTimeout(f.Context(), wait)
	defer cancel()
	ids, err := p.holder().Consumed(ctx)
	if err != nil && ctx.Err() == nil && !errors.Is(err, context.DeadlineExceeded) { // over the wire the plugin's clock may be first
		f.Errorf("consumed: %v", err)
	}
	return ids
}

func multiTickets(f *composite) {
	p := f.of(f.a, f.b)
	hold, keys := f.produced(p)
	f.fetch(f.b, hold, keys)
	f.fetch(f.a, hold, keys)
	if ids := f.consumed(p, soon); fmt.Sprint(ids) != fmt.Sprint([]connector.HoldID{hold.ID}) {
		f.Errorf("both children's holds were fetched, Consumed gave %v, want [%d]", ids, hold.ID)
	}
}

// infoOf is what a connector says that has one child.
func (f *composite) infoOf(kid map[string]json.RawMessage) connector.Info {
	f.Helper()
	info, err := f.start(1, 64).Describe(f.Context(), f.configOf(kid))
	f.must(err, "describe a child")
	return info
}

func multiNamed(f *composite) {
	holder, store := f.a, f.b
	keeps := func(kid map[string]json.RawMessage) bool { return f.infoOf(kid).Capabilities&connector.CanHold != 0 }
	if !keeps(holder) {
		holder, store = store, holder
	}
	if !keeps(holder) || keeps(store) || f.infoOf(store).Scope != connector.ScopeShared {
		f.Skipf("the children are not one that keeps blocks for consumers and a shared store")
	}
	hold, keys := f.produced(f.of(holder, store))
	from := blocks(0, keys...) // what the store has now is told apart from what the producer has
	s := f.of(store)
	s.wipe(0x5A, from...)
	t := transfer(from)
	t.Replace = true
	f.must(s.saveOnly(f.Context(), t), "save with Replace")
	for _, order := range [][]map[string]json.RawMessage{{holder, store}, {store, holder}} {
		d := f.of(order...)
		q := query(keys)
		q.Ticket = hold.Ticket
		f.equal(3*blockTokens, d.ask(q)[0].Tokens, "tokens offered for the ticket")
		to := blocks(6, keys...)
		f.must(d.loadTicket(f.Context(), to, hold.Ticket), "load with the ticket")
		for _, b := range to {
			if d.differs(b) == "" {
				f.Errorf("block %d came from the producer, which had saved it to a shared store", b.ID)
			}
		}
	}
}

func multiHoldLast(f *composite) {
	for _, kid := range []map[string]json.RawMessage{f.a, f.b} {
		if f.infoOf(kid).Capabilities&connector.CanHold == 0 {
			f.Skipf("a child keeps no blocks for consumers")
		}
		alone := f.of(kid)
		hold, _ := f.produced(alone)
		alone.end()
		if hold.Weak {
			f.Skipf("a child gives the blocks back at once, so that nothing waits for its consumer")
		}
	}
	p := f.of(f.a, f.b)
	hold, keys := f.produced(p)
	f.fetch(f.a, hold, keys)
	if ids := f.consumed(p, 100*time.Millisecond); len(ids) > 0 {
		f.Errorf("the hold is over, but one child still keeps the blocks")
	}
	f.fetch(f.b, hold, keys)
	f.equal(1, len(f.consumed(p, soon)), "holds that are over when the last child's was fetched")
	f.twoHolds(p)
}

// twoHolds has two holds open at a time: each counts its own children's parts.
func (f *composite) twoHolds(p *engine) {
	f.Helper()
	one, ofOne := f.producedAt(p, 0)
	other, ofOther := f.producedAt(p, len(ofOne))
	f.fetch(f.a, one, ofOne)
	f.fetch(f.a, other, ofOther)
	if ids := f.consumed(p, 100*time.Millisecond); len(ids) > 0 {
		f.Errorf("of two holds one child's part of each was fetched, Consumed gave %v, and the other child still keeps the blocks", ids)
	}
	f.fetch(f.b, one, ofOne)
	f.fetch(f.b, other, ofOther)
	var over []connector.HoldID
	for w := f.patience(soon); len(over) < 2 && !w.over(); {
		over = append(over, f.consumed(p, soon)...)
	}
	slices.Sort(over)
	want := []connector.HoldID{one.ID, other.ID}
	slices.Sort(want)
	if !slices.Equal(over, want) {
		f.Errorf("both children's parts of two holds were fetched, Consumed gave %v, want %v", over, want)
	}
}

// waitsFor asks for a hold's ticket as an engine with one of the children, whose request waits.
func (f *composite) waitsFor(kid map[string]json.RawMessage, hold connector.Hold, keys []connector.BlockKey) (ask func()) {
	f.Helper()
	d := f.of(kid)
	q := query(keys)
	q.Ticket = hold.Ticket
	return func() { d.ask(q) }
}

func multiRenews(f *composite) {
	p := f.of(f.a, f.b)
	for i, kid := range []map[string]json.RawMessage{f.a, f.b} {
		hold, keys := f.produced(p)
		ask := f.waitsFor(kid, hold, keys)
		for w := p.patience(soon); ; {
			ask()
			if slices.Contains(p.leases(), hold.ID) {
				break
			}
			if w.over() {
				f.Errorf("the hold is not renewed, although a consumer that has child %d waits", i)
				break
			}
		}
	}
}

func multiRenewsNoMore(f *composite) {
	p := f.of(f.a, f.b)
	hold, keys := f.produced(p)
	asks := []func(){f.waitsFor(f.a, hold, keys), f.waitsFor(f.b, hold, keys)}
	p.leases()
	p.leases(hold.ID)
	for range 3 {
		for _, ask := range asks {
			ask()
		}
		if slices.Contains(p.leases(), hold.ID) {
			f.Errorf("a hold that the host has ended is renewed")
			return
		}
	}
}
