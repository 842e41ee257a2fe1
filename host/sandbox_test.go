package host

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/sandbox"
)

// TestSandboxedPlugin: a malicious plugin gets at everything outside the sandbox, and at trust level staged at
// nothing but its own folder. There it also saves and loads.
func TestSandboxedPlugin(t *testing.T) {
	kernel := sandbox.Probe()
	if lacks := kernel.Lacks(false); len(lacks) > 0 {
		t.Logf("not run: this kernel lacks a part of the sandbox: %q", lacks)
		return
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	secret := filepath.Join(t.TempDir(), "ticket.key")
	require.NoError(t, os.WriteFile(secret, []byte("secret"), 0o600))
	t.Setenv("TOKEN_OF_ANOTHER", "secret")
	data, err := os.ReadFile(testPlugin())
	require.NoError(t, err)
	sum := sha256.Sum256(data)
	hash := hex.EncodeToString(sum[:])

	run := func(settings map[string]any) (worked map[string]bool, h Health) {
		dir := filepath.Join(t.TempDir(), "made")
		r := newRig(t, rigOptions{dir: dir, settings: settings, extra: map[string]any{
			"fault": "escape", "secret": secret, "address": l.Addr().String(),
		}})
		ks := keys(1, 3)
		require.Empty(t, r.save("a", ks, 0).Failed)
		require.Empty(t, r.load("a", ks, 8).Failed)
		require.True(t, r.same(transfer("a", ks, 8).Blocks))
		data, err := os.ReadFile(filepath.Join(dir, "escaped"))
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(data, &worked))
		return worked, r.Health()
	}
	for name, settings := range map[string]map[string]any{
		"staged":               {"trust": "staged"},
		"staged, and pinned":   {"trust": "staged", "plugin_sha256": hash, "sandbox": "on"},
		"in place, and wanted": {"trust": "in-place", "sandbox": "on"},
	} {
		worked, h := run(settings)
		for what, did := range worked {
			require.Equal(t, what == "own folder", did, "%s: %s", name, what)
		}
		require.Equal(t, "on", h.Sandbox, name)
		require.Empty(t, h.SandboxLacks)
	}
	for name, settings := range map[string]map[string]any{
		"in place": {"trust": "in-place"}, "staged, and not wanted": {"trust": "staged", "sandbox": "off"},
		"other memory": {"trust": "in-place", "sandbox": "on", "cross_memory": true},
	} {
		worked, h := run(settings)
		for what, did := range worked {
			require.True(t, did, "%s: %s", name, what)
		}
		require.Equal(t, "off", h.Sandbox, name)
		require.Len(t, h.SandboxLacks, 1)
	}
	worked, _ := run(map[string]any{"trust": "staged", "environment": []string{"TOKEN_OF_ANOTHER"}, "sandbox_allow": map[string]any{"read": []string{secret}}})
	require.True(t, worked["variable"] && worked["secret"] && !worked["memory"], "what the operator permits works: %v", worked)
}

// TestSandboxedManifest: a plugin is in the sandbox when it is asked for its manifest, too.
func TestSandboxedManifest(t *testing.T) {
	path := alias(t, "kvport-spy")
	require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(path), "secret"), nil, 0o600))
	for trust, want := range map[string]string{"in-place": "stolen", "staged": "1"} {
		cfg, err := ParseConfig(fmt.Sprintf(`{"kv_connector":"TestConnector","kv_role":"kv_both","kvport":{"trust":%q}}`, trust))
		require.NoError(t, err)
		cfg.SandboxedBy(Self)
		for _, module := range []string{"", path} {
			cfg.ModulePath = module
			b, err := cfg.box(sandbox.Probe())
			require.NoError(t, err)
			prog, m, err := resolve(t.Context(), cfg, []string{filepath.Dir(path)}, &b)
			require.NoError(t, err)
			require.NoError(t, prog.Close())
			require.Equal(t, want, m.Version, trust)
		}
	}
}

