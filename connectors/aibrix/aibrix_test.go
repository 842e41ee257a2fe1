package aibrix_test

import (
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/redistest"
	"github.com/kvport/kvport/conformance/storetest"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/aibrix"
	"github.com/kvport/kvport/sdk"
)

const prefix = "AIBRIX_KV_CACHE_OL_"

func plugin() connector.Plugin {
	d := sdk.Definition{
		Name: "AIBrix in a test", Version: "test", Scope: aibrix.Scope, Groups: true,
		Capabilities: aibrix.Capabilities, Stats: aibrix.StatInfos(),
	}
	return sdk.FromStore(d, aibrix.Open)
}

// clean takes AIBrix's variables out of the environment for one test.
func clean(t *testing.T) {
	t.Helper()
	for _, v := range os.Environ() {
		if name, _, _ := strings.Cut(v, "="); strings.HasPrefix(name, prefix) {
			t.Setenv(name, "")
		}
	}
}

// The defaults of aibrix-kvcache 0.8.0 (envs.py): L1 on, S3FIFO, 10 GiB, no L2.
func TestDefaults(t *testing.T) {
	clean(t)
	info, err := plugin().Describe(t.Context(), nil)
	require.NoError(t, err)
	require.Equal(t, int64(10<<30), info.ArenaBytes)
	require.Equal(t, connector.ScopeEngine, info.Scope)
}

func TestVariables(t *testing.T) {
	for name, test := range map[string]struct {
		env, config map[string]string
		arena       int64
		scope       connector.Scope
		want        string // in the error
	}{
		"capacity":             {env: map[string]string{"L1_CACHE_CAPACITY_GB": "0.5"}, arena: 1 << 29},
		"the config wins":      {env: map[string]string{"L1_CACHE_CAPACITY_GB": "7"}, config: map[string]string{"L1_CACHE_CAPACITY_GB": `"1"`}, arena: 1 << 30},
		"a number":             {config: map[string]string{"L1_CACHE_CAPACITY_GB": `2`}, arena: 2 << 30},
		"L2 alone":             {env: map[string]string{"L1_CACHE_ENABLED": "0", "L2_CACHE_BACKEND": "redis", "REDIS_URL": "redis://127.0.0.1:1"}, scope: connector.ScopeShared},
		"both":                 {env: map[string]string{"L2_CACHE_BACKEND": "REDIS", "REDIS_URL": "redis://127.0.0.1:1"}, arena: 10 << 30},
		"policy":               {env: map[string]string{"L1_CACHE_EVICTION_POLICY": "ARC"}, want: prefix + `L1_CACHE_EVICTION_POLICY is "ARC", want one of ["S3FIFO" "LRU" "FIFO"]`},
		"enabled":              {env: map[string]string{"L1_CACHE_ENABLED": "maybe"}, want: prefix + "L1_CACHE_ENABLED is"},
		"size":                 {env: map[string]string{"L1_CACHE_CAPACITY_GB": "ten"}, want: prefix + `L1_CACHE_CAPACITY_GB is "ten"`},
		"no size":              {env: map[string]string{"L1_CACHE_CAPACITY_GB": "NaN"}, want: prefix + `L1_CACHE_CAPACITY_GB is "NaN"`},
		"backend":              {env: map[string]string{"L2_CACHE_BACKEND": "INFINISTORE"}, want: prefix + `L2_CACHE_BACKEND is "INFINISTORE"`},
		"ingestion":            {env: map[string]string{"L2_CACHE_INGESTION_TYPE": "COLD"}, want: prefix + `L2_CACHE_INGESTION_TYPE is "COLD"`},
		"other backend":        {env: map[string]string{"L2_CACHE_BACKEND": "MEMCACHED"}, want: prefix + `L2_CACHE_BACKEND is "MEMCACHED", want REDIS`},
		"inflight":             {env: map[string]string{"L2_CACHE_INGESTION_MAX_INFLIGHT_TOKENS": "-1"}, want: prefix + `L2_CACHE_INGESTION_MAX_INFLIGHT_TOKENS is "-1"`},
		"policies in any case": {env: map[string]string{"L1_CACHE_EVICTION_POLICY": "fifo", "L2_CACHE_INGESTION_TYPE": "evicted", "L2_CACHE_COMPRESSION": "zstd"}, arena: 10 << 30},
		"device":               {env: map[string]string{"DEVICE": "cuda"}, want: prefix + `DEVICE is "CUDA"`},
		"workers":              {env: map[string]string{"L2_CACHE_NUM_ASYNC_WORKERS": "0"}, want: prefix + `L2_CACHE_NUM_ASYNC_WORKERS is "0"`},
		"nowhere":              {env: map[string]string{"L1_CACHE_ENABLED": "0"}, want: prefix + "L2_CACHE_BACKEND is not set"},
		"no server":            {env: map[string]string{"L2_CACHE_BACKEND": "REDIS"}, want: prefix + "REDIS_URL is not set"},
		"server without L2":    {env: map[string]string{"REDIS_URL": "redis://127.0.0.1:1"}, want: prefix + "REDIS_URL is set"},
		"bad server":           {env: map[string]string{"L2_CACHE_BACKEND": "REDIS", "REDIS_URL": "redis://u:hunter2@h"}, want: prefix + "REDIS_URL has a user"},
		"unknown config field": {config: map[string]string{"L1_CACHE_CAPACITY": `"1"`}, want: "unknown field"},
	} {
		t.Run(name, func(t *testing.T) {
			clean(t)
			for k, v := range test.env {
				t.Setenv(prefix+k, v)
			}
			config := map[string]json.RawMessage{}
			for k, v := range test.config {
				config[prefix+k] = json.RawMessage(v)
			}
			raw, err := json.Marshal(config)
			require.NoError(t, err)
			info, err := plugin().Describe(t.Context(), raw)
			if test.want != "" {
				require.ErrorIs(t, err, connector.ErrIncompatible)
				require.ErrorContains(t, err, test.want)
				require.NotContains(t, err.Error(), "hunter2")
				return
			}
			require.NoError(t, err)
			require.Equal(t, test.arena, info.ArenaBytes)
			require.Equal(t, test.arena > 0, info.Capabilities&connector.CanPlace != 0)
			if test.scope == 0 {
				test.scope = connector.ScopeEngine
			}
			require.Equal(t, test.scope, info.Scope)
		})
	}
}

