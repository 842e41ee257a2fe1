package remote_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/redistest"
	"github.com/kvport/kvport/conformance/storetest"
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

func TestStoreKeys(t *testing.T) {
	server, err := redistest.Start()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Close()) })
	stores := 0
	for name, config := range map[string]func() string{
		"memory": func() string { return `{}` },
		"server": func() string {
			stores++ // each has keys of its own
			return fmt.Sprintf(`{"url": "redis://%s", "key_prefix": "%d:"}`, server.Address, stores)
		},
	} {
		t.Run(name, func(t *testing.T) {
			storetest.Run(t, storetest.Harness{Open: func(st storetest.T) connector.Store {
				c, err := decode(t, config())
				require.NoError(st, err)
				s, err := remote.Open(st.Context(), env(&strings.Builder{}), c)
				require.NoError(st, err)
				return s
			}})
		})
	}
}
