// Package nodejs tests the connector for Node.js, which needs nothing but a node.
package nodejs

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
)

// plugin is the launcher that hosts start.
func plugin(t *testing.T) string {
	t.Helper()
	if _, err := exec.LookPath("node"); err != nil {
		t.Skipf("THE CONNECTOR FOR NODE.JS IS NOT TESTED: there is no node on this machine: %v", err)
	}
	path, err := filepath.Abs("kvport-nodestore")
	require.NoError(t, err)
	return path
}

// TestConformance runs the cases that every store has; make conform runs all that fixture.json names.
func TestConformance(t *testing.T) {
	config, err := os.ReadFile("conform.json")
	require.NoError(t, err)
	conformance.Run(t, conformance.Binary(plugin(t), config), conformance.Store)
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
