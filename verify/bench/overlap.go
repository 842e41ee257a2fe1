package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine"
	"github.com/kvport/kvport/engine/model"
	"github.com/kvport/kvport/engine/model/kernel"
	"github.com/kvport/kvport/engine/tokenizer"
	"github.com/kvport/kvport/host"
)

// Overlap has one engine load what another holds, by o.Connector, and emits when the model asked for each layer, when it
// could read the layer, when the load was over and when the first token came; then the median of the time to the first token beside
// that of an engine that waits for whole loads. With a connector that places blocks each of the two loads what it has saved itself.
func Overlap(ctx context.Context, o EngineOptions) (err error) {
	if o.Threads == 0 {
		o.Threads = runtime.GOMAXPROCS(0)
	}
	b := &bench{EngineOptions: o, prompt: 1024}
	rounds := 9
	if o.Quick {
		b.prompt, rounds = 128, 1
	}
	m, err := b.load(b.Threads, kernel.Auto)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	p, err := b.openOverlap(ctx, m)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close(ctx)) }()
	var last *overlapRun
	var early, whole []float64
	for n := range rounds + 1 { // the first round touches memory
		run, err := p.run(ctx, p.early, 2*n)
		if err != nil {
			return err
		}
		other, err := p.run(ctx, p.whole, 2*n+1)
		if err != nil {
			return err
		}
		if n > 0 {
			early, whole, last = append(early, ms(run.first)), append(whole, ms(other.first)), run
		}
	}
	bytes := blockBytes(m) * int64(b.prompt/blockTokens)
	rows := append(last.rows(bytes/int64(m.Spec().Layers)),
		shorter(fmt.Sprintf("first token of %d loaded tokens, layer by layer beside whole", b.prompt), bytes, middle(early), middle(whole), "ms")(budget{}))
	return o.Emit.all(rows)
}

// overlapPair is a producer, and two consumers that share its model, since only one of the three computes at a time. Without a producer the
// consumers load what they have saved.
type overlapPair struct {
	prompt                 int
	vocab                  int
	dir                    string
	producer, early, whole *engine.Engine
	watched                *watchedModel
}

// overlapEngine is how one of them is opened.
type overlapEngine struct {
	at       **engine.Engine
	model    model.Model
	role     string
	patience time.Duration
}

// watchedModel notes when layers are asked for and when they can be read.
type watchedModel struct {
	model.Model
	asked, read []time.Time
}

// Forward implements model.Model.
func (w *watchedModel) Forward(batch *model.Batch, kv *connector.KV) error {
	before := batch.BeforeLayer
	if before == nil {
		return w.Model.Forward(batch, kv)
	}
	w.asked, w.read = w.asked[:0], w.read[:0]
	b := *batch
	b.BeforeLayer = func(layer int) error {
		w.asked = append(w.asked, time.Now())
		err := before(layer)
		w.read = append(w.read, time.Now())
		return err
	}
	return w.Model.Forward(&b, kv)
}

