// Package shm is memory that two processes share: sealed memfds.
//
// The engine creates a region, seals its size and hands the descriptor to a plugin, which maps it
// only after it has seen the seals. Without them either end could truncate the file and the other
// would die of SIGBUS at its next access.
package shm

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// MaxSize is the largest region in bytes: what a mapping of a 47-bit address space can hold with
// room to spare. It keeps a peer's number from overflowing an int.
const MaxSize = 1 << 45

// ErrIncompatible says that a descriptor is not the sealed memory that was announced.
var ErrIncompatible = errors.New("not the announced shared memory")

// seals are what both ends rely on: the size is fixed, and so is this set.
const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// Region is one mapped piece of shared memory. Its methods are safe for concurrent use, but no
// slice of Bytes may be used once Close was called.
type Region struct {
	mu   sync.Mutex
	data []byte
	size int64
	file *os.File // nil where the descriptor belongs to somebody else

	stop    chan struct{} // closed to end Warm; nil before it
	warming sync.WaitGroup
}

// Create makes a zeroed region of size bytes under a name that shows in /proc. All its pages are
// allocated before it returns, so that a lack of memory is an error here and not a SIGBUS later.
func Create(name string, size int64) (*Region, error) {
	if size <= 0 || size > MaxSize {
		return nil, fmt.Errorf("shared memory %q: size %d, want 1..%d bytes", name, size, int64(MaxSize))
	}
	file, err := Reserve(name)
	if err != nil {
		return nil, err
	}
	data, err := prepare(file, size)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("shared memory %q of %d bytes: %w", name, size, err), file.Close())
	}
	return &Region{data: data, size: size, file: file}, nil
}

// prepare sizes, allocates, seals and maps a fresh memfd.
func prepare(file *os.File, size int64) ([]byte, error) {
	fd := int(file.Fd())
	if err := unix.Ftruncate(fd, size); err != nil {
		return nil, os.NewSyscallError("ftruncate", err)
	}
	if err := Allocate(file, 0, size); err != nil {
		return nil, err
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return nil, os.NewSyscallError("fcntl F_ADD_SEALS", err)
	}
	return mmap(fd, size, unix.MAP_POPULATE)
}

// Map maps the region behind fd, which the caller keeps and may close at once. It refuses, with
// ErrIncompatible, a descriptor that is not a memfd sealed by Create or whose size is not size. The
// descriptor is marked close-on-exec, so that no child process inherits the cache.
func Map(fd int, size int64) (*Region, error) {
	return mapSealed(fd, size, unix.MAP_POPULATE)
}

// MapOnDemand is Map for memory of which little may be used soon: a page costs time when it is first
// touched, not now.
func MapOnDemand(fd int, size int64) (*Region, error) { return mapSealed(fd, size, 0) }

func mapSealed(fd int, size int64, flags int) (*Region, error) {
	if size <= 0 || size > MaxSize {
		return nil, fmt.Errorf("shared memory fd %d: size %d, want 1..%d bytes: %w", fd, size, int64(MaxSize), ErrIncompatible)
	}
	got, err := sealedSize(fd)
	if err != nil {
		return nil, fmt.Errorf("shared memory %w", err)
	}
	if got != size {
		return nil, fmt.Errorf("shared memory fd %d is %d bytes, want %d: %w", fd, got, size, ErrIncompatible)
	}
	unix.CloseOnExec(fd)
	data, err := mmap(fd, size, flags)
	if err != nil {
		return nil, fmt.Errorf("shared memory fd %d: %w", fd, err)
	}
	return &Region{data: data, size: size}, nil
}

// sealedSize is the size of a sealed memfd. Errors name the descriptor.
func sealedSize(fd int) (int64, error) {
	got, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return 0, fmt.Errorf("fd %d is no sealable memfd (%w): %w", fd, err, ErrIncompatible)
	}
	if got&seals != seals {
		return 0, fmt.Errorf("fd %d: seals are %#x, want %#x: %w", fd, got, seals, ErrIncompatible)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, fmt.Errorf("fd %d: %w", fd, os.NewSyscallError("fstat", err))
	}
	return st.Size, nil
}

// Adopt maps the region behind a descriptor that another process made and sent, and keeps the file,
// which is the region's own from now on; it is closed on an error too. The rules are those of Map. All
// pages are allocated first, as by Create.
func Adopt(file *os.File, size int64) (*Region, error) {
	fd := int(file.Fd())
	r, err := Map(fd, size)
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	r.file = file
	if err := Allocate(file, 0, size); err != nil {
		return nil, errors.Join(fmt.Errorf("shared memory fd %d: %w", fd, err), r.Close())
	}
	return r, nil
}

// retry runs call until no signal interrupts it.
func retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// Bytes is the whole region, in place; nil once it is closed.
func (r *Region) Bytes() []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.data
}

// Size is the region's length in bytes, also after Close.
func (r *Region) Size() int64 { return r.size }

// File is the descriptor of a region made by Create or Adopt, to hand to another process; it stays the
// region's own. It is nil for a mapped region.
func (r *Region) File() *os.File { return r.file }

// Close unmaps the region and closes its descriptor. Calls after the first do nothing.
func (r *Region) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.data == nil {
		return nil
	}
	r.endWarm()
	err := munmap(r.data)
	r.data = nil
	if r.file != nil {
		err = errors.Join(err, r.file.Close())
	}
	return err
}

// hugePage is what one entry of the processor maps where the memory's owner has made huge pages of it,
// in bytes. They count only where addresses and offsets agree modulo this size.
const hugePage = 2 << 20

// mmap maps a whole file for reading and writing, at an address that is a multiple of hugePage.
func mmap(fd int, size int64, flags int) ([]byte, error) {
	span := uintptr(size) + hugePage
	// Addresses without memory: the mapping goes over some of them, the rest is given back.
	base, err := unix.MmapPtr(-1, 0, nil, span, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	skip := -uintptr(base) & (hugePage - 1)
	at := unsafe.Add(base, skip)
	if _, err := unix.MmapPtr(fd, 0, at, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED|flags); err != nil {
		return nil, errors.Join(os.NewSyscallError("mmap", err), os.NewSyscallError("munmap", unix.MunmapPtr(base, span)))
	}
	page := uintptr(os.Getpagesize())
	used := (uintptr(size) + page - 1) &^ (page - 1)
	if skip > 0 {
		err = unix.MunmapPtr(base, skip)
	}
	err = errors.Join(err, unix.MunmapPtr(unsafe.Add(at, used), hugePage-skip))
	data := unsafe.Slice((*byte)(at), size)
	if err != nil {
		return nil, errors.Join(os.NewSyscallError("munmap", err), munmap(data))
	}
	return data, nil
}

func munmap(data []byte) error {
	return os.NewSyscallError("munmap", unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(data)), uintptr(len(data))))
}

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

// CreateOnDemand is Create for memory of which perhaps nothing will be used: its pages are allocated by Allocate, or when
// they are first touched.
func CreateOnDemand(name string, size int64) (*Region, error) {
	file, err := Reserve(name)
	if err != nil {
		return nil, err
	}
	r, err := Fit(file, size)
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	r.file = file
	return r, nil
}

// Allocate gives size bytes of a memfd from an offset on their pages, as far as they have none. What is
// written there stays.
func Allocate(file *os.File, from, size int64) error {
	err := retry(func() error { return unix.Fallocate(int(file.Fd()), 0, from, size) })
	return os.NewSyscallError("fallocate", err)
}
