package acceptance

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
)

// TestExamples: each example is built and serves prefill and decode.
func TestExamples(t *testing.T) {
	r := rig.New(t)
	prompts := rig.Texts(t, *rig.Seed, 8, 400, 1200)
	single := r.ServeModel(rig.Simulated(), "single", "")
	want := r.All(single.URL, prompts, 4)
	for name, connector := range map[string]string{"custom": "CustomExample", "database": "DatabaseExample", "p2p": "PeerExample"} {
		t.Run(name, func(t *testing.T) {
			r := rig.New(t)
			dir := shortDir(t)
			_, d, router := r.Pair(fmt.Sprintf(`"kv_connector":%q,"kv_connector_module_path":%q,"kv_connector_extra_config":{"dir":%q}`, connector, example(t, name), dir))
			rig.Same(t, "P/D with "+connector, want, r.All(router.URL, prompts, 4))
			external := r.Metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`)
			t.Logf("tokens from the connector: %.0f", external)
			require.Positive(t, external)
		})
	}
}

// shortDir is a folder whose name leaves room for that of a socket.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	return dir
}
