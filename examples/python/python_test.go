// Package python tests the connector that is written in Python: over the protocol, as a process, and
// under real engines.
package python

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/verify/cluster"
)

// plugin is the launcher that hosts start. Without the Python of make deps there is nothing to test.
func plugin(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs("kvport-pystore")
	require.NoError(t, err)
	venv := filepath.Join("..", "..", ".deps", "venv", "bin", "python")
	require.FileExists(t, venv, "the packages of tools/python/requirements.txt are missing: run make deps first")
	return path
}

// TestConformance runs the cases of several ranks; make conform runs all that fixture.json names, and with its full count this test those of a
// store.
func TestConformance(t *testing.T) {
	config, err := os.ReadFile("conform.json")
	require.NoError(t, err)
	profiles := []conformance.Profile{conformance.MultiRank}
	if os.Getenv("KVPORT_SOAK") != "" {
		profiles = append(profiles, conformance.Store)
	}
	conformance.Run(t, conformance.Binary(plugin(t), config), profiles...)
}

// A host that asks the plugin where it is before it kills it gets its stacks.
func TestItSaysWhereItIs(t *testing.T) {
	var said []string
	p, err := host.Launch(t.Context(), plugin(t), host.LaunchOptions{Where: func(lines []string) { said = lines }})
	require.NoError(t, err)
	p.Kill()
	require.Regexp(t, `File ".*/pystore\.py", line \d+ in main`, strings.Join(said, "\n"))
}

// What the commands of the documentation say when the plugin is run by hand.
func TestByHand(t *testing.T) {
	path := plugin(t)
	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"no arguments":    {nil, 2, "usage:"},
		"manifest":        {[]string{"--manifest"}, 0, `"name": "PyStoreConnector"`},
		"a good config":   {[]string{"--manifest", "--config", `{"dir":"x"}`}, 0, `"scope": "shared"`},
		"a bad config":    {[]string{"--manifest", "--config", `{"dir":"x","dri":"x"}`}, 2, `unknown field "dri"`},
		"a missing field": {[]string{"--manifest", "--config", `{}`}, 2, "dir is missing"},
		"not JSON":        {[]string{"--manifest", "--config", `{`}, 2, "bad JSON"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), path, c.args...)
			cmd.Env = []string{} // as a host starts it
			out, _ := cmd.CombinedOutput()
			require.Equal(t, c.code, cmd.ProcessState.ExitCode(), "%s", out)
			require.Contains(t, string(out), c.says)
		})
	}
}

// rig runs engines of the sim model, in which a wrong byte of KV is a wrong token.
type rig struct {
	*testing.T
	client cluster.Client
	kvport string
	store  string
}

func newRig(t *testing.T) *rig {
	t.Helper()
	dir := t.TempDir()
	r := &rig{T: t, kvport: filepath.Join(dir, "kvport"), store: filepath.Join(dir, "blocks")}
	r.build("cmd/kvport", r.kvport)
	return r
}

func (r *rig) build(folder, to string) {
	r.Helper()
	out, err := exec.CommandContext(r.Context(), "go", "build", "-buildvcs=false", "-o", to, filepath.Join("..", "..", folder)).CombinedOutput()
	require.NoError(r, err, "%s", out)
}

// serve starts an engine with a connector; without a path, with none.
func (r *rig) serve(name, connector, path, role string) *cluster.Process {
	r.Helper()
	args := []string{"serve", "--model", "sim", "--port", "0", "--enable-prefix-caching=false"}
	if path != "" {
		config := fmt.Sprintf(`{"kv_connector":%q,"kv_connector_module_path":%q,"kv_role":%q,"kv_connector_extra_config":{"dir":%q}}`,
			connector, path, role, r.store)
		args = append(args, "--kv-transfer-config", config)
	}
	return r.start(name, args...)
}

func (r *rig) start(name string, args ...string) *cluster.Process {
	r.Helper()
	p, err := cluster.Start(r.Context(), nil, name, r.kvport, args...)
	require.NoError(r, err)
	r.Cleanup(func() {
		if r.Failed() {
			r.Logf("last output of %s:\n%s", name, p.Logs())
		}
		p.Kill()
	})
	return p
}

