package lmcache_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/lmcache"
	"github.com/kvport/kvport/sdk"
)

func plugin() connector.Plugin {
	d := sdk.Definition{
		Name: "LMCache in a test", Version: "test", Scope: lmcache.Scope, Groups: true,
		Capabilities: lmcache.Capabilities, Stats: lmcache.StatInfos(),
	}
	return sdk.FromStore(d, lmcache.Open)
}

// clean takes LMCache's variables out of the environment for one test.
func clean(t *testing.T) {
	t.Helper()
	for _, v := range os.Environ() {
		if name, _, _ := strings.Cut(v, "="); strings.HasPrefix(name, "LMCACHE_") {
			t.Setenv(name, "")
		}
	}
}

// Values come from the transfer config, then the environment, then the file, then LMCache's defaults.
func TestWhereValuesComeFrom(t *testing.T) {
	for name, test := range map[string]struct {
		config, file string
		env          map[string]string
		arena        int64
		scope        connector.Scope
		want         string // in the error
	}{
		"defaults":        {arena: 5 << 30},
		"file":            {file: "max_local_cpu_size: 2.5\nchunk_size: 64\nlocal_disk: null\nuse_layerwise: true\n", arena: 5 << 29},
		"variable":        {file: "max_local_cpu_size: 2\n", env: map[string]string{"MAX_LOCAL_CPU_SIZE": "3"}, arena: 3 << 30},
		"config":          {env: map[string]string{"MAX_LOCAL_CPU_SIZE": "3"}, config: `{"lmcache.max_local_cpu_size": 1}`, arena: 1 << 30},
		"text":            {config: `{"lmcache.max_local_cpu_size": "1"}`, arena: 1 << 30},
		"remote alone":    {config: `{"lmcache.local_cpu": false, "lmcache.remote_url": "lm://127.0.0.1:65432"}`, scope: connector.ScopeShared},
		"remote by file":  {file: "local_cpu: False\nremote_url: \"redis://127.0.0.1:6379\"\nremote_serde: naive\n", scope: connector.ScopeShared},
		"remote and CPU":  {config: `{"lmcache.remote_url": "resp://127.0.0.1:6379"}`, arena: 5 << 30},
		"disk alone":      {config: `{"lmcache.local_cpu": "off", "lmcache.local_disk": "file:///x", "lmcache.max_local_disk_size": 1}`},
		"nowhere":         {config: `{"lmcache.local_cpu": false}`, want: "there is nowhere to keep blocks"},
		"chunk":           {env: map[string]string{"CHUNK_SIZE": "many"}, want: `lmcache.chunk_size (LMCACHE_CHUNK_SIZE) is "many"`},
		"truth":           {config: `{"lmcache.local_cpu": "perhaps"}`, want: "lmcache.local_cpu (LMCACHE_LOCAL_CPU) is"},
		"first in first":  {config: `{"lmcache.cache_policy": "fifo"}`, arena: 5 << 30},
		"two disks":       {config: `{"lmcache.local_disk": "/x,/y", "lmcache.max_local_disk_size": 1}`, want: "lmcache.local_disk (LMCACHE_LOCAL_DISK) names several folders"},
		"policy":          {config: `{"lmcache.cache_policy": "LFU"}`, want: `lmcache.cache_policy (LMCACHE_CACHE_POLICY) is "LFU"`},
		"serde":           {config: `{"lmcache.remote_serde": "cachegen"}`, want: `lmcache.remote_serde (LMCACHE_REMOTE_SERDE) is "cachegen"`},
		"disk size":       {config: `{"lmcache.local_disk": "/x"}`, want: "lmcache.max_local_disk_size (LMCACHE_MAX_LOCAL_DISK_SIZE) is 0"},
		"disk path":       {config: `{"lmcache.local_disk": "file://local_disk/", "lmcache.max_local_disk_size": 1}`, arena: 5 << 30},
		"part of a token": {config: `{"lmcache.chunk_size": 256.5}`, want: "lmcache.chunk_size (LMCACHE_CHUNK_SIZE) is 256.5, want a whole number"},
		"other remote":    {config: `{"lmcache.remote_url": "mooncakestore://h:1"}`, want: `has the scheme "mooncakestore"`},
		"lm without port": {config: `{"lmcache.remote_url": "lm://h"}`, want: "names no port"},
		"secret":          {config: `{"lmcache.remote_url": "redis://u:hunter2@h"}`, want: "has a user or a password in it"},
		"unknown in file": {file: "max_local_cpu_siez: 1\n", want: `unknown name "max_local_cpu_siez", did you mean "max_local_cpu_size"?`},
		"list in file":    {file: "chunk_size: [1]\n", want: "chunk_size is no plain value"},
		"no YAML":         {file: "\t{", want: "LMCACHE_CONFIG_FILE: "},
		"unknown field":   {config: `{"lmcache.chunk": 1}`, want: "unknown field"},
	} {
		t.Run(name, func(t *testing.T) {
			clean(t)
			for k, v := range test.env {
				t.Setenv("LMCACHE_"+k, v)
			}
			if test.file != "" {
				path := filepath.Join(t.TempDir(), "lmcache.yaml")
				require.NoError(t, os.WriteFile(path, []byte(test.file), 0o600))
				t.Setenv("LMCACHE_CONFIG_FILE", path)
			}
			info, err := plugin().Describe(t.Context(), json.RawMessage(test.config))
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

// What is in memory is all there is without a disk and a server, and nothing is where there is no memory.
func TestComplete(t *testing.T) {
	clean(t)
	for config, want := range map[string]bool{
		`{}`: true,
		`{"lmcache.remote_url": "resp://127.0.0.1:6379"}`:                                                   false,
		`{"lmcache.local_disk": "file:///x", "lmcache.max_local_disk_size": 1}`:                             false,
		`{"lmcache.local_cpu": false, "lmcache.local_disk": "file:///x", "lmcache.max_local_disk_size": 1}`: false,
		`{"lmcache.local_cpu": false, "lmcache.remote_url": "lm://127.0.0.1:65432"}`:                        false,
	} {
		info, err := plugin().Describe(t.Context(), json.RawMessage(config))
		require.NoError(t, err)
		require.Equal(t, want, info.Complete, config)
	}
}

// Every name of LMCache is known: read, or accepted without effect in a file, the environment and a transfer config.
func TestNamesOfLMCache(t *testing.T) {
	clean(t)
	text, err := os.ReadFile("testdata/config-0.5.6.txt")
	require.NoError(t, err)
	declared, known := lmcache.Environment(), 0
	for name := range strings.Lines(string(text)) {
		if name = strings.TrimSpace(name); strings.HasPrefix(name, "#") {
			continue
		}
		known++
		require.Contains(t, declared, "LMCACHE_"+strings.ToUpper(name))
		require.Contains(t, string(plugin().Schema), `"lmcache.`+name+`"`)
	}
	const earlier = 12 // names of earlier versions, which TestExamplesOfLMCache has
	require.Len(t, declared, known+3+earlier, "in addition to LMCACHE_CONFIG_FILE and what resp:// reads")
	var log strings.Builder
	config, err := sdk.DecodeConfig[lmcache.Config](json.RawMessage(`{"lmcache.local_cpu": false, "lmcache.remote_url": "redis://127.0.0.1:1", "lmcache.use_layerwise": true, "lmcache.extra_config": {"a": [1]}, "lmcache.enable_xpyd": null}`))
	require.NoError(t, err)
	env := connector.Env{Log: slog.New(slog.NewTextHandler(&log, nil)), Layout: connector.Layout{
		Groups: []connector.Group{{BlockTokens: 16, Policy: connector.PolicyAll}}, Segments: []connector.Segment{{Bytes: 64}}, Blocks: 1,
	}}
	s, err := lmcache.Open(t.Context(), env, config)
	require.NoError(t, err)
	require.NoError(t, s.Close())
	require.Contains(t, log.String(), "lmcache.use_layerwise")
	require.Contains(t, log.String(), "lmcache.extra_config")
	require.NotContains(t, log.String(), "enable_xpyd")
}

// The configs of LMCache's published examples start, with a short warning that names what has no effect; those that
// keep blocks nowhere, since LMCache would only transfer them, say so.
func TestExamplesOfLMCache(t *testing.T) {
	const nixl = "local_cpu: %s\nmax_local_cpu_size: %d\nmax_local_disk_size: 0\nremote_serde: NULL\n\nenable_nixl: True\nnixl_role: \"receiver\"\nnixl_peer_host: \"localhost\"\n" +
		"nixl_peer_port: 55555\nnixl_receiver_host: \"localhost\"\nnixl_receiver_port: 55555\nnixl_buffer_size: 1073741824 # 1GB\nnixl_buffer_device: \"cuda\"\nnixl_enable_gc: True\n"
	const pd = "local_cpu: %s\nmax_local_cpu_size: %d\nenable_pd: True\ntransfer_channel: \"nixl\"\npd_role: \"sender\"\npd_proxy_host: \"localhost\"\npd_proxy_port: 7500\n" +
		"pd_buffer_size: 1073741824\npd_buffer_device: \"cuda\"\nnixl_backends: [UCX]\n"
	for name, test := range map[string]struct{ file, config, warn, want string }{
		"rpc port":   {config: `{"discard_partial_chunks": false, "lmcache_rpc_port": "producer1"}`, warn: `names="[discard_partial_chunks lmcache_rpc_port]"`},
		"controller": {file: "chunk_size: 256\nlocal_cpu: True\nmax_local_cpu_size: 5\nenable_controller: True\nlmcache_instance_id: \"i\"\ncontroller_url: \"localhost:9001\"\ndistributed_url: \"localhost:8002\"\nlmcache_worker_port: 8001\n", warn: "distributed_url"},
		"first":      {file: "chunk_size: 256\nlocal_device: \"cpu\"\nremote_url: \"lm://127.0.0.1:65432\"\nremote_serde: \"naive\"\npipelined_backend: False\n", warn: "names=\"[local_device pipelined_backend]\""},
		"off":        {file: "enable_p2p: False\nlookup_url: null\nerror_handling: False\n", warn: "error_handling"},
		"nixl":       {file: fmt.Sprintf(nixl, "True", 1), warn: "LMCache's own transfer between engines (enable_nixl) is not built"},
		"pd":         {file: fmt.Sprintf(pd, "True", 1), warn: "LMCache's own transfer between engines (enable_pd) is not built"},
		"nixl alone": {file: fmt.Sprintf(nixl, "False", 0), want: "nowhere to keep blocks; LMCache's own transfer between engines (enable_nixl) is not built"},
		"pd alone":   {file: fmt.Sprintf(pd, "False", 0), want: "nowhere to keep blocks; LMCache's own transfer between engines (enable_pd) is not built"},
		"misspelt":   {config: `{"lmcache.chunk_siz": 1}`, want: `did you mean "lmcache.chunk_size"?`},
		"unknown":    {config: `{"nothing_like_it_at_all": 1}`, want: "more: kvport schema lists them"},
	} {
		t.Run(name, func(t *testing.T) {
			clean(t)
			if test.file != "" {
				path := filepath.Join(t.TempDir(), "lmcache.yaml")
				require.NoError(t, os.WriteFile(path, []byte(test.file), 0o600))
				t.Setenv("LMCACHE_CONFIG_FILE", path)
			}
			config, err := sdk.DecodeConfig[lmcache.Config](json.RawMessage(test.config))
			if test.want != "" {
				require.ErrorContains(t, err, test.want)
				require.Less(t, len(err.Error()), 800)
				return
			}
			require.NoError(t, err)
			var log strings.Builder
			env := connector.Env{Log: slog.New(slog.NewTextHandler(&log, nil)), Arena: make([]byte, 1<<20), Layout: connector.Layout{
				Groups: []connector.Group{{BlockTokens: 16, Policy: connector.PolicyAll}}, Segments: []connector.Segment{{Bytes: 64}}, Blocks: 1,
			}}
			s, err := lmcache.Open(t.Context(), env, config)
			require.NoError(t, err)
			require.NoError(t, s.Close())
			require.Contains(t, log.String(), test.warn)
			require.NotContains(t, log.String(), "enable_p2p")
		})
	}
}

func TestEnvironmentIsDeclared(t *testing.T) {
	names := lmcache.Environment()
	require.Len(t, slices.Compact(slices.Clone(names)), len(names))
	for _, name := range []string{"LMCACHE_CONFIG_FILE", "LMCACHE_CHUNK_SIZE", "LMCACHE_REMOTE_URL", "LMCACHE_USE_LAYERWISE", "LMCACHE_RESP_PASSWORD"} {
		require.Contains(t, names, name)
	}
}

// Hits come in whole chunks.
func TestChunks(t *testing.T) {
	clean(t)
	env := connector.Env{Layout: connector.Layout{
		Groups: []connector.Group{{BlockTokens: 16, Policy: connector.PolicyAll}}, Segments: []connector.Segment{{Bytes: 64}}, Blocks: 1,
	}, Arena: nil}
	open := func(chunk string) (connector.Store, error) {
		config, err := sdk.DecodeConfig[lmcache.Config](json.RawMessage(fmt.Sprintf(`{"lmcache.chunk_size": %s, "lmcache.local_cpu": false, "lmcache.local_disk": %q, "lmcache.max_local_disk_size": 0.001}`,
			chunk, t.TempDir())))
		require.NoError(t, err)
		env.Log = discard()
		return lmcache.Open(t.Context(), env, config)
	}
	_, err := open("40")
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "lmcache.chunk_size is 40, want a multiple of the engine's block size 16")
	s, err := open("48")
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	keys := make([]connector.StoreKey, 8)
	for i := range keys {
		keys[i][0] = byte(i + 1)
		require.NoError(t, s.Put(t.Context(), []connector.Item{{Key: keys[i], Spans: [][]byte{make([]byte, 64)}}}))
		found, err := s.Lookup(t.Context(), [][]connector.StoreKey{keys})
		require.NoError(t, err)
		require.Equal(t, (i+1)/3*3, found[0])
	}
}

// What memory has is saved to the disk again whose file was removed, beside a remote store too.
func TestRemovedFile(t *testing.T) {
	clean(t)
	dir := t.TempDir()
	open := func(more string) connector.Store {
		config, err := sdk.DecodeConfig[lmcache.Config](json.RawMessage(fmt.Sprintf(`{"lmcache.chunk_size": 16, "lmcache.local_disk": %q, "lmcache.max_local_disk_size": 0.001%s}`, dir, more)))
		require.NoError(t, err)
		s, err := lmcache.Open(t.Context(), connector.Env{Log: discard(), Arena: make([]byte, 1<<20), Layout: connector.Layout{
			Groups: []connector.Group{{BlockTokens: 16, Policy: connector.PolicyAll}}, Segments: []connector.Segment{{Bytes: 64}}, Blocks: 1,
		}}, config)
		require.NoError(t, err)
		return s
	}
	block := []connector.Item{{Key: connector.StoreKey{1}, Spans: [][]byte{make([]byte, 64)}}}
	disk := func() []string {
		files, err := filepath.Glob(filepath.Join(dir, "*"))
		require.NoError(t, err)
		require.Len(t, files, 1)
		return files
	}
	const remote = `, "lmcache.remote_url": "redis://127.0.0.1:1"`
	s := open(remote)
	require.NoError(t, s.Put(t.Context(), block))
	require.NoError(t, s.Close())
	s = open(remote)
	require.NoError(t, s.Get(t.Context(), block))
	require.NoError(t, os.Remove(disk()[0]))
	require.NoError(t, s.Put(t.Context(), block))
	require.NoError(t, s.Close())
	disk()
	s = open("")
	require.NoError(t, s.Get(t.Context(), block))
	require.NoError(t, s.Close())
}

func TestConformance(t *testing.T) {
	if testing.Short() {
		t.Skip("with -short, which the race stage uses: the tiers are those of connectors/offload and connectors/remote")
	}
	clean(t)
	config, err := os.ReadFile(filepath.Join("..", "..", "plugins", "lmcache", "conform.json"))
	require.NoError(t, err)
	conformance.Run(t, conformance.InProcess(plugin(), config))
	conformance.Run(t, conformance.Wire(plugin(), config))
}

// With a Redis server alone it is a remote store like any other.
func TestRemoteConformance(t *testing.T) {
	if testing.Short() {
		t.Skip("with -short, which the race stage uses: the tiers are those of connectors/offload and connectors/remote")
	}
	clean(t)
	config := `{"lmcache.chunk_size": 4, "lmcache.local_cpu": false, "lmcache.remote_url": "redis://@SERVER@", "lmcache.blocking_timeout_secs": 3}`
	conformance.Run(t, conformance.Wire(plugin(), json.RawMessage(config)), conformance.Store, conformance.Remote)
}

// TestPlainTextBeyondMachine: what travels to another machine without TLS needs a word in the config, wherever the address comes from.
func TestPlainTextBeyondMachine(t *testing.T) {
	clean(t)
	refused := func(config, field string) {
		_, err := sdk.DecodeConfig[lmcache.Config](json.RawMessage(config))
		require.ErrorIs(t, err, connector.ErrIncompatible, config)
		for _, part := range []string{field, "plain text beyond this machine", "allow_plaintext", "rediss://"} {
			require.ErrorContains(t, err, part, config)
		}
	}
	for _, url := range []string{"lm://cache.example:1", "lm://10.0.0.1:65432", "redis://10.0.0.1", "resp://cache.example:1", "valkey://10.0.0.1"} {
		refused(fmt.Sprintf(`{"lmcache.remote_url": %q}`, url), "lmcache.remote_url")
		_, err := sdk.DecodeConfig[lmcache.Config](json.RawMessage(fmt.Sprintf(`{"lmcache.remote_url": %q}`, url)))
		require.Equal(t, strings.HasPrefix(url, "lm://"), strings.Contains(err.Error(), "a tunnel that begins at 127.0.0.1 and the same kvport.ticket_key_file on all machines"),
			"%s: the other end of a tunnel is another machine, too", url)
		_, err = sdk.DecodeConfig[lmcache.Config](json.RawMessage(fmt.Sprintf(`{"lmcache.remote_url": %q, "allow_plaintext": true}`, url)))
		require.NoError(t, err, url)
	}
	for _, url := range []string{"lm://127.0.0.1:1", "lm://localhost:1", "redis://[::1]", "unix:///x", "rediss://10.0.0.1"} {
		_, err := sdk.DecodeConfig[lmcache.Config](json.RawMessage(fmt.Sprintf(`{"lmcache.remote_url": %q}`, url)))
		require.NoError(t, err, url)
	}
	t.Setenv("LMCACHE_REMOTE_URL", "lm://cache.example:1")
	refused(`{}`, "LMCACHE_REMOTE_URL")
}

// TestBeyondMachine: a remote store on another machine is seen by others, wherever its address comes from.
func TestBeyondMachine(t *testing.T) {
	clean(t)
	describe := func(config string) string {
		info, err := plugin().Describe(t.Context(), json.RawMessage(config))
		require.NoError(t, err)
		return info.BeyondMachine
	}
	require.Empty(t, describe(`{}`))
	require.Empty(t, describe(`{"lmcache.remote_url": "lm://127.0.0.1:1"}`))
	require.Contains(t, describe(`{"lmcache.remote_url": "lm://cache.example:1", "allow_plaintext": true}`), "remote_url (LMCACHE_REMOTE_URL) has the address cache.example:1")
	t.Setenv("LMCACHE_REMOTE_URL", "rediss://10.0.0.1")
	require.Contains(t, describe(`{}`), "10.0.0.1:6379")
}
