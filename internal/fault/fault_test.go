package fault

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPointWithoutHookDoesNothing(t *testing.T) {
	require.NoError(t, Point("nowhere"))
}
