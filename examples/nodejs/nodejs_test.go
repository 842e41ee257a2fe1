// Package nodejs tests the connector for Node.js, which needs nothing but a node.
package nodejs

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/testkit"
)

// plugin is the launcher that hosts start.
func plugin(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs("kvport-nodestore")
	require.NoError(t, err)
	if err := testkit.Starts(t, path); err != nil {
		t.Skipf("THE CONNECTOR FOR NODE.JS IS NOT TESTED: %v", err)
	}
	return path
}

// TestConformance runs the cases of several ranks; make conform runs all that fixture.json names, and with its full count this test those of a
// store.
func TestConformance(t *testing.T) {
	config, err := os.ReadFile("conform.json")
	require.NoError(t, err)
	profiles := []conformance.Profile{conformance.MultiRank}
	if os.Getenv("KVPORT_SOAK") != "" {
		profiles = append(profiles, conformance.Store)
	}
	conformance.Run(t, conformance.Binary(plugin(t), config), profiles...)
}

// What the plugin says when it is run by hand.
func TestByHand(t *testing.T) {
	path := plugin(t)
	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"no arguments":     {nil, 2, "usage:"},
		"another argument": {[]string{"--serve"}, 2, "usage:"},
		"half a config":    {[]string{"--manifest", "--config"}, 2, "usage:"},
		"manifest":         {[]string{"--manifest"}, 0, `"name": "NodeStoreConnector"`},
		"a good config":    {[]string{"--manifest", "--config", `{"dir":"x"}`}, 0, `"scope": "shared"`},
		"a bad config":     {[]string{"--manifest", "--config", `{"dir":"x","dri":"x"}`}, 2, `unknown field "dri"`},
		"a missing field":  {[]string{"--manifest", "--config", `{}`}, 2, "dir is missing"},
		"not JSON":         {[]string{"--manifest", "--config", `{`}, 2, "bad JSON"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), path, c.args...)
			cmd.Env = []string{} // as a host starts it
			out, _ := cmd.CombinedOutput()
			require.Equal(t, c.code, cmd.ProcessState.ExitCode(), "%s", out)
			require.Contains(t, string(out), c.says)
		})
	}
}

// A plugin that does not speak the host's protocol says so in one line and prints no handshake.
func TestOtherProtocol(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), plugin(t))
	cmd.Env = []string{"KVPORT_PLUGIN=b1f0e4a6c7d94b0f9b7e6f4a5d3c2810", "PLUGIN_PROTOCOL_VERSIONS=2", "PLUGIN_UNIX_SOCKET_DIR=" + t.TempDir()}
	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Equal(t, `{"@level":"error","@message":"the host speaks protocol 2, this plugin 1"}`+"\n", string(out))
}

// An engine of the sim model, in which a wrong byte of KV is a wrong token, answers a second time from what the plugin has kept,
// and once more after the plugin was killed.
func TestServesAnEngine(t *testing.T) {
	path, kvport := plugin(t), filepath.Join(t.TempDir(), "kvport")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-o", kvport, "../../cmd/kvport").CombinedOutput()
	require.NoError(t, err, "%s", out)
	config := fmt.Sprintf(`{"kv_connector":"NodeStoreConnector","kv_connector_module_path":%q,"kv_role":"kv_both","kv_connector_extra_config":{"dir":%q}}`,
		path, t.TempDir())
	engine, err := cluster.Start(t.Context(), nil, "engine", kvport,
		"serve", "--model", "sim", "--port", "0", "--enable-prefix-caching=false", "--kv-transfer-config", config)
	require.NoError(t, err)
	defer engine.Kill()
	var client cluster.Client
	prompt := strings.Repeat("the same story again; ", 30)
	complete := func() []int32 {
		c, err := client.Complete(t.Context(), engine.URL, cluster.Request{Prompt: prompt, MaxTokens: 32, IgnoreEOS: true})
		require.NoError(t, err, "%s", engine.Logs())
		return c.Tokens
	}
	want := complete()
	require.Len(t, want, 32)
	loads := func() { // saves end after the answer, and a plugin that was killed takes a moment to come back
		before := external(t, &client, engine)
		require.Eventually(t, func() bool {
			require.Equal(t, want, complete())
			return external(t, &client, engine) > before+0.8*float64(len(prompt))
		}, time.Minute, 50*time.Millisecond)
	}
	loads()
	plugins := cluster.Children(engine.PID())
	require.Len(t, plugins, 1)
	require.NoError(t, syscall.Kill(plugins[0], syscall.SIGKILL))
	loads()
	m, err := client.Metrics(t.Context(), engine.URL)
	require.NoError(t, err)
	require.EqualValues(t, 1, m.Sum("kvport_plugin_restarts_total"))
}

// external is how many prompt tokens an engine loaded instead of computing them.
func external(t *testing.T, client *cluster.Client, engine *cluster.Process) float64 {
	t.Helper()
	m, err := client.Metrics(t.Context(), engine.URL)
	require.NoError(t, err)
	require.Zero(t, m.Sum("kvport_integrity_failures_total"))
	return m.Sum("kvport_prompt_tokens_total", `source="external"`)
}
