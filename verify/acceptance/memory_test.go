package acceptance

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
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

// TestDefaultMemoryTiersStartBusy: the memory tiers that AIBrix's and LMCache's defaults ask for, 10 and 5 GiB,
// are there when the machine has eight other things to do, and keep blocks.
func TestDefaultMemoryTiersStartBusy(t *testing.T) {
	r := newRig(t)
	r.tokens = 4
	spinners(t, 8)
	prompts := texts(t, *flagSeed+61000, 2, 400, 800)
	for name, gib := range map[string]int64{"AIBrixOffloadingConnectorV1Type1": 10, "LMCacheConnectorV1": 5} {
		began := time.Now()
		engine := r.serveModel("sim", name, fmt.Sprintf(`{"kv_connector":%q,"kv_role":"kv_both"}`, name), "--enable-prefix-caching=false")
		t.Logf("%s: up after %s", name, time.Since(began).Round(time.Millisecond))
		h, err := r.client.Health(t.Context(), engine.URL)
		require.NoError(t, err)
		require.Equal(t, "ready", h.Connector.State)
		require.InDelta(t, gib<<30, r.metrics(engine).Sum("kvport_arena_bytes"), 0)
		cold := r.all(engine.URL, prompts, 1)
		r.idle(engine)
		same(t, name+", warm", cold, r.all(engine.URL, prompts, 1))
		require.Positive(t, r.metrics(engine).Sum("kvport_prompt_tokens_total", `source="external"`))
		r.stop(engine)
	}
}

// TestTiersThatDoNotFit: what the machine cannot have is exit 2 with one line that names the field, the size that
// was asked for and what is there.
func TestTiersThatDoNotFit(t *testing.T) {
	r := newRig(t)
	for name, c := range map[string]struct {
		connector, extra string
		want             []string
	}{
		"blocks":       {"OffloadingConnector", `"num_cpu_blocks": 200000000`, []string{"kv_connector_extra_config: num_cpu_blocks: ", " asks for an arena of ", "this machine has free "}},
		"bytes":        {"OffloadingConnector", `"cpu_bytes_to_use": 17592186044416`, []string{"kv_connector_extra_config: cpu_bytes_to_use: ", "17592186044416 bytes", "this machine has free "}},
		"AIBrix":       {"AIBrixOffloadingConnectorV1Type1", `"AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB": "16000"`, []string{"AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB: ", "this machine has free "}},
		"LMCache":      {"LMCacheConnectorV1", `"lmcache.max_local_cpu_size": 16000`, []string{"max_local_cpu_size", "this machine has free "}},
		"disk":         {"OffloadingConnector", `"disk_path": "@DIR@", "disk_bytes": 109951162777600`, []string{"disk_bytes is 109951162777600 bytes, the file system of ", " free: set it lower"}},
		"LMCache disk": {"LMCacheConnectorV1", `"lmcache.local_disk": "@DIR@", "lmcache.max_local_disk_size": 100000`, []string{"max_local_disk_size", "the file system of ", " free: set it lower"}},
	} {
		t.Run(name, func(t *testing.T) {
			extra := strings.ReplaceAll(c.extra, "@DIR@", filepath.Join(t.TempDir(), "tier"))
			config := fmt.Sprintf(`{"kv_connector":%q,"kv_role":"kv_both","kv_connector_extra_config":{%s}}`, c.connector, extra)
			_, err := cluster.Start(r.Context(), nil, "engine", binary(t), "serve", "--model", "sim", "--port", "0", "--kv-transfer-config", config)
			t.Log(err)
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit)
			require.Equal(t, 2, exit.ExitCode())
			for _, text := range c.want {
				require.ErrorContains(t, err, text)
			}
			require.NotContains(t, err.Error(), "goroutine ")
		})
	}
}
