package acceptance

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance/redistest"
	"github.com/kvport/kvport/host"
)

// backend is where the connectors of one test keep their blocks.
type backend struct {
	dir, server string // a folder of its own; host:port of a real Redis or Valkey server
	redis       *redistest.Server
}

// backend starts a server and makes a folder.
func newBackend(t *testing.T) backend {
	t.Helper()
	server, err := redistest.Start()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Close()) })
	return backend{dir: t.TempDir(), server: server.Address, redis: server}
}

// under is a backend apart from its siblings' on the same server.
func (b backend) under(t *testing.T, name string) backend {
	t.Helper()
	dir := filepath.Join(b.dir, strings.NewReplacer("/", "-", " ", "-").Replace(name))
	require.NoError(t, os.MkdirAll(dir, 0o700))
	return backend{dir: dir, server: b.server, redis: b.redis}
}

// fixture is a connector as tests set it up.
type fixture struct {
	name, binary string
	variant      string // how it is set up; "": as its scene says
	groups       bool   // it handles caches of several groups
	peers        bool   // blocks go from engine to engine, by ticket
	pairs        bool   // a decode engine finds what a prefill engine has saved
	keeps        bool   // a later engine on the same backend finds the blocks
	extra        func(b backend) string
}

// scene is what a manifest does not say of a connector.
func scene(name string) (fixture, bool) {
	at := func(format string) func(backend) string {
		return func(b backend) string {
			return strings.NewReplacer("@DIR@", b.dir, "@NAME@", filepath.Base(b.dir), "@SERVER@", b.server).Replace(format)
		}
	}
	store := fixture{groups: true, pairs: true, keeps: true}
	tiers := fixture{groups: true, keeps: true} // blocks reach what other engines see some time after they are saved
	plain := fixture{pairs: true, keeps: true}
	peers := fixture{groups: true, pairs: true, peers: true}
	with := func(f fixture, extra string) (fixture, bool) {
		f.extra = at(extra)
		return f, true
	}
	switch name {
	case "SharedStorageConnector":
		return with(store, `{"shared_storage_path":"@DIR@/kv"}`)
	case "RemoteStoreConnector":
		return with(store, `{"url":"redis://@SERVER@","key_prefix":"@NAME@:"}`)
	case "OffloadingConnector":
		return with(tiers, `{"cpu_bytes_to_use":134217728,"disk_path":"@DIR@/disk","disk_bytes":536870912,"disk_admit_after":1}`)
	case "AIBrixOffloadingConnectorV1Type1":
		return with(tiers, `{"AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB":"0.125","AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND":"REDIS",`+
			`"AIBRIX_KV_CACHE_OL_L2_CACHE_INGESTION_TYPE":"ALL","AIBRIX_KV_CACHE_OL_L2_CACHE_NAMESPACE":"@NAME@","AIBRIX_KV_CACHE_OL_REDIS_URL":"redis://@SERVER@"}`)
	case "LMCacheConnectorV1":
		return with(tiers, `{"lmcache.chunk_size":16,"lmcache.max_local_cpu_size":0.125,"lmcache.local_disk":"file://@DIR@/disk",`+
			`"lmcache.max_local_disk_size":0.5,"lmcache.remote_url":"redis://@SERVER@/1"}`)
	case "MultiConnector":
		store.extra = func(b backend) string { return multi(b, "kv_both", multiChildren()...) }
		return store, true
	case "MinimalConnector", "CustomExample":
		return with(plain, `{"dir":"@DIR@/kv"}`)
	case "PyStoreConnector":
		return with(plain, `{"dir":"@DIR@/kv"}`)
	case "DatabaseExample":
		return with(plain, `{"dir":"@DIR@/kv","keep":true}`)
	case "PipeConnector":
		return with(peers, `{}`)
	case "NixlConnector":
		return with(peers, `{}`)
	case "P2pNcclConnector":
		return with(peers, `{"kv_buffer_size":268435456}`)
	case "PeerExample":
		return with(peers, `{"dir":"@DIR@"}`)
	}
	return fixture{}, false
}

// multiChildren are three children of different scopes.
func multiChildren() []string {
	return []string{"SharedStorageConnector", "OffloadingConnector", "RemoteStoreConnector"}
}

// multi is the extra config of a MultiConnector with such children.
func multi(b backend, role string, children ...string) string {
	list := make([]string, len(children))
	for i, name := range children {
		f, _ := scene(name)
		list[i] = fmt.Sprintf(`{"kv_connector":%q,"kv_role":%q,"kv_connector_extra_config":%s}`, name, role, f.extra(b))
	}
	return `{"connectors":[` + strings.Join(list, ",") + `]}`
}

// pluginPath are the folders in which the connectors are found: those of make build, the example in Python, and
// the examples that make build leaves out.
func pluginPath(t *testing.T) []string {
	t.Helper()
	dir := t.TempDir()
	bin := filepath.Join(root(t), "bin")
	mains, err := filepath.Glob(filepath.Join(root(t), "examples", "*", "main.go"))
	require.NoError(t, err)
	for _, main := range mains {
		folder := filepath.Dir(main)
		name := filepath.Base(folder)
		if _, err := os.Stat(filepath.Join(bin, "kvport-"+name)); name == "demo" || err == nil && name != "p2p" {
			continue
		}
		out, err := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, "kvport-example-"+name), folder).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	return []string{bin, filepath.Join(root(t), "examples", "python"), dir}
}

// fixtures are all connectors that answer with a manifest, each once, or those of -connector. One without a scene
// fails the test.
func fixtures(t *testing.T) []fixture {
	t.Helper()
	var out []fixture
	for _, found := range host.List(t.Context(), pluginPath(t)) {
		require.NoError(t, found.Err)
		name := found.Manifest.Name
		if slices.ContainsFunc(out, func(f fixture) bool { return f.name == name }) {
			continue
		}
		f, known := scene(name)
		require.True(t, known, "no scene for %s of %s", name, found.Path)
		if name == "NixlConnector" && !haveNixl(t) {
			t.Log("NixlConnector IS NOT TESTED: NIXL is not in .deps/nixl; run make deps")
			continue
		}
		f.name, f.binary = name, found.Path
		if name == host.MultiName {
			f.binary = "" // the host composes it
		}
		out = append(out, f)
	}
	require.GreaterOrEqual(t, len(out), 12, "connectors found")
	if *flagConnector != "" {
		out = slices.DeleteFunc(out, func(f fixture) bool { return !slices.Contains(strings.Split(*flagConnector, ","), f.name) })
		require.NotEmpty(t, out, "-connector %s", *flagConnector)
	}
	return out
}

// haveNixl says whether make deps has put NIXL where its plugin looks.
func haveNixl(t *testing.T) bool {
	t.Helper()
	_, err := os.Stat(filepath.Join(root(t), ".deps", "nixl", "lock.sha256"))
	require.True(t, err == nil || os.IsNotExist(err), "%v", err)
	require.False(t, err != nil && os.Getenv("KVPORT_NATIVE_TEST") != "", "make native-test needs NIXL")
	return err == nil
}

// config is a --kv-transfer-config of the connector.
func (f *fixture) config(role, engine, extra, settings string) string {
	return fmt.Sprintf(`{"kv_connector":%q,"kv_role":%q,"engine_id":%q,"kv_connector_module_path":%q,"kv_connector_extra_config":%s,"kvport":{%s}}`,
		f.name, role, engine, f.binary, extra, settings)
}
