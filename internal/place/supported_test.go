package place

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

// Rule PLACE-19.
func TestOtherProcessors(t *testing.T) {
	_, err := Map(aligned(64))
	if runtime.GOARCH == "amd64" {
		require.NoError(t, err)
	} else {
		require.ErrorIs(t, err, ErrUnsupported)
	}
}
