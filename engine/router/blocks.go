package router

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"sync"

	"github.com/kvport/kvport/engine/kvevents"
	"github.com/kvport/kvport/engine/router/kvindex"
	"github.com/kvport/kvport/engine/router/policy"
)

// blocks knows which instances hold the beginning of a prompt, by the events that they publish. A nil one knows nothing
// and follows nobody.
type blocks struct {
	log     *slog.Logger
	metrics *metrics
	index   *kvindex.Index
	pool    *pool
	tokens  *promptTokens
	places  map[string]kvevents.Place // of the config, by placeOf
	resolve func(p *kvevents.Place, host string) (kvevents.Place, error)

	mu      sync.Mutex
	ctx     context.Context  //nolint:containedctx // of Run; nil: Run does not run
	sources map[string]*feed // by placeOf; a change makes another map, so that a decision can look at it without the lock
	refused map[string]bool  // instances whose place was refused, once in the log
	numbers [kvindex.Instances]bool
	turn    int // of helpers
	tasks   sync.WaitGroup
}

// feed is an instance whose events are followed.
type feed struct {
	of     *blocks
	number int // in the index
	place  kvevents.Place
	stop   context.CancelFunc

	mu    sync.Mutex
	whole bool // all that the instance has is in the index: what is not there, it does not have
}

func newBlocks(c Config, client *http.Client, p *pool, m *metrics) (*blocks, error) {
	b := &blocks{
		log: c.Log, metrics: m, pool: p, index: kvindex.New(kvindex.Config{Total: c.IndexBlocks}), tokens: newPromptTokens(client, m),
		places: map[string]kvevents.Place{}, resolve: (*kvevents.Place).Of, sources: map[string]*feed{}, refused: map[string]bool{},
	}
	for text, place := range c.Events {
		u, err := parseURL(text)
		if err == nil {
			err = place.Check()
		}
		if err != nil {
			return nil, fmt.Errorf("--kv-events: %w", err)
		}
		b.places[placeOf(u)] = place
	}
	return b, nil
}

// warnOfStrangers tells the operator about places that the config gives for URLs of which there is no instance: a URL that is
// spelled otherwise than the instance's has no effect.
func (b *blocks) warnOfStrangers() {
	b.pool.mu.Lock()
	defer b.pool.mu.Unlock()
	for _, key := range slices.Sorted(maps.Keys(b.places)) {
		_, prefills := b.pool.places[identity{prefill, key}]
		_, decodes := b.pool.places[identity{decode, key}]
		if !prefills && !decodes {
			b.log.Warn("--kv-events names no instance that is known now: its KV events are not read unless it becomes one", "instance", key)
		}
	}
}

// begin lets instances be followed until ctx ends; end waits until none is any more.
func (b *blocks) begin(ctx context.Context) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ctx = ctx
}

func (b *blocks) end() {
	if b == nil {
		return
	}
	b.mu.Lock()
	b.ctx = nil
	b.sources = map[string]*feed{}
	b.mu.Unlock()
	b.tasks.Wait()
}

// where says where the events of an instance that is well are, as it says or as the config does; nil: it has none that the
// router reads. It may look at files that the instance names, so no lock is held.
func (b *blocks) where(u *url.URL, says *fit) *kvevents.Place {
	if b == nil {
		return nil
	}
	key := placeOf(u)
	if place, configured := b.places[key]; configured {
		return &place
	}
	if says == nil || says.Events == nil {
		return nil
	}
	place, err := b.resolve(says.Events, u.Hostname())
	if err != nil {
		b.refuse(key, err)
		return nil
	}
	return &place
}

// follow follows the events of an instance; with no place it stops that.
func (b *blocks) follow(u *url.URL, place *kvevents.Place) {
	if b == nil {
		return
	}
	key := placeOf(u)
	b.mu.Lock()
	s := b.sources[key]
	b.mu.Unlock()
	if s != nil && place != nil && s.place == *place {
		return
	}
	b.leave(u)
	if place != nil {
		b.start(key, *place)
	}
}

// refuse notes a place to which the router does not go. The log has it once for each instance.
func (b *blocks) refuse(key string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.refused[key] {
		b.refused[key] = true
		b.log.Warn("KV events of an instance are not read", "instance", key, "err", err)
	}
}

// start begins to follow an instance that is not followed yet.
func (b *blocks) start(key string, place kvevents.Place) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ctx == nil || b.sources[key] != nil {
		return
	}
	s := b.enter(key, place)
	if s == nil {
		return
	}
	ctx, stop := context.WithCancel(b.ctx)
	s.stop = stop
	b.log.Info("KV events of an instance are read", "instance", key, "endpoint", place.Endpoint, "replay_endpoint", place.ReplayEndpoint)
	b.tasks.Go(func() {
		defer stop()
		subscription := kvevents.Subscription{Place: place, Sink: s, Log: b.log, Count: b.count}
		if err := subscription.Run(ctx); err != nil {
			b.log.Warn("KV events of an instance cannot be read", "instance", key, "err", err)
		}
		s.Lost()
		b.mu.Lock()
		b.numbers[s.number] = false
		b.mu.Unlock()
	})
}

