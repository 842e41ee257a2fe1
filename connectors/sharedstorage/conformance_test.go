package sharedstorage_test

import (
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/storetest"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/sharedstorage"
	"github.com/kvport/kvport/sdk"
)

func plugin() connector.Plugin {
	d := sdk.Definition{
		Name: "shared storage in a test", Version: "test", Scope: sharedstorage.Scope, Groups: true,
		Capabilities: sharedstorage.Capabilities, Stats: sharedstorage.StatInfos(), Medium: sharedstorage.Medium,
	}
	return sdk.FromStore(d, sharedstorage.Open)
}

func config(t *testing.T) json.RawMessage {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "plugins", "sharedstorage", "conform.json"))
	require.NoError(t, err)
	return b
}

func TestStoreKeys(t *testing.T) {
	storetest.Run(t, storetest.Harness{Open: func(st storetest.T) connector.Store {
		env := connector.Env{Log: slog.New(slog.DiscardHandler)}
		s, err := sharedstorage.Open(st.Context(), env, sharedstorage.Config{Path: t.TempDir()})
		require.NoError(st, err)
		return s
	}})
}

func TestInProcess(t *testing.T) {
	conformance.Run(t, conformance.InProcess(plugin(), config(t)))
}

func TestOverTheWire(t *testing.T) {
	conformance.Run(t, conformance.Wire(plugin(), config(t)))
}

func TestStaged(t *testing.T) {
	conformance.Run(t, conformance.Staged(conformance.Wire(plugin(), config(t))))
}
