package main

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/storetest"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

func testConfig(t *testing.T) json.RawMessage {
	t.Helper()
	b, err := os.ReadFile("conform.json")
	require.NoError(t, err)
	return b
}

func plugin() connector.Plugin {
	return sdk.FromStore(sdk.Definition{Name: "MinimalConnector", Version: "1", Scope: connector.ScopeShared}, open)
}

func TestInProcess(t *testing.T) {
	conformance.Run(t, conformance.InProcess(plugin(), testConfig(t)))
}

func TestStoreKeys(t *testing.T) {
	storetest.Run(t, storetest.Harness{Open: func(st storetest.T) connector.Store {
		s, err := open(st.Context(), connector.Env{}, config{Dir: t.TempDir()})
		require.NoError(st, err)
		return s
	}})
}

// What another version of kvport has stored is no damage.
func TestOutdated(t *testing.T) {
	s, err := open(t.Context(), connector.Env{}, config{Dir: t.TempDir()})
	require.NoError(t, err)
	put := connector.Item{Spans: [][]byte{make([]byte, 32)}}
	require.NoError(t, s.Put(t.Context(), []connector.Item{put}))
	require.ErrorIs(t, s.Get(t.Context(), []connector.Item{{Spans: [][]byte{make([]byte, 48)}}}), connector.ErrOutdated)
	require.NoError(t, s.Get(t.Context(), []connector.Item{put}))
}
