package router

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/engine/router/policy"
)

// Cached is what an instance says about a prompt: how many tokens a request would get there without computing them, and
// from where. It is a hint: blocks may be evicted before a request comes.
type Cached struct {
	Prompt  int  // tokens of the prompt
	Engine  int  // of them in the instance itself
	Node    int  // in what the engines of its host share, beyond those
	Shared  int  // in a store that engines of several hosts share, beyond those
	Unknown bool // one of its connectors did not say in time: there may be more
}

// hit is the same for the policy. What the shared store has by itself is only known if nothing is nearer: each token is
// named once, so the store may lack those that the instance has itself.
func (c *Cached) hit() policy.Hit {
	h := policy.Hit{Engine: c.Engine, Node: c.Engine + c.Node, Shared: c.Engine + c.Node + c.Shared}
	if h.Node == 0 {
		h.Store = c.Shared
	}
	return h
}

// Limits of cache queries.
const (
	mostQueries     = 64                     // at once, to all instances together
	mostAsked       = 16                     // instances for one request
	queryPatience   = 200 * time.Millisecond // for all queries of a request, which they delay
	queryShare      = 2                      // queries for each request, in addition to the few of admission.Budget
	queryFresh      = 2 * time.Second        // how long an answer is good for other requests that begin alike
	queryPause      = 5 * time.Second        // in which an instance that failed is not asked
	mostSilent      = 8                      // queries in a row that an instance may leave without an answer before it counts as failed
	mostAnswers     = 1 << 13                // that are remembered
	maxQueryAnswer  = 64 << 10               // bytes
	cacheQueryWords = `{"cache_query":true,"block_ids":false}`

	worthAsking = 512 // bytes: a shorter prompt is computed as soon as asked about
	enoughKnown = 0.5 // the part of a prompt that an instance is known to hold, so that nobody is asked
)

// asker bounds the cache queries of a router and remembers their answers for a moment.
type asker struct {
	patience time.Duration    // negative: nobody is asked
	now      func() time.Time // of tests
	seed     maphash.Seed
	slots    chan struct{} // one for each query that runs
	budget   allowance

	mu    sync.Mutex
	known map[question]heard
}

// question is a prompt, with all else that an answer depends on, and the instance that is asked.
type question struct {
	instance int
	prompt   uint64
}

// heard is an answer, or that there was none.
type heard struct {
	cached Cached
	ok     bool
	at     time.Time
}

func newAsker(patience time.Duration) *asker {
	a := &asker{patience: patience, now: time.Now, seed: maphash.MakeSeed(), slots: make(chan struct{}, mostQueries), known: map[question]heard{}}
	a.budget.budget.Share = queryShare
	return a
}

// recall gives an answer that is not too old.
func (a *asker) recall(q question, now time.Time) (s heard, found bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	s, found = a.known[q]
	return s, found && now.Sub(s.at) < queryFresh
}

// note remembers an answer.
func (a *asker) note(q question, s heard) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.known) >= mostAnswers {
		clear(a.known)
	}
	a.known[q] = s
}

// forget drops the answers of instances that are gone.
func (a *asker) forget(places gone) {
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.DeleteFunc(a.known, func(q question, _ heard) bool {
		_, left := places[q.instance]
		return left
	})
}

// inquiry is what a request asks.
type inquiry struct {
	prompt uint64 // the hash of all that an answer depends on
	body   []byte
}

// inquiry makes what a request asks. The API key is part of the hash: nobody learns what others have.
func (a *asker) inquiry(c *call) *inquiry {
	var h maphash.Hash
	h.SetSeed(a.seed)
	scope, prompt := c.body.prompt()
	for _, part := range [][]byte{[]byte(c.path), []byte(c.header.Get("Authorization")), scope, prompt} {
		maphash.WriteComparable(&h, len(part))
		_, _ = h.Write(part) // never fails
	}
	body := c.body.forPrefill()
	body["kv_transfer_params"] = json.RawMessage(cacheQueryWords)
	return &inquiry{h.Sum64(), body.encode()}
}

