package shm

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func create(t *testing.T, size int64) *Region {
	t.Helper()
	r, err := Create("test", size)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	return r
}

func TestBothEndsSeeTheSameBytes(t *testing.T) {
	const size = 3*4096 + 5 // no multiple of a page
	r := create(t, size)
	require.Len(t, r.Bytes(), size)
	require.EqualValues(t, size, r.Size())
	require.Equal(t, make([]byte, size), r.Bytes())

	m, err := Map(int(r.File().Fd()), size)
	require.NoError(t, err)
	require.Nil(t, m.File())
	r.Bytes()[size-1] = 7
	m.Bytes()[0] = 9
	require.Equal(t, byte(7), m.Bytes()[size-1])
	require.Equal(t, byte(9), r.Bytes()[0])

	require.NoError(t, r.Close())
	require.Equal(t, byte(7), m.Bytes()[size-1], "a mapping outlives its creator")
	require.NoError(t, m.Close())
	require.NoError(t, m.Close(), "closing again does nothing")
	require.Nil(t, m.Bytes())
	require.EqualValues(t, size, m.Size())
}

func TestSizeIsSealed(t *testing.T) {
	r := create(t, 8192)
	require.ErrorIs(t, r.File().Truncate(4096), os.ErrPermission)
	require.ErrorIs(t, r.File().Truncate(16384), os.ErrPermission)
	_, err := unix.FcntlInt(r.File().Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
	require.ErrorIs(t, err, os.ErrPermission, "the set of seals is itself sealed")
}

func TestMapRefuses(t *testing.T) {
	memfd := func(seals int) int {
		fd, err := unix.MemfdCreate("x", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, unix.Close(fd)) })
		require.NoError(t, unix.Ftruncate(fd, 4096))
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
		require.NoError(t, err)
		return fd
	}
	file, err := os.Create(filepath.Join(t.TempDir(), "f"))
	require.NoError(t, err)
	defer file.Close()
	require.NoError(t, file.Truncate(4096))
	good := create(t, 4096)

	for name, c := range map[string]struct {
		fd   int
		size int64
	}{
		"regular file":  {int(file.Fd()), 4096},
		"no seals":      {memfd(0), 4096},
		"can shrink":    {memfd(unix.F_SEAL_GROW | unix.F_SEAL_SEAL), 4096},
		"can grow":      {memfd(unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL), 4096},
		"too large":     {int(good.File().Fd()), 8192},
		"too small":     {int(good.File().Fd()), 2048},
		"zero":          {int(good.File().Fd()), 0},
		"negative":      {int(good.File().Fd()), -1},
		"beyond memory": {int(good.File().Fd()), math.MaxInt64},
		"no descriptor": {1 << 20, 4096},
		"negative fd":   {-1, 4096},
	} {
		_, err := Map(c.fd, c.size)
		require.ErrorIs(t, err, ErrIncompatible, name)
	}
}

func TestMapMarksCloseOnExec(t *testing.T) {
	r := create(t, 4096)
	_, err := unix.FcntlInt(r.File().Fd(), unix.F_SETFD, 0)
	require.NoError(t, err)
	m, err := Map(int(r.File().Fd()), 4096)
	require.NoError(t, err)
	defer m.Close()
	flags, err := unix.FcntlInt(r.File().Fd(), unix.F_GETFD, 0)
	require.NoError(t, err)
	require.NotZero(t, flags&unix.FD_CLOEXEC)
}

func TestCreateRefuses(t *testing.T) {
	for _, size := range []int64{0, -1, MaxSize + 1, math.MaxInt64} {
		_, err := Create("test", size)
		require.Error(t, err)
	}
	before := descriptors(t)
	_, err := Create("a\x00b", 4096)
	require.Error(t, err)
	require.Equal(t, before, descriptors(t), "a failed Create leaves no descriptor")
}

func descriptors(t *testing.T) int {
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(entries)
}

func TestNothingIsLeft(t *testing.T) {
	before := descriptors(t)
	for range 20 {
		r, err := Create("test", 1<<20)
		require.NoError(t, err)
		m, err := Map(int(r.File().Fd()), 1<<20)
		require.NoError(t, err)
		var closers sync.WaitGroup
		for range 4 { // Close is idempotent under concurrency too
			closers.Go(func() { _ = r.Close() })
			closers.Go(func() { _ = m.Close() })
		}
		closers.Wait()
	}
	require.Equal(t, before, descriptors(t))
}

func TestReservedMemory(t *testing.T) {
	before := descriptors(t)
	file, err := Reserve("test")
	require.NoError(t, err)
	const size = 2*4096 + 1
	for _, wrong := range []int64{0, -1, MaxSize + 1} {
		_, err := Fit(file, wrong)
		require.Error(t, err)
	}
	require.NoError(t, file.Truncate(8)) // as somebody else might who has it
	_, err = file.WriteAt([]byte("8 bytes."), 0)
	require.NoError(t, err)
	r, err := Fit(file, size)
	require.NoError(t, err)
	require.Equal(t, make([]byte, size), r.Bytes())
	require.ErrorIs(t, file.Truncate(size+1), os.ErrPermission)
	m, err := MapOnDemand(int(file.Fd()), size)
	require.NoError(t, err)
	r.Bytes()[size-1] = 7
	require.Equal(t, byte(7), m.Bytes()[size-1])
	_, err = Fit(file, size)
	require.ErrorIs(t, err, os.ErrPermission, "once")
	require.NoError(t, r.Close())
	require.NoError(t, m.Close())
	require.NoError(t, file.Close())
	require.Equal(t, before, descriptors(t))
}

func TestMappingsSuitHugePages(t *testing.T) {
	page := int64(os.Getpagesize())
	for _, size := range []int64{1, page, page + 1, 2<<20 - 1, 2 << 20, 4<<20 + 5} {
		before := maps(t)
		r := create(t, size)
		m, err := Map(int(r.File().Fd()), size)
		require.NoError(t, err)
		for _, b := range [][]byte{r.Bytes(), m.Bytes()} {
			require.Zero(t, uintptr(unsafe.Pointer(unsafe.SliceData(b)))%(2<<20), size)
			b[size-1]++
		}
		require.Equal(t, byte(2), m.Bytes()[size-1])
		require.NoError(t, m.Close())
		require.NoError(t, r.Close())
		require.Empty(t, strings.ReplaceAll(maps(t), before, ""), "nothing stays mapped")
	}
}

// maps lists memfds that are mapped.
func maps(t *testing.T) string {
	raw, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	var out strings.Builder
	for line := range strings.Lines(string(raw)) {
		if strings.Contains(line, "memfd:test") {
			out.WriteString(line)
		}
	}
	return out.String()
}

func TestAddressesAreGivenBack(t *testing.T) {
	mapped := func() int {
		raw, err := os.ReadFile("/proc/self/maps")
		require.NoError(t, err)
		return strings.Count(string(raw), "\n")
	}
	before := mapped()
	for range 500 {
		require.NoError(t, create(t, 4096+1).Close())
	}
	require.Less(t, mapped()-before, 100)
}
