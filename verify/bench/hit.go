package bench

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine"
	"github.com/kvport/kvport/engine/model"
	"github.com/kvport/kvport/engine/model/kernel"
	"github.com/kvport/kvport/engine/model/sim"
	"github.com/kvport/kvport/engine/tokenizer"
	"github.com/kvport/kvport/host"
)

// middle is the median of numbers.
func middle(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

// runner asks an engine for tokens.
type runner struct {
	*engine.Engine
	serial atomic.Int64
}

// generate returns how long the first token took and how long the others.
func (r *runner) generate(ctx context.Context, prompt []int32, tokens int) (first, rest time.Duration, external int, err error) {
	id := connector.RequestID(strconv.FormatInt(r.serial.Add(1), 10))
	begin := time.Now()
	out, err := r.Submit(ctx, engine.Request{
		ID: id, Prompt: slices.Clone(prompt), MaxTokens: tokens, IgnoreEOS: true,
	})
	if err != nil {
		return 0, 0, 0, err
	}
	for o := range out {
		if first == 0 && len(o.Tokens) > 0 {
			first = time.Since(begin)
		}
		if o.Err != nil {
			return 0, 0, 0, o.Err
		}
		external = o.Usage.External
	}
	return first, time.Since(begin) - first, external, nil
}

// stored is the connector of an engine: the typical store.
type stored struct {
	role   string // empty: there is none
	dir    string
	digest host.Digest // empty: the default
	// Empty: the defaults.
	trust   host.Trust
	sandbox host.SandboxMode
}

// connectorConfig is what an engine with this connector would be started with.
func connectorConfig(name, role string, extra json.RawMessage) (*host.Config, error) {
	arg, err := json.Marshal(struct {
		Connector string          `json:"kv_connector"`
		Role      string          `json:"kv_role"`
		Extra     json.RawMessage `json:"kv_connector_extra_config"`
	}{name, role, extra})
	if err != nil {
		return nil, err
	}
	return host.ParseConfig(string(arg))
}

// newRunner starts an engine.
func (b *bench) newRunner(ctx context.Context, m model.Model, with stored) (*runner, error) {
	config := engine.Config{
		Model: m, Tokenizer: tokenizer.Bytes(), NumBlocks: 256, PluginPath: b.PluginPath, Log: slog.New(slog.DiscardHandler),
	}
	if with.role != "" {
		store, err := typicalStore()
		if err != nil {
			return nil, err
		}
		extra, err := store.config(with.dir)
		if err != nil {
			return nil, err
		}
		if config.Connector, err = connectorConfig(store.name, with.role, extra); err != nil {
			return nil, err
		}
		set := &config.Connector.Settings
		set.Digest, set.Trust, set.Sandbox = cmp.Or(with.digest, set.Digest), cmp.Or(with.trust, set.Trust), cmp.Or(with.sandbox, set.Sandbox)
		config.Connector.SandboxedBy(host.Self)
	}
	e, err := engine.New(ctx, config)
	if err != nil {
		return nil, err
	}
	return &runner{Engine: e}, nil
}

// hit compares the time to the first token of a prompt that is in shared storage with the time that the
// host spends on checking its digests, and with the time without a connector: both engines use one model, since only one works at a time.
func (b *bench) hit(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp(b.Dir, "kvport-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	m, err := b.load(b.Threads, kernel.Auto)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	r, err := b.newRunner(ctx, m, stored{role: "kv_both", dir: dir})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close(context.WithoutCancel(ctx))) }()
	prompt := tokensOf(b.prompt+1, 3, m.Spec().Vocab)
	alone, err := b.newRunner(ctx, m, stored{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, alone.Close(context.WithoutCancel(ctx))) }()
	if err := b.store(ctx, r, prompt); err != nil {
		return err
	}
	check, err := b.checks(m, true)
	if err != nil {
		return err
	}
	unkeyed, err := b.checks(m, false)
	if err != nil {
		return err
	}
	var hits, misses took
	took, err := b.turns().measure(ctx, check, unkeyed, func(int) error {
		first, err := b.firstToken(ctx, r, prompt)
		hits = append(hits, first)
		return err
	}, func(int) error {
		first, _, _, err := alone.generate(ctx, prompt, 1)
		misses = append(misses, first)
		return err
	})
	if err != nil {
		return err
	}
	slices.Sort(hits)
	slices.Sort(misses)
	bytes := blockBytes(m) * int64(b.prompt/blockTokens)
	if err := b.Emit(shorter(fmt.Sprintf("first token of a hit, %d tokens", b.prompt), bytes, hits.millis(), misses.millis(), "ms")(budget{})); err != nil {
		return err
	}
	for i, name := range []string{"digests of a hit, share of first token", "digests of a hit, XXH3-128, share of first token"} {
		limits := []budget{atMost(2), {}}
		share := 100 * float64(took[i].median()) / float64(hits.median())
		row := shorter(name, bytes, share, 100, "%")(limits[i])
		row.Ratio = nil // the limit is the whole; being far below it is good
		if err := b.Emit(row); err != nil {
			return err
		}
	}
	return nil
}

// firstToken is the time to the first token of a prompt all of whose blocks must come from storage.
func (b *bench) firstToken(ctx context.Context, r *runner, prompt []int32) (time.Duration, error) {
	first, _, external, err := r.generate(ctx, prompt, 1)
	if err == nil && external != b.prompt {
		err = fmt.Errorf("%d tokens of %d came from storage", external, b.prompt)
	}
	return first, err
}

// store computes a prompt once, which saves it, and waits until it can be loaded.
func (b *bench) store(ctx context.Context, r *runner, prompt []int32) error {
	_, _, _, err := r.generate(ctx, prompt, 1)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for err == nil && (r.Health().Host.Pending > 0 || r.Health().Blocks.Pinned > 0) {
		select {
		case <-ctx.Done():
			err = ctx.Err()
		case <-tick.C:
		}
	}
	return err
}

func blockBytes(m model.Model) int64 {
	l := m.Layout(blockTokens, 1)
	return l.BlockBytes(0)
}

// checks gives a function that does the host's work on the digests of a prompt, of edition 2 or 1, bytes hot from the last time.
func (b *bench) checks(m model.Model, keyed bool) (func(int) error, error) {
	n := b.prompt / blockTokens
	layout, size := host.WithDigests(m.Layout(blockTokens, n))
	memory := make([]byte, size)
	fill(memory)
	kv, err := connector.NewKV(layout, [][]byte{memory})
	if err != nil {
		return nil, err
	}
	h := hashing(connector.Fingerprint{}, connector.Fingerprint{}, keyed)
	blocks := make([]connector.Block, n)
	for i := range blocks {
		blocks[i] = connector.Block{ID: connector.BlockID(i), Key: key(i)}
		if err := h.Make(kv, blocks[i]); err != nil {
			return nil, err
		}
	}
	return func(int) error {
		for _, block := range blocks {
			if err := h.Check(kv, block); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

// step compares engine steps with a connector that has nothing to do with steps without one. The sim model
// makes them so short that the difference shows; it is set against a step of the model.
func (b *bench) step(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp(b.Dir, "kvport-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	const tokens = 201
	var rests [2]took
	var ways []func(int) error
	for i, role := range []string{"kv_consumer", ""} {
		var m model.Model
		if m, err = sim.New(sim.Options{}); err != nil {
			return err
		}
		var r *runner
		if r, err = b.newRunner(ctx, m, stored{role: role, dir: dir}); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, r.Close(context.WithoutCancel(ctx))) }()
		ways = append(ways, func(int) error {
			_, rest, _, err := r.generate(ctx, []int32{1, 2, 3}, tokens)
			rests[i] = append(rests[i], rest/(tokens-1))
			return err
		})
	}
	w, err := b.newWork(b.Threads, kernel.Auto, 1, 128, 1)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	took, err := b.turns().measure(ctx, append(ways, w.forward)...)
	if err != nil {
		return err
	}
	for _, r := range rests {
		slices.Sort(r)
	}
	added := rests[0].micros() - rests[1].micros()
	row := shorter("added to a step without transfers", 0, 100*added/took[2].micros(), 100, "%")(atMost(1))
	row.Ratio = nil
	return b.Emit(row)
}
