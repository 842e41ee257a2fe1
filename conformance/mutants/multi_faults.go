package mutants

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/multiconnector"
)

// multiMutants are the wrong connectors made of others.
func multiMutants() []Mutant {
	var out []Mutant
	for _, m := range []struct {
		name, caseID string
		knobs        func() multiKnobs
	}{
		{"lets a child have an engine_id", "multi-engine-id", func() multiKnobs { return forgives("engine_id") }},
		{"takes an empty list of children", "multi-bad-list", func() multiKnobs { return forgives("empty") }},
		{"takes a child twice", "multi-bad-list", func() multiKnobs { return forgives("again") }},
		{"does not bound nesting", "multi-depth", func() multiKnobs { return forgives("deep") }},
		{"loads from the last child first", "multi-first", func() multiKnobs { return multiKnobs{jointWork: lastFirst} }},
		{"loads from a child that only saves", "multi-producer", func() multiKnobs {
			return multiKnobs{children: func(cs []multiconnector.Child) {
				for i := range cs {
					cs[i].Role = connector.RoleBoth
				}
			}}
		}},
		{"saves to the first child only", "multi-save-all", func() multiKnobs { return multiKnobs{worker: saves(func(i int) bool { return i == 0 })} }},
		{"saves to the last child only", "multi-save-all", func() multiKnobs { return multiKnobs{worker: saves(func(i int) bool { return i == 1 })} }},
		{"saves to a child that only loads", "multi-consumer", func() multiKnobs {
			return multiKnobs{children: func(cs []multiconnector.Child) {
				for i := range cs {
					cs[i].Role = connector.RoleBoth
				}
			}}
		}},
		{"tells the first child alone to replace", "multi-replace", func() multiKnobs { return multiKnobs{worker: replacesFirst} }},
		{"sends a child nothing that it was sent before", "multi-other-resets", func() multiKnobs { return multiKnobs{worker: once} }},
		{"takes the whole prefix from one child", "multi-compose", func() multiKnobs { return multiKnobs{scheduler: fromZero} }},
		{"asks children only near the begin of a prompt", "multi-alternate", func() multiKnobs { return multiKnobs{scheduler: nearOnly} }},
		{"offers what lies behind a gap", "multi-gap", func() multiKnobs { return multiKnobs{joint: addsUp} }},
		{"gives up after the first child", "multi-second", func() multiKnobs { return multiKnobs{children: failing} }},
		{"names a block that has arrived", "multi-nobody", func() multiKnobs { return multiKnobs{jointWork: namesMore} }},
		{"does not save to a nested child", "multi-nested", func() multiKnobs { return multiKnobs{worker: notNested} }},
		{"hands a child another's ticket", "multi-tickets", func() multiKnobs { return multiKnobs{joint: swapsTickets} }},
		{"counts the holds of two children as one", "multi-hold-last", func() multiKnobs { return multiKnobs{scheduler: firstCounts} }},
		{"counts what children have reported over all holds", "multi-hold-last", countsOverAll},
		{"swallows its children's renewals", "multi-renews", func() multiKnobs { return multiKnobs{joint: swallowsRenewals} }},
		{"passes on the first child's renewals only", "multi-renews", func() multiKnobs { return multiKnobs{scheduler: firstRenews} }},
		{"does not tell its children which holds are over", "multi-renews-no-more", func() multiKnobs { return multiKnobs{joint: tellsNoEnd} }},
		{"saves layer by layer to the first child only", "multi-layers", func() multiKnobs { return multiKnobs{worker: layersToFirst} }},
		{"answers before the last layer", "multi-layers", func() multiKnobs { return multiKnobs{jointWork: answersEarly} }},
		{"saves what the engine has given up", "multi-layers-give-up", func() multiKnobs { return multiKnobs{jointWork: savesGivenUp} }},
	} {
		out = append(out, Mutant{
			Name: m.name, Case: m.caseID, Config: MultiConfig, Plugin: func() connector.Plugin { return multiPlugin(m.knobs()) },
		})
	}
	return append(out, Mutant{
		Name: "does not name the shared store", Case: "multi-named", Config: MultiStoreConfig,
		Plugin: func() connector.Plugin { return multiPlugin(multiKnobs{joint: namesNoStore}) },
	}, Mutant{
		Name: "saves whole blocks before their layers are computed", Case: "multi-layers", Config: MultiStoreConfig,
		Plugin: func() connector.Plugin { return multiPlugin(multiKnobs{jointWork: savesAtOnce}) },
	})
}

// layersToFirst has the other children wait for layers and forget them.
func layersToFirst(i int, w connector.Worker) connector.Worker {
	if i == 0 {
		return w
	}
	return multiWorker{Worker: w, layers: func(c layerCall) error { return c.waitFor(c.layers()) }}
}

