package machine

import (
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// Nobody who connects, or listens without naming a port, is given one of these.
func TestFreePort(t *testing.T) {
	end := firstEphemeral(portRange) - busOffset
	for range 100 {
		text, err := FreePort(t.Context())
		require.NoError(t, err)
		port, err := strconv.Atoi(text)
		require.NoError(t, err)
		require.GreaterOrEqual(t, port, lowestPort)
		require.Less(t, port, end)
		l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:"+text)
		require.NoError(t, err)
		require.NoError(t, l.Close())
	}
}

func TestFirstEphemeralPort(t *testing.T) {
	file := filepath.Join(t.TempDir(), "range")
	for text, want := range map[string]int{"30000\t60000\n": 30000, "20000\t60000\n": defaultEphemeral, "1024\t65535\n": defaultEphemeral, "": defaultEphemeral, "x\ty": defaultEphemeral} {
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		require.Equal(t, want, firstEphemeral(file), text)
	}
	require.Equal(t, defaultEphemeral, firstEphemeral(filepath.Join(t.TempDir(), "none")))
}
