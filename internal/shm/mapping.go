package shm

import (
	"errors"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

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
