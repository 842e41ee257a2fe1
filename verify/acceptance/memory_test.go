package acceptance

import (
	"fmt"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
)

// spinners start processes that want a processor all the time, until the test is over.
func spinners(t *testing.T, n int) {
	t.Helper()
	for range n {
		cmd := exec.CommandContext(t.Context(), "sh", "-c", "while :; do :; done")
		require.NoError(t, cmd.Start())
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait() // killed
		})
	}
}

// TestDefaultMemoryTiersStartBusy: the memory tiers that connectors' defaults ask for are there when the machine has
// eight other things to do, and keep blocks.
func TestDefaultMemoryTiersStartBusy(t *testing.T) {
	r := rig.New(t)
	r.Tokens = 4
	spinners(t, 8)
	prompts := rig.Texts(t, *rig.Seed+61000, 2, 400, 800)
	for _, f := range rig.Connectors(t, func(f *fixture.Fixture) bool { return f.Tiers.DefaultGiB > 0 }) {
		name := f.Connector
		began := time.Now()
		engine := r.ServeModel("sim", name, fmt.Sprintf(`{"kv_connector":%q,"kv_role":"kv_both"}`, name), "--enable-prefix-caching=false")
		t.Logf("%s: up after %s", name, time.Since(began).Round(time.Millisecond))
		h, err := r.Client.Health(t.Context(), engine.URL)
		require.NoError(t, err)
		require.Equal(t, "ready", h.Connector.State)
		require.InDelta(t, f.Tiers.DefaultGiB<<30, r.Metrics(engine).Sum("kvport_arena_bytes"), 0)
		cold := r.All(engine.URL, prompts, 1)
		r.Idle(engine)
		rig.Same(t, name+", warm", cold, r.All(engine.URL, prompts, 1))
		require.Positive(t, r.Metrics(engine).Sum("kvport_prompt_tokens_total", `source="external"`))
		r.Stop(engine)
	}
}

// TestTiersThatDoNotFit: what the machine cannot have is exit 2 with one line that names the field, the size that
// was asked for and what is there.
func TestTiersThatDoNotFit(t *testing.T) {
	r := rig.New(t)
	for _, f := range rig.Connectors(t, func(f *fixture.Fixture) bool { return len(f.Tiers.TooLarge) > 0 }) {
		for i, c := range f.Tiers.TooLarge {
			t.Run(fmt.Sprint(f.Connector, " ", i), func(t *testing.T) {
				extra, err := fixture.Fill(c.Config, fixture.Values{"TMP": t.TempDir()})
				require.NoError(t, err)
				config := fmt.Sprintf(`{"kv_connector":%q,"kv_role":"kv_both","kv_connector_extra_config":%s}`, f.Connector, extra)
				_, err = cluster.Start(r.Context(), nil, "engine", rig.Binary(t), "serve", "--model", "sim", "--port", "0", "--kv-transfer-config", config)
				t.Log(err)
				var exit *exec.ExitError
				require.ErrorAs(t, err, &exit)
				require.Equal(t, 2, exit.ExitCode())
				for _, text := range c.Says {
					require.ErrorContains(t, err, text)
				}
				require.NotContains(t, err.Error(), "goroutine ")
			})
		}
	}
}
