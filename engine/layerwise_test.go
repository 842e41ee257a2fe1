package engine

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/model"
	"github.com/kvport/kvport/engine/model/sim"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/machine"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

// freeAddress is where nobody listens.
func freeAddress(t testing.TB) string {
	port, err := machine.FreePort(t.Context())
	require.NoError(t, err)
	return net.JoinHostPort("127.0.0.1", port)
}

// piped is the config of an engine whose connector saves layer by layer.
func piped(t testing.TB, cfg Config, role connector.Role, dir, extra string) Config {
	key := filepath.Join(dir, "ticket.key")
	require.NoError(t, os.WriteFile(key, []byte("0123456789abcdef0123456789abcdef"), 0o600))
	c, err := host.ParseConfig(fmt.Sprintf(`{"kv_connector": %q, "kv_role": %q, "kv_connector_extra_config": {%s},
		"kvport": {"breaker": {"deaths": 1000}}}`, testkit.Typical(t, fixture.Peers).Connector, role, extra))
	require.NoError(t, err)
	c.Settings.TicketKeyFile = key
	cfg.Connector, cfg.PluginPath = c, []string{plugins}
	return cfg
}

// pair starts a producer and a consumer that takes over what it computes.
func pair(t testing.TB, cfg Config) (p, d *rig) {
	return pairAs(t, cfg, func(c Config) Config { return c })
}

// pairAs is pair with configs as a function makes them.
func pairAs(t testing.TB, cfg Config, as func(Config) Config) (p, d *rig) {
	address, dir := freeAddress(t), t.TempDir()
	p = start(t, as(piped(t, cfg, connector.RoleProducer, dir, fmt.Sprintf(`"listen": %q`, address))))
	cfg.PrefixCaching = false
	d = start(t, as(piped(t, cfg, connector.RoleConsumer, dir, fmt.Sprintf(`"subscribe": [%q]`, address))))
	require.Eventually(t, func() bool { return p.metric(t, "kvport_connector_subscribers", "") == 1 }, time.Minute, 5*time.Millisecond)
	return p, d
}

// hooked is a model that is disturbed after each layer.
type hooked struct {
	model.Model
	after func(layer int) error
}

// Forward implements model.Model.
func (h *hooked) Forward(batch *model.Batch, kv *connector.KV) error {
	b := *batch
	b.AfterLayer = func(layer int) error {
		if batch.AfterLayer != nil {
			if err := batch.AfterLayer(layer); err != nil {
				return err
			}
		}
		return h.after(layer)
	}
	return h.Model.Forward(&b, kv)
}

// Rule LAYER-09: what a producer computes, in chunks, is with its consumer layer by layer, and right.
func TestLayerWise(t *testing.T) {
	for name, cfg := range map[string]Config{"sim": simConfig(t), "tiny": tinyConfig(t), "ranks": spreadConfig(t, 2, 2, sim.ByBlock), "multi": simConfig(t)} {
		t.Run(name, func(t *testing.T) {
			cfg.MaxBatchedTokens = 48 // a long prompt is computed in several steps
			reqs := requests(12)
			want := tokensOf(start(t, cfg).ask(t, reqs, 4))
			p, d := pairAs(t, cfg, func(c Config) Config {
				if name == "multi" {
					return composed(t, c)
				}
				return c
			})
			require.True(t, p.host.LayerWise())
			decode := prefill(t, p, reqs)
			got := d.ask(t, decode, 4)
			require.Equal(t, want, tokensOf(got))
			require.Positive(t, external(got))
			require.Eventually(t, func() bool { // it is asked for about once a second
				return p.metric(t, "kvport_connector_layer_confirmed_bytes_total", "") > 0
			}, time.Minute, 10*time.Millisecond)
			requireIdle(t, p)
			t.Logf("%d tokens of %d requests came from the producer", external(got), len(got))
		})
	}
}