// enter gives an instance that is followed from now on a number in the index; nil: as many are followed as can be
// registered. The caller holds mu.
func (b *blocks) enter(key string, place kvevents.Place) *feed {
	number := slices.Index(b.numbers[:], false)
	if number < 0 {
		return nil
	}
	s := &feed{of: b, number: number, place: place}
	b.sources, b.numbers[number] = maps.Clone(b.sources), true
	b.sources[key] = s
	return s
}

// count counts what subscriptions do.
func (b *blocks) count(what kvevents.Counted, n int) {
	b.metrics.events.WithLabelValues(string(what)).Add(float64(n))
}

// leave stops following an instance, if it is followed.
func (b *blocks) leave(u *url.URL) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if s := b.sources[placeOf(u)]; s != nil {
		s.stop()
		b.sources = maps.Clone(b.sources)
		delete(b.sources, placeOf(u))
	}
}

// forget stops following an instance that is gone, and drops what else is remembered of it.
func (b *blocks) forget(u *url.URL) {
	if b == nil {
		return
	}
	b.leave(u)
	b.tokens.mended(placeOf(u))
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.refused, placeOf(u))
}

// From implements kvevents.Sink.
func (s *feed) From(seq uint64) { s.setWhole(seq == 0) }

func (s *feed) setWhole(whole bool) {
	s.mu.Lock()
	s.whole = whole
	s.mu.Unlock()
}

// Apply implements kvevents.Sink.
func (s *feed) Apply(events []kvevents.Event) {
	r := s.of.index.Apply(s.number, events)
	if r.Unplaced+r.Full > 0 {
		s.setWhole(false)
	}
	for _, number := range r.Forgotten {
		s.of.forgotten(number)
	}
	for what, n := range map[string]int{"stored": r.Stored, "removed": r.Removed, "unplaced": r.Unplaced, "full": r.Full, "evicted": r.Evicted} {
		if n > 0 {
			s.of.metrics.blocks.WithLabelValues(what).Add(float64(n))
		}
	}
	s.of.metrics.indexed.Set(float64(s.of.index.Blocks()))
}

// forgotten notes that the index has nothing of an instance any more, since others needed the room.
func (b *blocks) forgotten(number int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for key, s := range b.sources {
		if s.number == number {
			s.setWhole(false)
			b.log.Warn("KV events of an instance are forgotten, since the index is full and others have less: a greater --kv-index-blocks holds more", "instance", key)
		}
	}
}

// Lost implements kvevents.Sink.
func (s *feed) Lost() {
	s.setWhole(false)
	s.of.index.Forget(s.number)
	s.of.metrics.indexed.Set(float64(s.of.index.Blocks()))
}

// held implements holder: how many tokens of the prompt each instance has whose events say so. An instance that is not
// listed may have more than is known of it.
func (b *blocks) held(ctx context.Context, c *call) (list []policy.Held) {
	b.mu.Lock()
	sources := b.sources
	b.mu.Unlock()
	if len(sources) == 0 {
		return nil
	}
	tokens := b.tokens.of(ctx, c, b.helper(sources))
	if tokens == nil {
		return nil
	}
	c.tokens = len(tokens)
	prompt := kvindex.Prompt{Tokens: tokens}
	_ = json.Unmarshal(c.body["cache_salt"], &prompt.Salt) // an instance will refuse what is not a text
	_ = json.Unmarshal(c.body["model"], &prompt.Model)
	return b.holding(prompt, sources, c.foreign())
}

// holding is held for a prompt that is known in tokens. The salts of a foreign one are those of tenants, which events do not
// have.
func (b *blocks) holding(prompt kvindex.Prompt, sources map[string]*feed, foreign bool) []policy.Held {
	prompt.Tokens = prompt.Tokens[:len(prompt.Tokens)-1] // engines compute the last one whatever they have
	var has [kvindex.Instances]*kvindex.Held
	found := b.index.Prefix(&prompt)
	for i := range found {
		has[found[i].Instance] = &found[i]
	}
	all := make([]policy.Held, 0, len(sources))
	b.pool.mu.Lock()
	defer b.pool.mu.Unlock()
	for i, u := range b.pool.urls {
		if u == nil {
			continue
		}
		s := sources[b.pool.known[i].at]
		if s == nil {
			continue
		}
		s.mu.Lock()
		whole := s.whole && !foreign // events have the salts of tenants, so no hit says nothing
		s.mu.Unlock()
		if h := has[s.number]; h != nil {
			all = append(all, policy.Held{Place: i, Hit: policy.Hit{Engine: h.Own, Node: h.Node, Shared: h.Shared, Store: h.Store}})
		} else if whole {
			all = append(all, policy.Held{Place: i})
		}
	}
	if len(all) == 0 {
		return nil // nothing is known
	}
	return all
}

// helper is an instance that can be asked for the tokens of a text, one after the other: all that are followed have the same
// model. One that is full would refuse. Without a URL there is none.
func (b *blocks) helper(sources map[string]*feed) target {
	p := b.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	var list []int
	for i, u := range p.urls {
		if at := p.known[i].at; u != nil && sources[at] != nil && p.table.available(i) && !p.isFull(i) && !b.tokens.ails(at) {
			list = append(list, i)
		}
	}
	if len(list) == 0 {
		return target{}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.turn++
	i := list[b.turn%len(list)]
	return target{index: i, url: p.urls[i]}
}
