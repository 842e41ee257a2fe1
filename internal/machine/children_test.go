package machine

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/testkit"
)

// A shell starts another one, which waits: a child and a grandchild are found, and nothing when they are gone.
func TestDescendants(t *testing.T) {
	child, grandchild, end := testkit.Family(t)

	require.Contains(t, Children(0), child)
	require.NotContains(t, Children(0), grandchild)
	require.Equal(t, []int{grandchild}, Children(child))
	found := Descendants(64, os.Getpid())
	require.Contains(t, found, child)
	require.Contains(t, found, grandchild)
	require.Less(t, slices.Index(found, child), slices.Index(found, grandchild))
	require.Len(t, Descendants(1, os.Getpid()), 1)

	end()
	require.NotContains(t, Children(0), child)
	require.Empty(t, Children(child))
}

// Both kinds of kernel, as files.
func TestFamilyOfBothKernels(t *testing.T) {
	put := func(root, path, text string) {
		file := filepath.Join(root, path)
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o700))
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	}
	lists := t.TempDir()
	put(lists, "7/task/7/children", "8 ")
	put(lists, "7/task/9/children", "10 11 ")
	require.Equal(t, []int{8, 10, 11}, familyIn(lists, true).children(7))

	silent := t.TempDir()
	put(silent, "7/stat", "7 (a) S 1 7")
	put(silent, "8/stat", "8 (a b) R 1 (c)) S 7 8")
	put(silent, "9/stat", "9 (c) Z 8 9")
	put(silent, "10/stat", "") // it has just ended
	put(silent, "uptime", "1")
	require.Equal(t, []int{8}, familyIn(silent, false).children(7))
	require.Equal(t, []int{9}, familyIn(silent, false).children(8))
	require.Empty(t, familyIn(silent, false).children(9))
}