// stop asks an engine to drain, which closes its plugin's sides.
func (r *rig) stop(p *cluster.Process) {
	r.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	require.NoError(r, p.Stop(ctx))
}

// tokens are the answers to all prompts, one after another.
func (r *rig) tokens(url string, prompts []string) [][]int32 {
	r.Helper()
	var all [][]int32
	for _, prompt := range prompts {
		c, err := r.client.Complete(r.Context(), url, cluster.Request{Prompt: prompt, MaxTokens: 32, IgnoreEOS: true})
		require.NoError(r, err)
		require.Len(r, c.Tokens, 32)
		all = append(all, c.Tokens)
	}
	return all
}

// external is how many prompt tokens an engine loaded instead of computing them.
func (r *rig) external(p *cluster.Process) float64 {
	r.Helper()
	m, err := r.client.Metrics(r.Context(), p.URL)
	require.NoError(r, err)
	require.Zero(r, m.Sum("kvport_integrity_failures_total"))
	return m.Sum("kvport_prompt_tokens_total", `source="external"`)
}

// prompts of 200 to 1,300 bytes, which are as many tokens.
func prompts() (list []string, tokens int) {
	for n := range 8 {
		list = append(list, strings.Repeat(fmt.Sprintf("prompt %d tells the same story again; ", n), 6+4*n))
		tokens += len(list[n])
	}
	return list, tokens
}

// A prompt is computed by one engine and answered by another, with the tokens of a single node.
func TestPrefillAndDecode(t *testing.T) {
	path, r := plugin(t), newRig(t)
	list, size := prompts()
	want := r.tokens(r.serve("single", "", "", "").URL, list)

	p := r.serve("prefill", "PyStoreConnector", path, "kv_producer")
	d := r.serve("decode", "PyStoreConnector", path, "kv_consumer")
	router := r.start("router", "route", "--port", "0", "--prefill", p.URL, "--decode", d.URL)
	require.Equal(t, want, r.tokens(router.URL, list))
	external := r.external(d)
	t.Logf("%d prompts, %d prompt tokens, %.0f of them loaded, %d tokens equal", len(list), size, external, 32*len(list))
	require.Greater(t, external, 0.8*float64(size))
	require.Zero(t, r.external(p))
	for _, engine := range []*cluster.Process{router, d, p} {
		r.stop(engine)
	}
}

// A plugin of the Go sdk and this one derive the same keys and write the same files.
func TestSharesBlocksWithGo(t *testing.T) {
	path, r := plugin(t), newRig(t)
	minimal := filepath.Join(t.TempDir(), "kvport-minimal")
	r.build("examples/minimal", minimal)
	list, size := prompts()

	writer := r.serve("go", "MinimalConnector", minimal, "kv_both")
	want := r.tokens(writer.URL, list)
	r.stop(writer)
	reader := r.serve("python", "PyStoreConnector", path, "kv_both")
	require.Equal(t, want, r.tokens(reader.URL, list))
	require.Greater(t, r.external(reader), 0.8*float64(size))
	r.stop(reader)
}

// The plugin is killed between prompts; the engine goes on with the next one and the same tokens.
func TestPluginDies(t *testing.T) {
	path, r := plugin(t), newRig(t)
	list, size := prompts()
	engine := r.serve("both", "PyStoreConnector", path, "kv_both")
	want := r.tokens(engine.URL, list)
	plugins := cluster.Children(engine.PID())
	require.Len(t, plugins, 1)
	require.NoError(t, syscall.Kill(plugins[0], syscall.SIGKILL))
	require.Equal(t, want, r.tokens(engine.URL, list))
	require.Equal(t, want, r.tokens(engine.URL, list))
	require.Greater(t, r.external(engine), 0.8*float64(size))
	m, err := r.client.Metrics(t.Context(), engine.URL)
	require.NoError(t, err)
	require.EqualValues(t, 1, m.Sum("kvport_plugin_restarts_total"))
	require.False(t, cluster.Alive(plugins[0]))

	require.Len(t, cluster.Children(engine.PID()), 1)
	next := cluster.Children(engine.PID())[0]
	engine.Kill() // takes the plugin with it
	require.Eventually(t, func() bool { return !cluster.Alive(next) }, time.Minute, 10*time.Millisecond)
}
