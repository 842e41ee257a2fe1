package engine

import (
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/model"
	"github.com/kvport/kvport/engine/model/sim"
	"github.com/kvport/kvport/engine/sample"
	"github.com/kvport/kvport/host"
)

// spreadConfig is a sim engine of several ranks and groups. Windows end inside the prompts.
func spreadConfig(t testing.TB, ranks, groups int, stride sim.Stride) Config {
	m, err := sim.New(sim.Options{
		Layers: 4, BytesPerToken: 32, Seed: 3, MaxTokens: 1024, Ranks: ranks, Groups: groups, Window: 40, Stride: stride,
	})
	require.NoError(t, err)
	cfg := simConfig(t)
	cfg.Model, cfg.NumBlocks = m, 800
	return cfg
}

// fullBlocks counts the prompts' tokens that can come from elsewhere.
func fullBlocks(reqs []Request) (tokens int) {
	for _, r := range reqs {
		tokens += (len(r.Prompt) - 1) / 16 * 16
	}
	return tokens
}

// TestSpreadModels has prefill and decode engines of several ranks and groups exchange blocks, the
// two with different strides where the shape allows, at both trust levels.
func TestSpreadModels(t *testing.T) {
	for _, trust := range []host.Trust{host.TrustInPlace, host.TrustStaged} {
		t.Run(string(trust), func(t *testing.T) { spreadModels(t, fmt.Sprintf(`{"trust": %q}`, trust)) })
	}
}

func spreadModels(t *testing.T, settings string) {
	reqs := requests(16)
	for _, c := range []struct {
		ranks, groups int
		p, d          sim.Stride
	}{
		{3, 2, sim.ByLayer, sim.ByBlock},
		{3, 2, sim.ByBlock, sim.ByShared},
		{3, 2, sim.ByPlane, sim.ByPlane},
		{3, 2, sim.ByShared, sim.ByLayer},
		{2, 1, sim.ByBlock, sim.ByLayer},
		{1, 3, sim.ByShared, sim.ByShared},
	} {
		t.Run(fmt.Sprintf("%d ranks %d groups %s to %s", c.ranks, c.groups, c.p, c.d), func(t *testing.T) {
			want := tokensOf(start(t, spreadConfig(t, c.ranks, c.groups, c.d)).ask(t, reqs, 1))
			dir := storage(t)
			p := start(t, shared(t, spreadConfig(t, c.ranks, c.groups, c.p), connector.RoleProducer, dir, settings))
			decode := prefill(t, p, reqs)
			cfg := spreadConfig(t, c.ranks, c.groups, c.d)
			cfg.PrefixCaching = false
			d := start(t, shared(t, cfg, connector.RoleConsumer, dir, settings))
			got := d.ask(t, decode, 8)
			require.Equal(t, want, tokensOf(got))
			require.Equal(t, fullBlocks(reqs), external(got), "every full block came from the producer")
			require.Zero(t, d.metric(t, "kvport_integrity_failures_total", ""))
			requireIdle(t, p)
			requireIdle(t, d)
		})
	}
}

// shardedGate is a model over several ranks that computes nothing before it is opened.
type shardedGate struct {
	model.Sharded
	open chan struct{}
}

func (g *shardedGate) ForwardRanks(b *model.Batch, ranks []*connector.KV) error {
	<-g.open
	return g.Sharded.ForwardRanks(b, ranks)
}

// TestGroupsDependOnRequestAlone has windows slide in small and large steps, caches so small that
// requests lose their blocks, and prefixes found again.
func TestGroupsDependOnRequestAlone(t *testing.T) {
	reqs := requests(16)
	want := tokensOf(start(t, spreadConfig(t, 2, 3, sim.ByLayer)).ask(t, reqs, 1))
	preempted, local := 0, 0
	for _, blockSize := range []int{1, 5, 16} {
		for _, budget := range []int{7, 512} {
			for _, stride := range sim.Strides() {
				cfg := spreadConfig(t, 2, 3, stride)
				cfg.BlockSize, cfg.MaxBatchedTokens, cfg.MaxModelLen = blockSize, budget, 240
				cfg.NumBlocks = 3 * (260/blockSize + 3)
				// All of the first round is in the engine before its first step, so that it runs out of blocks.
				g := &shardedGate{Sharded: cfg.Model.(model.Sharded), open: make(chan struct{})}
				cfg.Model = g
				r := start(t, cfg)
				got := append(r.askTogether(t, reqs, g.open), r.ask(t, reqs, 16)...)
				require.Equal(t, slices.Concat(want, want), tokensOf(got), "blocks of %d, %d tokens a step, stride %s", blockSize, budget, stride)
				for _, res := range got {
					local += res.last.Usage.Local
				}
				preempted += r.metric(t, "kvport_preemptions_total", "")
				requireIdle(t, r)
			}
		}
	}
	require.Positive(t, preempted)
	require.Positive(t, local)
}

// TestWindowFreesBlocks: a request gives back what has left the windows while it runs, and a prefix is
// found again although the windows' first blocks were used for something else.
func TestWindowFreesBlocks(t *testing.T) {
	cfg := spreadConfig(t, 1, 2, sim.ByLayer)
	cfg.NumBlocks = 128
	r := start(t, cfg)
	first := r.ask(t, []Request{{ID: "a", Prompt: make([]int32, 800), MaxTokens: 2, IgnoreEOS: true}}, 1)
	for i := range 3 { // 60 blocks, of which 26 were never used
		r.ask(t, []Request{{ID: "b", Prompt: slices.Repeat([]int32{int32(i + 1)}, 150), MaxTokens: 2, IgnoreEOS: true}}, 1)
	}
	again := r.ask(t, []Request{{ID: "a", Prompt: make([]int32, 800), MaxTokens: 2, IgnoreEOS: true}}, 1)
	require.Equal(t, tokensOf(first), tokensOf(again))
	require.Equal(t, 784, again[0].last.Usage.Local)
	requireIdle(t, r)
}

