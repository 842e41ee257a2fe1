package engine

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/model"
	"github.com/kvport/kvport/engine/model/sim"
	"github.com/kvport/kvport/engine/sched"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

// prompts are requests of several lengths, around the ends of blocks.
func prompts() (reqs []Request) {
	for i, n := range []int{33, 40, 64, 65, 100, 145} {
		reqs = append(reqs, long(connector.RequestID(fmt.Sprintf("r%d", i)), n))
	}
	return reqs
}

// overlapping are an engine that holds what it computes, and one that loads it layer by layer, as extra says.
func overlapping(t *testing.T, cfg Config, extra string) (p, d *rig) {
	return overlappingAs(t, cfg, extra, func(c Config) Config { return c })
}

// overlappingAs is overlapping with configs as a function makes them.
func overlappingAs(t *testing.T, cfg Config, extra string, as func(Config) Config) (p, d *rig) {
	dir := sockets(t)
	p = start(t, as(peered(t, cfg, connector.RoleProducer, dir, "")))
	cfg.PrefixCaching = false
	return p, start(t, as(peered(t, cfg, connector.RoleConsumer, dir, extra)))
}

// composed makes a connector the first child of a MultiConnector, whose second child has nothing.
func composed(t *testing.T, cfg Config) Config {
	c := cfg.Connector
	multi, err := host.ParseConfig(fmt.Sprintf(`{"kv_connector": "MultiConnector", "kv_role": %q, "kv_connector_extra_config": {"connectors": [
		{"kv_connector": %q, "kv_role": %q, "kv_connector_extra_config": %s},
		{"kv_connector": "TestConnector", "kv_role": %q, "kv_connector_extra_config": {"dir": %q}}]}}`,
		c.Role, c.Connector, c.Role, c.Extra, c.Role, t.TempDir()))
	require.NoError(t, err)
	multi.Settings.TicketKeyFile = c.Settings.TicketKeyFile
	cfg.Connector = multi
	return cfg
}

// Rule OVERLAP-03: no second layer arrives before the first one of the request is computed, and all tokens are loaded and
// right. So the engine computes while a load lasts.
func TestOverlap(t *testing.T) {
	for name, cfg := range map[string]Config{"sim": simConfig(t), "tiny": tinyConfig(t), "ranks": spreadConfig(t, 2, 2, sim.ByBlock), "multi": simConfig(t)} {
		t.Run(name, func(t *testing.T) {
			reqs := prompts()
			want := tokensOf(start(t, cfg).ask(t, reqs, 1))
			gate := filepath.Join(t.TempDir(), "gate")
			open := func(layer int) error {
				if layer > 0 {
					return nil
				}
				return os.WriteFile(gate, nil, 0o600)
			}
			cfg.LayerPatience = time.Minute
			if name != "ranks" {
				cfg.Model = &hooked{Model: cfg.Model, after: open}
			} else {
				cfg.Model = &hookedRanks{Model: cfg.Model, after: open}
			}
			p, d := overlappingAs(t, cfg, fmt.Sprintf(`, "gate": %q`, gate), func(c Config) Config {
				if name == "multi" {
					return composed(t, c)
				}
				return c
			})
			for i, req := range prefill(t, p, reqs) {
				_ = os.Remove(gate)
				got := collect(submit(t, d, req))
				require.Equal(t, want[i], got.tokens, "request %d", i)
				require.Equal(t, len(req.Prompt)-1, got.last.Usage.External)
			}
			released(t, p)
			requireIdle(t, d)
			require.Equal(t, len(reqs), d.metric(t, "kvport_overlapped_chunks_total", ""), "each prompt's last token was computed amid its load")
		})
	}
}

