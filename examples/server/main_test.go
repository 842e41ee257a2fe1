package main

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/redistest"
	"github.com/kvport/kvport/conformance/storetest"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

func plugin() connector.Plugin {
	return sdk.FromStore(sdk.Definition{Name: "ServerExample", Version: "1", Scope: connector.ScopeShared, Groups: true}, open)
}

// The suite runs the server; make conform runs the other profiles, too.
func TestInProcess(t *testing.T) {
	config, err := os.ReadFile("conform.json")
	require.NoError(t, err)
	conformance.Run(t, conformance.InProcess(plugin(), config), conformance.Remote)
}

// With a server of somebody else's, which the suite reaches through a relay.
func TestAnotherServer(t *testing.T) {
	server, err := redistest.Start()
	require.NoError(t, err)
	defer func() { require.NoError(t, server.Close()) }()
	config := json.RawMessage(`{"address": "@PROXY:` + server.Address + `@", "prefix": "@UNIQUE@:"}`)
	only := conformance.Options{Profiles: []conformance.Profile{conformance.Remote}, Only: []string{"remote-cut-load", "remote-cut-save", "remote-idle"}}
	for _, r := range conformance.Check(t.Context(), conformance.InProcess(plugin(), config), only) {
		require.Equal(t, conformance.Pass, r.Status, "%s: %v", r.ID, r.Log)
	}
}

func TestStoreKeys(t *testing.T) {
	server, err := redistest.Start()
	require.NoError(t, err)
	defer func() { require.NoError(t, server.Close()) }()
	storetest.Run(t, storetest.Harness{Open: func(st storetest.T) connector.Store {
		require.NoError(st, server.Do(st.Context(), "flushall"))
		s, err := open(st.Context(), connector.Env{}, config{Address: server.Address})
		require.NoError(st, err)
		return s
	}})
}

// Operators are asked for a key where other machines may see the blocks, and an address that is none ends the start.
func TestConfig(t *testing.T) {
	for address, beyond := range map[string]string{
		"127.0.0.1:6379": "", "localhost:6379": "", "[::1]:6379": "", "10.0.0.1:6379": "address is 10.0.0.1:6379", "cache:6379": "address is cache:6379",
	} {
		require.Equal(t, beyond, config{Address: address}.BeyondMachine())
	}
	_, err := open(t.Context(), connector.Env{}, config{Address: "cache"})
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "address: ")
}

// Of several causes the one that says most is told.
func TestWorse(t *testing.T) {
	order := []error{connector.ErrCorrupt, connector.ErrOutdated, connector.ErrGone, connector.ErrBusy, nil}
	for i, worst := range order {
		for _, other := range order[i:] {
			require.Equal(t, worst, worse(worst, other))
			require.Equal(t, worst, worse(other, worst))
		}
	}
}