// What is in L1 is all there is without L2, and nothing is where there is no L1.
func TestComplete(t *testing.T) {
	for _, test := range []struct {
		env  map[string]string
		want bool
	}{
		{want: true},
		{env: map[string]string{"L2_CACHE_BACKEND": "REDIS", "REDIS_URL": "redis://127.0.0.1:1"}},
		{env: map[string]string{"L2_CACHE_BACKEND": "REDIS", "REDIS_URL": "redis://127.0.0.1:1", "L1_CACHE_ENABLED": "0"}},
	} {
		clean(t)
		for k, v := range test.env {
			t.Setenv(prefix+k, v)
		}
		info, err := plugin().Describe(t.Context(), nil)
		require.NoError(t, err)
		require.Equal(t, test.want, info.Complete, "%v", test.env)
	}
}

// Every variable that AIBrix reads is read here, or passed on so that it can be named in the log; but no password of its
// own backends.
func TestVariablesOfAIBrix(t *testing.T) {
	text, err := os.ReadFile("testdata/envs-0.8.0.txt")
	require.NoError(t, err)
	for name := range strings.Lines(string(text)) {
		name = strings.TrimSpace(name)
		if strings.HasPrefix(name, "#") || strings.HasSuffix(name, "_PASSWORD") {
			continue
		}
		require.Contains(t, aibrix.Environment(), name)
	}
}

