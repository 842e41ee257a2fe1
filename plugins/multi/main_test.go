package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
)

// binaryPath builds this plugin and, beside it, the one that conform.json has as children.
func binaryPath(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"sharedstorage", "multi"} {
		output, err := exec.Command("go", "build", "-buildvcs=false", "-ldflags", "-X main.version=1.2.3",
			"-o", filepath.Join(dir, "kvport-"+name), "../"+name).CombinedOutput()
		require.NoError(t, err, "%s", output)
	}
	return filepath.Join(dir, "kvport-multi")
}

func TestBinary(t *testing.T) {
	config, err := os.ReadFile("conform.json")
	require.NoError(t, err)
	conformance.Run(t, conformance.Binary(binaryPath(t), config), conformance.Store, conformance.MultiChildren)
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
