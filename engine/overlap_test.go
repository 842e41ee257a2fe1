package engine

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/model"
	"github.com/kvport/kvport/engine/model/sim"
	"github.com/kvport/kvport/engine/sched"
	"github.com/kvport/kvport/host"
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
	l.noEarly.Store(time.Now().Add(time.Hour).UnixNano())
	require.False(t, l.early(), "the host need not say which layers have come")
	l.arrives(&host.Event{Request: "a", Layers: &connector.LayerCount{}})
	require.Empty(t, l.arriving)
	l.noEarly.Store(time.Now().UnixNano())
	require.True(t, l.early())
	l.arrives(&host.Event{Request: "a", Layers: &connector.LayerCount{}})
	require.Len(t, l.arriving, 1)
}
