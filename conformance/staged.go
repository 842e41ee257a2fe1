package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/keyring"
	"github.com/kvport/kvport/internal/ticket"
)

// Staged runs the connectors that Wire makes at trust level staged: each of their worker sides has a
// host.Host before it, so that it reaches the cache only through landing memory. That memory has room for
// a third of the cache, so that transfers are divided and wait for each other.
func Staged(inner Maker) Maker {
	return func() (Harness, error) {
		h, err := inner()
		if err != nil {
			return nil, err
		}
		wired, ok := h.(*loopback)
		if !ok {
			return nil, errors.Join(errors.New("only connectors that Wire makes can run staged"), h.Close())
		}
		wired.staged = true
		return wired, nil
	}
}

// hostedWorker is a worker side that is called through a host. The host makes and checks digests, divides
// transfers, copies them and retries, and it tells only which blocks of a transfer failed, and why the first did.
type hostedWorker struct {
	connector.Worker // what the host calls
	host             *host.Host
	env              connector.Env // of the engine
	read             chan struct{} // closed when no more events come

	mu     sync.Mutex
	step   uint64
	moves  map[connector.RequestID]*move // that run
	closed error                         // of the worker side's Close
}

// openStaged opens a worker side behind a host. An env that does not fit the cache is the connector's to refuse.
func (m *engineMemory) openStaged(ctx context.Context, connect func([]*host.Region) *host.Remote, env connector.Env, config json.RawMessage) (connector.Worker, error) {
	if env.Rank < 0 || env.Rank >= len(m.regions) || env.Layout.Validate([]int64{int64(len(m.views[env.Rank]))}) != nil {
		return connect(m.regions).OpenWorker(ctx, env, config)
	}
	cfg, err := host.ParseConfig(fmt.Sprintf(
		`{"kv_connector":"conformance","kv_role":"kv_both","kvport":{"trust":"staged","landing_bytes":%d,"digest":"xxh3"}}`, landingBytes(&env.Layout)))
	if err != nil {
		return nil, err
	}
	w := &hostedWorker{env: env, read: make(chan struct{}), moves: map[connector.RequestID]*move{}}
	w.host, err = host.Open(ctx, cfg, host.Engine{
		ID: env.Engine, Model: env.Model, Shape: env.Shape, Layout: env.Layout, Ranks: m.regions[env.Rank : env.Rank+1],
	}, host.Options{Workers: func(memory []*host.Region, layout connector.Layout) ([]connector.Worker, error) {
		env.Layout = layout
		var err error
		w.Worker, err = connect(slices.Repeat(memory, len(m.regions))).OpenWorker(ctx, env, config)
		return []connector.Worker{&behind{w.Worker, w}}, err
	}})
	if err != nil {
		return nil, err
	}
	go w.watch()
	return w, nil
}

// landingBytes is landing memory for a third of a cache's blocks, with room for the alignment of its segments.
func landingBytes(l *connector.Layout) (n int64) {
	const align = 64
	for _, s := range l.Segments {
		n += int64(max(1, l.Blocks/3))*s.Bytes + align
	}
	return n
}

// watch passes on how transfers ended.
func (w *hostedWorker) watch() {
	defer close(w.read)
	for e := range w.host.Events() {
		if e.Kind != host.Loaded && e.Kind != host.Saved {
			continue
		}
		w.mu.Lock()
		w.moves[e.Request].end <- e
		delete(w.moves, e.Request)
		w.mu.Unlock()
	}
}

// move is a transfer that the host was given.
type move struct {
	*hostedWorker
	ctx     context.Context //nolint:containedctx // of the case's call
	step    uint64
	request connector.RequestID // of its own, so that it can be cancelled alone
	end     chan host.Event
	placing *placingMove // nil: not a call of SavePlaced or LoadPlaced
}

// placingMove is what such a call says beside its transfer, which the host divides.
type placingMove struct {
	mu           sync.Mutex
	used, placed []uint32
}

// part is one part of the call.
func (p *placingMove) part(ctx context.Context, t *connector.Transfer, kv *connector.KV, call placeCall) error {
	p.mu.Lock()
	used := p.used
	p.used = nil
	p.mu.Unlock()
	placed, err := call(ctx, t, kv, used)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.placed = append(p.placed, placed...)
	return err
}

