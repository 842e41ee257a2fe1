package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/model"
	"github.com/kvport/kvport/engine/model/sim"
	"github.com/kvport/kvport/engine/sample"
	"github.com/kvport/kvport/engine/tokenizer"
)

// rig is an engine under test with its registry.
type rig struct {
	*Engine
	reg *prometheus.Registry
}

// simConfig is a small engine of the sim model.
func simConfig(t testing.TB) Config {
	m, err := sim.New(sim.Options{Layers: 3, BytesPerToken: 32, Seed: 1, MaxTokens: 1024})
	require.NoError(t, err)
	return Config{
		Model: m, Tokenizer: tokenizer.Bytes(), NumBlocks: 400, PrefixCaching: true,
		Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
	}
}

// start runs an engine and closes it at the end of the test; then every block must be free.
func start(t testing.TB, cfg Config) *rig {
	r := &rig{reg: prometheus.NewRegistry()}
	cfg.Metrics = r.reg
	var err error
	r.Engine, err = New(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { r.stop(t) })
	return r
}

func (r *rig) stop(t testing.TB) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	require.NoError(t, r.Close(ctx))
}

// metric is a counter's or gauge's value, summed over the series that have the given label value.
func (r *rig) metric(t testing.TB, name, label string) int {
	sum := 0.0
	families, err := r.reg.Gather()
	require.NoError(t, err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			hit := label == ""
			for _, l := range m.GetLabel() {
				hit = hit || l.GetValue() == label
			}
			if f.GetName() == name && hit {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return int(sum)
}

// result is a whole generation.
type result struct {
	tokens []int32
	last   Output
}

func collect(out <-chan Output) (r result) {
	for o := range out {
		r.tokens = append(r.tokens, o.Tokens...)
		r.last = o
	}
	return r
}

// ask runs requests, at most batch at a time, and returns their results in order.
func (r *rig) ask(t testing.TB, reqs []Request, batch int) []result {
	results := make([]result, len(reqs))
	var wg sync.WaitGroup
	slots := make(chan struct{}, batch)
	for i, req := range reqs {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			out, err := r.Submit(t.Context(), req)
			if err != nil {
				results[i].last = Output{Reason: connector.ReasonError, Err: err}
				return
			}
			results[i] = collect(out)
		})
	}
	wg.Wait()
	return results
}

// askTogether has all requests in the engine before it opens the gate of the engine's model.
func (r *rig) askTogether(t testing.TB, reqs []Request, gate chan struct{}) (results []result) {
	var outs []<-chan Output
	for _, req := range reqs {
		outs = append(outs, submit(t, r, req))
	}
	close(gate)
	for _, out := range outs {
		results = append(results, collect(out))
	}
	return results
}

// requests makes n requests whose prompts share prefixes, some greedy, some sampled.
func requests(n int) []Request {
	rng := rand.New(rand.NewPCG(11, 12))
	common := make([]int32, 70)
	for i := range common {
		common[i] = 32 + rng.Int32N(90)
	}
	var list []Request
	for i := range n {
		prompt := slices.Clone(common[:rng.IntN(len(common))])
		for range 1 + rng.IntN(120) {
			prompt = append(prompt, rng.Int32N(256))
		}
		req := Request{ID: connector.RequestID(fmt.Sprintf("r%d", i)), Prompt: prompt, MaxTokens: 1 + rng.IntN(40), IgnoreEOS: i%2 == 0}
		if i%3 == 0 {
			req.Params = sample.Params{Temperature: 0.8, TopP: 0.9, TopK: 50, Seed: uint64(i)}
		}
		list = append(list, req)
	}
	return list
}

func tokensOf(results []result) (all [][]int32) {
	for _, r := range results {
		all = append(all, r.tokens)
	}
	return all
}

