package cuda

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// open loads the library that make native-abi-gpu has fetched, or the system's.
func open(t testing.TB) *Library {
	t.Helper()
	dir := filepath.Join("..", "..", ".deps", "headers", "gpu-headers", "nvidia/cu13/lib")
	if _, err := os.Stat(dir); err != nil {
		dir = ""
	}
	l, err := Open(dir)
	if err != nil && dir == "" {
		t.Skipf("CUDA IS NOT TESTED: run make native-abi-gpu, which fetches it (220 MB): %v", err)
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
	require.NoError(t, os.WriteFile(filepath.Join(broken, "libcudart.so.13"), []byte("not a library"), 0o600))
	_, err = Open(broken)
	require.ErrorIs(t, err, ErrUnavailable)
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("no gcc to make a library without functions")
	}
	out, err := exec.CommandContext(t.Context(), gcc, "-shared", "-o", filepath.Join(other, "libcudart.so.13"), "-x", "c", os.DevNull).CombinedOutput()
	require.NoError(t, err, string(out))
	var failed *LoadError
	_, err = Open(other)
	require.ErrorAs(t, err, &failed)
	require.Equal(t, "cudaGetDeviceCount", failed.Symbol)
}

func TestWithoutDevice(t *testing.T) {
	l := open(t)
	v, err := l.Version()
	require.NoError(t, err)
	require.Positive(t, v)
	if n, err := l.Devices(); err == nil {
		t.Skipf("THERE ARE %d DEVICES: what happens without one is not tested", n)
	}
	_, err = l.Devices()
	require.ErrorIs(t, err, ErrNoDevice)
	_, err = l.Alloc(0, 100)
	require.ErrorIs(t, err, ErrNoDevice)
	require.ErrorIs(t, l.CopyIn(0, nil, []byte{1}), ErrNoDevice)
	require.ErrorIs(t, l.CopyOut(0, []byte{1}, nil), ErrNoDevice)
	_, err = l.NewStream(0)
	require.ErrorIs(t, err, ErrNoDevice)
	_, err = l.Import(0, Handle{})
	require.ErrorIs(t, err, ErrNoDevice)
	_, err = l.Export(0, nil)
	require.ErrorIs(t, err, ErrNoDevice)
	_, err = l.Alloc(0, 0)
	require.ErrorIs(t, err, ErrInvalid)
}

// What is copied to a device comes back.
func TestDevice(t *testing.T) {
	l := open(t)
	if _, err := l.Devices(); errors.Is(err, ErrNoDevice) {
		t.Skip("NO DEVICE: copies are not tested")
	}
	p, err := l.Alloc(0, 1<<20)
	require.NoError(t, err)
	want := bytes.Repeat([]byte("kv"), 1<<19)
	require.NoError(t, l.CopyIn(0, p, want))
	got := make([]byte, len(want))
	require.NoError(t, l.CopyOut(0, got, p))
	require.Equal(t, want, got)
	_, err = l.Export(0, p)
	require.NoError(t, err)
	require.NoError(t, l.Free(0, p))
}
