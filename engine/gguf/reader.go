package gguf

import (
	"encoding/binary"
	"fmt"
	"math/bits"
)

// Least bytes of an encoded tensor description and metadata entry: what bounds their counts.
const (
	tensorInfoBytes = 8 + 4 + 8 + 4 + 8
	metadataBytes   = 8 + 4 + 1
)

// reader walks a header. After the first error it returns zeros and keeps that error.
type reader struct {
	data []byte
	pos  int
	err  error
}

func (r *reader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("at byte %d: %s: %w", r.pos, fmt.Sprintf(format, args...), ErrFormat)
	}
}

func (r *reader) bytes(n uint64) []byte {
	if r.err != nil {
		return nil
	}
	if n > uint64(len(r.data)-r.pos) {
		r.fail("%d bytes wanted, %d left", n, len(r.data)-r.pos)
		return nil
	}
	b := r.data[r.pos : r.pos+int(n)]
	r.pos += int(n)
	return b
}

func (r *reader) u32() uint32 {
	if b := r.bytes(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (r *reader) u64() uint64 {
	if b := r.bytes(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// count reads a number of things of at least the given encoded size.
func (r *reader) count(what string, limit, size int) int {
	n := r.u64()
	if n > uint64(limit) || n > uint64(len(r.data)-r.pos)/uint64(size) {
		r.fail("%d %s, more than %d or than the file can hold", n, what, limit)
		return 0
	}
	return int(n)
}

func (r *reader) name() string {
	n := r.u64()
	if n == 0 || n > MaxName {
		r.fail("name of %d bytes, want 1..%d", n, MaxName)
		return ""
	}
	return string(r.bytes(n))
}

// value reads a metadata value. Arrays are only measured here and decoded when asked for.
func (r *reader) value(key string) value {
	v := value{kind: kind(r.u32())}
	switch v.kind {
	case kindString:
		v.raw = r.bytes(r.u64())
	case kindArray:
		v.elem = kind(r.u32())
		v.count = r.u64()
		v.raw = r.array(key, v.elem, v.count)
	default:
		size := v.kind.size()
		if size == 0 {
			r.fail("metadata key %q has unknown type %d", key, v.kind)
		}
		v.raw = r.bytes(size)
	}
	return v
}

func (r *reader) array(key string, elem kind, count uint64) []byte {
	if elem == kindString {
		start := r.pos
		for i := uint64(0); i < count && r.err == nil; i++ {
			r.bytes(r.u64())
		}
		return r.data[start:r.pos]
	}
	size := elem.size()
	if size == 0 {
		r.fail("metadata key %q is an array of unsupported type %d", key, elem)
		return nil
	}
	over, n := bits.Mul64(size, count)
	if over != 0 {
		r.fail("metadata key %q has %d elements", key, count)
		return nil
	}
	return r.bytes(n)
}

// tensor reads a tensor's description; its data are placed later.
func (r *reader) tensor() *Tensor {
	t := &Tensor{Name: r.name()}
	dims := r.u32()
	if dims == 0 || dims > MaxDims {
		r.fail("tensor %q has %d dimensions, want 1..%d", t.Name, dims, MaxDims)
		return t
	}
	elements := uint64(1)
	for range dims {
		d := r.u64()
		over, n := bits.Mul64(elements, d)
		if d == 0 || over != 0 || n > 1<<48 {
			r.fail("tensor %q has impossible dimensions", t.Name)
			return t
		}
		elements = n
		t.Dims = append(t.Dims, int(d))
	}
	t.Type = Type(r.u32())
	t.offset = r.u64()
	if r.err != nil {
		return t
	}
	perBlock, blockBytes := t.Type.block()
	switch {
	case perBlock == 0:
		r.fail("tensor %q has type %s; supported are F32, F16, Q4_0, Q4_1 and Q8_0", t.Name, t.Type)
	case t.Dims[0]%perBlock != 0:
		r.fail("tensor %q has rows of %d, want a multiple of %d for %s", t.Name, t.Dims[0], perBlock, t.Type)
	default:
		t.bytes = elements / uint64(perBlock) * uint64(blockBytes)
	}
	return t
}
