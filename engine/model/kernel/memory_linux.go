package kernel

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// NewMemory reserves room for matrices of bytes in all, on huge pages where the system has them: weights
// are streamed once for each token, and small pages cost a tenth of the speed.
func NewMemory(bytes int) (*Memory, error) {
	bytes += alignment // never empty
	data, err := unix.Mmap(-1, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("reserve %d bytes for weights: %w", bytes, err)
	}
	_ = unix.Madvise(data, unix.MADV_HUGEPAGE) // best effort: only speed depends on it
	return &Memory{data: data, free: data, release: unix.Munmap}, nil
}
