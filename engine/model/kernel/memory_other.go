//go:build !linux

package kernel

import "unsafe"

// NewMemory reserves room for matrices of bytes in all.
func NewMemory(bytes int) (*Memory, error) {
	words := make([]uint64, (bytes+2*alignment)/8)
	data := unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), len(words)*8)
	return &Memory{data: data, free: data, release: func([]byte) error { return nil }}, nil
}
