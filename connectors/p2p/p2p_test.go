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
	return sdk.FromPipe(sdk.Definition{Name: "PipeConnector", Version: "1", Groups: true, Stats: append(sdk.PeerStats(), sdk.LayerStats()...)}, Open)
}

func TestConformance(t *testing.T) {
	conformance.Run(t, conformance.Wire(plugin(), json.RawMessage(`{}`)), conformance.Pipe, conformance.Store, conformance.MultiRank, conformance.Groups, conformance.LayerWise)
}

func TestConformanceOverSharedMemory(t *testing.T) {
	conformance.Run(t, conformance.Wire(plugin(), json.RawMessage(`{"transport":"shm"}`)), conformance.Pipe, conformance.Store, conformance.MultiRank, conformance.Groups, conformance.LayerWise)
}

func TestConfig(t *testing.T) {
	for field, config := range map[string]string{
		"transport": `{"transport":"rdma"}`, "socket_dir": `{"socket_dir":"/tmp/x"}`, "listen": `{"transport":"shm","listen":"0.0.0.0:1"}`, "key_file": `{"transport":"shm","key_file":"x"}`,
	} {
		_, err := sdk.DecodeConfig[Config](json.RawMessage(config))
		require.ErrorContains(t, err, field)
	}
	for _, config := range []string{`{}`, `{"transport":"tcp","listen":"127.0.0.1:0"}`, `{"transport":"shm","socket_dir":"/tmp/x"}`, `{"transport":"shm"}`} {
		_, err := sdk.DecodeConfig[Config](json.RawMessage(config))
		require.NoError(t, err, config)
	}
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
