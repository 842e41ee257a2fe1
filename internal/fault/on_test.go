//go:build kvport_fault

package fault

import (
	"errors"
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
