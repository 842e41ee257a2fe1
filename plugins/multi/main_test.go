package main

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// binaryPath builds this plugin.
func binaryPath(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kvport-multi")
	output, err := exec.Command("go", "build", "-buildvcs=false", "-ldflags", "-X main.version=1.2.3", "-o", path, ".").CombinedOutput()
	require.NoError(t, err, "%s", output)
	return path
}

func TestManifest(t *testing.T) {
	out, err := exec.Command(binaryPath(t), "--manifest").Output()
	require.NoError(t, err)
	var manifest struct {
		Name, Version string
		Environment   []string
		Schema        struct{ Required []string } `json:"config_schema"`
	}
	require.NoError(t, json.Unmarshal(out, &manifest))
	require.Equal(t, "MultiConnector", manifest.Name)
	require.Equal(t, "1.2.3", manifest.Version)
	require.Contains(t, manifest.Environment, "KVPORT_PLUGIN_PATH")
	require.Equal(t, []string{"connectors"}, manifest.Schema.Required)
}