// asked is an instance that may be asked, with all of its places: one that does both parts has two.
type asked struct {
	target
	places []int
}

// askAround asks instances what they have of the request's prompt if none is known to have half of it: after the router
// has started again, for a branch that it has not seen, and where others have sent the prompt. The request waits for the
// answers, but not for long. What they say counts for this request, and the history learns it for those that follow.
func (c *call) askAround(ctx context.Context, q *policy.Request) {
	a := c.router.asker
	if a.patience < 0 {
		return
	}
	a.budget.request()
	list := c.router.pool.toAsk(q, a.now())
	if len(list) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, a.patience)
	defer cancel()
	what, answers := a.inquiry(c), make([]*Cached, len(list))
	var tasks sync.WaitGroup
	for n, in := range list {
		tasks.Go(func() {
			cached, result := c.askCache(ctx, in, what)
			c.router.metrics.queries.WithLabelValues(result).Inc()
			if result == "answered" || result == "remembered" {
				answers[n] = &cached
			}
		})
	}
	tasks.Wait()
	c.router.pool.told(q, list, answers)
}

// askCache asks an instance, unless its answer is remembered; result says how that went, as a label.
func (c *call) askCache(ctx context.Context, t *asked, what *inquiry) (cached Cached, result string) {
	a, q := c.router.asker, question{t.index, what.prompt}
	if s, found := a.recall(q, a.now()); found {
		if !s.ok {
			return Cached{}, "unanswered"
		}
		return s.cached, "remembered"
	}
	if !a.budget.allow() {
		return Cached{}, "limited"
	}
	select {
	case a.slots <- struct{}{}:
		defer func() { <-a.slots }()
	default:
		return Cached{}, "limited"
	}
	cached, err := c.sendQuery(ctx, t.target, what)
	if errors.Is(ctx.Err(), context.Canceled) {
		return Cached{}, "unanswered" // the client left: nothing is known of the instance
	}
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", errTooSlow, err)
	}
	a.note(q, heard{cached, err == nil, a.now()})
	c.router.pool.queried(t, err, a.now())
	if err == nil {
		return cached, "answered"
	}
	c.router.config.Log.Debug("cache query failed", "id", c.id, "instance", t.url.String(), "err", err)
	return Cached{}, "unanswered"
}

// Why a query has no answer though the instance may answer others.
var (
	errRefused = errors.New("the query is refused") // for its prompt, model, key or salt
	errTooSlow = errors.New("no answer in time")    // for which the prompt may be too long
)

// sendQuery makes one cache query.
func (c *call) sendQuery(ctx context.Context, t target, what *inquiry) (Cached, error) {
	defer c.router.pool.asks(t.index, t.url, cacheQuery)()
	resp, err := c.send(ctx, t, what.body)
	if err != nil {
		return Cached{}, err
	}
	defer resp.Body.Close()
	got, err := whole(resp, maxQueryAnswer)
	switch {
	case resp.StatusCode >= 400 && resp.StatusCode < 500 && resp.StatusCode != http.StatusTooManyRequests:
		return Cached{}, fmt.Errorf("%w: HTTP %d", errRefused, resp.StatusCode)
	case err != nil:
		return Cached{}, err
	case got.status != http.StatusOK:
		return Cached{}, fmt.Errorf("status %d", got.status)
	}
	cached, err := parseCached(got.body)
	if err == nil && cached.Prompt > c.size+policy.MaxTemplate {
		return Cached{}, fmt.Errorf("%w that makes sense: %+v", errNoCached, cached)
	}
	return cached, err
}

// errNoCached says that an instance did not answer what it has.
var errNoCached = errors.New("the answer to a cache query says nothing")

