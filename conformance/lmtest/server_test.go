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
	here, there := net.Pipe()
	s.note(here)
	require.NoError(t, there.SetReadDeadline(time.Now().Add(time.Second)))
	_, err = there.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
}