// Rule LAYER-09: a step that fails in the middle is given up. Nothing of it is served, and the engine goes on.
func TestLayerWiseFails(t *testing.T) {
	cfg := simConfig(t)
	want := tokensOf(start(t, cfg).ask(t, requests(6), 1))
	var fail atomic.Bool
	broken := cfg
	broken.Model = &hooked{Model: cfg.Model, after: func(layer int) error {
		if layer == 1 && fail.Swap(false) {
			return errors.New("overheated")
		}
		return nil
	}}
	broken.PrefixCaching = false
	p, d := pair(t, broken)
	for i, req := range requests(6) {
		fail.Store(true)
		half := req
		half.MaxTokens = 1
		require.Equal(t, connector.ReasonError, collect(submit(t, p, half)).last.Reason)
		decode := prefill(t, p, []Request{req})
		require.Equal(t, want[i], collect(submit(t, d, decode[0])).tokens)
	}
	requireIdle(t, p)
}

// The plugin of either end is killed after any layer: no request is lost, no token is wrong, no block
// leaks.
func TestLayerWiseKills(t *testing.T) {
	cfg := simConfig(t)
	reqs := requests(10)
	want := tokensOf(start(t, cfg).ask(t, reqs, 1))
	var at, kills atomic.Int64
	var victim atomic.Pointer[rig]
	struck := cfg
	struck.MaxBatchedTokens, struck.PrefixCaching = 48, false
	struck.Model = &hooked{Model: cfg.Model, after: func(layer int) error {
		if r := victim.Load(); r != nil && int64(layer) == at.Load() {
			victim.Store(nil)
			if pid := r.Health().Host.PID; pid > 0 && syscall.Kill(pid, syscall.SIGKILL) == nil {
				kills.Add(1)
			}
		}
		return nil
	}}
	p, d := pair(t, struck)
	for i, req := range reqs {
		at.Store(int64(i % 3))
		victim.Store([]*rig{p, d}[i/3%2])
		decode := slices.Clone(prefill(t, p, []Request{req}))
		victim.Store(nil)
		require.Equal(t, want[i], collect(submit(t, d, decode[0])).tokens, "request %d", i)
		for _, r := range []*rig{p, d} {
			require.Eventually(t, func() bool { return r.Health().Host.State == "ready" }, time.Minute, time.Millisecond)
		}
	}
	require.GreaterOrEqual(t, kills.Load(), int64(5))
	requireIdle(t, p)
	requireIdle(t, d)
	t.Logf("%d kills in the middle of a step", kills.Load())
}

// Requests of one step that have the same prompt: the layers of each block are sent once, what the consumer takes over is right, and
// it stays a subscriber.
func TestLayerWiseTwins(t *testing.T) {
	cfg := simConfig(t)
	reqs := requests(4)
	want := tokensOf(start(t, cfg).ask(t, reqs, 1))
	g := &gate{Model: cfg.Model, open: make(chan struct{})}
	cfg.Model = g
	p, d := pair(t, cfg)
	const each = 3
	var twins []Request
	for _, req := range reqs {
		for n := range each {
			twin := req
			twin.ID, twin.MaxTokens, twin.Remote = connector.RequestID(fmt.Sprintf("%s-%d", req.ID, n)), 1, true
			twins = append(twins, twin)
		}
	}
	got := p.askTogether(t, twins, g.open)
	for i, req := range reqs {
		req.Ticket = got[each*i].last.Ticket
		require.Equal(t, want[i], collect(submit(t, d, req)).tokens)
	}
	requireIdle(t, p)
	require.Eventually(t, func() bool { // it is asked for about once a second
		sent, stored := p.metric(t, "kvport_connector_layer_bytes_total", ""), p.metric(t, "kvport_connector_buffer_bytes", "")
		return sent > 0 && sent == stored
	}, time.Minute, 10*time.Millisecond)
	require.Equal(t, 1, p.metric(t, "kvport_connector_subscribers", ""))
}
