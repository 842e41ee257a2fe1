package kernel

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// mapImage maps a file for reading, if it has the given size and belongs to this user alone.
func mapImage(name string, size int) ([]byte, func([]byte) error, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	var s unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &s); err != nil {
		return nil, nil, os.NewSyscallError("fstat", err)
	}
	if s.Mode&unix.S_IFMT != unix.S_IFREG || s.Mode&0o022 != 0 || int(s.Uid) != os.Geteuid() || s.Size != int64(size) {
		return nil, nil, fmt.Errorf("%s has mode %o, owner %d and %d bytes, want a file of user %d with %d", name, s.Mode, s.Uid, s.Size, os.Geteuid(), size)
	}
	data, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_POPULATE)
	if err != nil {
		return nil, nil, fmt.Errorf("map %s: %w", name, err)
	}
	_ = unix.Madvise(data, unix.MADV_HUGEPAGE) // best effort: only speed depends on it
	return data, unix.Munmap, nil
}
