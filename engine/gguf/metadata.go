package gguf

import (
	"encoding/binary"
	"fmt"
	"math"
)

// kind is a metadata value type; the numbers are the format's.
type kind uint32

const (
	kindU8 kind = iota
	kindI8
	kindU16
	kindI16
	kindU32
	kindI32
	kindF32
	kindBool
	kindString
	kindArray
	kindU64
	kindI64
	kindF64
)

// size is the encoded size of a scalar, or 0 for other types.
func (k kind) size() uint64 {
	switch k {
	case kindU8, kindI8, kindBool:
		return 1
	case kindU16, kindI16:
		return 2
	case kindU32, kindI32, kindF32:
		return 4
	case kindU64, kindI64, kindF64:
		return 8
	default:
		return 0
	}
}

// value is a metadata value, still encoded.
type value struct {
	kind, elem kind
	count      uint64 // of an array
	raw        []byte
}

func (f *File) get(key string) (value, error) {
	v, ok := f.meta[key]
	if !ok {
		return value{}, fmt.Errorf("metadata key %q: %w", key, ErrMissing)
	}
	return v, nil
}

func wrongType(key, want string) error {
	return fmt.Errorf("metadata key %q is no %s: %w", key, want, ErrFormat)
}

// String is a string value. Errors wrap ErrMissing or ErrFormat, here and below.
func (f *File) String(key string) (string, error) {
	v, err := f.get(key)
	if err != nil {
		return "", err
	}
	if v.kind != kindString {
		return "", wrongType(key, "string")
	}
	return string(v.raw), nil
}

// Uint is an integer value of any width that is not negative.
func (f *File) Uint(key string) (uint64, error) {
	v, err := f.get(key)
	if err != nil {
		return 0, err
	}
	n, ok := v.kind.integer(v.raw)
	if !ok || n < 0 {
		return 0, wrongType(key, "unsigned integer")
	}
	return uint64(n), nil
}

// Float is a floating-point value.
func (f *File) Float(key string) (float64, error) {
	v, err := f.get(key)
	if err != nil {
		return 0, err
	}
	switch v.kind {
	case kindF32:
		return float64(math.Float32frombits(binary.LittleEndian.Uint32(v.raw))), nil
	case kindF64:
		return math.Float64frombits(binary.LittleEndian.Uint64(v.raw)), nil
	default:
		return 0, wrongType(key, "number")
	}
}

// Bool is a truth value.
func (f *File) Bool(key string) (bool, error) {
	v, err := f.get(key)
	if err != nil {
		return false, err
	}
	if v.kind != kindBool || v.raw[0] > 1 {
		return false, wrongType(key, "bool")
	}
	return v.raw[0] == 1, nil
}

// Strings is an array of strings, a new slice each time.
func (f *File) Strings(key string) ([]string, error) {
	v, err := f.get(key)
	if err != nil {
		return nil, err
	}
	if v.kind != kindArray || v.elem != kindString {
		return nil, wrongType(key, "array of strings")
	}
	r := &reader{data: v.raw}
	out := make([]string, 0, v.count) // the parser has seen them all: 8 bytes each at least
	for range v.count {
		out = append(out, string(r.bytes(r.u64())))
	}
	return out, r.err
}

// Ints is an array of integers that fit 32 bits, a new slice each time.
func (f *File) Ints(key string) ([]int32, error) {
	v, err := f.get(key)
	if err != nil {
		return nil, err
	}
	size := int(v.elem.size())
	if v.kind != kindArray || size == 0 {
		return nil, wrongType(key, "array of integers")
	}
	out := make([]int32, 0, v.count)
	for raw := v.raw; len(raw) > 0; raw = raw[size:] {
		n, ok := v.elem.integer(raw[:size])
		if !ok || n != int64(int32(n)) {
			return nil, wrongType(key, "array of 32-bit integers")
		}
		out = append(out, int32(n))
	}
	return out, nil
}

// integer decodes a scalar; false for other types and for numbers beyond int64.
func (k kind) integer(raw []byte) (int64, bool) {
	le := binary.LittleEndian
	switch k {
	case kindU8:
		return int64(raw[0]), true
	case kindI8:
		return int64(int8(raw[0])), true
	case kindU16:
		return int64(le.Uint16(raw)), true
	case kindI16:
		return int64(int16(le.Uint16(raw))), true
	case kindU32:
		return int64(le.Uint32(raw)), true
	case kindI32:
		return int64(int32(le.Uint32(raw))), true
	case kindU64, kindI64:
		n := int64(le.Uint64(raw))
		return n, k == kindI64 || n >= 0
	default:
		return 0, false
	}
}
