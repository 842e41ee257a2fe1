package acceptance

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance/mutants"
	"github.com/kvport/kvport/sdk"
	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

// What the test binary is called when it serves wrong connector number N: as it is, or with the two
// core interfaces alone, since a connector that keeps blocks is refused at trust level staged.
const (
	mutantBinary = "kvport-mutant-"
	plainBinary  = "kvport-plain-mutant-"
)

// TestMain serves a wrong connector when the binary is started under a plugin's name, and else runs the tests.
func TestMain(m *testing.M) {
	name := filepath.Base(os.Args[0])
	for _, prefix := range []string{mutantBinary, plainBinary} {
		number, is := strings.CutPrefix(name, prefix)
		if !is {
			continue
		}
		n, err := strconv.Atoi(number)
		if all := mutants.All(); err == nil && n < len(all) {
			plugin := all[n].Plugin()
			if prefix == plainBinary {
				plugin = mutants.Plain(plugin)
			}
			sdk.Serve(plugin)
		}
		os.Exit(2)
	}
	os.Exit(withExamples(m))
}

// withExamples runs the tests with a folder for the examples that they build.
func withExamples(m *testing.M) int {
	dir, err := os.MkdirTemp("", "kvport-examples-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	exampleFolder = dir
	return m.Run()
}

// trusted are the cases whose breach the engine does not survive at trust level in-place: the plugin
// writes where it was not granted to (DESIGN 6.1).
var trusted = map[string]bool{
	"load-granted": true, // writes other blocks than its own
	"guard-bytes":  true, // writes between blocks
	"save-reads":   true, // writes blocks that it saves
	"load-ends":    true, // goes on writing after its answer
}

var flagMutants = flag.Int("mutants", 1, "run every n-th wrong connector; default 8, in soak 1: all")

// TestWrongConnectors: an engine with a connector that is wrong on purpose gives the tokens of one
// without a connector, or refuses to start with it. Those that write where they must not are run at
// trust level staged.
func TestWrongConnectors(t *testing.T) {
	r := rig.New(t)
	prompts := rig.Texts(t, *rig.Seed+8000, 6, 200, 600)
	node := r.ServeModel("sim", "single", "")
	want := r.All(node.URL, prompts, 3)

	served, refused, staged, tokens := 0, 0, 0, 0
	folder := t.TempDir()
	all, share := mutants.All(), rig.Count(t, "mutants", *flagMutants, 8, 1)
	t.Logf("every %d. of %d wrong connectors, and those that write wildly; all of them in soak", share, len(all))
	for n, m := range all {
		if (n+int(*rig.Seed))%share != 0 && !trusted[m.Case] {
			continue
		}
		t.Run(m.Name, func(t *testing.T) {
			r := &rig.Rig{T: t, Tokens: r.Tokens}
			name, host := mutantBinary, `,"kvport":{"deadlines":{"save":"3s"}}` // or one that waits for ever takes long
			if trusted[m.Case] {
				name, host = plainBinary, `,"kvport":{"trust":"staged"}`
				staged++
			}
			if m.Plugin().Name == "FilesConnector" {
				host += fmt.Sprintf(`,"kv_connector_extra_config":{"dir":%q}`, t.TempDir())
			}
			p, err := wrong(r, filepath.Join(folder, fmt.Sprint(name, n)), fmt.Sprintf(`{"kv_connector":%q,"kv_role":"kv_both"%s}`, m.Plugin().Name, host))
			if err != nil {
				require.ErrorContains(t, err, "exit status 2")
				require.False(t, trusted[m.Case], "at trust level staged it should serve: %v", err)
				refused++
				return
			}
			for range 2 {
				tokens += rig.Compare(t, m.Name, want, r.All(p.URL, prompts, 3))
			}
			r.Idle(p)
			r.Stop(p)
			served++
		})
	}
	t.Logf("%d wrong connectors served with, %d of them at trust level staged, %d refused at start; %d tokens compared, 0 differ",
		served, staged, refused, tokens)
	require.Greater(t, served, 20)
}

// wrong starts an engine with the test binary as its plugin, under the given path.
func wrong(r *rig.Rig, plugin, config string) (*cluster.Process, error) {
	r.Helper()
	self, err := os.Executable()
	require.NoError(r, err)
	require.NoError(r, os.Symlink(self, plugin))
	r.Cleanup(func() { _ = os.Remove(plugin) })
	p, err := cluster.Start(r.Context(), nil, filepath.Base(plugin), rig.Binary(r.T), "serve", "--model", "sim", "--port", "0",
		"--plugin-path", filepath.Dir(plugin), "--enable-prefix-caching=false", "--kv-transfer-config", config)
	if err == nil {
		r.Cleanup(p.Kill)
	}
	return p, err
}
