package acceptance

import (
	"fmt"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
)

// TestLayerWise: a prefill engine pushes the layers of every chunk to the decode engine while it computes
// them. Tokens are those of a single node, also when the plugin of either end is killed amid layers.
func TestLayerWise(t *testing.T) {
	r := newRig(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := l.Addr().String()
	require.NoError(t, l.Close())
	config := func(role, extra string) string {
		return fmt.Sprintf(`{"kv_connector":"PipeConnector","kv_role":%q,"kv_connector_extra_config":{%s}%s}`, role, extra, patient)
	}
	node := r.serve("single", "")
	p := r.serve("prefill", config("kv_producer", fmt.Sprintf(`"listen":%q`, address)), "--max-num-batched-tokens", "128", "--enable-prefix-caching=false")
	d := r.serve("decode", config("kv_consumer", fmt.Sprintf(`"subscribe":[%q]`, address)), "--enable-prefix-caching=false")
	router := r.route(p, d)
	subscribed := func() bool { return r.metrics(p).Sum("kvport_connector_subscribers") == 1 }
	require.Eventually(t, subscribed, time.Minute, 50*time.Millisecond)

	prompts := texts(t, *flagSeed+3000, 4, 1200, 2400)
	same(t, "layer by layer", r.all(node.URL, prompts, 2), r.all(router.URL, prompts, 2))
	require.Eventually(t, func() bool { return r.metrics(p).Sum("kvport_connector_layer_confirmed_bytes_total") > 0 }, time.Minute, 50*time.Millisecond)
	require.Positive(t, r.metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`))

	kills := max(2, *flagKills/5)
	var got, want []*cluster.Completion
	for i := range kills {
		victim := []*cluster.Process{p, d}[i%2]
		require.Eventually(t, subscribed, time.Minute, 50*time.Millisecond)
		prompt := texts(t, *flagSeed+3100+uint64(i), 1, 1600, 2400)
		answered := make(chan []*cluster.Completion, 1)
		go func() { answered <- r.all(router.URL, prompt, 1) }()
		r.killAmidLayers(p, victim)
		got, want = append(got, <-answered...), append(want, r.all(node.URL, prompt, 1)...)
	}
	same(t, fmt.Sprintf("%d kills amid layers", kills), want, got)
	r.idle(p)
	r.idle(d)
	m := r.metrics(p)
	t.Logf("bytes pushed: %.0f, confirmed: %.0f, when the last layer was computed: %.0f; plugins started again: %.0f", m.Sum("kvport_connector_layer_bytes_total"),
		m.Sum("kvport_connector_layer_confirmed_bytes_total"), m.Sum("kvport_connector_layer_early_bytes_total"),
		m.Sum("kvport_plugin_restarts_total")+r.metrics(d).Sum("kvport_plugin_restarts_total"))
}

// TestLayerWiseInPlace: a decode engine reads the layers of every chunk in place while the prefill engine computes
// them. Tokens are those of a single node, also when the plugin of either end is killed amid layers.
func TestLayerWiseInPlace(t *testing.T) {
	r := newRig(t)
	if !haveNixl(t) {
		t.Skip("NixlConnector IS NOT TESTED: NIXL is not in .deps/nixl; run make deps")
	}
	config := func(role, extra string) string {
		return fmt.Sprintf(`{"kv_connector":"NixlConnector","kv_role":%q,"kv_connector_extra_config":{%s}%s}`, role, extra, patient)
	}
	node := r.serve("single", "")
	p := r.serve("prefill", config("kv_producer", ""), "--max-num-batched-tokens", "128", "--enable-prefix-caching=false")
	d := r.serve("decode", config("kv_consumer", `"subscribe":["tickets"]`), "--enable-prefix-caching=false")
	router := r.route(p, d)
	// The decode engine subscribes at the address in the first ticket, and only then reads layers ahead of their load.
	first := texts(t, *flagSeed+3250, 1, 1200, 2400)
	same(t, "the first ticket", r.all(node.URL, first, 1), r.all(router.URL, first, 1))
	require.Eventually(t, func() bool { return r.metrics(p).Sum("kvport_connector_subscribers") == 1 }, time.Minute, 20*time.Millisecond)
	prompts := texts(t, *flagSeed+3200, count(t, "prompts", *flagPrompts, 2, 16), 1200, 2400)
	same(t, "layers read in place", r.all(node.URL, prompts, 2), r.all(router.URL, prompts, 1))
	m := r.metrics(p)
	t.Logf("bytes of layers that were announced to the decode engine: %.0f, confirmed: %.0f, when the last layer was computed: %.0f; blocks that were there before their load: %.0f",
		m.Sum("kvport_connector_layer_bytes_total"), m.Sum("kvport_connector_layer_confirmed_bytes_total"), m.Sum("kvport_connector_layer_early_bytes_total"),
		r.metrics(d).Sum("kvport_connector_early_blocks_total"))
	require.Positive(t, r.metrics(d).Sum("kvport_connector_early_blocks_total"))

	var got, want []*cluster.Completion
	for i := range count(t, "kills", *flagKills, 2, 10) {
		prompt := texts(t, *flagSeed+3300+uint64(i), 1, 1600, 2400)
		answered := make(chan []*cluster.Completion, 1)
		go func() { answered <- r.all(router.URL, prompt, 1) }()
		r.killAmidLayers(p, []*cluster.Process{p, d}[i%2])
		got, want = append(got, <-answered...), append(want, r.all(node.URL, prompt, 1)...)
	}
	same(t, fmt.Sprintf("%d kills amid layers", len(got)), want, got)
	require.Zero(t, r.metrics(d).Sum("kvport_integrity_failures_total"))
	r.idle(p)
	r.idle(d)
}

// killAmidLayers kills a plugin while the prefill engine saves what it computes.
func (r *rig) killAmidLayers(p, victim *cluster.Process) {
	r.Helper()
	require.Eventually(r, func() bool {
		h, err := r.client.Health(r.Context(), p.URL)
		return err == nil && h.Connector.Pending > 0
	}, time.Minute, time.Millisecond)
	plugins := cluster.Plugins(victim.PID())
	require.Len(r, plugins, 1)
	require.NoError(r, syscall.Kill(plugins[0], syscall.SIGKILL))
}
