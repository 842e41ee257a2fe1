package lmcache_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/lmtest"
	"github.com/kvport/kvport/conformance/redistest"
	"github.com/kvport/kvport/conformance/storetest"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/lmcache"
	"github.com/kvport/kvport/sdk"
	"github.com/kvport/kvport/verify/testkit"
)

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

// TestRealServer runs LMCache's own cache server and the profile store on it: what it speaks is what the
// client speaks. Without LMCache the test says that it has not run; connectors/internal/remote then has only the
// headers that were recorded from it.
func TestRealServer(t *testing.T) {
	if testing.Short() {
		t.Skip("half a minute of processes: left out with -short")
	}
	clean(t)
	server, err := lmtest.StartReal(t.Context(), testkit.Root(t))
	if errors.Is(err, lmtest.ErrNoLMCache) {
		t.Skipf("NOT RUN: %v", err)
	}
	require.NoError(t, err)
	t.Cleanup(func() {
		if output := server.Close(); t.Failed() {
			t.Logf("LMCache's server:\n%s", output)
		}
	})
	config := fmt.Sprintf(`{"lmcache.chunk_size": 4, "lmcache.local_cpu": false, "lmcache.remote_url": "lm://%s"}`, server.Address)
	conformance.Run(t, conformance.InProcess(plugin(), json.RawMessage(config)))
	conformance.Run(t, conformance.Wire(plugin(), json.RawMessage(config)), conformance.Store, conformance.MultiRank, conformance.Groups)
}

func TestStoreKeys(t *testing.T) {
	if testing.Short() {
		t.Skip("with -short, which the race stage uses: the stores are those of connectors/remote")
	}
	clean(t)
	redis, err := redistest.Start()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, redis.Close()) })
	layout := connector.Layout{Groups: []connector.Group{{BlockTokens: 16, Policy: connector.PolicyAll}}, Segments: []connector.Segment{{Bytes: 64}}, Blocks: 1}
	for name, empty := range map[string]func(st storetest.T) string{
		"redis": func(st storetest.T) string {
			require.NoError(st, redis.Do(st.Context(), "flushall"))
			return redis.Address
		},
		"lm": func(st storetest.T) string {
			server, err := lmtest.Start(st.Context(), "")
			require.NoError(st, err)
			st.Cleanup(func() { require.NoError(st, server.Close()) })
			return server.Address
		},
	} {
		t.Run(name, func(t *testing.T) {
			storetest.Run(t, storetest.Harness{Open: func(st storetest.T) connector.Store {
				config, err := sdk.DecodeConfig[lmcache.Config](json.RawMessage(fmt.Sprintf(`{"lmcache.chunk_size": 16, "lmcache.local_cpu": false, "lmcache.remote_url": "%s://%s"}`, name, empty(st))))
				require.NoError(st, err)
				s, err := lmcache.Open(st.Context(), connector.Env{World: 1, Layout: layout, Log: discard()}, config)
				require.NoError(st, err)
				return s
			}})
		})
	}
}
