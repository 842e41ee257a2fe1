package lmtest

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestCloseEndsLateConnections: a connection that is accepted just before the server closes ends with it.
func TestCloseEndsLateConnections(t *testing.T) {
	s, err := Start(t.Context(), "")
	require.NoError(t, err)
	require.NoError(t, s.Close())
	here, _ := net.Pipe()
	s.note(here)
	require.ErrorIs(t, here.SetDeadline(time.Time{}), io.ErrClosedPipe)
}
