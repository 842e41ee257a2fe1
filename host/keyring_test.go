package host

import (
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/ticket"
)

// A plugin is given the link key of its connector, alone and wherever it is in a composite.
func TestLinkKeys(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(file, []byte(strings.Repeat("k", 32)), 0o600))
	ticketKey, err := ticket.LoadKey(file)
	require.NoError(t, err)
	all, err := newKeyring(ticketKey)
	require.NoError(t, err)
	link, none, err := all.of("TestConnector", &connector.Info{Scope: connector.ScopeNode})
	require.NoError(t, err)
	require.Nil(t, none)
	want := hex.EncodeToString(link) + " "

	dir, settings := dirs(t, 3), map[string]any{"ticket_key_file": file}
	for _, d := range dir {
		require.NoError(t, os.WriteFile(filepath.Join(d, "tell-keys"), nil, 0o600))
	}
	newRig(t, rigOptions{dir: dir[0], settings: settings})
	multiRig(t, 1, settings, kid(map[string]any{"dir": dir[1]}, nil, nil), kid(map[string]any{"dir": dir[2]}, nil, nil))
	for _, d := range dir {
		told, err := os.ReadFile(filepath.Join(d, "tell-keys"))
		require.NoError(t, err)
		require.Equal(t, want, string(told))
	}
}

// The router's key goes to connectors that hand blocks over by tickets, and no connector has another's key.
func TestWhoGetsWhichKey(t *testing.T) {
	all, err := newKeyring([]byte(strings.Repeat("k", 32)))
	require.NoError(t, err)
	link, router, err := all.of("A", &connector.Info{Scope: connector.ScopeEngine, Capabilities: connector.CanHold})
	require.NoError(t, err)
	require.Equal(t, all.router, router)
	other, router, err := all.of("B", &connector.Info{Scope: connector.ScopeShared, Capabilities: connector.CanHold})
	require.NoError(t, err)
	require.Nil(t, router)
	require.NotEqual(t, []byte(link), []byte(other))
	_, router, err = all.of("A", &connector.Info{Scope: connector.ScopeEngine})
	require.NoError(t, err)
	require.Nil(t, router)
	link, router, err = keyring{}.of("A", &connector.Info{Scope: connector.ScopeEngine, Capabilities: connector.CanHold})
	require.NoError(t, err)
	require.Nil(t, link)
	require.Nil(t, router, "a composite whose host gave it nothing has nothing to give")
}
