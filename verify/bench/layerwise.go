package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/model/kernel"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/digest"
)

// LayerWise computes a prompt while its layers go to a consumer in another process, by o.Connector, and
// emits when each layer was computed and when the consumer had confirmed it, and how much that was before
// the last layer's compute ended.
func LayerWise(ctx context.Context, o EngineOptions) (err error) {
	if o.Threads == 0 {
		o.Threads = runtime.GOMAXPROCS(0)
	}
	b := &bench{EngineOptions: o, prompt: 512}
	rounds := 5
	if o.Quick {
		b.prompt, rounds = 128, 1
	}
	w, err := b.newWork(o.Threads, kernel.Auto, 1, 0, b.prompt)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	l, err := openLayers(ctx, &o, w)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	if err := w.model.Forward(w.batch, w.kv); err != nil { // the first one touches memory
		return err
	}
	var last *layerRun
	var alone, beside []time.Duration
	var early []float64
	for range rounds {
		began := time.Now()
		w.batch.AfterLayer = nil
		if err := w.model.Forward(w.batch, w.kv); err != nil {
			return err
		}
		alone = append(alone, time.Since(began))
		r, err := l.run(ctx, w)
		if err != nil {
			return err
		}
		beside, early, last = append(beside, r.end), append(early, float64(r.early)), r
	}
	slices.Sort(early)
	slices.Sort(alone)
	slices.Sort(beside)
	rows := append(last.rows(),
		faster("layer-wise save, bytes confirmed before the last layer's compute ends", last.bytes, early[len(early)/2], float64(last.bytes), "B")(atLeast(0.9)),
		shorter(fmt.Sprintf("prompt of %d tokens, computed beside its save", b.prompt), last.bytes, ms(beside[len(beside)/2]), ms(alone[len(alone)/2]), "ms")(budget{}))
	for _, row := range rows {
		if err := o.Emit(row); err != nil {
			return err
		}
	}
	return nil
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// layers is a producer's and a consumer's plugin, and the cache that the producer saves.
type layers struct {
	processes []*host.Process
	sides     []interface{ Close() error }
	worker    connector.LayerWorker
	stats     connector.StatsSource
	hasher    *digest.Hasher
	consumer  *host.Region
	runs      byte
}

// layerRun is one prompt's time line, from its beginning.
type layerRun struct {
	computed, confirmed []time.Duration // of each layer
	end                 time.Duration   // of the last layer's compute
	bytes, early        int64
}

func openLayers(ctx context.Context, o *EngineOptions, w *work) (_ *layers, err error) {
	l := &layers{}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close())
		}
	}()
	name := o.Connector
	if name == "" {
		if name, err = typicalPeers(); err != nil {
			return nil, err
		}
	}
	binary, err := host.Find(o.PluginPath, name)
	if err != nil {
		return nil, err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	at, err := netip.ParseAddrPort(listener.Addr().String())
	if err := errors.Join(err, listener.Close()); err != nil {
		return nil, err
	}
	producer, consumer, err := layerEnds(name, int(at.Port()))
	if err != nil {
		return nil, err
	}
	env := connector.Env{
		Engine: "p", Epoch: 1, Role: connector.RoleProducer, World: 1, Layout: *w.kv.Layout(),
		Model: connector.NewFingerprint("bench"), Shape: connector.NewFingerprint("layers"), Log: slog.New(slog.DiscardHandler),
		LinkKey: linkKey(),
	}
	l.hasher = hashing(env.Model, env.Shape, true)
	scheduler, worker, err := l.open(ctx, binary.Path, w.region, env, producer)
	if err != nil {
		return nil, err
	}
	var ok, has bool
	l.worker, ok = connector.As[connector.LayerWorker](worker)
	l.stats, has = connector.As[connector.StatsSource](scheduler)
	if !ok || !has {
		return nil, fmt.Errorf("%s does not save layer by layer: %w", binary.Path, connector.ErrIncompatible)
	}
	if l.consumer, err = host.NewRegion(w.region.Size()); err != nil {
		return nil, err
	}
	env.Engine, env.Role = "d", connector.RoleConsumer
	if _, _, err = l.open(ctx, binary.Path, l.consumer, env, consumer); err != nil {
		return nil, err
	}
	return l, l.await(ctx, "subscribers", 1)
}

func (l *layers) open(ctx context.Context, path string, region *host.Region, env connector.Env, config json.RawMessage) (connector.Scheduler, connector.Worker, error) {
	options := patient()
	options.Regions = []*host.Region{region}
	p, err := host.Launch(ctx, path, options)
	if err != nil {
		return nil, nil, err
	}
	l.processes = append(l.processes, p)
	scheduler, err := p.OpenScheduler(ctx, env, config)
	if err != nil {
		return nil, nil, err
	}
	worker, err := p.OpenWorker(ctx, env, config)
	if err != nil {
		return nil, nil, err
	}
	l.sides = append(l.sides, scheduler, worker)
	return scheduler, worker, nil
}