// TestTokensDependOnRequestAlone runs the same requests under everything that must not matter.
func TestTokensDependOnRequestAlone(t *testing.T) {
	for name, base := range map[string]Config{"sim": simConfig(t), "tiny": tinyConfig(t)} {
		reqs := requests(16)
		plain := base
		plain.PrefixCaching = false
		want := tokensOf(start(t, plain).ask(t, reqs, 1))
		for _, w := range want {
			require.NotEmpty(t, w)
		}
		for _, v := range []struct {
			name   string
			change func(*Config)
			batch  int
			check  func(t *testing.T, r *rig)
		}{
			{"batch 8", func(*Config) {}, 8, nil},
			{"batch 16, chunk 1", func(c *Config) { c.MaxBatchedTokens = 1 }, 16, nil},
			{"chunk 7", func(c *Config) { c.MaxBatchedTokens = 7 }, 8, nil},
			{"chunk 64", func(c *Config) { c.MaxBatchedTokens = 64 }, 8, nil},
			{"block 1", func(c *Config) { c.BlockSize = 1; c.NumBlocks = 4000 }, 8, nil},
			{"block 32", func(c *Config) { c.BlockSize = 32 }, 8, nil},
			{"block 64, chunk 33", func(c *Config) { c.BlockSize, c.MaxBatchedTokens = 64, 33 }, 8, nil},
			{"no prefix cache", func(c *Config) { c.PrefixCaching = false }, 8, func(t *testing.T, r *rig) {
				require.Zero(t, r.metric(t, "kvport_prompt_tokens_total", "local_cache"))
			}},
			{"warm prefix cache", func(*Config) {}, 8, func(t *testing.T, r *rig) {
				before := r.metric(t, "kvport_prompt_tokens_total", "local_cache")
				require.Equal(t, want, tokensOf(r.ask(t, reqs, 8)))
				require.Greater(t, r.metric(t, "kvport_prompt_tokens_total", "local_cache"), before+500)
				require.NoError(t, r.Reset(t.Context()))
				before = r.metric(t, "kvport_prompt_tokens_total", "local_cache")
				require.Equal(t, want[:1], tokensOf(r.ask(t, reqs[:1], 1)), "after a reset")
				require.Equal(t, before, r.metric(t, "kvport_prompt_tokens_total", "local_cache"))
			}},
			{"tiny cache", func(c *Config) { c.NumBlocks, c.BlockSize = 60, 4 }, 16, nil},
		} {
			t.Run(name+" "+v.name, func(t *testing.T) {
				cfg := base
				v.change(&cfg)
				r := start(t, cfg)
				require.Equal(t, want, tokensOf(r.ask(t, reqs, v.batch)))
				if v.check != nil {
					v.check(t, r)
				}
				requireIdle(t, r)
			})
		}
	}
}

// TestPreemption has all requests in the engine before the first step, in a cache that holds few.
func TestPreemption(t *testing.T) {
	for name, cfg := range map[string]Config{"sim": simConfig(t), "tiny": tinyConfig(t)} {
		t.Run(name, func(t *testing.T) {
			reqs := requests(16)
			want := tokensOf(start(t, cfg).ask(t, reqs, 1))
			g := &gate{Model: cfg.Model, open: make(chan struct{})}
			cfg.Model, cfg.NumBlocks, cfg.BlockSize = g, 60, 4
			r := start(t, cfg)
			require.Equal(t, want, tokensOf(r.askTogether(t, reqs, g.open)))
			n := r.metric(t, "kvport_preemptions_total", "")
			t.Logf("%v preemptions", n)
			require.Positive(t, n)
			requireIdle(t, r)
		})
	}
}

// tinyConfig is an engine with real arithmetic.
func tinyConfig(t testing.TB) Config {
	cfg := simConfig(t)
	m, err := model.Tiny(3, model.Options{Threads: 1})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	cfg.Model, cfg.MaxModelLen = m, 1024
	return cfg
}

// requireIdle waits until the engine has nothing to do; then all blocks are free.
func requireIdle(t testing.TB, r *rig) {
	require.Eventually(t, func() bool {
		h := r.Health()
		return h.Running+h.Waiting == 0 && h.Blocks == Blocks{Free: r.Info().NumBlocks}
	}, time.Minute, time.Millisecond, "blocks are not free again")
}

