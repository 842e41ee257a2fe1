package shm

import (
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Memory whose file has no pages any more is an error, in Go code and in the runtime's copy, and other panics stay panics.
func TestGuard(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "")
	require.NoError(t, err)
	require.NoError(t, f.Truncate(8192))
	mem, err := unix.Mmap(int(f.Fd()), 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	require.NoError(t, f.Truncate(0))
	var seen byte
	require.ErrorIs(t, Guard(func() error { seen = mem[4096]; return nil }), ErrFault)
	require.Zero(t, seen)
	require.ErrorIs(t, Guard(func() error { copy(make([]byte, 4096), mem[4096:]); return nil }), ErrFault)
	own := errors.New("own")
	require.ErrorIs(t, Guard(func() error { return own }), own)
	require.NoError(t, Guard(func() error { return nil }))
	require.PanicsWithValue(t, "own", func() { _ = Guard(func() error { panic("own") }) })
	require.NoError(t, unix.Munmap(mem))
	require.NoError(t, f.Close())
}