// parseCached reads the answer to a cache query.
func parseCached(body []byte) (Cached, error) {
	type scope struct {
		Tokens  int  `json:"cached_tokens"`
		Unknown bool `json:"unknown"`
	}
	var a struct {
		Usage struct {
			Prompt int `json:"prompt_tokens"`
		} `json:"usage"`
		Params struct {
			Cache *struct {
				Engine scope `json:"engine"`
				Node   scope `json:"node"`
				Shared scope `json:"shared"`
			} `json:"kvport_cache"`
		} `json:"kv_transfer_params"`
	}
	if err := json.Unmarshal(body, &a); err != nil {
		return Cached{}, fmt.Errorf("the answer to a cache query: %w", err)
	}
	in := a.Params.Cache
	if in == nil {
		return Cached{}, errNoCached
	}
	c := Cached{
		Prompt: a.Usage.Prompt, Engine: in.Engine.Tokens, Node: in.Node.Tokens, Shared: in.Shared.Tokens,
		Unknown: in.Engine.Unknown || in.Node.Unknown || in.Shared.Unknown,
	}
	rest := c.Prompt
	for _, n := range []int{c.Engine, c.Node, c.Shared} {
		if rest -= n; n < 0 || rest < 0 {
			return Cached{}, fmt.Errorf("%w that makes sense: %+v", errNoCached, c)
		}
	}
	return c, nil
}

// toAsk lists instances that may be asked what they have of a prompt, unless enough is known of it: those that say that
// they answer, since those of other makers would generate, and whose events say nothing.
func (p *pool) toAsk(r *policy.Request, now time.Time) (list []*asked) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.filter(r, nil)
	byURL := map[string]*asked{}
	for i, u := range p.urls {
		k := &p.known[i]
		if u == nil || k.fit == nil || !k.fit.answers || now.Before(k.muted) || r.Standing(i) >= policy.Out ||
			slices.ContainsFunc(r.Held, func(h policy.Held) bool { return h.Place == i }) {
			continue
		}
		in := byURL[placeOf(u)]
		if in == nil {
			in = &asked{target: target{index: i, role: p.table.instances[i].role, url: u, life: p.lives[i].ctx}}
			byURL[placeOf(u)] = in
			list = append(list, in)
		}
		in.places = append(in.places, i)
	}
	if len(list) == 0 || p.policy.Known(r) >= enoughKnown {
		return nil
	}
	if len(list) > mostAsked {
		rand.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
		list = list[:mostAsked]
	}
	return list
}

// told takes note of what instances answered; nil: nothing.
func (p *pool) told(r *policy.Request, list []*asked, answers []*Cached) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for n, cached := range answers {
		if cached == nil {
			continue
		}
		if len(r.Held) == 0 { // else the tokens are known
			r.Tokens = cached.Prompt
		}
		for _, i := range list[n].places {
			if u := p.urls[i]; u == nil || placeOf(u) != placeOf(list[n].url) { // it has left
				continue
			}
			r.Held = append(r.Held, policy.Held{Place: i, Hit: cached.hit(), Sure: !cached.Unknown})
			p.policy.Told(&r.Prompt, i, cached.hit(), cached.Prompt)
		}
	}
}

// queried takes note of how a query went. An instance that failed is not asked for a while; one client's queries must not
// keep those of others away.
func (p *pool) queried(in *asked, err error, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, i := range in.places {
		k := &p.known[i]
		if !errors.Is(err, errTooSlow) {
			k.silent = 0
		} else if k.silent++; k.silent < mostSilent {
			continue
		}
		if err != nil && !errors.Is(err, errRefused) {
			k.muted = now.Add(queryPause)
		}
	}
}

// asksForCache reports whether a client's request is a cache query. It would be answered with tokens here.
func (f fields) asksForCache() bool {
	var p struct {
		Query bool `json:"cache_query"`
	}
	return json.Unmarshal(f["kv_transfer_params"], &p) == nil && p.Query
}