// TestAborts ends requests at random moments; the others must not notice.
func TestAborts(t *testing.T) {
	cfg := simConfig(t)
	reqs := requests(16)
	want := tokensOf(start(t, cfg).ask(t, reqs, 1))
	cfg.NumBlocks, cfg.BlockSize, cfg.MaxBatchedTokens = 100, 4, 16
	r := start(t, cfg)
	rng := rand.New(rand.NewPCG(1, 1))
	for range 20 {
		var wg sync.WaitGroup
		for i, req := range reqs {
			doomed, after := rng.IntN(2) == 0, rng.IntN(6)
			wg.Go(func() {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if doomed && after == 0 {
					cancel() // before it was taken in
				}
				out, err := r.Submit(ctx, req)
				if err != nil {
					assert.Fail(t, "submit", err)
					return
				}
				var got result
				for o := range out {
					got.tokens = append(got.tokens, o.Tokens...)
					if got.last = o; doomed && len(got.tokens) >= after {
						cancel()
					}
				}
				switch got.last.Reason {
				case connector.ReasonAbort:
					assert.True(t, doomed)
					assert.True(t, slices.Equal(want[i][:len(got.tokens)], got.tokens))
				default:
					assert.Equal(t, want[i], got.tokens)
				}
			})
		}
		wg.Wait()
	}
	aborted := r.metric(t, "kvport_requests_total", "abort")
	t.Logf("%d of 320 requests aborted", aborted)
	require.Greater(t, aborted, 20)
	requireIdle(t, r)
}

func TestStopByCaller(t *testing.T) {
	cfg := simConfig(t)
	g := &gate{Model: cfg.Model, open: make(chan struct{})}
	cfg.Model = g
	r := start(t, cfg)
	ctx, cancel := context.WithCancelCause(t.Context())
	out, err := r.Submit(ctx, Request{ID: "a", Prompt: []int32{65}, MaxTokens: 1000, IgnoreEOS: true})
	require.NoError(t, err)
	defer close(g.open)
	g.open <- struct{}{}
	require.Len(t, (<-out).Tokens, 1)
	cancel(ErrStop)
	var got result
	g.steps(t, func() { got = collect(out) })
	require.Equal(t, connector.ReasonStop, got.last.Reason)
	requireIdle(t, r)
}

func TestStopToken(t *testing.T) {
	r := start(t, simConfig(t))
	var stopped, ran int
	for i := range 20 {
		req := Request{ID: "a", Prompt: []int32{int32(i)}, MaxTokens: 300}
		got := collect(submit(t, r, req))
		req.IgnoreEOS = true
		all := collect(submit(t, r, req)).tokens
		require.Equal(t, all[:len(got.tokens)], got.tokens)
		if got.last.Reason == connector.ReasonStop {
			stopped++
			require.Equal(t, int32(tokenizer.EOS), got.tokens[len(got.tokens)-1])
			require.NotContains(t, got.tokens[:len(got.tokens)-1], int32(tokenizer.EOS))
		} else {
			ran++
			require.Len(t, got.tokens, 300)
		}
		require.Len(t, all, 300)
	}
	require.Positive(t, stopped)
}

func submit(t testing.TB, r *rig, req Request) <-chan Output {
	out, err := r.Submit(t.Context(), req)
	require.NoError(t, err)
	return out
}

func TestUsage(t *testing.T) {
	r := start(t, simConfig(t))
	req := Request{ID: "a", Prompt: slices.Repeat([]int32{1, 2, 3}, 11), MaxTokens: 5, IgnoreEOS: true}
	require.Equal(t, Usage{Prompt: 33, Generated: 5}, collect(submit(t, r, req)).last.Usage)
	require.Equal(t, Usage{Prompt: 33, Generated: 5, Local: 32}, collect(submit(t, r, req)).last.Usage)
	req.Salt = "tenant"
	require.Equal(t, Usage{Prompt: 33, Generated: 5}, collect(submit(t, r, req)).last.Usage, "another salt shares nothing")
	req.Prompt, req.Salt = req.Prompt[:32], ""
	require.Equal(t, Usage{Prompt: 32, Generated: 5, Local: 16}, collect(submit(t, r, req)).last.Usage, "one token must be computed")
	require.Equal(t, 20, r.metric(t, "kvport_generated_tokens_total", ""))
	require.Equal(t, 48, r.metric(t, "kvport_prompt_tokens_total", "local_cache"))
	require.Equal(t, 33+1+33+16, r.metric(t, "kvport_prompt_tokens_total", "local_compute"))
}