// TestSandboxedSearch: who is only asked whether it is the wanted plugin is asked in a sandbox, at every trust level.
func TestSandboxedSearch(t *testing.T) {
	kernel := sandbox.Probe()
	if !kernel.Confines() {
		t.Log("not run: this kernel cannot refuse files")
		return
	}
	path := alias(t, "kvport-marks")
	folder := filepath.Dir(path)
	cfg, err := ParseConfig(`{"kv_connector":"AnotherConnector","kv_role":"kv_both"}`)
	require.NoError(t, err)
	for _, program := range []string{Self, ""} {
		cfg.SandboxedBy(program)
		_, _, err := resolve(t.Context(), cfg, []string{folder}, &box{kernel: kernel})
		require.ErrorContains(t, err, "TestConnector", "it was asked")
		_, err = os.Stat(filepath.Join(folder, "marked"))
		require.Equal(t, program == "", err == nil, "%q: %v", program, err)
	}
}

// TestSandboxModes: when there is a sandbox, and what is said where there is none.
func TestSandboxModes(t *testing.T) {
	all, none := sandbox.Probe(), sandbox.Support{}
	files := all
	files.Seccomp = false
	for _, c := range []struct {
		kvport, connector, program string
		kernel                     sandbox.Support
		on, warn                   bool
		why                        string
		refused                    bool
	}{
		{kvport: `{}`, program: Self, kernel: all, why: "in-place"},
		{kvport: `{"sandbox":"on"}`, program: Self, kernel: all, on: true},
		{kvport: `{"trust":"staged"}`, program: Self, kernel: all, on: true},
		{kvport: `{"trust":"staged","sandbox":"off"}`, program: Self, kernel: all, warn: true, why: "is off"},
		{kvport: `{"trust":"staged","cross_memory":true}`, program: Self, kernel: all, warn: true, why: "cross_memory"},
		{kvport: `{"sandbox":"on","cross_memory":true}`, program: Self, kernel: all, warn: true, why: "cross_memory"},
		{kvport: `{"trust":"staged"}`, kernel: all, warn: true, why: "this program does not say"},
		{kvport: `{"trust":"staged","sandbox":"on"}`, kernel: all, refused: true, why: "this program does not say"},
		{kvport: `{"trust":"staged"}`, program: Self, kernel: none, warn: true, why: "no Landlock"},
		{kvport: `{"trust":"staged","sandbox":"on"}`, program: Self, kernel: none, refused: true, why: "no seccomp"},
		{kvport: `{"trust":"staged"}`, program: Self, kernel: sandbox.Support{Seccomp: true}, on: true},
		{kvport: `{"sandbox":"on"}`, program: Self, kernel: sandbox.Support{Seccomp: true}, refused: true, why: "the engine's memory and cache"},
		{kvport: `{"sandbox":"on"}`, program: Self, kernel: files, refused: true, why: "no seccomp"},
		{kvport: `{"trust":"staged"}`, connector: MultiName, program: Self, kernel: all, warn: true, why: "starts its children itself"},
		{kvport: `{"sandbox":"on"}`, connector: MultiName, program: Self, kernel: all, refused: true, why: "starts its children itself"},
	} {
		if c.connector == "" {
			c.connector = "TestConnector"
		}
		cfg, err := ParseConfig(fmt.Sprintf(`{"kv_connector":%q,"kv_role":"kv_both","kv_connector_module_path":"x","kvport":%s}`, c.connector, c.kvport))
		require.NoError(t, err)
		cfg.SandboxedBy(c.program)
		if strings.Contains(c.kvport, `"on"`) && c.on && !c.kernel.Confines() {
			t.Logf("not run: this kernel has no sandbox for %s", c.kvport)
			continue
		}
		b, err := cfg.box(c.kernel)
		if c.refused {
			require.ErrorIs(t, err, ErrConfig, c.kvport)
			require.ErrorContains(t, err, c.why)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, c.on, b.on, c.kvport)
		require.Equal(t, c.warn, b.warn, c.kvport)
		require.Equal(t, c.kernel, b.kernel, "the kernel is asked once: the search for plugins has a sandbox, too")
		require.Contains(t, b.why, c.why)
		state, lacks := b.state()
		require.Equal(t, map[bool]string{true: "on", false: "off"}[c.on], map[string]string{"on": "on", "partial": "on", "off": "off"}[state])
		require.Equal(t, !c.on || len(c.kernel.Lacks(false)) > 0, len(lacks) > 0)
	}
}

