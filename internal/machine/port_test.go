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
	end := handedOut("/proc/sys/net/ipv4/ip_local_port_range") - besides
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

func TestPortsThatTheKernelHandsOut(t *testing.T) {
	file := filepath.Join(t.TempDir(), "range")
	for text, want := range map[string]int{"30000\t60000\n": 30000, "20000\t60000\n": firstHandedOut, "1024\t65535\n": firstHandedOut, "": firstHandedOut, "x\ty": firstHandedOut} {
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		require.Equal(t, want, handedOut(file), text)
	}
	require.Equal(t, firstHandedOut, handedOut(filepath.Join(t.TempDir(), "none")))
}