// answersEarly returns before the last layer.
func answersEarly(w connector.Worker, _ []connector.Worker) connector.Worker {
	return multiWorker{Worker: w, layers: func(c layerCall) error { return c.waitFor(c.layers() - 1) }}
}

// savesGivenUp saves whole blocks after layers did not come.
func savesGivenUp(w connector.Worker, sides []connector.Worker) connector.Worker {
	return multiWorker{Worker: w, layers: func(c layerCall) error {
		err := layersOf(w, c)
		if err != nil {
			err = errors.Join(err, sides[len(sides)-1].Save(c.ctx, c.t, c.kv))
		}
		return err
	}}
}

// savesAtOnce gives the last child whole blocks when the engine begins to compute them.
func savesAtOnce(w connector.Worker, sides []connector.Worker) connector.Worker {
	return multiWorker{Worker: w, layers: func(c layerCall) error {
		if err := sides[len(sides)-1].Save(c.ctx, c.t, c.kv); err != nil {
			return err
		}
		return layersOf(w, c)
	}}
}

// namesNoStore leaves out of tickets what is in shared stores, which comes last.
func namesNoStore(s connector.Scheduler) connector.Scheduler {
	side := sideOf(s)
	side.Holder = finishing{side.Holder, func(holds []connector.Hold) {
		for k := range holds {
			if at := bytes.Index(holds[k].Ticket, []byte("shared/")); at >= 2 {
				holds[k].Ticket = holds[k].Ticket[:at-2] // with the length of the name
			}
		}
	}}
	return side
}

// forgives takes a config although an error with the given word was found in it.
func forgives(word string) multiKnobs {
	return multiKnobs{check: func(_ []shelfConfig, err error, _ int) error {
		if err != nil && strings.Contains(err.Error(), word) {
			return nil
		}
		return err
	}}
}

// jointSide is a scheduler side of parts.
type jointSide struct {
	connector.Scheduler
	connector.Holder
	connector.Leaser
	connector.Resetter
	connector.Partial
}

func sideOf(s connector.Scheduler) jointSide {
	h, _ := s.(connector.Holder)
	l, _ := s.(connector.Leaser)
	r, _ := s.(connector.Resetter)
	p, _ := s.(connector.Partial)
	return jointSide{s, h, l, r, p}
}

// renewing makes a Renewals in its own way.
type renewing struct {
	connector.Leaser
	renewals func(ctx context.Context, ended []connector.HoldID) ([]connector.HoldID, error)
}

// Renewals implements connector.Leaser.
func (r renewing) Renewals(ctx context.Context, ended []connector.HoldID) ([]connector.HoldID, error) {
	return r.renewals(ctx, ended)
}

func swallowsRenewals(s connector.Scheduler) connector.Scheduler {
	side := sideOf(s)
	inner := side.Leaser
	side.Leaser = renewing{inner, func(ctx context.Context, ended []connector.HoldID) ([]connector.HoldID, error) {
		_, err := inner.Renewals(ctx, ended)
		return nil, err
	}}
	return side
}

func firstRenews(i int, s connector.Scheduler) connector.Scheduler {
	if i == 0 {
		return s
	}
	return swallowsRenewals(s)
}

func tellsNoEnd(s connector.Scheduler) connector.Scheduler {
	side := sideOf(s)
	inner := side.Leaser
	side.Leaser = renewing{inner, func(ctx context.Context, _ []connector.HoldID) ([]connector.HoldID, error) {
		return inner.Renewals(ctx, nil)
	}}
	return side
}

// matching answers a Match in its own way.
type matching struct {
	connector.Scheduler
	match func(ctx context.Context, qs []connector.Query) ([]connector.Match, error)
}

// Match implements connector.Scheduler.
func (m matching) Match(ctx context.Context, qs []connector.Query) ([]connector.Match, error) {
	return m.match(ctx, qs)
}

// fromZero asks a child as if nothing had been computed or found: without the begin it has nothing.
func fromZero(_ int, s connector.Scheduler) connector.Scheduler {
	side := sideOf(s)
	side.Scheduler = matching{s, func(ctx context.Context, qs []connector.Query) ([]connector.Match, error) {
		whole := slices.Clone(qs)
		for i := range whole {
			whole[i].Computed = 0
		}
		out, err := s.Match(ctx, whole)
		for i := range out {
			out[i].Tokens = max(0, out[i].Tokens-qs[i].Computed)
		}
		return out, err
	}}
	return side
}

func nearOnly(_ int, s connector.Scheduler) connector.Scheduler {
	side := sideOf(s)
	side.Scheduler = matching{s, func(ctx context.Context, qs []connector.Query) ([]connector.Match, error) {
		out, err := s.Match(ctx, qs)
		for i := range out {
			if qs[i].Computed > 8 {
				out[i] = connector.Match{}
			}
		}
		return out, err
	}}
	return side
}

