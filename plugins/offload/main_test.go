package main

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
)

func binaryPath(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kvport-offload")
	output, err := exec.Command("go", "build", "-buildvcs=false", "-ldflags", "-X main.version=1.2.3", "-o", path, ".").CombinedOutput()
	require.NoError(t, err, "%s", output)
	return path
}

// A memory tier that is counted in blocks survives the plugin's death too.
func TestBinaryCountedInBlocks(t *testing.T) {
	only := []string{"arena-missing", "arena-kept", "arena-killed", "arena-torn", "arena-damaged", "arena-garbage", "arena-fresh"}
	results := conformance.Check(t.Context(), conformance.Binary(binaryPath(t), json.RawMessage(`{"num_cpu_blocks": 64}`)), conformance.Options{Only: only, Seed: 3})
	require.Len(t, results, len(only))
	for _, r := range results {
		require.Equal(t, conformance.Pass, r.Status, "%s: %v", r.ID, r.Log)
	}
}

func TestManifest(t *testing.T) {
	out, err := exec.Command(binaryPath(t), "--manifest").Output()
	require.NoError(t, err)
	var manifest struct {
		Name    string   `json:"name"`
		Aliases []string `json:"aliases"`
		Version string   `json:"version"`
		Schema  struct {
			Required   []string `json:"required"`
			Properties map[string]struct {
				Type        string `json:"type"`
				Description string `json:"description"`
			} `json:"properties"`
		} `json:"config_schema"`
	}
	require.NoError(t, json.Unmarshal(out, &manifest))
	require.Equal(t, "OffloadingConnector", manifest.Name)
	require.Empty(t, manifest.Aliases)
	require.Equal(t, "1.2.3", manifest.Version)
	require.Empty(t, manifest.Schema.Required)
	for name, typ := range map[string]string{
		"block_size": "integer", "cpu_bytes_to_use": "integer", "num_cpu_blocks": "integer", "eviction_policy": "string",
		"store_threshold": "integer", "disk_path": "string", "disk_bytes": "integer", "tenant_bytes": "integer", "ttl_seconds": "integer",
	} {
		require.Equal(t, typ, manifest.Schema.Properties[name].Type, name)
	}
	for name, p := range manifest.Schema.Properties {
		require.NotEmpty(t, p.Description, name)
	}
}
