package mutants

import (
	"context"
	"encoding/json"
	"slices"

	"github.com/kvport/kvport/connector"
)

// Mutant is a wrong connector.
type Mutant struct {
	Name string // what is wrong with it
	Case string // the case of package conformance that must find out
	// Plugin makes the connector.
	Plugin func() connector.Plugin
	Config string // of the connector; "" is {}
	// Program is the name of the binary that serves it, where the fault shows only in a process of
	// its own; else "".
	Program string
}

// All lists every mutant, at least one for each case.
func All() []Mutant {
	out := slices.Concat(badStores(), fileMutants(), heldMutants(), versionMutants(), arenaMutants(), placingMutants(), lendingMutants(), remoteMutants(), offloadMutants(), pipeMutants(), pdMutants(), bufferMutants(), multiMutants(), someRandomlyFound())
	lists := [][]fault{
		openFaults(), matchFaults(), workFaults(), layoutFaults(), storeFaults(), keyFaults(), powerFaults(), statFaults(), eventFaults(), layerFaults(), overlapFaults(),
		lifeFaults(), ringFaults(), rankFaults(), rankOrderFaults(), groupFaults(), oddFaults(), hostileFaults(),
	}
	for _, list := range lists {
		for _, f := range list {
			out = append(out, Mutant{Name: f.name, Case: f.caseID, Plugin: func() connector.Plugin {
				b := newBackend()
				var w wrappers
				f.plant(b, &w)
				return b.plugin(w)
			}})
		}
	}
	return out
}

// Plain hides a connector's optional powers.
func Plain(p connector.Plugin) connector.Plugin {
	describe, scheduler := p.Describe, p.Scheduler
	p.Capabilities = 0
	p.Describe = func(ctx context.Context, config json.RawMessage) (connector.Info, error) {
		info, err := describe(ctx, config)
		info.Capabilities = 0
		return info, err
	}
	p.Scheduler = func(ctx context.Context, env connector.Env, config json.RawMessage) (connector.Scheduler, error) {
		s, err := scheduler(ctx, env, config)
		return struct{ connector.Scheduler }{s}, err
	}
	return p
}

// fault is one way to be wrong, planted in the reference.
type fault struct {
	name, caseID string
	plant        func(*backend, *wrappers)
}

// badScheduler is a scheduler side with some calls replaced.
type badScheduler struct {
	*scheduler
	match    func(context.Context, []connector.Query) ([]connector.Match, error)
	plan     func(context.Context, *connector.Step) (*connector.Plan, error)
	finish   func(context.Context, []connector.Ended) ([]connector.Hold, error)
	consumed func(context.Context) ([]connector.HoldID, error)
	reset    func(context.Context) (bool, error)
	stats    func(context.Context) ([]connector.Stat, error)
	events   func(context.Context) ([]connector.BlockEvent, error)
	renewals func(context.Context, []connector.HoldID) ([]connector.HoldID, error)
}

// Match implements connector.Scheduler.
func (s *badScheduler) Match(ctx context.Context, qs []connector.Query) ([]connector.Match, error) {
	if s.match != nil {
		return s.match(ctx, qs)
	}
	return s.scheduler.Match(ctx, qs)
}

// Plan implements connector.Planner.
func (s *badScheduler) Plan(ctx context.Context, step *connector.Step) (*connector.Plan, error) {
	if s.plan != nil {
		return s.plan(ctx, step)
	}
	return s.scheduler.Plan(ctx, step)
}

// Finish implements connector.Holder.
func (s *badScheduler) Finish(ctx context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	if s.finish != nil {
		return s.finish(ctx, ended)
	}
	return s.scheduler.Finish(ctx, ended)
}

// Consumed implements connector.Holder.
func (s *badScheduler) Consumed(ctx context.Context) ([]connector.HoldID, error) {
	if s.consumed != nil {
		return s.consumed(ctx)
	}
	return s.scheduler.Consumed(ctx)
}

