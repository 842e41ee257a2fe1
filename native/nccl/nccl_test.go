package nccl

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// open loads the library that make native-abi-gpu has fetched, or the system's.
func open(t testing.TB) *Library {
	t.Helper()
	dir := filepath.Join("..", "..", ".deps", "headers", "gpu-headers", "nvidia/nccl/lib")
	if _, err := os.Stat(dir); err != nil {
		dir = ""
	}
	l, err := Open(dir)
	if err != nil && dir == "" {
		t.Skipf("NCCL IS NOT TESTED: run make native-abi-gpu, which fetches it (220 MB): %v", err)
	}
	require.NoError(t, err)
	require.NotEmpty(t, l.Path())
	return l
}

func TestOpenFails(t *testing.T) {
	empty, broken, other := t.TempDir(), t.TempDir(), t.TempDir()
	_, err := Open(empty)
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, mendMissing)
	t.Setenv(EnvDir, empty)
	_, err = Open("")
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, empty)
	require.NoError(t, os.WriteFile(filepath.Join(broken, "libnccl.so.2"), []byte("not a library"), 0o600))
	_, err = Open(broken)
	require.ErrorIs(t, err, ErrUnavailable)
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("no gcc to make a library without functions")
	}
	out, err := exec.CommandContext(t.Context(), gcc, "-shared", "-o", filepath.Join(other, "libnccl.so.2"), "-x", "c", os.DevNull).CombinedOutput()
	require.NoError(t, err, string(out))
	var failed *LoadError
	_, err = Open(other)
	require.ErrorAs(t, err, &failed)
	require.Equal(t, "ncclGetVersion", failed.Symbol)
}

func TestWithoutDevice(t *testing.T) {
	t.Setenv("NCCL_SOCKET_IFNAME", "lo")
	l := open(t)
	v, err := l.Version()
	require.NoError(t, err)
	require.Regexp(t, `^2\.\d+\.\d+$`, v)
	a, err := l.NewID()
	require.NoError(t, err)
	b, err := l.NewID()
	require.NoError(t, err)
	require.NotEqual(t, a, b)
	_, err = l.Join(a, 1, 1)
	require.ErrorIs(t, err, ErrInvalid)
	comm, err := l.Join(a, 1, 0)
	if err == nil {
		require.NoError(t, comm.Close())
		t.Skip("THERE IS A DEVICE: what happens without one is not tested")
	}
	require.ErrorIs(t, err, ErrNoDevice)
}

func TestExplain(t *testing.T) {
	require.ErrorIs(t, explain(1, "unhandled cuda error", "CUDA driver version is insufficient for CUDA runtime version\n"), ErrNoDevice)
	var failed *CodeError
	err := explain(5, "invalid usage", "rank 7 does not exist\n")
	require.ErrorAs(t, err, &failed)
	require.Equal(t, "NCCL: invalid usage: rank 7 does not exist (5)", err.Error())
}
