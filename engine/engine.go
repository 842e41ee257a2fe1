// Package engine runs a model: it takes requests, schedules them over the paged KV cache, asks the
// connector's host what it can load, and streams tokens back.
package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/kvcache"
	"github.com/kvport/kvport/engine/sample"
	"github.com/kvport/kvport/engine/sched"
	"github.com/kvport/kvport/host"
)

// Engine is one running engine. Its methods are safe for concurrent use.
//
// One goroutine, the loop, owns the scheduler, the cache and the model. Everybody else leaves it
// functions to run in the inbox and hears from it through channels.
type Engine struct {
	cfg     Config
	info    Info
	space   connector.KeySpace // of requests without salt
	metrics *metrics
	regions []*host.Region        // the cache of each rank
	host    *host.Host            // nil: no connector
	reports chan host.BlockReport // of its blocks; nil: nobody is told
	wake    chan struct{}
	loop    *loop         // to be used by its own goroutine
	done    chan struct{} // closed when the loop has ended
	once    sync.Once     // Close
	closed  error

	mu      sync.Mutex
	inbox   []func(*loop)
	live    map[connector.RequestID]*stream
	closing bool
	health  Health
}

// New starts an engine. Errors name the field of Config, or come from the connector's host. The
// caller ends the engine with Close, then closes the model.
func New(ctx context.Context, cfg Config) (*Engine, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	spec := cfg.Model.Spec()
	layout, size := host.WithDigests(cfg.Model.Layout(cfg.BlockSize, cfg.NumBlocks))
	m, err := newMetrics(cfg.Metrics)
	if err != nil {
		return nil, err
	}
	regions, ranks, err := newCaches(layout, size, max(1, spec.Ranks))
	if err != nil {
		m.set.Unregister()
		return nil, fmt.Errorf("%d blocks of %d tokens: %w", cfg.NumBlocks, cfg.BlockSize, err)
	}
	e := &Engine{
		cfg: cfg, metrics: m, regions: regions, space: connector.KeySpace{Model: spec.Weights},
		info: Info{
			Model: spec.Name, Vocab: spec.Vocab, MaxModelLen: cfg.MaxModelLen,
			BlockSize: cfg.BlockSize, NumBlocks: cfg.NumBlocks, MaxSeqs: cfg.MaxSeqs, Fit: cfg.fit(layout),
		},
		wake: make(chan struct{}, 1), done: make(chan struct{}),
		live: map[connector.RequestID]*stream{},
	}
	if err := e.openHost(ctx, layout); err != nil {
		m.set.Unregister()
		return nil, errors.Join(err, closeAll(regions))
	}
	l := newLoop(e, ranks)
	l.observe()
	e.loop = l
	go l.run()
	return e, nil
}

// newCaches makes the memory of every rank's cache and the view of it. All ranks have one layout.
func newCaches(layout connector.Layout, size int64, ranks int) (regions []*host.Region, kv []*connector.KV, err error) {
	for range ranks {
		region, err := host.NewRegion(size)
		if err != nil {
			return nil, nil, errors.Join(err, closeAll(regions))
		}
		regions = append(regions, region)
		view, err := connector.NewKV(layout, [][]byte{region.Bytes()})
		if err != nil {
			return nil, nil, errors.Join(err, closeAll(regions))
		}
		kv = append(kv, view)
	}
	return regions, kv, nil
}

func closeAll(regions []*host.Region) error {
	var errs []error
	for _, r := range regions {
		errs = append(errs, r.Close())
	}
	return errors.Join(errs...)
}

// openHost starts the connector, if there is one.
func (e *Engine) openHost(ctx context.Context, layout connector.Layout) (err error) {
	c := e.cfg.Connector
	if c == nil {
		return nil
	}
	// The host reads it too, for digests.
	if e.space.Secret, err = c.Settings.TenantSecret(); err != nil {
		return err
	}
	if e.cfg.Events != nil {
		e.reports = make(chan host.BlockReport, maxReports)
	}
	opts := host.Options{PluginPath: e.cfg.PluginPath, Log: e.cfg.Log, Metrics: e.cfg.Metrics, BlockEvents: e.reports}
	// A load of which a layer was announced has no second attempt, so the host says nothing while none is used early, nor where a load that fails ends its request.
	if e.cfg.LayerPatience > 0 && c.FailurePolicy != host.PolicyFail {
		opts.Overlap = func(uint64, connector.RequestID) bool { return e.loop.early() }
	}
	e.host, err = host.Open(ctx, c, host.Engine{
		ID: c.EngineID, Model: e.space.Model, Shape: e.cfg.shape(layout), Base: e.cfg.base(layout),
		ShapeText: e.info.Fit.ShapeText, Layout: layout, Ranks: e.regions,
		Addresses: func(id connector.RequestID, blockTokens, tokens int) []connector.BlockKey {
			return e.loop.sched.Addresses(id, blockTokens, tokens)
		},
		Tail: func(id connector.RequestID) connector.BlockKey { return e.loop.sched.Tail(id) },
	}, opts)
	if err != nil {
		return err
	}
	e.info.Connector, e.info.UnsignedPairs = e.host.Info().Name, e.host.Info().UnsignedPairs
	return nil
}

