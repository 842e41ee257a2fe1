package p2p

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

func plugin() connector.Plugin {
	return sdk.FromPipe(sdk.Definition{Name: "PipeConnector", Version: "1", Groups: true}, Open)
}

func TestConformance(t *testing.T) {
	conformance.Run(t, conformance.Wire(plugin(), json.RawMessage(`{}`)), conformance.Pipe, conformance.Store, conformance.MultiRank, conformance.Groups)
}

func TestKeyFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	c := Config{KeyFile: path, Listen: "0.0.0.0:0"}
	_, err := c.network()
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, os.WriteFile(path, []byte(strings.Repeat("k", 32)), 0o600))
	n, err := c.network()
	require.NoError(t, err)
	l, err := n.Listen(t.Context())
	require.NoError(t, err)
	require.NoError(t, l.Close())
	require.NoError(t, os.Chmod(path, 0o644))
	_, err = c.network()
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "key_file")
}