// Rule OVERLAP-03: a layer that is not what was saved costs computing. What was computed from the layers before it does not
// count.
func TestOverlapFails(t *testing.T) {
	cfg := simConfig(t)
	reqs := prompts()
	want := tokensOf(start(t, cfg).ask(t, reqs, 1))
	cfg.LayerPatience = time.Minute
	p, d := overlapping(t, cfg, `, "fault": "damage"`)
	for i, req := range prefill(t, p, reqs) {
		require.Equal(t, want[i], collect(submit(t, d, req)).tokens, "request %d", i)
	}
	require.Equal(t, len(reqs), d.metric(t, "kvport_failed_loads_total", ""))
	released(t, p)
	requireIdle(t, d)
}

// The plugin dies when the first layer is there: no token is wrong, no request is lost, no block leaks.
func TestOverlapKills(t *testing.T) {
	cfg := simConfig(t)
	reqs := prompts()
	want := tokensOf(start(t, cfg).ask(t, reqs, 1))
	gate := filepath.Join(t.TempDir(), "gate")
	cfg.LayerPatience = time.Minute
	p, d := overlapping(t, cfg, fmt.Sprintf(`, "gate": %q, "fault": "die"`, gate))
	for i, req := range prefill(t, p, reqs) {
		if i%2 == 0 {
			require.NoError(t, os.WriteFile(gate, nil, 0o600))
		}
		require.Equal(t, want[i], collect(submit(t, d, req)).tokens, "request %d", i)
		require.NoFileExists(t, gate)
		require.Eventually(t, func() bool { return d.Health().Host.State == "ready" }, time.Minute, time.Millisecond)
	}
	require.Equal(t, 3, d.Health().Host.Restarts)
	requireIdle(t, d)
}

// A step does not wait for layers longer than it may: requests go on when their loads are over.
func TestOverlapLate(t *testing.T) {
	cfg := simConfig(t)
	reqs := prompts()
	want := tokensOf(start(t, cfg).ask(t, reqs, 1))
	for name, patience := range map[string]time.Duration{"impatient": time.Nanosecond, "never": -1} {
		t.Run(name, func(t *testing.T) {
			cfg.LayerPatience = patience
			p, d := overlapping(t, cfg, "")
			got := d.ask(t, prefill(t, p, reqs), 4)
			require.Equal(t, want, tokensOf(got))
			require.Positive(t, external(got))
			released(t, p)
			requireIdle(t, d)
		})
	}
}

// Where a load that fails ends its request, none is used before its end, so each keeps its second attempt: the gate, which only loads layer by
// layer wait for, never opens.
func TestNoOverlapWhereLoadsMustNotFail(t *testing.T) {
	cfg := simConfig(t)
	reqs := prompts()
	want := tokensOf(start(t, cfg).ask(t, reqs, 1))
	p, d := overlappingAs(t, cfg, fmt.Sprintf(`, "gate": %q`, filepath.Join(t.TempDir(), "gate")), func(c Config) Config {
		c.Connector.FailurePolicy = host.PolicyFail
		return c
	})
	got := d.ask(t, prefill(t, p, reqs), 1)
	require.Equal(t, want, tokensOf(got))
	require.Positive(t, external(got))
	released(t, p)
	requireIdle(t, d)
	require.Zero(t, d.metric(t, "kvport_overlapped_chunks_total", ""))
}

// hookedRanks is hooked for a model that is spread over ranks.
type hookedRanks struct {
	model.Model
	after func(layer int) error
}

// ForwardRanks implements model.Sharded.
func (h *hookedRanks) ForwardRanks(batch *model.Batch, ranks []*connector.KV) error {
	b := *batch
	b.AfterLayer = h.after
	return h.Model.(model.Sharded).ForwardRanks(&b, ranks)
}

// A load that begins to arrive soon after another one was too slow is not used before its end.
func TestOverlapRests(t *testing.T) {
	l := &loop{arriving: map[connector.RequestID]connector.Progress{}, sched: sched.New(sched.Config{BlockTokens: 16, Groups: 1, Trailing: []int{0}, MaxBatchedTokens: 16, MaxSeqs: 1}, nil)}
	now := time.Now()
	later := now.Add(time.Hour)
	l.noEarly.Store(&later)
	require.False(t, l.early(), "the host need not say which layers have come")
	l.arrives(&host.Event{Request: "a", Layers: &connector.LayerCount{}})
	require.Empty(t, l.arriving)
	l.noEarly.Store(&now)
	require.True(t, l.early())
	l.full.Store(true)
	require.False(t, l.early(), "the batch has no place")
	l.arrives(&host.Event{Request: "a", Layers: &connector.LayerCount{}})
	require.Len(t, l.arriving, 1)
}