// Info says what the engine serves. Of all that it says, only the keys in Fit ever change.
func (e *Engine) Info() Info {
	info := e.info
	if e.host != nil {
		info.Fit = e.host.Fit()
	}
	return info
}

// Health says how the engine and its connector are.
func (e *Engine) Health() Health {
	e.mu.Lock()
	h := e.health
	h.Closing = e.closing
	e.mu.Unlock()
	if e.host != nil {
		state := e.host.Health()
		h.Host = &state
	}
	return h
}

// Submit starts a generation. Its outputs come on the channel, which is closed after the last one,
// the one with Reason set; a reader that falls behind gets several at once. When ctx is done the
// request ends with ReasonAbort, or ReasonStop if the cause is ErrStop. Errors wrap ErrInvalid,
// ErrTooLong, ErrOverloaded or ErrClosed; then there is no channel.
func (e *Engine) Submit(ctx context.Context, req Request) (<-chan Output, error) {
	if err := e.check(&req); err != nil {
		return nil, err
	}
	space := e.space
	space.Salt = req.Salt
	seq := sched.Request{
		ID: req.ID, Prompt: req.Prompt, MaxTokens: req.MaxTokens, Ticket: req.Ticket, Remote: req.Remote, Turn: req.Turn, Query: req.Query,
	}
	if e.cfg.PrefixCaching || e.host != nil {
		seq.Space, seq.Keys = &space, space.Keys(req.Prompt, e.cfg.BlockSize) // hashed here, off the loop
	}
	if !req.IgnoreEOS {
		seq.Stops = e.cfg.Tokenizer.Stops()
	}
	st := &stream{
		id: req.ID, params: req.Params, prompt: len(req.Prompt), since: time.Now(), out: make(chan Output, 1),
		cause: func() error { return context.Cause(ctx) }, brought: brought{any: len(req.Ticket) > 0},
	}
	if req.Query {
		st.query = e.query(&req, &seq)
	}
	if err := e.register(st); err != nil {
		return nil, err
	}
	e.metrics.await(st)
	// If ctx ends before the loop has seen the request, add notices.
	st.unwatch = context.AfterFunc(ctx, func() { e.do(func(l *loop) { l.abort(st) }) })
	e.do(func(l *loop) { l.add(st, seq) })
	return st.out, nil
}

// check refuses a request that cannot be served.
func (e *Engine) check(req *Request) error {
	if err := checkQuery(req); err != nil {
		return err
	}
	outside := func(t int32) bool { return t < 0 || int(t) >= e.info.Vocab }
	switch {
	case req.ID == "":
		return fmt.Errorf("%w: id is empty", ErrInvalid)
	case len(req.Prompt) == 0:
		return fmt.Errorf("%w: prompt is empty", ErrInvalid)
	case req.MaxTokens < 1:
		return fmt.Errorf("%w: max_tokens is %d, want at least 1", ErrInvalid, req.MaxTokens)
	case len(req.Prompt) > e.info.MaxModelLen || req.MaxTokens > e.info.MaxModelLen-len(req.Prompt):
		return fmt.Errorf("%w: prompt of %d tokens and max_tokens %d, together at most %d",
			ErrTooLong, len(req.Prompt), req.MaxTokens, e.info.MaxModelLen)
	case slices.ContainsFunc(req.Prompt, outside):
		return fmt.Errorf("%w: prompt has a token outside 0..%d", ErrInvalid, e.info.Vocab-1)
	}
	if err := req.Params.Validate(); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return nil
}

func (e *Engine) register(st *stream) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.closing:
		return ErrClosed
	case e.live[st.id] != nil:
		return fmt.Errorf("%w: id %s is in use", ErrInvalid, st.id)
	case len(e.live) >= e.cfg.MaxWaiting+e.cfg.MaxSeqs:
		return fmt.Errorf("%w: %d are waiting or running", ErrOverloaded, len(e.live))
	}
	e.live[st.id] = st
	return nil
}

// do leaves the loop a function to run between two steps.
func (e *Engine) do(f func(*loop)) {
	e.mu.Lock()
	e.inbox = append(e.inbox, f)
	e.mu.Unlock()
	select {
	case e.wake <- struct{}{}:
	default: // it will look anyway
	}
}

