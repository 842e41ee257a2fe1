package remote_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/remote"
	"github.com/kvport/kvport/sdk"
)

func plugin() connector.Plugin {
	d := sdk.Definition{
		Name: "remote in a test", Version: "test", Scope: remote.Scope, Groups: true,
		Capabilities: remote.Capabilities, Stats: remote.StatInfos(),
	}
	return sdk.FromStore(d, remote.Open)
}

func config(t *testing.T) json.RawMessage {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "plugins", "remote", "conform.json"))
	require.NoError(t, err)
	return b
}

func TestInProcess(t *testing.T) {
	conformance.Run(t, conformance.InProcess(plugin(), config(t)), conformance.Store, conformance.Remote)
}

func TestOverTheWire(t *testing.T) {
	if testing.Short() {
		t.Skip("with -short, which the race stage uses: TestInProcess runs the same cases")
	}
	conformance.Run(t, conformance.Wire(plugin(), config(t)), conformance.Store, conformance.Remote)
}

func TestStaged(t *testing.T) {
	if testing.Short() {
		t.Skip("with -short, which the race stage uses: TestInProcess runs the same cases")
	}
	conformance.Run(t, conformance.Staged(conformance.Wire(plugin(), config(t))))
}

// Without a server everything but what reaches other engines works.
func TestEmbeddedConforms(t *testing.T) {
	conformance.Run(t, conformance.InProcess(plugin(), nil))
}
