package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/verify/fixture"
)

// PlacedOptions say what Placed works with.
type PlacedOptions struct {
	Model      string   // GGUF file or tiny-random, whose decoding is disturbed
	Threads    int      // that decode; 0: one for each CPU
	PluginPath []string // where the plugin of the memory tier is
	Only       string   // blocks of these sizes, such as "8 MiB"
	Peers      bool     // other people's stores beside ours
	PeersDir   string   // what verify/bench/peers/setup.py made
	Quick      bool     // a few rounds, to see that it works
	Emit       Emit
}

// placedShapes are blocks of caches; the batches are how many an engine asks for at once.
func placedShapes() []placedShape {
	return []placedShape{
		{shape{"48 KB", 2, 24 << 10, 0}, []int{1, 8, 32, 128}},
		{shape{"737 KB", 30, 24 << 10, 0}, []int{1, 8, 32}},
		{shape{"1.41 MiB", 30, 48 << 10, 0}, []int{1, 8, 32}},
		{shape{"8 MiB", 32, 256 << 10, 0}, []int{1, 4}},
	}
}

type placedShape struct {
	shape
	batches []int
}

// lentShare is how many slots of a memory tier there are for each that it lends at a time.
const lentShare = 128

// otherWork is what a caller does before an operation that is not measured hot.
const otherWork = 20 * time.Millisecond

// placed is a host whose plugin keeps all blocks of the cache in its memory.
type placed struct {
	PlacedOptions
	*host.Host
	shape    placedShape
	layout   connector.Layout
	region   *host.Region
	kv       *connector.KV // the cache
	slots    *memorySlots  // as much memory, of which the limits copy
	metrics  *prometheus.Registry
	plugin   int32 // the clock of its processor time
	step     uint64
	saved    int              // keys that were saved
	loaded   int              // blocks that were loaded
	previous *connector.Ended // the request of the step before; nil: none
}

// Placed measures what an engine waits for blocks that lie in the memory of a plugin, through the host: lookups, loads and saves, hot and
// after other work, with the processor time of both processes. A load is copied and verified by the host, and a save is copied and digested by it, as long as
// slots are lent.
// The limits copy the same bytes between memory of the same kind with as many threads.
func Placed(ctx context.Context, o PlacedOptions) error {
	if !slices.ContainsFunc(placedShapes(), func(s placedShape) bool { return strings.Contains(s.name, o.Only) }) {
		return fmt.Errorf("no size of blocks has %q in it: 48 KB, 737 KB, 1.41 MiB and 8 MiB are measured", o.Only)
	}
	for _, s := range placedShapes() {
		if o.Quick && s.block() > 1<<20 || !strings.Contains(s.name, o.Only) {
			continue
		}
		if err := placedShapeRows(ctx, o, s); err != nil {
			return fmt.Errorf("blocks of %s: %w", s.name, err)
		}
	}
	return nil
}

func placedShapeRows(ctx context.Context, o PlacedOptions, s placedShape) (err error) {
	p, err := openPlaced(ctx, o, s)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	if err := p.fill(ctx); err != nil {
		return err
	}
	for _, other := range []time.Duration{otherWork, 0} {
		if err := p.lookups(ctx, other); err != nil {
			return err
		}
		if err := p.moves(ctx, "load", other, p.load, p.slots.in); err != nil {
			return err
		}
	}
	if s.name == disturbing {
		if err := p.decoding(ctx); err != nil {
			return err
		}
	}
	if err := p.peers(ctx); err != nil {
		return err
	}
	if err := p.allPlaced(); err != nil {
		return err
	}
	return p.saves(ctx)
}

// saves measures saves, and says how many of their blocks went without the plugin: all others were saved while too few slots were lent.
func (p *placed) saves(ctx context.Context) error {
	const lent = "kvport_placed_saved_blocks_total"
	was, err := p.metric(lent)
	if err != nil {
		return err
	}
	began := p.saved
	for _, other := range []time.Duration{otherWork, 0} {
		if err := p.moves(ctx, "save", other, p.save, p.slots.out); err != nil {
			return err
		}
	}
	now, err := p.metric(lent)
	if err != nil {
		return err
	}
	return p.Emit(Row{Name: fmt.Sprintf("saves of %s: blocks that went without a call of the plugin", p.shape.name), Value: round(100 * (now - was) / float64(p.saved-began)), Unit: "%"})
}

