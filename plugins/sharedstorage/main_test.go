package main

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func binaryPath(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kvport-sharedstorage")
	output, err := exec.Command("go", "build", "-buildvcs=false", "-ldflags", "-X main.version=1.2.3", "-o", path, ".").CombinedOutput()
	require.NoError(t, err, "%s", output)
	return path
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
	require.Equal(t, "SharedStorageConnector", manifest.Name)
	require.Equal(t, []string{"ExampleConnector"}, manifest.Aliases)
	require.Equal(t, "1.2.3", manifest.Version)
	require.Empty(t, manifest.Schema.Required)
	for name, typ := range map[string]string{
		"shared_storage_path": "string", "max_bytes": "integer", "read_only": "boolean", "fsync": "boolean", "workers": "integer",
	} {
		require.Equal(t, typ, manifest.Schema.Properties[name].Type, name)
		require.NotEmpty(t, manifest.Schema.Properties[name].Description, name)
	}
	require.Len(t, manifest.Schema.Properties, 5)
}