// Reset implements connector.Resetter.
func (s *badScheduler) Reset(ctx context.Context) (bool, error) {
	if s.reset != nil {
		return s.reset(ctx)
	}
	return s.scheduler.Reset(ctx)
}

// Stats implements connector.StatsSource.
func (s *badScheduler) Stats(ctx context.Context) ([]connector.Stat, error) {
	if s.stats != nil {
		return s.stats(ctx)
	}
	return s.scheduler.Stats(ctx)
}

// Events implements connector.EventSource.
func (s *badScheduler) Events(ctx context.Context) ([]connector.BlockEvent, error) {
	if s.events != nil {
		return s.events(ctx)
	}
	return s.scheduler.Events(ctx)
}

// Renewals implements connector.Leaser.
func (s *badScheduler) Renewals(ctx context.Context, ended []connector.HoldID) ([]connector.HoldID, error) {
	if s.renewals != nil {
		return s.renewals(ctx, ended)
	}
	return s.scheduler.Renewals(ctx, ended)
}

// badWorker is a worker side with some calls replaced.
type badWorker struct {
	*worker
	load, save func(context.Context, *connector.Transfer, *connector.KV) error
	layers     func(layerCall) error
	overlap    func(overlapCall) error
	close      func() error
}

// SaveLayers implements connector.LayerWorker.
func (w *badWorker) SaveLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, p connector.Progress) error {
	if w.layers != nil {
		return w.layers(layerCall{call{w.worker, ctx, t, kv}, p})
	}
	return w.worker.SaveLayers(ctx, t, kv, p)
}

// LoadLayers implements connector.LayerLoader.
func (w *badWorker) LoadLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, arrived connector.Arrivals) error {
	if w.overlap != nil {
		return w.overlap(overlapCall{call{w.worker, ctx, t, kv}, arrived})
	}
	return w.worker.LoadLayers(ctx, t, kv, arrived)
}

// Load implements connector.Worker.
func (w *badWorker) Load(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	if w.load != nil {
		return w.load(ctx, t, kv)
	}
	return w.worker.Load(ctx, t, kv)
}

// Save implements connector.Worker.
func (w *badWorker) Save(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	if w.save != nil {
		return w.save(ctx, t, kv)
	}
	return w.worker.Save(ctx, t, kv)
}

// Close implements connector.Worker.
func (w *badWorker) Close() error {
	if w.close != nil {
		return w.close()
	}
	return w.worker.Close()
}

// onMatch plants a Match.
func onMatch(f func(s *scheduler, qs []connector.Query) []connector.Match) func(*backend, *wrappers) {
	return func(_ *backend, w *wrappers) {
		w.scheduler = func(s *scheduler) connector.Scheduler {
			return &badScheduler{scheduler: s, match: func(_ context.Context, qs []connector.Query) ([]connector.Match, error) {
				return f(s, qs), nil
			}}
		}
	}
}

// call is one Load or Save.
type call struct {
	*worker
	ctx context.Context //nolint:containedctx // the arguments of a call, for the time of the call
	t   *connector.Transfer
	kv  *connector.KV
}

// onLoad plants a Load.
func onLoad(f func(call) error) func(*backend, *wrappers) {
	return func(_ *backend, w *wrappers) {
		w.worker = func(k *worker) connector.Worker {
			return &badWorker{worker: k, load: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
				return f(call{k, ctx, t, kv})
			}}
		}
	}
}

// onSave plants a Save.
func onSave(f func(call) error) func(*backend, *wrappers) {
	return func(_ *backend, w *wrappers) {
		w.worker = func(k *worker) connector.Worker {
			return &badWorker{worker: k, save: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
				return f(call{k, ctx, t, kv})
			}}
		}
	}
}

// rightLoad loads as the reference does.
func (c call) rightLoad() error { return c.Load(c.ctx, c.t, c.kv) }

// rightSave saves as the reference does.
func (c call) rightSave() error { return c.Save(c.ctx, c.t, c.kv) }
