package conformance

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvport/kvport/conformance/internal/model"
	"github.com/kvport/kvport/connector"
)

func statCases() []Case {
	return []Case{
		powerCase(Case{ID: "stat-declared", Rule: "STAT-01", Text: "Stats gives what Info declares, and nothing else."}, connector.CanStat, statDeclared),
		powerCase(Case{ID: "stat-counters", Rule: "STAT-02", Text: "Counters begin at 0 and do not go back."}, connector.CanStat, statCounters),
		powerCase(Case{ID: "stat-soon", Rule: "STAT-03", Text: "Stats answers while blocks are loaded and saved."}, connector.CanStat, statSoon),
	}
}

func eventCases() []Case {
	return []Case{
		powerCase(Case{ID: "event-stored", Rule: "EVENT-01", Text: "Blocks that were saved are reported as stored, under their keys."}, connector.CanEvents, eventStored),
		powerCase(Case{ID: "event-sequence", Rule: "EVENT-02", Text: "Events are numbered without a gap, and each is reported once."}, connector.CanEvents, eventSequence),
		powerCase(Case{ID: "event-waits", Rule: "EVENT-03", Text: "Events waits until its context is done."}, connector.CanEvents, eventWaits),
		powerCase(Case{ID: "event-cleared", Rule: "EVENT-04", Text: "What a Reset forgot is reported."}, connector.CanEvents, eventCleared),
		powerCase(Case{ID: "event-evicted", Rule: "EVENT-04", Text: "What a full connector gave up is reported."}, connector.CanEvents, eventEvicted),
	}
}

// stats asks for the numbers and checks them against what Info declares.
func (e *engine) stats() []connector.Stat {
	e.Helper()
	source, ok := connector.As[connector.StatsSource](e.scheduler)
	if !ok {
		e.Errorf("Info claims stat, the scheduler side does not have it")
		e.FailNow()
	}
	var stats []connector.Stat
	err := e.returns("Stats", soon, func(ctx context.Context) (err error) {
		stats, err = source.Stats(ctx)
		return err
	})
	e.must(err, "stats")
	if len(stats) > connector.MaxSamples {
		e.Errorf("%d stats, limit %d", len(stats), connector.MaxSamples)
	}
	declared := map[string]*connector.StatInfo{}
	for i := range e.info.Stats {
		declared[e.info.Stats[i].Name] = &e.info.Stats[i]
	}
	for i := range stats {
		info := declared[stats[i].Name]
		if info == nil {
			e.Errorf("stat %q is not in Info.Stats", stats[i].Name)
			continue
		}
		if err := info.Check(&stats[i]); err != nil {
			e.Errorf("%v", err)
		}
	}
	return stats
}

// counters are the present values of the counters, by name and labels.
func (e *engine) counters() map[string]float64 {
	e.Helper()
	out := map[string]float64{}
	for _, s := range e.stats() {
		for _, i := range e.info.Stats {
			if i.Name == s.Name && i.Kind == connector.Counter {
				for _, l := range s.Labels {
					s.Name += "," + l
				}
				out[s.Name] = s.Value
			}
		}
	}
	return out
}

func statDeclared(r *rig) {
	if len(r.info.Stats) == 0 {
		r.Errorf("Info claims stat and declares none")
	}
	if err := connector.ValidateStats(r.info.Stats); err != nil {
		r.Errorf("Info.Stats: %v", err)
	}
	e := r.engine(setup{})
	if len(e.stats()) == 0 {
		r.Errorf("Stats gives nothing")
	}
	bs := blocks(0, e.keys(3)...)
	e.save(bs...)
	r.must(e.loadSaved(bs), "load")
	e.stats()
}

// loadSaved loads blocks that were saved, by a ticket where they are found by nothing else.
func (e *engine) loadSaved(bs []connector.Block) error {
	e.Helper()
	if e.info.Capabilities&connector.CanHold == 0 || e.match(keysOf(bs)...) == len(bs) {
		return e.load(bs...)
	}
	hold := e.finish(ended("request", bs))[0]
	return e.loadTicket(e.Context(), blocks(slots/2, keysOf(bs)...), hold.Ticket)
}

func statCounters(r *rig) {
	for range 2 { // the second time in the next life of the engine
		e := r.engine(setup{})
		last := e.counters()
		for name, v := range last {
			if v != 0 {
				r.Errorf("counter %s is %v before anything happened", name, v)
			}
		}
		for range 4 {
			bs := blocks(0, e.keys(3)...)
			e.save(bs...)
			r.must(e.loadSaved(bs), "load")
			now := e.counters()
			for name, v := range last {
				if n, there := now[name]; there && n < v {
					r.Errorf("counter %s went back from %v to %v", name, v, n)
				}
			}
			last = now
		}
		e.closeAll()
	}
}