// Prompts wait until their first token, or until their client leaves; those that the engine has not taken in yet do, too.
func TestPromptTokensWaiting(t *testing.T) {
	cfg := simConfig(t)
	g := &gate{Model: cfg.Model, open: make(chan struct{})}
	cfg.Model = g
	r := start(t, cfg)
	waiting := func() int { return r.metric(t, "kvport_prompt_tokens_waiting", "") }
	first := submit(t, r, Request{ID: "a", Prompt: slices.Repeat([]int32{1}, 30), MaxTokens: 50, IgnoreEOS: true})
	require.Equal(t, 30, waiting())
	ctx, leave := context.WithCancel(t.Context())
	left, err := r.Submit(ctx, Request{ID: "b", Prompt: slices.Repeat([]int32{2}, 12), MaxTokens: 900, IgnoreEOS: true})
	require.NoError(t, err)
	require.Equal(t, 42, waiting())
	_, err = r.Submit(t.Context(), Request{ID: "c", MaxTokens: 1})
	require.ErrorIs(t, err, ErrInvalid)
	require.Equal(t, 42, waiting(), "what is refused does not wait")
	defer close(g.open)
	leave()
	g.steps(t, func() {
		assert.Len(t, collect(first).tokens, 50)
		assert.Equal(t, connector.ReasonAbort, collect(left).last.Reason)
	})
	require.Zero(t, waiting())
	_ = collect(submit(t, r, Request{ID: "d", Prompt: []int32{1, 2}, Query: true}))
	require.Zero(t, waiting(), "a cache query waits for no token")
}

func TestRefusals(t *testing.T) {
	cfg := simConfig(t)
	cfg.MaxModelLen, cfg.MaxWaiting, cfg.MaxSeqs = 100, 1, 1
	r := start(t, cfg)
	good := Request{ID: "a", Prompt: []int32{1}, MaxTokens: 99, IgnoreEOS: true}
	for name, c := range map[string]struct {
		change func(*Request)
		want   error
	}{
		"no id":          {func(q *Request) { q.ID = "" }, ErrInvalid},
		"no prompt":      {func(q *Request) { q.Prompt = nil }, ErrInvalid},
		"no tokens":      {func(q *Request) { q.MaxTokens = 0 }, ErrInvalid},
		"token too high": {func(q *Request) { q.Prompt = []int32{259} }, ErrInvalid},
		"token negative": {func(q *Request) { q.Prompt = []int32{-1} }, ErrInvalid},
		"bad parameters": {func(q *Request) { q.Params.TopP = 2 }, ErrInvalid},
		"too long":       {func(q *Request) { q.MaxTokens = 100 }, ErrTooLong},
		"far too long":   {func(q *Request) { q.MaxTokens = 1 << 62 }, ErrTooLong},
	} {
		t.Run(name, func(t *testing.T) {
			req := good
			c.change(&req)
			_, err := r.Submit(t.Context(), req)
			require.ErrorIs(t, err, c.want)
		})
	}
	hold, cancel := context.WithCancel(t.Context())
	defer cancel()
	block := &gate{Model: cfg.Model, open: make(chan struct{})}
	cfg.Model = block
	g := start(t, cfg)
	first, err := g.Submit(hold, good)
	require.NoError(t, err)
	_, err = g.Submit(hold, good)
	require.ErrorIs(t, err, ErrInvalid, "the id is in use")
	good.ID = "b"
	second, err := g.Submit(hold, good)
	require.NoError(t, err)
	good.ID = "c"
	_, err = g.Submit(hold, good)
	require.ErrorIs(t, err, ErrOverloaded)
	close(block.open)
	require.Len(t, collect(first).tokens, 99)
	require.NotEmpty(t, collect(second).tokens)
}

// gate is a model that waits until it may continue, and then fails as often as it is told to.
type gate struct {
	model.Model
	open  chan struct{}
	fails int
}

func (g *gate) Forward(b *model.Batch, kv *connector.KV) error {
	<-g.open
	if g.fails > 0 {
		g.fails--
		return errors.New("overheated")
	}
	return g.Model.Forward(b, kv)
}