// shards lists the files of one rank's part of the prompts' blocks, by group.
func shards(t testing.TB, cfg Config, dir string, reqs []Request, rank int) [][]string {
	cfg, err := cfg.withDefaults()
	require.NoError(t, err)
	layout, _ := host.WithDigests(cfg.Model.Layout(cfg.BlockSize, cfg.NumBlocks))
	spec := cfg.Model.Spec()
	space := connector.KeySpace{Model: spec.Weights}
	files := make([][]string, len(layout.Groups))
	for _, r := range reqs {
		for _, k := range space.Keys(r.Prompt, cfg.BlockSize) {
			for g := range files {
				key := connector.NewStoreKey(k, cfg.shape(layout), uint16(g), connector.Shard{Rank: rank, World: spec.Ranks})
				name := hex.EncodeToString(key[:])
				files[g] = append(files[g], filepath.Join(dir, name[:1], name[1:2], name))
			}
		}
	}
	for g := range files {
		slices.Sort(files[g])
		files[g] = slices.Compact(files[g])
	}
	return files
}

// TestDamagedShards damages or removes parts that one rank has in one group; the blocks fail on all
// ranks, in all groups that need them, and are computed.
func TestDamagedShards(t *testing.T) {
	reqs := requests(16)
	want := tokensOf(start(t, spreadConfig(t, 3, 2, sim.ByBlock)).ask(t, reqs, 1))
	dir := storage(t)
	cfg := spreadConfig(t, 3, 2, sim.ByBlock)
	prefill(t, start(t, shared(t, cfg, connector.RoleProducer, dir, "")), reqs)
	cfg.PrefixCaching = false
	rng := rand.New(rand.NewPCG(8, 8))
	for rank := range 3 {
		for group := range 2 {
			for name, damage := range map[string]func(data []byte) []byte{
				"flipped": func(data []byte) []byte { data[len(data)/2+rng.IntN(len(data)/2)] ^= 1; return data },
				"cut":     func(data []byte) []byte { return data[:rng.IntN(len(data))] },
				"removed": nil,
			} {
				t.Run(fmt.Sprintf("rank %d group %d %s", rank, group, name), func(t *testing.T) {
					files := shards(t, cfg, dir, reqs, rank)[group]
					whole := map[string][]byte{}
					for _, i := range rng.Perm(len(files))[:len(files)/4] {
						data, err := os.ReadFile(files[i])
						require.NoError(t, err, "a block of a prompt is not stored")
						whole[files[i]] = slices.Clone(data)
						if damage == nil {
							require.NoError(t, os.Remove(files[i]))
							continue
						}
						require.NoError(t, os.WriteFile(files[i], damage(data), 0o600))
					}
					d := start(t, shared(t, cfg, connector.RoleConsumer, dir, ""))
					got := d.ask(t, reqs, 8)
					require.Equal(t, want, tokensOf(got))
					require.Less(t, external(got), fullBlocks(reqs))
					require.Equal(t, damage != nil, d.metric(t, "kvport_integrity_failures_total", "") > 0)
					requireIdle(t, d)
					for path, data := range whole {
						require.NoError(t, os.WriteFile(path, data, 0o600))
					}
				})
			}
		}
	}
	d := start(t, shared(t, cfg, connector.RoleConsumer, dir, ""))
	got := d.ask(t, reqs, 8)
	require.Equal(t, want, tokensOf(got))
	require.Equal(t, fullBlocks(reqs), external(got), "all is as it was")
}

// TestRanksAreOfOneShape: engines that are cut differently never exchange blocks.
func TestRanksAreOfOneShape(t *testing.T) {
	reqs := requests(4)
	dir := storage(t)
	for _, c := range []struct {
		ranks, groups int
		stride        sim.Stride
	}{{1, 1, sim.ByLayer}, {2, 1, sim.ByLayer}, {3, 2, sim.ByLayer}, {3, 2, sim.ByPlane}} {
		cfg := spreadConfig(t, c.ranks, c.groups, c.stride)
		cfg.PrefixCaching = false
		want := tokensOf(start(t, cfg).ask(t, reqs, 1))
		r := start(t, shared(t, cfg, connector.RoleBoth, dir, ""))
		got := r.ask(t, reqs, 1)
		require.Equal(t, want, tokensOf(got))
		requireIdle(t, r) // all is saved
		warm := r.ask(t, []Request{{ID: "again", Prompt: reqs[3].Prompt, MaxTokens: 1, Params: sample.Params{}}}, 1)
		require.Positive(t, external(warm))
		r.stop(t)
	}
}

func TestSpreadConfigs(t *testing.T) {
	cfg := spreadConfig(t, 2, 2, sim.ByLayer)
	cfg.NumBlocks = 1
	_, err := New(t.Context(), cfg)
	require.ErrorContains(t, err, "for each of 2 groups")
	cfg = spreadConfig(t, 2, 2, sim.ByLayer)
	cfg.Model = &gate{Model: cfg.Model}
	_, err = New(t.Context(), cfg)
	require.ErrorContains(t, err, "cannot be spread over 2 ranks")
	cfg = spreadConfig(t, 2, 2, sim.ByLayer)
	cfg.NumBlocks, cfg.BlockSize = 9, 8
	require.Equal(t, 32, start(t, cfg).Info().MaxModelLen)
}