// Every variable that is read is in the manifest, since a plugin sees no other.
func TestEnvironmentIsDeclared(t *testing.T) {
	declared := map[string]bool{}
	for _, name := range aibrix.Environment() {
		require.True(t, strings.HasPrefix(name, prefix) || name == "VLLM_AIBRIX_SYNC_GRANULARITY", name)
		require.False(t, declared[name], name)
		declared[name] = true
	}
	schema := string(plugin().Schema)
	for name := range declared {
		if strings.Contains(schema, name) {
			delete(declared, name)
		}
	}
	require.True(t, declared[prefix+"REDIS_PASSWORD"], "a password is in no config")
}

func TestConformance(t *testing.T) {
	if testing.Short() {
		t.Skip("with -short, which the race stage uses: the tiers are those of connectors/offload and connectors/remote")
	}
	clean(t)
	config, err := os.ReadFile(filepath.Join("..", "..", "plugins", "aibrix", "conform.json"))
	require.NoError(t, err)
	conformance.Run(t, conformance.InProcess(plugin(), config))
	conformance.Run(t, conformance.Wire(plugin(), config))
}

func TestStoreKeys(t *testing.T) {
	if testing.Short() {
		t.Skip("with -short, which the race stage uses: the store is that of connectors/remote")
	}
	clean(t)
	server, err := redistest.Start()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Close()) })
	config, err := sdk.DecodeConfig[aibrix.Config](json.RawMessage(`{"` + prefix + `L1_CACHE_ENABLED": "0", "` + prefix + `L2_CACHE_BACKEND": "REDIS", "` + prefix + `REDIS_URL": "redis://` + server.Address + `"}`))
	require.NoError(t, err)
	storetest.Run(t, storetest.Harness{Open: func(st storetest.T) connector.Store {
		require.NoError(st, server.Do(st.Context(), "flushall"))
		s, err := aibrix.Open(st.Context(), connector.Env{World: 1, Log: slog.New(slog.DiscardHandler)}, config)
		require.NoError(st, err)
		return s
	}})
}

// With L2 alone the connector is a remote store like any other.
func TestRemoteConformance(t *testing.T) {
	if testing.Short() {
		t.Skip("with -short, which the race stage uses: the tiers are those of connectors/offload and connectors/remote")
	}
	clean(t)
	config := `{"` + prefix + `L1_CACHE_ENABLED": "0", "` + prefix + `L2_CACHE_BACKEND": "REDIS", "` + prefix + `REDIS_URL": "redis://@SERVER@"}`
	conformance.Run(t, conformance.Wire(plugin(), json.RawMessage(config)), conformance.Store, conformance.Remote)
}

// TestPlainTextBeyondMachine: a server on another machine without TLS needs a word in the config.
func TestPlainTextBeyondMachine(t *testing.T) {
	clean(t)
	t.Setenv(prefix+"L2_CACHE_BACKEND", "REDIS")
	t.Setenv(prefix+"REDIS_URL", "redis://10.0.0.1")
	_, err := sdk.DecodeConfig[aibrix.Config](json.RawMessage(`{}`))
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, prefix+"REDIS_URL has the address 10.0.0.1:6379: plain text beyond this machine; write rediss:// for TLS, or set allow_plaintext")
	_, err = sdk.DecodeConfig[aibrix.Config](json.RawMessage(`{"allow_plaintext": true}`))
	require.NoError(t, err)
	t.Setenv(prefix+"REDIS_URL", "rediss://10.0.0.1")
	_, err = sdk.DecodeConfig[aibrix.Config](json.RawMessage(`{}`))
	require.NoError(t, err)
}

// TestBeyondMachine: a server on another machine is seen by others.
func TestBeyondMachine(t *testing.T) {
	clean(t)
	describe := func() string {
		info, err := plugin().Describe(t.Context(), json.RawMessage(`{}`))
		require.NoError(t, err)
		return info.BeyondMachine
	}
	require.Empty(t, describe())
	t.Setenv(prefix+"L2_CACHE_BACKEND", "REDIS")
	t.Setenv(prefix+"REDIS_URL", "redis://127.0.0.1:1")
	require.Empty(t, describe())
	t.Setenv(prefix+"REDIS_URL", "rediss://10.0.0.1")
	require.Equal(t, prefix+"REDIS_URL has the address 10.0.0.1:6379", describe())
}