// TestSandboxOfChildren: what a MultiConnector says holds for its children, and a child may leave the sandbox.
func TestSandboxOfChildren(t *testing.T) {
	cfg, err := ParseConfig(`{"kv_connector":"MultiConnector","kv_role":"kv_both","kvport":{"sandbox":"on"},"kv_connector_extra_config":{"connectors":[
		{"kv_connector":"A","kv_role":"kv_both"},{"kv_connector":"B","kv_role":"kv_both","kvport":{"cross_memory":true}}]}}`)
	require.NoError(t, err)
	cfg.SandboxedBy(Self)
	kernel := sandbox.Probe()
	for i, want := range []bool{true, false} {
		if want && !kernel.Confines() {
			t.Log("not run: this kernel has no sandbox")
			continue
		}
		b, err := cfg.Children[i].box(kernel)
		require.NoError(t, err)
		require.Equal(t, want, b.on)
	}
}

// TestSandboxPolicy: a plugin gets the paths that the operator wrote, and variables that are permitted.
func TestSandboxPolicy(t *testing.T) {
	t.Setenv("KVPORT_FOLDER", "/variable")
	t.Setenv("OTHERS_TOKEN", "x")
	m := &Manifest{
		Environment: []string{"KVPORT_FOLDER", "OTHERS_TOKEN", "HOME"},
		Needs:       connector.Needs{Network: true, Reads: []string{"key", "OTHERS_TOKEN", "socket"}, Writes: []string{"dir", "absent", "number", "KVPORT_FOLDER", "url", "server"}},
	}
	policy := func(kvport string) (names, withheld []string, p sandbox.Policy) {
		cfg, err := ParseConfig(`{"kv_connector":"X","kv_role":"kv_both","kv_connector_extra_config":{"key":"/key","dir":"relative","number":7,"url":"file:///disk","socket":"unix:///run/redis.sock","server":"redis://h:1"},"kvport":` + kvport + `}`)
		require.NoError(t, err)
		cfg.SandboxedBy(Self)
		b, err := cfg.box(sandbox.Support{Seccomp: true})
		require.NoError(t, err)
		names, withheld = cfg.environment(m, &b)
		return names, withheld, cfg.confine(&b, names, m.Needs).spec().Policy
	}
	here, err := os.Getwd()
	require.NoError(t, err)
	names, withheld, p := policy(`{"trust":"staged","sandbox_allow":{"read":["/more"],"run":["/program"],"data_bytes":"1GiB"}}`)
	require.Equal(t, []string{"KVPORT_FOLDER", "HOME"}, names)
	require.Equal(t, []string{"OTHERS_TOKEN"}, withheld)
	require.Equal(t, sandbox.Policy{
		Read: []string{"/more", "/key"}, Run: []string{"/program"}, Network: true, Data: 1 << 30,
		Write: []string{filepath.Join(here, "relative"), "/disk"}, Connect: []string{"/run/redis.sock"},
	}, p)
	_, _, p = policy(`{"trust":"staged","environment":["KVPORT_FOLDER"]}`)
	require.Equal(t, []string{filepath.Join(here, "relative"), "/variable", "/disk"}, p.Write)
	names, withheld, p = policy(`{"trust":"staged","environment":[],"sandbox_allow":{"network":false,"write":["/w"]}}`)
	require.Empty(t, names)
	require.Equal(t, []string{"KVPORT_FOLDER", "OTHERS_TOKEN"}, withheld[:2])
	require.False(t, p.Network)
	require.Equal(t, []string{"/w", filepath.Join(here, "relative"), "/disk"}, p.Write)
	cfg, err := ParseConfig(`{"kv_connector":"X","kv_role":"kv_both","kvport":{"environment":["OTHERS_TOKEN","UNKNOWN"]}}`)
	require.NoError(t, err)
	names, _ = cfg.environment(m, &box{})
	require.Equal(t, []string{"OTHERS_TOKEN"}, names, "the list holds without a sandbox, too")
	names, _ = (&Config{}).environment(m, &box{})
	require.Equal(t, m.Environment, names)
}

