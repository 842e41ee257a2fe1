package acceptance

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
)

// levels are the trust levels with landing memory that is as large as it is by default, and so small
// that every transfer goes through it in parts.
var levels = map[string]string{
	"in-place":       `,"kvport":{"trust":"in-place"}`,
	"staged":         `,"kvport":{"trust":"staged"}`,
	"staged, narrow": `,"kvport":{"trust":"staged","landing_bytes":%d}`,
}

// TestTrustLevels: tokens are those of a single node at every trust level, in one engine that saves
// and loads and with prefill and decode apart; at level staged the plugin maps no cache.
func TestTrustLevels(t *testing.T) {
	for _, c := range []struct {
		model   string
		prompts int
		narrow  int // bytes of landing memory: a few blocks and padding
	}{
		{"sim:groups=2,window=64,stride=blocks", *flagPrompts / 2, 40 << 10},
		{"sim:groups=2,window=64,stride=planes", *flagPrompts / 2, 40 << 10},
		{"sim:groups=2,window=64,stride=shared", *flagPrompts / 2, 40 << 10},
		{"sim", 2 * *flagPrompts, 4*4*(1024+16) + 5*64},
		{model(t), min(3, *flagPrompts), 4 << 20},
	} {
		prompts := texts(t, *flagSeed+8000, c.prompts, 400, 1600)
		for name, level := range levels {
			if strings.Contains(level, "%d") {
				level = fmt.Sprintf(level, c.narrow)
			}
			if !strings.HasPrefix(c.model, "sim") && name != "staged, narrow" {
				continue // the others are compared on sim; in-place on the real model is TestEqualTokens
			}
			t.Run(filepath.Base(c.model)+"/"+name, func(t *testing.T) { testLevel(newRig(t), c.model, level, prompts) })
		}
	}
}

func testLevel(r *rig, model, level string, prompts []string) {
	r.Helper()
	var ranks []string
	if strings.HasPrefix(model, "sim:") {
		ranks = []string{"--tensor-parallel-size", "3"}
	}
	uncached := append([]string{"--enable-prefix-caching=false"}, ranks...)
	node := r.serveModel(model, "single", "", ranks...)
	want := r.all(node.URL, prompts, 4)
	r.stop(node)
	p := r.serveModel(model, "prefill", r.config("kv_producer", "", level), ranks...)
	d := r.serveModel(model, "decode", r.config("kv_consumer", "", level), uncached...)
	router := r.route(p, d)
	same(r.T, "P/D", want, r.all(router.URL, prompts, 4))
	both := r.serveModel(model, "both", r.config("kv_both", "", level), uncached...)
	same(r.T, "kv_both, warm", want, r.all(both.URL, prompts, 4))
	for _, engine := range []*cluster.Process{p, d, both} {
		r.idle(engine)
		r.mapsOnly(engine, strings.Contains(level, "staged"))
	}
	for _, engine := range []*cluster.Process{d, both} {
		m := r.metrics(engine)
		require.Positive(r, m.Sum("kvport_prompt_tokens_total", `source="external"`))
		require.Equal(r, strings.Contains(level, "staged"), m.Sum("kvport_landing_copied_bytes_total", `direction="load"`) > 0)
		require.Zero(r, m.Sum("kvport_landing_slots_used"))
		require.Zero(r, m.Sum("kvport_integrity_failures_total"))
		r.Logf("%s: tokens from external KV: %.0f, bytes copied in: %.0f", engine.Name,
			m.Sum("kvport_prompt_tokens_total", `source="external"`), m.Sum("kvport_landing_copied_bytes_total", `direction="load"`))
	}
}

// mapsOnly checks which of the engine's memory its plugin maps.
func (r *rig) mapsOnly(engine *cluster.Process, staged bool) {
	r.Helper()
	plugins := cluster.Plugins(engine.PID())
	require.Len(r, plugins, 1)
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", plugins[0]))
	require.NoError(r, err)
	require.Equal(r, !staged, strings.Contains(string(maps), "memfd:kvport-cache"))
	require.Equal(r, staged, strings.Contains(string(maps), "memfd:kvport-landing"))
}
