package router

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"net/http"
	"sync"
	"time"
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

// CacheQuery asks an instance of the pool, by its place, what it has of one request's prompt. ok is false where that is
// not known: the instance does not answer cache queries, it did not answer in time, or too many queries run.
type CacheQuery func(ctx context.Context, instance int) (c Cached, ok bool)

// Limits of cache queries.
const (
	mostQueries     = 64                     // at once, to all instances together
	queryPatience   = 200 * time.Millisecond // for one of them, which delays the request that it is for
	queryFresh      = 2 * time.Second        // how long an answer is good for other requests that begin alike
	mostAnswers     = 1 << 13                // that are remembered
	maxQueryAnswer  = 64 << 10               // bytes
	cacheQueryWords = `{"cache_query":true,"block_ids":false}`
)

// asker bounds the cache queries of a router and remembers their answers for a moment.
type asker struct {
	patience time.Duration
	seed     maphash.Seed
	slots    chan struct{} // one for each query that runs

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

func newAsker() *asker {
	return &asker{patience: queryPatience, seed: maphash.MakeSeed(), slots: make(chan struct{}, mostQueries), known: map[question]heard{}}
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
func (a *asker) forget(places map[int]bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.DeleteFunc(a.known, func(q question, _ heard) bool { return places[q.instance] })
}

// question names what a request asks an instance. The API key is part of it: nobody learns what others have.
func (a *asker) question(c *call, instance int) question {
	var h maphash.Hash
	h.SetSeed(a.seed)
	scope, prompt := c.body.prompt()
	for _, part := range [][]byte{[]byte(c.path), []byte(c.header.Get("Authorization")), scope, prompt} {
		maphash.WriteComparable(&h, len(part))
		_, _ = h.Write(part) // never fails
	}
	return question{instance, h.Sum64()}
}

// cacheQuery is how the request's prompt is asked about.
func (c *call) cacheQuery() CacheQuery {
	return func(ctx context.Context, instance int) (Cached, bool) {
		cached, result := c.askCache(ctx, instance)
		c.router.metrics.queries.WithLabelValues(result).Inc()
		return cached, result == "answered" || result == "remembered"
	}
}

// askCache asks an instance, unless its answer is remembered; result says how that went, as a label.
func (c *call) askCache(ctx context.Context, instance int) (cached Cached, result string) {
	a := c.router.asker
	t, answers := c.router.pool.answersQueries(instance)
	if !answers || c.body.several() {
		return Cached{}, "unsupported"
	}
	q := a.question(c, instance)
	if s, found := a.recall(q, time.Now()); found {
		if !s.ok {
			return Cached{}, "unanswered"
		}
		return s.cached, "remembered"
	}
	select {
	case a.slots <- struct{}{}:
		defer func() { <-a.slots }()
	default:
		return Cached{}, "limited"
	}
	ctx, cancel := context.WithTimeout(ctx, a.patience)
	defer cancel()
	cached, err := c.sendQuery(ctx, t)
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return Cached{}, "unanswered" // the client left: nothing is known of the instance
	case err != nil:
		c.router.config.Log.Debug("cache query failed", "id", c.id, "instance", t.url.String(), "err", err)
		result = "unanswered"
	default:
		result = "answered"
	}
	a.note(q, heard{cached, err == nil, time.Now()})
	return cached, result
}

// sendQuery makes one cache query.
func (c *call) sendQuery(ctx context.Context, t target) (Cached, error) {
	body := c.body.forPrefill()
	body["kv_transfer_params"] = json.RawMessage(cacheQueryWords)
	resp, err := c.send(ctx, t, body.encode())
	if err != nil {
		return Cached{}, err
	}
	defer resp.Body.Close()
	got, err := whole(resp, maxQueryAnswer)
	switch {
	case err != nil:
		return Cached{}, err
	case got.status != http.StatusOK:
		return Cached{}, fmt.Errorf("status %d", got.status)
	}
	return parseCached(got.body)
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

// answersQueries gives an instance that may be asked what it has. Those of other makers would generate.
func (p *pool) answersQueries(i int) (t target, answers bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.known[i].fit
	t = target{index: i, role: p.table.instances[i].role, url: p.urls[i], life: p.lives[i].ctx}
	return t, f != nil && f.answers && p.table.available(i)
}

// asksForCache reports whether a client's request is a cache query. It would be answered with tokens here.
func (f fields) asksForCache() bool {
	var p struct {
		Query bool `json:"cache_query"`
	}
	return json.Unmarshal(f["kv_transfer_params"], &p) == nil && p.Query
}
