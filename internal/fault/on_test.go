//go:build kvport_fault

package fault

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestHook(t *testing.T) {
	boom := errors.New("boom")
	unset := Set("here", func() error { return boom })
	require.ErrorIs(t, Point("here"), boom)
	require.NoError(t, Point("there"))
	unset()
	require.NoError(t, Point("here"))
}

func TestOrders(t *testing.T) {
	folder := t.TempDir()
	t.Setenv(Folder, folder)
	t.Setenv(Orders, "a:2:EIO,b:*:error,nonsense,c:0:kill,d:1")
	for hit := 1; hit <= 3; hit++ {
		err := Point("a")
		require.Equal(t, hit == 2, err != nil)
		require.Equal(t, hit == 2, errors.Is(err, syscall.EIO))
		require.ErrorIs(t, Point("b"), ErrInjected)
		require.NoError(t, Point("c"))
		require.NoError(t, Point("d"))
		Crash("b")
	}
	hits, err := os.ReadFile(filepath.Join(folder, "a"))
	require.NoError(t, err)
	require.Len(t, hits, 3)
	fired, err := os.ReadFile(filepath.Join(folder, Fired))
	require.NoError(t, err)
	require.Equal(t, 1, strings.Count(string(fired), "a 2 EIO "))
}