// placeCall is SavePlaced or LoadPlaced.
type placeCall func(context.Context, *connector.Transfer, *connector.KV, []uint32) ([]uint32, error)

// begin hands a transfer over in a step of its own.
func (w *hostedWorker) begin(ctx context.Context, t *connector.Transfer, place func(*connector.Step) *[]connector.Transfer) *move {
	return w.move(ctx, t, nil).begin(t, place)
}

// move notes a transfer that is going to be handed over.
func (w *hostedWorker) move(ctx context.Context, t *connector.Transfer, placing *placingMove) *move {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.step++
	m := &move{w, ctx, w.step, connector.RequestID(fmt.Sprintf("%s %d", t.Request, w.step)), make(chan host.Event, 1), placing}
	w.moves[m.request] = m
	return m
}

func (m *move) begin(t *connector.Transfer, place func(*connector.Step) *[]connector.Transfer) *move {
	w := m.hostedWorker
	if len(t.Ticket) > 0 {
		w.bring(m.request, t)
	}
	own := *t
	own.Request = m.request
	s := &connector.Step{ID: m.step}
	*place(s) = []connector.Transfer{own}
	w.host.Step(s)
	return m
}

// wait waits for the end of a transfer.
func (m *move) wait() error {
	select {
	case e := <-m.end:
		if len(e.Failed) == 0 {
			return nil
		}
		if some, ok := errors.AsType[*connector.BlockError](e.Err); ok {
			e.Err = some.Err
		}
		return &connector.BlockError{Blocks: e.Failed, Err: e.Err}
	case <-m.read:
		return fmt.Errorf("the worker side is closed: %w", connector.ErrGone)
	}
}

// bring gives the host the ticket of a load, signed as the producer's host signs it. Without it the connector does
// not find the blocks.
func (w *hostedWorker) bring(request connector.RequestID, t *connector.Transfer) {
	tokens := t.From + t.Tokens
	e := ticket.Envelope{Engine: "producer", Tokens: tokens, Lease: time.Minute, Model: w.env.Model, Shape: w.env.Shape, Plugin: t.Ticket}
	keys, err := keyring.OpenAt("", nil)
	if err == nil {
		if signed, err := ticket.Seal(keys.Ring(), &e); err == nil {
			w.host.Match(connector.Query{Request: request, Tokens: tokens}, signed)
		}
	}
}

// Load implements connector.Worker.
func (w *hostedWorker) Load(ctx context.Context, t *connector.Transfer, _ *connector.KV) error {
	return w.load(ctx, t, nil)
}

// load cancels as a host cancels the load of a preempted request.
func (w *hostedWorker) load(ctx context.Context, t *connector.Transfer, placing *placingMove) error {
	m := w.move(ctx, t, placing).begin(t, func(s *connector.Step) *[]connector.Transfer { return &s.Admitted })
	defer context.AfterFunc(ctx, func() { w.host.Step(&connector.Step{Preempted: []connector.RequestID{m.request}}) })()
	return m.wait()
}

// Save implements connector.Worker.
func (w *hostedWorker) Save(ctx context.Context, t *connector.Transfer, _ *connector.KV) error {
	return w.begin(ctx, t, func(s *connector.Step) *[]connector.Transfer { return &s.Computed }).wait()
}

// SavePlaced implements connector.Placer.
func (w *hostedWorker) SavePlaced(ctx context.Context, t *connector.Transfer, _ *connector.KV, used []uint32) ([]uint32, error) {
	p := &placingMove{used: used}
	err := w.move(ctx, t, p).begin(t, func(s *connector.Step) *[]connector.Transfer { return &s.Computed }).wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.placed, err
}

// LoadPlaced implements connector.Placer.
func (w *hostedWorker) LoadPlaced(ctx context.Context, t *connector.Transfer, _ *connector.KV, used []uint32) ([]uint32, error) {
	p := &placingMove{used: used}
	err := w.load(ctx, t, p)
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.placed, err
}

// Lends implements connector.Lender.
func (w *hostedWorker) Lends() int {
	if lender, ok := connector.As[connector.Lender](w.Worker); ok {
		return lender.Lends()
	}
	return 0
}

