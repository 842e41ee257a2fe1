package testkit

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/fixture"
)

// Root is the folder with go.mod.
func Root(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	require.NoError(t, err)
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		parent := filepath.Dir(dir)
		require.NotEqual(t, dir, parent, "no go.mod above the test")
		dir = parent
	}
}

// Fixtures are those of all plugins and examples.
func Fixtures(t testing.TB) fixture.List {
	t.Helper()
	list, err := fixture.Tree(os.DirFS(Root(t)))
	require.NoError(t, err)
	return list
}

// Typical is the fixture that stands for connectors of a kind.
func Typical(t testing.TB, kind fixture.Kind) *fixture.Fixture {
	t.Helper()
	f, err := Fixtures(t).Typical(kind)
	require.NoError(t, err)
	return f
}