// disturbing is the shape of blocks whose loads run beside decoding.
const disturbing = "48 KB"

func openPlaced(ctx context.Context, o PlacedOptions, s placedShape) (_ *placed, err error) {
	p := &placed{PlacedOptions: o, shape: s, metrics: prometheus.NewRegistry()}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	bytes := int64(cacheBytes)
	if o.Quick {
		bytes = 2 * s.block() * int64(slices.Max(s.batches))
	}
	var size int64
	p.layout, size = (&link{shape: s.shape, blocks: int(bytes / s.block())}).layout(true)
	if p.region, err = host.NewRegion(size); err != nil {
		return nil, err
	}
	fill(p.region.Bytes())
	if p.kv, err = connector.NewKV(p.layout, [][]byte{p.region.Bytes()}); err != nil {
		return nil, err
	}
	if p.slots, err = newMemorySlots(p.kv); err != nil {
		return nil, err
	}
	memory := size + size/8
	if !o.Quick { // so that the largest batch is lent at once: 144 times that, 6.4 GiB at most; smaller memory has it saved by message
		memory = max(memory, lentShare*s.block()*int64(slices.Max(s.batches))*9/8)
	}
	cfg, err := tierConfig(memory)
	if err != nil {
		return nil, err
	}
	engine := host.Engine{
		Model: connector.NewFingerprint("bench"), Shape: connector.NewFingerprint("bench", s.name), Layout: p.layout, Ranks: []*host.Region{p.region},
	}
	p.Host, err = host.Open(ctx, cfg, engine, host.Options{PluginPath: o.PluginPath, Log: slog.New(slog.DiscardHandler), Metrics: p.metrics})
	if err != nil {
		return nil, err
	}
	p.plugin = ^int32(p.Health().PID)<<3 | 2 // as clock_getcpuclockid(3) of Linux makes it
	return p, nil
}

// tierConfig is the config of the connector that stands for memory tiers, with that much memory.
func tierConfig(bytes int64) (*host.Config, error) {
	list, err := fixtures()
	if err != nil {
		return nil, err
	}
	f, err := list.Typical(fixture.Tier)
	if err != nil {
		return nil, err
	}
	extra, err := fixture.Fill(f.Memory().Config, fixture.Values{"MEMORY_BYTES": bytes, "MEMORY_GIB": gib(bytes), "BLOCK": blockTokens})
	if err != nil {
		return nil, err
	}
	cfg, err := connectorConfig(f.Connector, "kv_both", json.RawMessage(extra))
	if err != nil {
		return nil, err
	}
	cfg.SandboxedBy(host.Self)
	return cfg, nil
}

func (p *placed) close() error {
	var errs []error
	if p.Host != nil {
		go func() {
			for range p.Events() { // what nobody waits for any more
			}
		}()
		errs = append(errs, p.Close(context.Background()))
	}
	if p.slots != nil {
		errs = append(errs, p.slots.close())
	}
	if p.region != nil {
		errs = append(errs, p.region.Close())
	}
	return errors.Join(errs...)
}

// fill has the plugin keep one walk through the cache: block by block at first, each in memory that nobody has written before.
func (p *placed) fill(ctx context.Context) error {
	if err := p.warmed(ctx); err != nil {
		return err
	}
	const apart = 33
	var first []float64
	for p.saved < p.layout.Blocks {
		n := 1
		if p.saved >= min(apart, p.layout.Blocks/2) {
			n = min(32, p.layout.Blocks-p.saved)
		}
		began := time.Now()
		if err := p.save(p.saved, n); err != nil {
			return err
		}
		if n == 1 && p.saved > 1 {
			first = append(first, micros(time.Since(began)))
		}
	}
	var later []float64
	for range apart - 1 {
		began := time.Now()
		if err := p.save(p.saved, 1); err != nil {
			return err
		}
		later = append(later, micros(time.Since(began)))
	}
	for at := 0; at < p.layout.Blocks; at += 32 { // the blocks that are loaded
		if err := p.keep(at, min(32, p.layout.Blocks-at)); err != nil {
			return err
		}
	}
	name := fmt.Sprintf("save of 1 x %s, the first into its memory", p.shape.name)
	return p.Emit(shorter(name, p.shape.block(), middle(first), middle(later), "us")(atLeast(0.77)))
}