// Reset empties the prefix cache and the connector. Requests in flight go on with what they have.
// An error means that the connector, or part of it, still has earlier blocks.
func (e *Engine) Reset(ctx context.Context) error {
	kept := e.resetHost(ctx)
	// Only now: until the connector was empty its blocks could still come into the prefix cache.
	forgotten := make(chan struct{})
	e.do(func(l *loop) {
		l.news.clear(l.sched.Forget)
		close(forgotten)
	})
	select {
	case <-forgotten:
		return kept
	case <-e.done:
		return ErrClosed
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (e *Engine) resetHost(ctx context.Context) error {
	if e.host == nil {
		return nil
	}
	emptied, err := e.host.Reset(ctx)
	switch {
	case err != nil || emptied:
		return err
	case e.host.Info().Capabilities&connector.CanReset == 0:
		return fmt.Errorf("%w: %s cannot be reset, what it keeps for other engines (%d requests are held) ends when it is fetched or its time is over",
			ErrNotReset, e.info.Connector, e.host.Health().Held)
	}
	return fmt.Errorf("%w: %s, or a part of it that cannot be reset, still has blocks of earlier requests", ErrKept, e.info.Connector)
}

// Close refuses new requests and lets those in flight end. When ctx is done first, the rest ends with
// ErrClosed. Afterwards the connector is gone, the cache is unmapped and no goroutine is left.
func (e *Engine) Close(ctx context.Context) error {
	e.once.Do(func() {
		e.mu.Lock()
		e.closing = true
		e.mu.Unlock()
		e.do(func(l *loop) { l.closing = true })
		select {
		case <-e.done:
		case <-ctx.Done():
			e.do((*loop).abortAll)
			<-e.done
		}
		e.closed = errors.Join(e.closeHost(ctx), closeAll(e.regions))
		e.metrics.set.Unregister()
	})
	return e.closed
}

// closeHost ends the connector. Events of what was still running have no meaning any more, but the
// host waits for somebody to take them.
func (e *Engine) closeHost(ctx context.Context) error {
	if e.host == nil {
		return nil
	}
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		for range e.host.Events() {
			continue
		}
	}()
	err := e.host.Close(ctx)
	<-drained
	return err
}

// blocks is a pool's account.
func blocks(p *kvcache.Pool) Blocks {
	n := p.Counts()
	return Blocks{Free: n[kvcache.Free], Used: n[kvcache.Used], Pinned: n[kvcache.Pinned], Held: n[kvcache.Held]}
}

// Errors that a front end turns into answers of its own.
var (
	// ErrTooLong says that prompt and MaxTokens exceed what the model or the cache can hold.
	ErrTooLong = errors.New("request is too long")
	// ErrOverloaded says that too many requests wait; the client may retry.
	ErrOverloaded = errors.New("too many requests")
	// ErrClosed says that the engine is shutting down.
	ErrClosed = errors.New("engine is shutting down")
	// ErrLoadFailed ends a request whose KV could not be loaded under load failure policy "fail".
	ErrLoadFailed = sched.ErrLoadFailed
	// ErrInvalid says that a request's fields make no sense; the message names the field.
	ErrInvalid = errors.New("invalid request")
	// ErrStop, as the cause with which the context of a Submit is cancelled, ends the request with
	// ReasonStop instead of ReasonAbort: the caller found a stop string and needs nothing more.
	ErrStop = errors.New("stopped by the caller")
	// ErrNotReset says that the prefix cache was reset, and that the connector cannot be.
	ErrNotReset = errors.New("the prefix cache is empty, the connector is not")
	// ErrKept says that the prefix cache was reset, and the connector not wholly.
	ErrKept = errors.New("the prefix cache is empty, the connector has kept some blocks")
)

// Request is one generation.
type Request struct {
	ID        connector.RequestID // unique among live requests; the engine refuses a duplicate
	Prompt    []int32             // at least one token; owned by the engine after Submit
	Params    sample.Params
	MaxTokens int  // generated tokens at most
	IgnoreEOS bool // go on after a stop token
	Salt      string
	Ticket    []byte // signed ticket of a producer (P/D, decode side); nil if none
	Remote    bool   // P/D, prefill side: a consumer will fetch the KV, give a ticket at the end
	Turn      bool   // P/D, decode side, with Remote: the ticket is for the next turn, and keeps nothing from being evicted
	Query     bool   // a cache query: nothing is generated, the only Output says what is Cached; MaxTokens does not matter
	Hold      bool   // with Query: give a ticket for what the prefix cache has; it keeps nothing from being evicted
}

// Output is a piece of a generation. The last one has Reason set, and Err too if that is ReasonError.
type Output struct {
	Tokens []int32          // new tokens, in order; a stop token that ends the generation is the last of them
	Reason connector.Reason // 0 while the request runs
	Err    error            // set when Reason is ReasonError
	Usage  Usage            // complete in the last Output, running totals before
	Ticket []byte           // last Output of a Remote request, and of one with Hold, if there is anything to fetch
	Cached *Cached          // Output of a Query that was answered; nil otherwise
}

// Usage says where the KV of a request's prompt came from, in tokens.
type Usage struct {
	Prompt    int // length of the prompt
	Generated int
	Local     int // from the engine's own prefix cache
	External  int // loaded through the connector
	Handoff   Handoff
}