// TestSandboxVariables: a plugin gets no path by a variable that every program has, and no credentials of another connector.
func TestSandboxVariables(t *testing.T) {
	greedy := []string{
		"HOME", "TMPDIR", "XDG_CACHE_HOME", "KVPORT_PLUGIN_PATH", "KVPORT_ANY", "LD_PRELOAD", "LD_LIBRARY_PATH", "KVPORT_UCX_DIR",
		"LMCACHE_LOCAL_DISK", "KVPORT_REMOTE_PASSWORD", "LMCACHE_RESP_PASSWORD", "VLLM_API_KEY", "AIBRIX_KV_CACHE_OL_REDIS_URL",
	}
	for _, name := range greedy {
		t.Setenv(name, "/of/"+name)
	}
	t.Setenv("LD_LIBRARY_PATH", "/one:/two")
	policy := func(name, kvport string) (variables []string, p sandbox.Policy) {
		cfg, err := ParseConfig(fmt.Sprintf(`{"kv_connector":%q,"kv_role":"kv_both","kvport":%s}`, name, kvport))
		require.NoError(t, err)
		cfg.SandboxedBy(Self)
		m := &Manifest{Name: name, Environment: greedy, Needs: connector.Needs{Reads: greedy, Writes: greedy}}
		b, err := cfg.box(sandbox.Support{Seccomp: true})
		require.NoError(t, err)
		variables, _ = cfg.environment(m, &b)
		s := cfg.confine(&b, variables, m.Needs)
		require.Equal(t, variables, s.permitted(m.Environment), "a process that is started with all of them has no more")
		return variables, s.spec().Policy
	}
	variables, p := policy("X", `{"trust":"staged"}`)
	require.Equal(t, []string{"/one", "/two", "/of/KVPORT_UCX_DIR"}, p.Read)
	require.Empty(t, p.Write)
	require.Equal(t, []string{"HOME", "TMPDIR", "XDG_CACHE_HOME", "KVPORT_PLUGIN_PATH", "KVPORT_ANY", "LD_LIBRARY_PATH", "KVPORT_UCX_DIR", "LMCACHE_LOCAL_DISK"}, variables)

	variables, p = policy("LMCacheOther", `{"trust":"staged"}`)
	require.Contains(t, variables, "LMCACHE_RESP_PASSWORD")
	require.NotContains(t, variables, "KVPORT_REMOTE_PASSWORD")
	require.Equal(t, []string{"/of/LMCACHE_LOCAL_DISK", "/of/LMCACHE_RESP_PASSWORD"}, p.Write)
	variables, _ = policy("RemoteOther", `{"trust":"staged"}`)
	require.Contains(t, variables, "KVPORT_REMOTE_PASSWORD")

	_, p = policy("X", `{"trust":"staged","environment":["HOME","KVPORT_PLUGIN_PATH","XDG_CACHE_HOME","LD_PRELOAD","KVPORT_ANY"]}`)
	require.Equal(t, []string{"/of/KVPORT_ANY"}, p.Read)
	require.Equal(t, []string{"/of/KVPORT_ANY"}, p.Write)
}

// TestSandboxFolders: folders that the plugin writes are made, and nothing else is.
func TestSandboxFolders(t *testing.T) {
	t.Chdir(t.TempDir())
	cfg, err := ParseConfig(`{"kv_connector":"X","kv_role":"kv_both","kv_connector_extra_config":{"url":"redis://h:1","dir":"own"},
		"kvport":{"trust":"staged","sandbox_allow":{"write":["file","folder/"]}}}`)
	require.NoError(t, err)
	cfg.SandboxedBy(Self)
	m := &Manifest{Needs: connector.Needs{Writes: []string{"url", "dir"}}}
	b, err := cfg.box(sandbox.Support{Seccomp: true})
	require.NoError(t, err)
	cfg.confine(&b, nil, m.Needs).makeFolders()
	made, err := filepath.Glob("*")
	require.NoError(t, err)
	require.Equal(t, []string{"folder", "own"}, made)
}
