package nccl

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/native/cuda"
	"github.com/kvport/kvport/pipe/pipetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestPipe runs where there are two GPUs: NCCL refuses two ranks on one.
func TestPipe(t *testing.T) {
	devices := 0
	if lib, err := cuda.Open(""); err == nil {
		devices, _ = lib.Devices()
	}
	if devices < 2 {
		t.Skipf("THE PIPE OVER NCCL IS NOT TESTED: it needs two GPUs, there are %d", devices)
	}
	a, b := &Network{Device: 0}, &Network{Device: 1}
	pipetest.Run(t, pipetest.Harness{Bound: 64 << 20, Open: func(t pipetest.T) pipetest.Ends {
		dialed, accepted := pipetest.Pair(t, a, b)
		return pipetest.Ends{Out: dialed.Out, In: accepted.In}
	}})
}

// Without a device every call says so, whether the libraries are there or not.
func TestNoDevice(t *testing.T) {
	n := &Network{CUDADir: t.TempDir()}
	for name, err := range map[string]error{"start": n.Start(), "again": n.Start()} {
		require.ErrorIs(t, err, ErrNoDevice, name)
		require.ErrorIs(t, err, cuda.ErrUnavailable, name)
	}
	_, err := n.Listen(t.Context())
	require.ErrorIs(t, err, ErrNoDevice)
	_, err = n.Dial(t.Context(), "127.0.0.1:1")
	require.ErrorIs(t, err, ErrNoDevice)
	require.NoError(t, n.Close())
	require.ErrorIs(t, (&Network{Device: 1 << 20}).Start(), ErrNoDevice)
	require.ErrorIs(t, (&Network{Piece: 1 << 30, Slots: 2}).Start(), connector.ErrIncompatible)
}

func TestStayLocal(t *testing.T) {
	const name = "NCCL_SOCKET_IFNAME"
	for address, want := range map[string]string{"": "lo", "127.0.0.1:0": "lo", "localhost:1": "lo", "0.0.0.0:0": "", "10.0.0.1:7": ""} {
		t.Setenv(name, "")
		require.NoError(t, os.Unsetenv(name))
		require.NoError(t, stayLocal(address))
		require.Equal(t, want, os.Getenv(name), address)
	}
	t.Setenv(name, "eth0")
	require.NoError(t, stayLocal(""))
	require.Equal(t, "eth0", os.Getenv(name), "what is set stays")
}
