package main

import (
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

// TestLayerWise: a prefill engine pushes the layers of every chunk to the decode engine while it computes
// them. Tokens are those of a single node, also when the plugin of either end is killed amid layers.
func TestLayerWise(t *testing.T) {
	r := rig.New(t)
	address := net.JoinHostPort("127.0.0.1", rig.FreePort(t))
	config := func(role, extra string) string {
		return fmt.Sprintf(`{"kv_connector":"PipeConnector","kv_role":%q,"kv_connector_extra_config":{%s}%s}`, role, extra, rig.Patient)
	}
	node := r.Serve("single", "")
	p := r.Serve("prefill", config("kv_producer", fmt.Sprintf(`"listen":%q`, address)), "--max-num-batched-tokens", "128", "--enable-prefix-caching=false")
	d := r.Serve("decode", config("kv_consumer", fmt.Sprintf(`"subscribe":[%q]`, address)), "--enable-prefix-caching=false")
	router := r.Route(p, d)
	subscribed := func() bool { return r.Metrics(p).Sum("kvport_connector_subscribers") == 1 }
	require.Eventually(t, subscribed, time.Minute, 50*time.Millisecond)

	prompts := rig.Texts(t, *rig.Seed+3000, 4, 1200, 2400)
	rig.Same(t, "layer by layer", r.All(node.URL, prompts, 2), r.All(router.URL, prompts, 2))
	require.Eventually(t, func() bool { return r.Metrics(p).Sum("kvport_connector_layer_confirmed_bytes_total") > 0 }, time.Minute, 50*time.Millisecond)
	require.Positive(t, r.Metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`))

	kills := max(2, *rig.Kills/5)
	var got, want []*cluster.Completion
	for i := range kills {
		victim := []*cluster.Process{p, d}[i%2]
		require.Eventually(t, subscribed, time.Minute, 50*time.Millisecond)
		prompt := rig.Texts(t, *rig.Seed+3100+uint64(i), 1, 1600, 2400)
		answered := make(chan []*cluster.Completion, 1)
		go func() { answered <- r.All(router.URL, prompt, 1) }()
		r.KillAmidLayers(p, victim)
		got, want = append(got, <-answered...), append(want, r.All(node.URL, prompt, 1)...)
	}
	rig.Same(t, fmt.Sprintf("%d kills amid layers", kills), want, got)
	r.Idle(p)
	r.Idle(d)
	m := r.Metrics(p)
	t.Logf("bytes pushed: %.0f, confirmed: %.0f, when the last layer was computed: %.0f; plugins started again: %.0f", m.Sum("kvport_connector_layer_bytes_total"),
		m.Sum("kvport_connector_layer_confirmed_bytes_total"), m.Sum("kvport_connector_layer_early_bytes_total"),
		m.Sum("kvport_plugin_restarts_total")+r.Metrics(d).Sum("kvport_plugin_restarts_total"))
}
