package acceptance

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
)

// TestLayerWiseInPlace: a decode engine reads the layers of every chunk in place while the prefill engine computes
// them. Tokens are those of a single node, also when the plugin of either end is killed amid layers.
func TestLayerWiseInPlace(t *testing.T) {
	r := newRig(t)
	need(t, "nixl")
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
