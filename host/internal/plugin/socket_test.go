package plugin

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNoFolderForSocket(t *testing.T) {
	long := filepath.Join(t.TempDir(), strings.Repeat("x", 100))
	require.NoError(t, os.Mkdir(long, 0o700))
	_, err := socketDir([]string{long, "/does/not/exist"})
	require.ErrorContains(t, err, "set TMPDIR")
	require.ErrorContains(t, err, long+" is too long")
	left, err := os.ReadDir(long)
	require.NoError(t, err)
	require.Empty(t, left)
}
