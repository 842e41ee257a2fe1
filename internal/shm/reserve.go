package shm

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Reserve makes a memfd that has no size yet, so that it can be handed to a process whose answer
// says how large it must be. The caller closes it.
func Reserve(name string) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("shared memory %q: %w", name, os.NewSyscallError("memfd_create", err))
	}
	return os.NewFile(uintptr(fd), "memfd:"+name), nil
}

// Fit gives a reserved memfd its size, zeroed and sealed, and maps it on demand. It takes no memory yet,
// whatever the size: a page is allocated when it is first touched, or by Allocate. Whoever else had the
// descriptor could have sized it first: the size is checked after the seals. The file stays the caller's;
// the region has no descriptor of its own.
func Fit(file *os.File, size int64) (*Region, error) {
	if size <= 0 || size > MaxSize {
		return nil, fmt.Errorf("shared memory: size %d, want 1..%d bytes", size, int64(MaxSize))
	}
	fd := int(file.Fd())
	if err := errors.Join(unix.Ftruncate(fd, 0), unix.Ftruncate(fd, size)); err != nil {
		return nil, fmt.Errorf("shared memory of %d bytes: %w", size, os.NewSyscallError("ftruncate", err))
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return nil, fmt.Errorf("shared memory of %d bytes: %w", size, os.NewSyscallError("fcntl F_ADD_SEALS", err))
	}
	return MapOnDemand(fd, size)
}

// Allocate gives size bytes of a memfd from an offset on their pages, as far as they have none. What is
// written there stays.
func Allocate(file *os.File, from, size int64) error {
	err := retry(func() error { return unix.Fallocate(int(file.Fd()), 0, from, size) })
	return os.NewSyscallError("fallocate", err)
}