// resident is the config of an engine with a connector that keeps blocks in memory of its host.
func resident(t *testing.T, cfg Config) Config {
	tier := testkit.Typical(t, fixture.Tier)
	own, err := fixture.Fill(tier.Memory().Config, fixture.Values{"MEMORY_BYTES": 32 << 20})
	require.NoError(t, err)
	c, err := host.ParseConfig(fmt.Sprintf(`{"kv_connector": %q, "kv_role": "kv_both", "kv_connector_extra_config": %s}`, tier.Connector, own))
	require.NoError(t, err)
	c.Settings.TicketKeyFile = filepath.Join(t.TempDir(), "ticket.key")
	require.NoError(t, os.WriteFile(c.Settings.TicketKeyFile, []byte("0123456789abcdef0123456789abcdef"), 0o600))
	cfg.Connector, cfg.PluginPath = c, []string{plugins}
	return cfg
}

// damage changes a bit in a layer of one block where the connector keeps it.
func (r *rig) damage(t *testing.T, layer int) {
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	kv := r.loop.ranks[0]
	segment := slices.IndexFunc(kv.Layout().Segments, func(s connector.Segment) bool { return s.Layer == layer })
	for _, e := range entries {
		name := "/proc/self/fd/" + e.Name()
		if target, err := os.Readlink(name); err != nil || !strings.Contains(target, "kvport-arena") {
			continue
		}
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		require.NoError(t, err)
		defer f.Close()
		arena, err := io.ReadAll(f)
		require.NoError(t, err)
		for id := range r.Info().NumBlocks {
			have := kv.View(segment, connector.BlockID(id))[:64] // the cache still has what was computed last
			if at := bytes.Index(arena, have); at >= 0 && !bytes.Equal(have, make([]byte, len(have))) {
				_, err := f.WriteAt([]byte{arena[at] ^ 1}, int64(at))
				require.NoError(t, err)
				return
			}
		}
	}
	require.FailNow(t, "no block of the cache is resident")
}

// Rule PLACE-36: a block whose last layer is damaged where it is resident costs computing and no token, although the engine has learned of the
// layers before that. It is replaced then.
func TestDamagedLayerOfAResidentBlock(t *testing.T) {
	m, err := sim.New(sim.Options{Layers: 8, BytesPerToken: 4096, Seed: 1, MaxTokens: 1024})
	require.NoError(t, err)
	cfg := simConfig(t)
	cfg.Model, cfg.NumBlocks, cfg.PrefixCaching, cfg.LayerPatience = m, 40, false, time.Minute
	ask := func(r *rig, id connector.RequestID) []int32 {
		got := collect(submit(t, r, long(id, 145)))
		requireIdle(t, r)
		return got.tokens
	}
	want := ask(start(t, cfg), "a")
	d := start(t, resident(t, cfg))
	require.Equal(t, want, ask(d, "a"))
	d.damage(t, 7)
	require.Equal(t, want, ask(d, "b"))
	require.Equal(t, 1, d.metric(t, "kvport_failed_loads_total", ""))
	require.Equal(t, 1, d.metric(t, "kvport_integrity_failures_total", ""))
	require.Equal(t, 8, d.metric(t, "kvport_placed_by_layer_blocks_total", ""), "all but one, and of them the engine has learned")
	require.Equal(t, want, ask(d, "c"))
	require.Equal(t, 1, d.metric(t, "kvport_failed_loads_total", ""))
	require.Equal(t, 1, d.metric(t, "kvport_integrity_failures_total", ""))
}
