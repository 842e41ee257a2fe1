package acceptance

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestExamples: each example is built and serves prefill and decode.
func TestExamples(t *testing.T) {
	r := newRig(t)
	prompts := texts(t, *flagSeed, 8, 400, 1200)
	single := r.serveModel(peersModel(), "single", "")
	want := r.all(single.URL, prompts, 4)
	for name, connector := range map[string]string{"custom": "CustomExample", "database": "DatabaseExample", "p2p": "PeerExample"} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			path := filepath.Join(t.TempDir(), "kvport-"+name)
			output, err := exec.Command("go", "build", "-buildvcs=false", "-o", path, "../../examples/"+name).CombinedOutput()
			require.NoError(t, err, "%s", output)
			dir := shortDir(t)
			_, d, router := r.pair(fmt.Sprintf(`"kv_connector":%q,"kv_connector_module_path":%q,"kv_connector_extra_config":{"dir":%q}`, connector, path, dir))
			same(t, "P/D with "+connector, want, r.all(router.URL, prompts, 4))
			external := r.metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`)
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