const warmPause = 20 * time.Millisecond

// warmed waits until the memory of the plugin is allocated and mapped, which both processes do in the background.
func (p *placed) warmed(ctx context.Context) error {
	began := time.Now()
	for allocated := 0.0; allocated < float64(p.Health().ArenaBytes); {
		if pauseFor(ctx, warmPause); ctx.Err() != nil {
			return ctx.Err()
		}
		now, err := p.metric("kvport_arena_allocated_bytes")
		switch {
		case err != nil:
			return err
		case now > allocated:
			allocated, began = now, time.Now()
		case time.Since(began) > time.Minute:
			return fmt.Errorf("%v bytes of the arena are allocated, and no more for a minute", allocated)
		}
	}
	for still := 0; still < 10; still++ {
		before := clockTime(p.plugin)
		if pauseFor(ctx, warmPause); ctx.Err() != nil {
			return ctx.Err()
		}
		if clockTime(p.plugin)-before > 2*time.Millisecond {
			still = 0
		}
	}
	return nil
}

// metric is the sum of a metric's values.
func (p *placed) metric(name string) (sum float64, err error) {
	all, err := p.metrics.Gather()
	if err != nil {
		return 0, err
	}
	for _, family := range all {
		if family.GetName() == name {
			for _, m := range family.GetMetric() {
				sum += m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	return sum, nil
}

// allPlaced says that some load went by message, which the rows would not show.
func (p *placed) allPlaced() error {
	placed, err := p.metric("kvport_placed_blocks_total")
	if err == nil && int(placed) != p.loaded {
		err = fmt.Errorf("%d of %d blocks were loaded without the plugin, want all", int(placed), p.loaded)
	}
	return err
}

// keys are those of n contents from number at on.
func placedKeys(at, n int) []connector.BlockKey {
	keys := make([]connector.BlockKey, n)
	for i := range keys {
		keys[i] = key(at + i)
	}
	return keys
}

// transferred is a request for n contents from number at on, in blocks of the cache from number block on.
func (p *placed) transferred(at, block, n int) (connector.Query, connector.Transfer) {
	id := connector.RequestID(strconv.FormatUint(p.step, 10))
	keys := placedKeys(at, n)
	t := connector.Transfer{Request: id, Tokens: n * blockTokens}
	for i, k := range keys {
		t.Blocks = append(t.Blocks, connector.Block{ID: connector.BlockID((block + i) % p.layout.Blocks), Key: k})
	}
	return connector.Query{Request: id, Tokens: n*blockTokens + 1, Keys: keys}, t
}

// do takes a step, ends the request of the step before, and waits for the event that ends this one's transfer.
func (p *placed) do(s *connector.Step, kind host.EventKind, t *connector.Transfer) error {
	if p.previous != nil {
		s.Ended = []connector.Ended{*p.previous}
	}
	p.step++
	s.ID, p.previous = p.step, &connector.Ended{Request: t.Request, Reason: connector.ReasonLength, Tokens: t.Tokens}
	p.Step(s)
	for e := range p.Events() {
		if e.Kind != kind || e.Request != t.Request {
			continue
		}
		if len(e.Failed) > 0 {
			return fmt.Errorf("%d blocks failed", len(e.Failed))
		}
		return nil
	}
	return errors.New("the host has ended")
}

// save has blocks saved whose content has a number that no other has.
func (p *placed) save(block, n int) error {
	err := p.saveAs(p.saved, block, n)
	p.saved += n
	return err
}

// keep has blocks saved under the keys that load asks for: the content with the number of the block.
func (p *placed) keep(at, n int) error { return p.saveAs(at, at, n) }

func (p *placed) saveAs(at, block, n int) error {
	q, t := p.transferred(at, block, n)
	return p.do(&connector.Step{Arrived: []connector.Query{q}, Computed: []connector.Transfer{t}}, host.Saved, &t)
}

// load has blocks loaded to where others were.
func (p *placed) load(at, n int) error {
	q, t := p.transferred(at, at+p.layout.Blocks/2, n)
	p.loaded += n
	return p.do(&connector.Step{Arrived: []connector.Query{q}, Admitted: []connector.Transfer{t}}, host.Loaded, &t)
}