func statSoon(r *rig) {
	e := r.engine(setup{})
	ctx, cancel := context.WithCancel(r.Context())
	ended := make(chan struct{})
	keys := e.keys(4)
	e.save(blocks(0, keys...)...)
	defer func() { // also when the case gives up: its workers are closed then
		cancel()
		<-ended
	}()
	go func() { // one caller: more would keep a small machine so busy that a late answer proves nothing
		defer close(ended)
		t := transfer(blocks(0, keys...))
		for ctx.Err() == nil {
			_ = e.workers[0].Load(ctx, &t, e.kv[0])
			t.Replace = true
			_ = e.workers[0].Save(ctx, &t, e.kv[0])
		}
	}()
	for range 10 {
		e.stats()
	}
}

// news is what Events has said so far.
type news struct {
	*engine
	source connector.EventSource
	last   uint64
	stored map[connector.BlockKey]int // how often
	gone   map[connector.BlockKey]bool
	clear  bool
}

func (e *engine) news() *news {
	e.Helper()
	source, ok := connector.As[connector.EventSource](e.scheduler)
	if !ok {
		e.Errorf("Info claims events, the scheduler side does not have it")
		e.FailNow()
	}
	return &news{engine: e, source: source, stored: map[connector.BlockKey]int{}, gone: map[connector.BlockKey]bool{}}
}

// until takes events until enough says so; what it waits for is said in the report.
func (n *news) until(what string, enough func() bool) {
	n.Helper()
	ctx, cancel := context.WithTimeout(n.Context(), soon)
	defer cancel()
	for !enough() {
		events, err := n.source.Events(ctx)
		if err != nil {
			n.must(err, "waiting for the event that %s", what)
		}
		for i := range events {
			n.take(&events[i])
		}
	}
}

func (n *news) take(e *connector.BlockEvent) {
	n.Helper()
	if n.last != 0 && e.Seq != n.last+1 {
		n.Errorf("event %d follows event %d", e.Seq, n.last)
	}
	n.last = e.Seq
	if len(e.Medium) > connector.MaxMedium || e.Scope < connector.ScopeEngine || e.Scope > connector.ScopeShared {
		n.Errorf("event %d has medium %q and %v", e.Seq, e.Medium, e.Scope)
	}
	if (len(e.Keys) == 0) != (e.Kind == connector.BlocksCleared) {
		n.Errorf("event %d is %v with %d keys", e.Seq, e.Kind, len(e.Keys))
	}
	switch e.Kind {
	case connector.BlocksStored:
		for _, k := range e.Keys {
			n.stored[k]++
		}
	case connector.BlocksRemoved:
		for _, k := range e.Keys {
			n.gone[k] = true
		}
	case connector.BlocksCleared:
		n.clear = true
	default:
		n.Errorf("event %d is of %v", e.Seq, e.Kind)
	}
}

// has reports whether all blocks were reported as stored.
func (n *news) has(keys ...connector.BlockKey) bool {
	for _, k := range keys {
		if n.stored[k] == 0 {
			return false
		}
	}
	return true
}

// only fails the case if other blocks than those were reported, or one of them twice.
func (n *news) only(keys ...connector.BlockKey) {
	n.Helper()
	n.equal(len(keys), len(n.stored), "blocks reported as stored")
	for _, k := range keys {
		n.equal(1, n.stored[k], "reports that %v is stored", k)
	}
}

func eventStored(r *rig) {
	e := r.engine(setup{world: 2})
	n := e.news()
	keys := e.keys(4)
	e.save(blocks(0, keys[:3]...)...)
	n.until("3 blocks are stored", func() bool { return n.has(keys[:3]...) })
	partial := transfer(blocks(3, keys[3]))
	partial.Tokens, partial.Blocks[0].Key = 1, connector.BlockKey{}
	r.must(e.saveOnly(r.Context(), partial), "save of a partial block")
	more := e.keys(1)
	e.save(blocks(4, more...)...)
	n.until("another block is stored", func() bool { return n.has(more...) })
	n.only(append(keys[:3:3], more...)...)
}

