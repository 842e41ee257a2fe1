package acceptance

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

// TestAuto: what `kvport conform --profile auto` chooses for each plugin and example is what its fixture claims, which `make conform` runs;
// so auto promises nothing that is not kept, and accuses nobody. Only authors know about three profiles, which it never chooses, and `ageing` takes up to a minute and writes 100,000 blocks.
func TestAuto(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the examples and starts every plugin: left out with -short, which the race stage uses")
	}
	never := []string{string(conformance.Power), string(conformance.Bidirectional), string(conformance.Offload), string(conformance.Ageing)}
	for _, f := range testkit.Fixtures(t) {
		t.Run(f.Folder, func(t *testing.T) {
			rig.Need(t, f.Needs)
			config, err := os.ReadFile(filepath.Join(testkit.Root(t), f.Folder, "conform.json"))
			if errors.Is(err, fs.ErrNotExist) {
				config, err = json.RawMessage("{}"), nil
			}
			require.NoError(t, err)
			got, notes, err := conformance.Suggest(t.Context(), conformance.Binary(program(t, f), config), conformance.Options{})
			if errors.Is(err, conformance.ErrInconclusive) && os.Getenv(conformance.MayBeInconclusive) != "" {
				t.Skip(err)
			}
			require.NoError(t, err)
			var chosen []string
			for _, p := range got {
				chosen = append(chosen, string(p))
			}
			t.Logf("%s %q", strings.Join(chosen, ","), notes)
			claimed := slices.DeleteFunc(slices.Clone(f.Profiles), func(p string) bool { return slices.Contains(never, p) })
			require.ElementsMatch(t, claimed, chosen)
		})
	}
}

// program is the plugin of a fixture: as make build has built it, a program that needs no build, or an example, which is built.
func program(t *testing.T, f *fixture.Fixture) string {
	t.Helper()
	root := testkit.Root(t)
	if strings.HasPrefix(f.Folder, "plugins/") {
		path := filepath.Join(root, "bin", "kvport-"+filepath.Base(f.Folder))
		require.FileExists(t, path, "run make build first")
		return path
	}
	scripts, err := filepath.Glob(filepath.Join(root, f.Folder, "kvport-*"))
	require.NoError(t, err)
	if len(scripts) > 0 {
		if err := testkit.Starts(t, scripts[0]); err != nil {
			t.Skipf("IT IS NOT TESTED: %v", err)
		}
		return scripts[0]
	}
	return example(t, filepath.Base(f.Folder))
}
