package main

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

// TestLayerWiseInPlace: a decode engine reads the layers of every chunk in place while the prefill engine computes
// them. Tokens are those of a single node, also when the plugin of either end is killed amid layers.
func TestLayerWiseInPlace(t *testing.T) {
	r := rig.New(t)
	rig.Need(t, "nixl")
	config := func(role, extra string) string {
		return fmt.Sprintf(`{"kv_connector":"NixlConnector","kv_role":%q,"kv_connector_extra_config":{%s}%s}`, role, extra, rig.Patient)
	}
	node := r.Serve("single", "")
	p := r.Serve("prefill", config("kv_producer", ""), "--max-num-batched-tokens", "128", "--enable-prefix-caching=false")
	d := r.Serve("decode", config("kv_consumer", `"subscribe":["tickets"]`), "--enable-prefix-caching=false")
	router := r.Route(p, d)
	// The decode engine subscribes at the address in the first ticket, and only then reads layers ahead of their load.
	first := rig.Texts(t, *rig.Seed+3250, 1, 1200, 2400)
	rig.Same(t, "the first ticket", r.All(node.URL, first, 1), r.All(router.URL, first, 1))
	require.Eventually(t, func() bool { return r.Metrics(p).Sum("kvport_connector_subscribers") == 1 }, time.Minute, 20*time.Millisecond)
	prompts := rig.Texts(t, *rig.Seed+3200, rig.Count(t, "prompts", *rig.Prompts, 2, 16), 1200, 2400)
	rig.Same(t, "layers read in place", r.All(node.URL, prompts, 2), r.All(router.URL, prompts, 1))
	m := r.Metrics(p)
	t.Logf("bytes of layers that were announced to the decode engine: %.0f, confirmed: %.0f, when the last layer was computed: %.0f; blocks that were there before their load: %.0f",
		m.Sum("kvport_connector_layer_bytes_total"), m.Sum("kvport_connector_layer_confirmed_bytes_total"), m.Sum("kvport_connector_layer_early_bytes_total"),
		r.Metrics(d).Sum("kvport_connector_early_blocks_total"))
	require.Eventually(t, func() bool { return r.Metrics(d).Sum("kvport_connector_early_blocks_total") > 0 }, time.Minute, 20*time.Millisecond) // asked about once a second

	var got, want []*cluster.Completion
	for i := range rig.Count(t, "kills", *rig.Kills, 2, 10) {
		prompt := rig.Texts(t, *rig.Seed+3300+uint64(i), 1, 1600, 2400)
		answered := make(chan []*cluster.Completion, 1)
		go func() { answered <- r.All(router.URL, prompt, 1) }()
		r.KillAmidLayers(p, []*cluster.Process{p, d}[i%2])
		got, want = append(got, <-answered...), append(want, r.All(node.URL, prompt, 1)...)
	}
	rig.Same(t, fmt.Sprintf("%d kills amid layers", len(got)), want, got)
	require.Zero(t, r.Metrics(d).Sum("kvport_integrity_failures_total"))
	r.Idle(p)
	r.Idle(d)
}