func eventSequence(r *rig) {
	e := r.engine(setup{})
	n := e.news()
	var all []connector.BlockKey
	for i := range 5 {
		keys := e.keys(2)
		all = append(all, keys...)
		e.save(blocks(0, keys...)...)
		if i%2 == 0 { // some are fetched one by one, some together
			n.until("blocks are stored", func() bool { return n.has(keys...) })
		}
	}
	e.save(blocks(0, all...)...) // once more: they are there
	last := e.keys(1)
	e.save(blocks(12, last...)...)
	n.until("all blocks are stored", func() bool { return n.has(append(all, last...)...) })
	n.only(append(all, last...)...)
}

func eventWaits(r *rig) {
	e := r.engine(setup{})
	n := e.news()
	e.waits("Events", func(ctx context.Context) int {
		events, _ := n.source.Events(ctx)
		return len(events)
	})
}

func eventCleared(r *rig) {
	e := r.engine(setup{})
	resetter, ok := connector.As[connector.Resetter](e.scheduler)
	if !ok {
		if r.info.Capabilities&connector.CanReset == 0 {
			r.undeclared("the connector does not offer %v", connector.CanReset)
		}
		r.Skipf("Info claims reset, the scheduler side does not have it")
	}
	n := e.news()
	keys := e.keys(3)
	e.save(blocks(0, keys...)...)
	n.until("blocks are stored", func() bool { return n.has(keys...) })
	emptied, err := resetter.Reset(r.Context())
	r.must(err, "reset")
	if !emptied {
		r.Skipf("the connector does not forget its blocks")
	}
	n.until("they are gone", func() bool { return n.clear || n.gone[keys[0]] && n.gone[keys[1]] && n.gone[keys[2]] })
	clear(n.stored)
	e.save(blocks(0, keys...)...)
	n.until("they are stored again", func() bool { return n.has(keys...) })
}

// eventEvicted saves twice as many blocks as the options of the config allow, one by one.
func eventEvicted(r *rig) {
	b := r.bounding()
	if b.tiers() == 0 {
		r.undeclared("no option in the schema of the config says that it bounds all that is kept")
	}
	layout := layoutOf(&model.Shape{Ranks: 1, Slots: 6, Gaps: true, Groups: []model.Group{{Segments: 3, Bytes: 6 << 10}}})
	config, limits, err := b.set(r.config, &model.Bounds{Blocks: 6}, layout.BlockBytes(0))
	r.must(err, "config")
	e := r.closed(setup{layout: &layout, config: config})
	e.config = config
	e.openAll()
	n := e.news()
	take, end := n.streamed()
	defer end()
	var keys []connector.BlockKey
	for range 2 * limits.All {
		k := e.keys(1)
		e.fill(blocks(0, k...)...)
		err := e.saveOnly(r.Context(), transfer(blocks(0, k...)))
		if errors.Is(err, connector.ErrDeclined) { // a quota or a threshold may have it so
			continue
		}
		r.must(err, "save")
		keys = append(keys, k...)
	}
	if len(keys) == 0 {
		r.unfit("with the options of the config, each block is declined that is saved once")
	}
	n.tells(keys, take)
}

// streamed asks for events in the background, with one context for all: what an answer brings when its context has just ended is lost. take
// takes those that have come, and end ends that.
func (n *news) streamed() (take, end func()) {
	ctx, cancel := context.WithCancel(n.Context())
	come := make(chan []connector.BlockEvent)
	go func() {
		defer close(come)
		for ctx.Err() == nil {
			events, err := n.source.Events(ctx)
			if err != nil {
				return
			}
			select {
			case come <- events:
			case <-ctx.Done():
			}
		}
	}()
	take = func() {
		for {
			select {
			case events, open := <-come:
				for i := range events {
					n.take(&events[i])
				}
				if !open {
					return
				}
			default:
				return
			}
		}
	}
	return take, func() {
		cancel()
		for range come { // until nobody asks any more
		}
	}
}

// tells waits until the last of the blocks was reported as stored, and each that was is offered or was reported as gone.
func (n *news) tells(keys []connector.BlockKey, take func()) {
	n.Helper()
	queries := make([]connector.Query, len(keys))
	for i := range keys {
		queries[i] = query(keys[i : i+1])
	}
	n.eventually(soon, func() string {
		take()
		if !n.has(keys[len(keys)-1]) {
			return "the block that was saved last is not reported as stored"
		}
		stale := 0
		for i, m := range n.ask(queries...) {
			if k := keys[i]; m.Tokens == 0 && n.stored[k] > 0 && !n.gone[k] && !n.clear {
				stale++
			}
		}
		if stale > 0 {
			return fmt.Sprintf("%d of %d blocks that were reported as stored are not offered any more, and not reported as removed", stale, len(n.stored))
		}
		return ""
	})
}
