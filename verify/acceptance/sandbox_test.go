package acceptance

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/testkit"
)

// TestSandboxedConnectors: every connector gives a single node's tokens from inside the sandbox, in each of its setups: stores at
// trust level staged, where it is the default, and those that keep blocks for their peers in place, where a config asks for it.
func TestSandboxedConnectors(t *testing.T) {
	r := rig.New(t)
	prompts := rig.Texts(t, *rig.Seed+9200, 4, 250, 600)
	node := r.ServeModel(rig.Simulated(), "single", "")
	want := r.All(node.URL, prompts, 1)
	r.Stop(node)
	b := newBackend(t)
	sandboxed := 0
	for _, f := range scenes(t) {
		for _, v := range f.variants() {
			t.Run(v.title(), func(t *testing.T) {
				s := sandboxScene{rig.New(t), v, b.under(t, v.name+v.Name), prompts, want}
				sandboxed += s.run()
			})
		}
	}
	t.Logf("%d processes of plugins were in the sandbox", sandboxed)
	require.Positive(t, sandboxed)
}

type sandboxScene struct {
	*rig.Rig
	f       scene
	b       backend
	prompts []string
	want    []*cluster.Completion
}

// run counts the plugins that it has seen in the sandbox.
func (s *sandboxScene) run() (seen int) {
	if s.f.Peers {
		require.NoError(s, s.b.redis.Do(s.Context(), "flushall"))
		p, d := s.engine("prefill", "kv_producer"), s.engine("decode", "kv_consumer")
		rig.Same(s.T, "P/D", s.want, s.All(s.Route(p, d).URL, s.prompts, 2))
		require.Positive(s, s.Metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`))
		return s.sandboxed(p) + s.sandboxed(d)
	}
	one := s.engine("one", "kv_both")
	rig.Same(s.T, "cold", s.want, s.All(one.URL, s.prompts, 2))
	s.Idle(one)
	rig.Same(s.T, "warm", s.want, s.All(one.URL, s.prompts, 2))
	require.Positive(s, s.Metrics(one).Sum("kvport_prompt_tokens_total", `source="external"`))
	return s.sandboxed(one)
}

// settings are what the connector needs, and a name that says whether it runs in the sandbox.
func (s *sandboxScene) settings() string {
	const handshake = `,"deadlines":{"handshake":"30s"}`
	switch {
	case s.f.Needs != "": // a native library that reads other processes' memory
		return `"sandbox":"on","cross_memory":true` + handshake
	case s.f.Peers:
		return `"sandbox":"on"` + handshake
	case filepath.Ext(s.f.binary) == "" && filepath.Base(filepath.Dir(s.f.binary)) == "python":
		root := testkit.Root(s.T)
		python, err := filepath.EvalSymlinks(filepath.Join(root, ".deps", "venv", "bin", "python"))
		require.NoError(s, err)
		home := filepath.Dir(filepath.Dir(python))
		return fmt.Sprintf(`"trust":"staged","sandbox_allow":{"run":["/bin","/usr/bin",%q,%q],"read":[%q]}`, home, filepath.Join(root, ".deps", "venv"), root) + handshake
	}
	return `"trust":"staged"` + handshake
}

func (s *sandboxScene) engine(name, role string) *cluster.Process {
	config := s.f.config(role, name, s.f.extra(s.T, s.b, role), s.settings())
	return s.ServeModel(rig.Simulated(), name, config, "--enable-prefix-caching=false")
}

// sandboxed counts an engine's plugins in the sandbox; those that are not there must be meant not to be.
func (s *sandboxScene) sandboxed(engine *cluster.Process) (seen int) {
	s.Helper()
	h, err := s.Client.Health(s.Context(), engine.URL)
	require.NoError(s, err)
	for _, c := range h.Connector.Leaves() {
		if c.Sandbox == "on" || c.Sandbox == "partial" {
			seen++
			continue
		}
		require.NotEmpty(s, s.f.Needs, "%s is %q: %v", s.f.title(), c.Sandbox, c.Lacks)
	}
	return seen
}
