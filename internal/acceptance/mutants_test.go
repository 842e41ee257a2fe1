package acceptance

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance/mutants"
	"github.com/kvport/kvport/internal/cluster"
	"github.com/kvport/kvport/sdk"
)

// mutantBinary is what the test binary is called when it serves as plugin number N.
const mutantBinary = "kvport-mutant-"

// TestMain serves a wrong connector when the binary is started under a plugin's name.
func TestMain(m *testing.M) {
	if number, is := strings.CutPrefix(filepath.Base(os.Args[0]), mutantBinary); is {
		n, err := strconv.Atoi(number)
		if all := mutants.All(); err == nil && n < len(all) {
			sdk.Serve(all[n].Plugin())
		}
		os.Exit(2)
	}
	os.Exit(m.Run())
}

// trusted are the rules whose breach the engine does not survive at trust level in-place: the plugin
// writes where it was not granted to (DESIGN 6.1).
var trusted = map[string]bool{
	"load-granted": true, // writes other blocks than its own
	"guard-bytes":  true, // writes between blocks
	"save-reads":   true, // writes blocks that it saves
	"load-ends":    true, // goes on writing after its answer
}

// TestWrongConnectors: an engine with a connector that is wrong on purpose gives the tokens of one
// without a connector, or refuses to start with it.
func TestWrongConnectors(t *testing.T) {
	r := newRig(t)
	prompts := texts(t, *flagSeed+8000, 6, 200, 600)
	node := r.serveModel("sim", "single", "")
	want := r.all(node.URL, prompts, 3)
	self, err := os.Executable()
	require.NoError(t, err)

	served, refused, left, tokens := 0, 0, 0, 0
	for n, m := range mutants.All() {
		if trusted[m.Case] {
			left++
			continue
		}
		t.Run(m.Name, func(t *testing.T) {
			r := &rig{T: t}
			folder := t.TempDir()
			require.NoError(t, os.Symlink(self, filepath.Join(folder, mutantBinary+strconv.Itoa(n))))
			config := fmt.Sprintf(`{"kv_connector":%q,"kv_role":"kv_both"}`, m.Plugin().Name)
			p, err := cluster.Start(t.Context(), nil, "mutant", binary(t), "serve", "--model", "sim", "--port", "0",
				"--plugin-path", folder, "--enable-prefix-caching=false", "--kv-transfer-config", config)
			if err != nil {
				require.ErrorContains(t, err, "exit status 2")
				refused++
				return
			}
			t.Cleanup(p.Kill)
			for range 2 {
				tokens += compare(t, m.Name, want, r.all(p.URL, prompts, 3))
			}
			r.idle(p)
			r.stop(p)
			served++
		})
	}
	t.Logf("%d wrong connectors served with, %d refused at start, %d left out as trusted; %d tokens compared, 0 differ",
		served, refused, left, tokens)
	require.Greater(t, served, 20)
}