func (b *bench) openOverlap(ctx context.Context, m model.Model) (_ *overlapPair, err error) {
	p := &overlapPair{prompt: b.prompt, vocab: m.Spec().Vocab, watched: &watchedModel{Model: m}}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close(ctx))
		}
	}()
	if p.dir, err = os.MkdirTemp(b.Dir, "kvport-bench-"); err != nil {
		return nil, err
	}
	name, own, err := b.overlapping()
	if err != nil {
		return nil, err
	}
	key := filepath.Join(p.dir, "key")
	if err := os.WriteFile(key, []byte("kvport bench overlap, for itself"), 0o600); err != nil {
		return nil, err
	}
	engines := []overlapEngine{{&p.producer, m, "kv_producer", -1}, {&p.early, p.watched, "kv_consumer", time.Minute}, {&p.whole, m, "kv_consumer", -1}}
	if own {
		engines = []overlapEngine{{&p.early, p.watched, "kv_both", time.Minute}, {&p.whole, m, "kv_both", -1}}
	}
	for _, e := range engines {
		arg, err := json.Marshal(map[string]string{"kv_connector": name, "kv_role": e.role})
		if err != nil {
			return nil, err
		}
		config := engine.Config{
			Model: e.model, Tokenizer: tokenizer.Bytes(), NumBlocks: b.prompt/blockTokens + 8, PluginPath: b.PluginPath,
			LayerPatience: e.patience, Log: slog.New(slog.DiscardHandler),
		}
		if config.Connector, err = host.ParseConfig(string(arg)); err != nil {
			return nil, err
		}
		config.Connector.Settings.TicketKeyFile = key
		if *e.at, err = engine.New(ctx, config); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// overlapping names the connector that is measured, and says whether it places blocks for the engine that saves them.
func (b *bench) overlapping() (name string, own bool, err error) {
	if b.Connector == "" {
		plugin, err := holder(b.PluginPath)
		if err != nil {
			return "", false, err
		}
		return plugin.Manifest.Name, false, nil
	}
	plugin, err := host.Find(b.PluginPath, b.Connector)
	if err != nil {
		return "", false, err
	}
	return b.Connector, slices.Contains(plugin.Manifest.Capabilities, connector.CanPlace.String()), nil
}

func (p *overlapPair) close(ctx context.Context) error {
	var errs []error
	for _, e := range []*engine.Engine{p.early, p.whole, p.producer} {
		if e != nil {
			errs = append(errs, e.Close(context.WithoutCancel(ctx)))
		}
	}
	return errors.Join(append(errs, os.RemoveAll(p.dir))...)
}

// overlapRun is the time line of one load, from when the request came.
type overlapRun struct {
	asked, read []time.Duration // of each layer; none if the load was over first
	over, first time.Duration
}

// ready has a prompt's KV where a consumer can load it: a producer holds it, or the consumer itself has saved it. It gives the ticket, if
// there is one.
func (p *overlapPair) ready(ctx context.Context, consumer *engine.Engine, id connector.RequestID, prompt []int32) ([]byte, error) {
	source, remote := p.producer, true
	if source == nil {
		source, remote, id = consumer, false, id+"-saved"
	}
	out, err := source.Submit(ctx, engine.Request{ID: id, Prompt: slices.Clone(prompt), MaxTokens: 1, IgnoreEOS: true, Remote: remote})
	if err != nil {
		return nil, err
	}
	var end engine.Output
	for end = range out {
		if end.Err != nil {
			return nil, end.Err
		}
	}
	for !remote && source.Health().Blocks.Free < source.Info().NumBlocks && ctx.Err() == nil { // a save pins its blocks
		pauseFor(ctx, time.Millisecond)
	}
	return end.Ticket, ctx.Err()
}

// run has a prompt computed, and a consumer load it.
func (p *overlapPair) run(ctx context.Context, consumer *engine.Engine, seed int) (*overlapRun, error) {
	prompt := tokensOf(p.prompt+1, seed, p.vocab)
	id := connector.RequestID("bench-" + strconv.Itoa(seed))
	ticket, err := p.ready(ctx, consumer, id, prompt)
	if err != nil {
		return nil, err
	}
	p.watched.asked, p.watched.read = nil, nil
	began := time.Now()
	out, err := consumer.Submit(ctx, engine.Request{ID: id, Prompt: prompt, MaxTokens: 1, IgnoreEOS: true, Ticket: ticket})
	if err != nil {
		return nil, err
	}
	var end engine.Output
	r := &overlapRun{}
	watching, stop := context.WithCancel(ctx)
	over := make(chan time.Duration, 1)
	go func() { over <- loaded(watching, consumer, began) }()
	for end = range out {
		if end.Err != nil {
			break
		}
		if r.first == 0 {
			r.first = time.Since(began)
		}
	}
	stop()
	r.over = <-over
	switch {
	case end.Err != nil:
		return nil, end.Err
	case r.over == 0: // between two looks: it was as quick as one
		r.over = r.first
	}
	if end.Usage.External != p.prompt {
		return nil, fmt.Errorf("%d tokens of %d were loaded", end.Usage.External, p.prompt)
	}
	for i := range p.watched.read {
		r.asked, r.read = append(r.asked, p.watched.asked[i].Sub(began)), append(r.read, p.watched.read[i].Sub(began))
	}
	return r, nil
}

// loaded waits until an engine's load has begun and is over, and gives that time; 0 if it has not seen it when ctx ends.
func loaded(ctx context.Context, e *engine.Engine, began time.Time) time.Duration {
	for loading := false; ctx.Err() == nil; pauseFor(ctx, 500*time.Microsecond) {
		n := e.Health().Host.Loading
		if n == 0 && loading {
			return time.Since(began)
		}
		loading = loading || n > 0
	}
	return 0
}

// rows are the time line.
func (r *overlapRun) rows(layerBytes int64) (out []Row) {
	row := func(name string, at time.Duration) {
		v := ms(at)
		out = append(out, Row{Name: name, Bytes: layerBytes, Value: &v, Unit: "ms"})
	}
	for i := range r.read {
		row(fmt.Sprintf("layer %d asked for", i), r.asked[i])
		row(fmt.Sprintf("layer %d verified and read", i), r.read[i])
	}
	row("the load is over", r.over)
	row("the first token is there", r.first)
	return out
}