func (l *layers) close() error {
	var errs []error
	for _, s := range l.sides {
		errs = append(errs, s.Close())
	}
	for _, p := range l.processes {
		p.Kill()
	}
	if l.consumer != nil {
		errs = append(errs, l.consumer.Close())
	}
	return errors.Join(errs...)
}

// number is the present value of one of the producer's numbers.
func (l *layers) number(ctx context.Context, name string) (int64, error) {
	stats, err := l.stats.Stats(ctx)
	for _, s := range stats {
		if s.Name == name {
			return int64(s.Value), err
		}
	}
	return 0, err
}

// await waits until a number is large enough.
func (l *layers) await(ctx context.Context, name string, least int64) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for ctx.Err() == nil {
		n, err := l.number(ctx, name)
		if err != nil || n >= least {
			return err
		}
		pauseFor(ctx, time.Millisecond)
	}
	return fmt.Errorf("%s: %w", name, ctx.Err())
}

func pauseFor(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// sealing is the Progress of a run, which makes the digests of each layer before it is announced.
type sealing struct {
	connector.LayerCount
	w    *work
	t    *connector.Transfer
	mu   sync.Mutex
	done int

	maker digest.Maker
}

// Wait implements connector.Progress.
func (s *sealing) Wait(ctx context.Context, seen int) (int, error) {
	n, err := s.LayerCount.Wait(ctx, seen)
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.t.Blocks {
		if err := s.maker.MakeSegments(s.w.kv, b, s.w.kv.Between(0, s.done, n)); err != nil {
			return 0, err
		}
	}
	s.done = n
	return n, nil
}

// run computes the prompt once while its blocks are saved.
func (l *layers) run(ctx context.Context, w *work) (*layerRun, error) {
	l.runs++
	table := w.batch.Chunks[0].Blocks[0]
	t := &connector.Transfer{Request: "bench", Tokens: len(table) * blockTokens}
	for i, id := range table {
		t.Blocks = append(t.Blocks, connector.Block{Key: connector.BlockKey{l.runs, byte(i), byte(i >> 8), 1}, ID: id})
	}
	before, err := l.number(ctx, "layer_confirmed_bytes_total")
	if err != nil {
		return nil, err
	}
	n := w.kv.Layout().Layers()
	r := &layerRun{confirmed: make([]time.Duration, n), bytes: int64(len(table)) * w.kv.Layout().BlockBytes(0)}
	perLayer := r.bytes / int64(n)
	maker, err := l.hasher.Maker()
	if err != nil {
		return nil, err
	}
	progress := &sealing{maker: maker, w: w, t: t}
	began := time.Now()
	saved, watched := make(chan error, 1), make(chan error, 1)
	go func() { saved <- l.worker.SaveLayers(ctx, t, w.kv, progress) }()
	go func() {
		watched <- l.watch(ctx, before, func(got int64) bool {
			now := time.Since(began)
			for i := range r.confirmed {
				if whole := perLayer * int64(i+1); r.confirmed[i] == 0 && (got >= whole || got >= r.bytes) {
					r.confirmed[i] = now
				}
			}
			return got >= r.bytes
		})
	}()
	w.batch.AfterLayer = func(layer int) error {
		r.computed = append(r.computed, time.Since(began))
		progress.Advance(layer + 1)
		return nil
	}
	if err := w.model.Forward(w.batch, w.kv); err != nil {
		progress.GiveUp()
		return nil, errors.Join(err, <-saved)
	}
	r.end = time.Since(began)
	got, err := l.number(ctx, "layer_confirmed_bytes_total")
	r.early = got - before
	return r, errors.Join(err, <-saved, <-watched)
}

// watch looks at how much was confirmed until enough says that it is all.
func (l *layers) watch(ctx context.Context, before int64, enough func(got int64) bool) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for ctx.Err() == nil {
		n, err := l.number(ctx, "layer_confirmed_bytes_total")
		if err != nil || enough(n-before) {
			return err
		}
		pauseFor(ctx, time.Millisecond)
	}
	return fmt.Errorf("not all bytes were confirmed: %w", ctx.Err())
}

// rows are the time line.
func (r *layerRun) rows() (out []Row) {
	row := func(name string, at time.Duration) {
		v := ms(at)
		out = append(out, Row{Name: name, Bytes: r.bytes / int64(len(r.computed)), Value: &v, Unit: "ms"})
	}
	for i := range r.computed {
		row(fmt.Sprintf("layer %d computed", i), r.computed[i])
		row(fmt.Sprintf("layer %d confirmed", i), r.confirmed[i])
	}
	row("last layer's compute ends", r.end)
	return out
}