// Lend implements connector.Lender. Nothing of it goes through landing memory, so the case is the host here, as it is in place.
func (w *hostedWorker) Lend(ctx context.Context, l *connector.Lending) (*connector.Loan, error) {
	lender, ok := connector.As[connector.Lender](w.Worker)
	if !ok {
		return nil, fmt.Errorf("the connector lends no slots: %w", connector.ErrIncompatible)
	}
	return lender.Lend(ctx, l)
}

// Capabilities implements connector.Partial.
func (w *hostedWorker) Capabilities() connector.Capability {
	return connector.CapabilitiesOf(w.Worker)
}

// SaveLayers implements connector.LayerWorker.
func (w *hostedWorker) SaveLayers(ctx context.Context, t *connector.Transfer, _ *connector.KV, progress connector.Progress) error {
	m := w.begin(ctx, t, func(s *connector.Step) *[]connector.Transfer { return &s.Computing })
	waiting, stop := context.WithCancel(context.WithoutCancel(ctx)) // an engine goes on computing
	var feeding sync.WaitGroup
	feeding.Go(func() {
		for final := 0; final < w.env.Layout.Layers(); {
			var err error
			if final, err = progress.Wait(waiting, final); err != nil {
				w.host.GiveUp(m.step)
				return
			}
			w.host.Layers(m.step, final)
		}
	})
	defer feeding.Wait()
	defer stop()
	return m.wait()
}

// LoadLayers implements connector.LayerLoader. A host that copies what it loads announces all of it at once.
func (w *hostedWorker) LoadLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, arrived connector.Arrivals) error {
	err := w.Load(ctx, t, kv)
	if err == nil {
		arrived.Advance(w.env.Layout.Layers())
	}
	return err
}

// Close implements connector.Worker. A host closes a worker side once and drops its error: this returns it, too.
func (w *hostedWorker) Close() error {
	err := w.host.Close(context.Background())
	<-w.read
	w.mu.Lock()
	defer w.mu.Unlock()
	return errors.Join(err, w.closed)
}

// behind is the worker side as the host sees it.
type behind struct {
	connector.Worker
	front *hostedWorker
}

// Close implements connector.Worker.
func (b *behind) Close() error {
	err := b.Worker.Close()
	b.front.mu.Lock()
	defer b.front.mu.Unlock()
	b.front.closed = err
	return err
}

// Capabilities implements connector.Partial.
func (b *behind) Capabilities() connector.Capability { return connector.CapabilitiesOf(b.Worker) }

// Load implements connector.Worker.
func (b *behind) Load(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	b.front.mu.Lock()
	m := b.front.moves[t.Request]
	b.front.mu.Unlock()
	if m != nil && m.placing != nil {
		return m.placing.part(ctx, t, kv, b.Worker.(connector.Placer).LoadPlaced) //nolint:forcetypeassert // Capabilities says so
	}
	return b.Worker.Load(ctx, t, kv)
}

// Save implements connector.Worker.
func (b *behind) Save(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	return b.front.untilCaller(ctx, t.Request, func(ctx context.Context, m *move) error {
		if m.placing != nil {
			return m.placing.part(ctx, t, kv, b.Worker.(connector.Placer).SavePlaced) //nolint:forcetypeassert // Capabilities says so
		}
		return b.Worker.Save(ctx, t, kv)
	})
}

// SaveLayers implements connector.LayerWorker.
func (b *behind) SaveLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, p connector.Progress) error {
	return b.front.untilCaller(ctx, t.Request, func(ctx context.Context, _ *move) error {
		return b.Worker.(connector.LayerWorker).SaveLayers(ctx, t, kv, p) //nolint:forcetypeassert // Capabilities says so
	})
}

// untilCaller makes a call of a save. An engine does not cancel saves: the host ends their calls when their
// deadline passes, which is half a minute away. Here the end of the context of the case's call takes that place,
// so a call that fails then is not made again.
func (w *hostedWorker) untilCaller(ctx context.Context, request connector.RequestID, call func(context.Context, *move) error) error {
	w.mu.Lock()
	m := w.moves[request]
	w.mu.Unlock()
	caller := m.ctx
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(caller, cancel)()
	if caller.Err() != nil {
		cancel() // before the call, not beside it
	}
	err := call(ctx, m)
	if errors.Is(err, connector.ErrBusy) && caller.Err() != nil {
		return caller.Err()
	}
	return err
}