// steps lets the model compute until f is over, with pauses: without them it could reach the last token of a request before the engine
// learns that somebody has ended it.
func (g *gate) steps(t testing.TB, f func()) {
	t.Helper()
	over := make(chan struct{})
	go func() {
		defer close(over)
		f()
	}()
	require.Eventually(t, func() bool {
		select {
		case g.open <- struct{}{}:
		case <-over:
			return true
		default:
		}
		return false
	}, time.Minute, time.Millisecond)
}

func TestModelFailure(t *testing.T) {
	cfg := simConfig(t)
	g := &gate{Model: cfg.Model, open: make(chan struct{}), fails: 1}
	cfg.Model, cfg.Log = g, slog.New(slog.DiscardHandler)
	close(g.open)
	r := start(t, cfg)
	req := Request{ID: "a", Prompt: []int32{1}, MaxTokens: 5, IgnoreEOS: true}
	got := collect(submit(t, r, req))
	require.Equal(t, connector.ReasonError, got.last.Reason)
	require.ErrorContains(t, got.last.Err, "overheated")
	require.Len(t, collect(submit(t, r, req)).tokens, 5, "the engine lives on")
	requireIdle(t, r)
}

func TestCloseDrains(t *testing.T) {
	cfg := simConfig(t)
	g := &gate{Model: cfg.Model, open: make(chan struct{})}
	cfg.Model = g
	r := start(t, cfg)
	out := submit(t, r, Request{ID: "a", Prompt: []int32{1}, MaxTokens: 900, IgnoreEOS: true})
	g.open <- struct{}{}
	require.Len(t, (<-out).Tokens, 1)
	close(g.open)
	r.stop(t)
	got := collect(out)
	require.Equal(t, connector.ReasonLength, got.last.Reason)
	_, err := r.Submit(t.Context(), Request{ID: "b", Prompt: []int32{1}, MaxTokens: 1})
	require.ErrorIs(t, err, ErrClosed)
	require.ErrorIs(t, r.Reset(t.Context()), ErrClosed)
	require.True(t, r.Health().Closing)
}

func TestCloseCutsOff(t *testing.T) {
	cfg := simConfig(t)
	g := &gate{Model: cfg.Model, open: make(chan struct{})}
	cfg.Model = g
	r := start(t, cfg)
	running := submit(t, r, Request{ID: "a", Prompt: []int32{1}, MaxTokens: 900, IgnoreEOS: true})
	cfg.MaxSeqs = 1
	waiting := submit(t, r, Request{ID: "b", Prompt: []int32{2}, MaxTokens: 900, IgnoreEOS: true})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	defer close(g.open)
	g.steps(t, func() { assert.NoError(t, r.Close(ctx)) })
	for _, out := range []<-chan Output{running, waiting} {
		got := collect(out)
		require.Equal(t, connector.ReasonError, got.last.Reason)
		require.ErrorIs(t, got.last.Err, ErrClosed)
	}
}

// TestSlowReader checks that a client that reads nothing holds up nobody and loses nothing.
func TestSlowReader(t *testing.T) {
	r := start(t, simConfig(t))
	slow := submit(t, r, Request{ID: "slow", Prompt: []int32{1, 2}, MaxTokens: 200, IgnoreEOS: true})
	want := collect(submit(t, r, Request{ID: "quick", Prompt: []int32{1, 2}, MaxTokens: 200, IgnoreEOS: true})).tokens
	requireIdle(t, r)
	require.Equal(t, want, collect(slow).tokens)
}

func TestBadConfig(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"model and tokenizer": func(c *Config) { c.Model = nil },
		"block size":          func(c *Config) { c.BlockSize = -1 },
		"max model length":    func(c *Config) { c.MaxModelLen = 1 << 20 },
		"metrics":             func(c *Config) { c.Metrics = start(t, simConfig(t)).reg },
	} {
		cfg := simConfig(t)
		change(&cfg)
		_, err := New(t.Context(), cfg)
		require.ErrorContains(t, err, name)
	}
}

// Places that no step fills cost nothing.
func TestManyPlaces(t *testing.T) {
	cfg := simConfig(t)
	want := tokensOf(start(t, cfg).ask(t, requests(4), 4))
	cfg.MaxSeqs = 1 << 40
	require.Equal(t, want, tokensOf(start(t, cfg).ask(t, requests(4), 4)))
}