func addsUp(s connector.Scheduler) connector.Scheduler {
	side := sideOf(s)
	side.Scheduler = matching{s, func(ctx context.Context, qs []connector.Query) ([]connector.Match, error) {
		out, err := s.Match(ctx, qs)
		for i := range out {
			if out[i].Tokens > 0 {
				out[i].Tokens = qs[i].Tokens - qs[i].Tokens%4 - qs[i].Computed
			}
		}
		return out, err
	}}
	return side
}

// finishing changes the holds of a Finish.
type finishing struct {
	connector.Holder
	change func([]connector.Hold)
}

// Finish implements connector.Holder.
func (f finishing) Finish(ctx context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	holds, err := f.Holder.Finish(ctx, ended)
	f.change(holds)
	return holds, err
}

func firstCounts(i int, s connector.Scheduler) connector.Scheduler {
	side := sideOf(s)
	side.Holder = finishing{side.Holder, func(holds []connector.Hold) {
		for k := range holds {
			holds[k].Weak = i > 0
		}
	}}
	return side
}

func swapsTickets(s connector.Scheduler) connector.Scheduler {
	side := sideOf(s)
	swap := strings.NewReplacer("ShelfA", "ShelfB", "ShelfB", "ShelfA")
	side.Holder = finishing{side.Holder, func(holds []connector.Hold) {
		for k := range holds {
			holds[k].Ticket = []byte(swap.Replace(string(holds[k].Ticket)))
		}
	}}
	return side
}

// multiWorker is a worker side with calls of its own.
type multiWorker struct {
	connector.Worker
	load, save func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error
	layers     func(layerCall) error
}

// SaveLayers implements connector.LayerWorker.
func (w multiWorker) SaveLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, p connector.Progress) error {
	c := layerCall{call{ctx: ctx, t: t, kv: kv}, p}
	if w.layers != nil {
		return w.layers(c)
	}
	return layersOf(w.Worker, c)
}

// layersOf has a worker side save layer by layer.
func layersOf(w connector.Worker, c layerCall) error {
	side, ok := w.(connector.LayerWorker)
	if !ok {
		return connector.ErrIncompatible
	}
	return side.SaveLayers(c.ctx, c.t, c.kv, c.progress)
}

// Load implements connector.Worker.
func (w multiWorker) Load(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	if w.load != nil {
		return w.load(ctx, t, kv)
	}
	return w.Worker.Load(ctx, t, kv)
}

// Save implements connector.Worker.
func (w multiWorker) Save(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	if w.save != nil {
		return w.save(ctx, t, kv)
	}
	return w.Worker.Save(ctx, t, kv)
}

func lastFirst(w connector.Worker, sides []connector.Worker) connector.Worker {
	return multiWorker{Worker: w, load: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
		if sides[len(sides)-1].Load(ctx, t, kv) == nil {
			return nil
		}
		return w.Load(ctx, t, kv)
	}}
}

// forgetting is a Save that does nothing.
func forgetting(context.Context, *connector.Transfer, *connector.KV) error { return nil }

func saves(wanted func(i int) bool) func(int, connector.Worker) connector.Worker {
	return func(i int, w connector.Worker) connector.Worker {
		if wanted(i) {
			return w
		}
		return multiWorker{Worker: w, save: forgetting}
	}
}

// once gives a child those blocks that it was not given before.
func once(_ int, w connector.Worker) connector.Worker {
	var mu sync.Mutex
	given := map[connector.BlockKey]bool{}
	return multiWorker{Worker: w, save: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
		mu.Lock()
		defer mu.Unlock()
		left := *t
		left.Blocks = slices.DeleteFunc(slices.Clone(t.Blocks), func(b connector.Block) bool { return given[b.Key] && !t.Replace })
		if len(left.Blocks) == 0 {
			return nil
		}
		if err := w.Save(ctx, &left, kv); err != nil {
			return err
		}
		for _, b := range left.Blocks {
			given[b.Key] = true
		}
		return nil
	}}
}

func notNested(_ int, w connector.Worker) connector.Worker {
	if _, plain := w.(*worker); plain {
		return w
	}
	return multiWorker{Worker: w, save: forgetting}
}

func replacesFirst(i int, w connector.Worker) connector.Worker {
	return multiWorker{Worker: w, save: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
		own := *t
		own.Replace = t.Replace && i == 0
		return w.Save(ctx, &own, kv)
	}}
}

func failing(children []multiconnector.Child) { children[0].Fail = true }

func namesMore(w connector.Worker, _ []connector.Worker) connector.Worker {
	return multiWorker{Worker: w, load: func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
		err := w.Load(ctx, t, kv)
		if some, ok := errors.AsType[*connector.BlockError](err); ok {
			return &connector.BlockError{Blocks: append(slices.Clone(some.Blocks), t.Blocks[0].ID), Err: some.Err}
		}
		return err
	}}
}
