package engine

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/model/sim"
	"github.com/kvport/kvport/verify/testkit"
)

// cutting is how an engine cuts its cache: tokens of a block, and ranks.
type cutting struct{ block, ranks int }

// cutTokens is the longest request, and cutCache what a cache has room for: all requests of a test at once, because a producer
// keeps what no consumer has fetched yet.
const (
	cutTokens = 2048
	cutCache  = 8 * cutTokens
)

// cutConfig is an engine with 24 heads that are cut so, and a plugin whose reader is as a fault says; without one it has no
// plugin.
func cutConfig(t testing.TB, c cutting, fault string) Config {
	m, err := sim.New(sim.Options{Layers: 3, Heads: 24, Ranks: c.ranks, Seed: 1, MaxTokens: cutTokens})
	require.NoError(t, err)
	cfg := simConfig(t)
	cfg.Model, cfg.BlockSize, cfg.NumBlocks = m, c.block, cutCache/c.block
	if fault == "" {
		return cfg
	}
	return tested(t, cfg, storage(t), map[string]any{"fault": fault}, "{}")
}

// cutRequests are prompts with their lengths, and what a single node answers.
func cutRequests(t *testing.T, lengths ...int) (reqs []Request, want [][]int32) {
	for i, n := range lengths {
		req := prompted(connector.RequestID(fmt.Sprint("r", i)), int32(i+1), n)
		req.MaxTokens = 20
		reqs = append(reqs, req)
	}
	return reqs, tokensOf(start(t, cutConfig(t, cutting{16, 1}, "")).ask(t, reqs, 4))
}

// TestReshape: engines with other block sizes and ranks load from each other, up to 2,000 blocks at a time, every block
// verified. What was loaded is in the prefix cache, as what is computed.
func TestReshape(t *testing.T) {
	reqs, want := cutRequests(t, 300, 333, 1990)
	for _, pair := range [][2]cutting{{{1, 1}, {16, 2}}, {{16, 1}, {32, 1}}, {{8, 2}, {128, 3}}, {{128, 8}, {8, 4}}} {
		t.Run(fmt.Sprint(pair), func(t *testing.T) {
			p, d := start(t, cutConfig(t, pair[0], "reshape")), start(t, cutConfig(t, pair[1], "reshape"))
			require.Equal(t, want, tokensOf(d.ask(t, prefill(t, p, reqs), 4)))
			requireIdle(t, d)
			require.Zero(t, d.metric(t, "kvport_unverified_blocks_total", ""))
			require.Zero(t, d.metric(t, "kvport_integrity_failures_total", ""))
			wide := max(pair[0].block, pair[1].block)
			require.GreaterOrEqual(t, d.metric(t, "kvport_prompt_tokens_total", "external"), 300/wide*wide+333/wide*wide+1990/wide*wide)
			again := prompted("again", 1, 300)
			require.GreaterOrEqual(t, collect(submit(t, d, again)).last.Usage.Local, 299/pair[1].block*pair[1].block)
		})
	}
}

// cuttingPairs are the shapes of a producer and a consumer: blocks 1:1 to 1:16 and 16:1, on ranks among which 24 heads can be
// divided. They are in a random order, which is always the same.
func cuttingPairs() (pairs [][2]cutting) {
	for _, wide := range []int{1, 2, 4, 8, 16} {
		for _, p := range []int{1, 2, 3, 4, 8} {
			for _, d := range []int{1, 2, 3, 4, 8} {
				switch {
				case wide > 1:
					pairs = append(pairs, [2]cutting{{16, p}, {16 * wide, d}}, [2]cutting{{16 * wide, p}, {16, d}})
				case p != d:
					pairs = append(pairs, [2]cutting{{16, p}, {16, d}})
				}
			}
		}
	}
	rand.New(rand.NewPCG(126, 1)).Shuffle(len(pairs), func(i, j int) { pairs[i], pairs[j] = pairs[j], pairs[i] })
	return pairs
}

// TestReshapePairs: what one engine has computed another one with any other shape has, token by token. 20 pairs of shapes with two
// prompts, all of them with 24 prompts in soak.
func TestReshapePairs(t *testing.T) {
	if testing.Short() {
		t.Skip("starts 40 engines: left out with -short")
	}
	pairs, lengths := cuttingPairs()[:20], []int{300, 333}
	if os.Getenv("KVPORT_SOAK") != "" {
		pairs, lengths = cuttingPairs(), nil
		for i := range 24 {
			lengths = append(lengths, 17+i*i*3+i)
		}
	}
	reqs, want := cutRequests(t, lengths...)
	tokens, external := 0, 0
	for _, pair := range pairs {
		t.Run(fmt.Sprint(pair), func(t *testing.T) {
			p, d := start(t, cutConfig(t, pair[0], "reshape")), start(t, cutConfig(t, pair[1], "reshape"))
			got := tokensOf(d.ask(t, prefill(t, p, reqs), 4))
			require.Equal(t, want, got)
			requireIdle(t, d)
			require.Zero(t, d.metric(t, "kvport_integrity_failures_total", ""))
			came := d.metric(t, "kvport_prompt_tokens_total", "external")
			require.Positive(t, came)
			for _, answer := range got {
				tokens += len(answer)
			}
			external += came
		})
	}
	t.Logf("%d pairs of shapes, %d prompts each, %d tokens compared, 0 differ; %d prompt tokens came over", len(pairs), len(reqs), tokens, external)
}

// TestWrongReaders: readers that are wrong in ways that were seen elsewhere cost time and no token, and the host says
// which block of the producer was not what it had made digests of.
func TestWrongReaders(t *testing.T) {
	reqs, want := cutRequests(t, 300, 500, 333)
	p := start(t, cutConfig(t, cutting{16, 4}, "reshape"))
	for _, fault := range []string{
		"reshape_modulo", "reshape_two_ranks", "reshape_layer", "reshape_half", "reshape_offset", "reshape_short", "reshape_early", "reshape_elsewhere",
	} {
		t.Run(fault, func(t *testing.T) {
			log := &testkit.Log{}
			cfg := cutConfig(t, cutting{64, 1}, fault)
			cfg.Log = slog.New(slog.NewTextHandler(log, nil))
			d := start(t, cfg)
			own := make([]Request, len(reqs))
			for i, req := range reqs {
				req.ID = connector.RequestID(fault) + req.ID
				own[i] = req
			}
			require.Equal(t, want, tokensOf(d.ask(t, prefill(t, p, own), 4)))
			requireIdle(t, d)
			require.Zero(t, d.metric(t, "kvport_unverified_blocks_total", ""))
			if fault == "reshape_elsewhere" {
				require.Positive(t, d.metric(t, "kvport_plugin_violations_total", ""))
				return
			}
			require.Positive(t, d.metric(t, "kvport_integrity_failures_total", ""))
			require.Contains(t, log.String(), "of 4 of the producer has it (16 tokens): block")
			require.Regexp(t, "digest differs|the header of its digests is damaged", log.String())
		})
	}
}
