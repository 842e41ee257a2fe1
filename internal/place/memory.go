package place

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"
)

// Memory is shared memory. The product has Map; simulators put their own in between, to interleave the ends at every
// access.
type Memory interface {
	Words
	// Bytes are n bytes in place. Accesses of them are ordered by those of words alone.
	Bytes(at, n int64) []byte
	// Size is the number of bytes.
	Size() int64
}

// Words are the words of a memory. They have 64 bits and are named by their offset in bytes, a multiple of 8. Each access of
// a word is atomic, and all of them have one order, in which every process sees them (sequential consistency).
type Words interface {
	// Load is the word at an offset.
	Load(at int64) uint64
	// Store replaces it.
	Store(at int64, v uint64)
	// CompareAndSwap replaces it if it is old.
	CompareAndSwap(at int64, old, with uint64) bool
	// Add adds to it, modulo 2^64.
	Add(at int64, delta uint64)
}

// ErrUnsupported says that the protocol was not shown to hold on this kind of processor.
var ErrUnsupported = errors.New("placement is supported on amd64 only")

// Map is the memory that b is in. It stays the caller's, who unmaps it after the last access. Errors wrap ErrUnsupported
// or ErrGeometry.
func Map(b []byte) (Memory, error) {
	if !supported {
		return nil, ErrUnsupported
	}
	return wrap(b)
}

func wrap(b []byte) (Memory, error) {
	if len(b) == 0 || uintptr(unsafe.Pointer(&b[0]))%8 != 0 {
		return nil, fmt.Errorf("%d bytes that do not begin at a multiple of 8: %w", len(b), ErrGeometry)
	}
	return mapped(b), nil
}

// mapped is memory of this process. On amd64 Store is an XCHG and Add a LOCK XADD: each waits until what was
// stored before is seen by all, which the pairs of rule PLACE-04 need.
type mapped []byte

func (m mapped) word(at int64) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&m[at : at+8 : at+8][0]))
}

func (m mapped) Load(at int64) uint64     { return m.word(at).Load() }
func (m mapped) Store(at int64, v uint64) { m.word(at).Store(v) }
func (m mapped) Add(at int64, d uint64)   { m.word(at).Add(d) }
func (m mapped) Size() int64              { return int64(len(m)) }
func (m mapped) Bytes(at, n int64) []byte { return m[at : at+n : at+n] }

func (m mapped) CompareAndSwap(at int64, old, with uint64) bool {
	return m.word(at).CompareAndSwap(old, with)
}
