package docs

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// hostile says which fuzz targets a kind of input from outside goes through.
func hostile() map[string][]string {
	return map[string][]string{
		"config":         {"host/FuzzParseConfig", "sdk/FuzzDecodeConfig"},
		"block header":   {"connectors/sharedstorage/FuzzDecode"},
		"ticket":         {"internal/ticket/FuzzOpen"},
		"wire messages":  {"internal/wire/FuzzSessionRequest"},
		"HTTP bodies":    {"engine/server/FuzzDecode", "engine/router/FuzzParse"},
		"plugin answers": {"internal/wire/FuzzSessionResponse", "host/internal/plugin/FuzzPlainLines"},
		"model files":    {"engine/gguf/FuzzParse"},
		"layouts":        {"connector/FuzzLayout"},
	}
}

// TestHostileInputs: at least 200 different hostile inputs are checked in, some of each kind. They
// are seeds of fuzz targets, so that a plain `go test` of their package tries all of them.
func TestHostileInputs(t *testing.T) {
	const all, ofEach, large = 200, 20, 16 << 10
	seen := map[string]string{}
	for kind, targets := range hostile() {
		count := 0
		for _, target := range targets {
			folder, fuzz := filepath.Split(target)
			folder = filepath.Join("..", folder)
			require.True(t, declares(t, folder, fuzz), "no test runs the seeds of %s", target)
			entries, err := os.ReadDir(filepath.Join(folder, "testdata", "fuzz", fuzz))
			require.NoError(t, err)
			require.NotEmpty(t, entries, target)
			for _, entry := range entries {
				path := filepath.Join(folder, "testdata", "fuzz", fuzz, entry.Name())
				text := read(t, []string{path})
				require.True(t, strings.HasPrefix(text, "go test fuzz v1\n"), "%s is not a seed", path)
				require.Less(t, len(text), large, "%s is large", path)
				require.Empty(t, seen[target+text], "%s says the same", path)
				seen[target+text] = path
				count++
			}
		}
		t.Logf("%s: %d hostile inputs", kind, count)
		require.GreaterOrEqual(t, count, ofEach, kind)
	}
	require.GreaterOrEqual(t, len(seen), all)
}

// declares reports whether the tests of a folder have the fuzz target.
func declares(t *testing.T, folder, fuzz string) bool {
	t.Helper()
	tests, err := filepath.Glob(filepath.Join(folder, "*_test.go"))
	require.NoError(t, err)
	return strings.Contains(read(t, tests), "func "+fuzz+"(f *testing.F)")
}
